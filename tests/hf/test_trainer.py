"""transformers' Trainer with private steps."""

import json
import math
import unittest
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("accelerate")
pytest.importorskip("peft")

from datasets import Dataset, concatenate_datasets
from dp_accounting import rdp
from peft import (
    IA3Config,
    LoraConfig,
    PeftModel,
    PromptTuningConfig,
    get_peft_model,
    get_peft_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import ConcatDataset, Subset, TensorDataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    default_data_collator,
)

import unison
from tests.harness.ranks import ranks
from tests.hf.common import (
    DELTA,
    MAX_LENGTH,
    VOCAB,
    Gradients,
    StopAt,
    accelerator,
    arguments,
    bert,
    clipped_mean,
    drawn,
    error_of,
    ledger_counts,
    llama,
    masked_bert,
    privacy,
    rows,
    silent,
    train,
)
from tests.privacy.accounts import sampled, times
from unison.hf import PrivateTrainer
from unison.hf.trainer import RowCollator, _are_sharded
from unison.models import per_sample_loss
from unison.privacy import refuse_training_rows
from unison.privacy.mechanism import sensitivity_factor

# TrainingArguments asks for what this machine has; nothing of it is ours.
pytestmark = pytest.mark.filterwarnings("ignore:.*pin_memory.*")


def lora_llama():
    torch.manual_seed(0)
    model = get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    for name, each in model.named_parameters():
        if "lora_B" in name:  # zeros, whose A has no gradient at the first step
            torch.nn.init.normal_(each, std=0.3)
    return model


def prompted_llama():
    torch.manual_seed(0)
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    return get_peft_model(llama(), config)


def adapted_llama(config):
    def make():
        torch.manual_seed(0)
        model = get_peft_model(llama(), config)
        for name, each in model.named_parameters():
            if each.requires_grad and "magnitude" not in name:
                torch.nn.init.normal_(each, 0.5, std=0.3)
        return model

    return make


def t5():
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}
    ends = {"pad_token_id": 0, "decoder_start_token_id": 0, "dropout_rate": 0.0}
    return T5ForConditionalGeneration(T5Config(vocab_size=VOCAB, **sizes, **ends))


DORA = LoraConfig(r=2, use_dora=True, target_modules=["q_proj", "down_proj"])
IA3 = IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])
COMPILED = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
CASES = {
    "causal": (llama, "completion", {}),
    "masked": (masked_bert, "completion", {}),
    "classification": (bert, "class", {}),
    "LoRA": (lora_llama, "completion", {}),
    "prompt tuning": (prompted_llama, "completion", {}),
    "DoRA": (adapted_llama(DORA), "completion", {}),
    "IA3": (adapted_llama(IA3), "completion", {}),
    "encoder and decoder": (t5, "completion", {}),
    "compiled": (llama, "completion", COMPILED),
    "checkpointing": (llama, "completion", {"gradient_checkpointing": True}),
    "one pass": (llama, "completion", {"per_device_train_batch_size": 40}),
}


QUICK = ("causal", "LoRA")
LONG = [pytest.param(case, marks=pytest.mark.full) for case in CASES if case not in QUICK]


@pytest.mark.parametrize("case", [*QUICK, *LONG])
def test_the_first_step_is_the_clipped_sum_of_single_rows(case, tmp_path):
    make, labels, settings = CASES[case]
    data, seen, model = rows(labels), Gradients(), make()
    args = arguments(tmp_path, max_steps=1, **settings)
    if case == "one pass":
        args.gradient_accumulation_steps = 1
    size = args.per_device_train_batch_size * args.gradient_accumulation_steps
    expected = clipped_mean(model, drawn(data, size), size)
    trainer = PrivateTrainer(
        model=model,
        args=args,
        train_dataset=data,
        privacy=silent(),
        max_length=MAX_LENGTH + 2,
        callbacks=[seen],
    )
    train(trainer)
    assert error_of(seen.found, expected) < 1e-6
    assert trainer.args is args
    assert args.gradient_accumulation_steps == (1 if case == "one pass" else 2)


@pytest.mark.full
def test_bf16_is_as_near_as_its_rounding(tmp_path):
    data, seen, model = rows(), Gradients(), llama()
    expected = clipped_mean(model, drawn(data, 8), 8)
    trainer = PrivateTrainer(
        model=model,
        args=arguments(tmp_path, max_steps=1, bf16=True),
        train_dataset=data,
        privacy=silent(),
        max_length=MAX_LENGTH,
        callbacks=[seen],
    )
    train(trainer)
    assert 1e-5 < error_of(seen.found, expected) < 3e-2


@pytest.mark.full
@ranks(2)
def test_two_processes_make_the_step_of_one(world, tmp_path):
    with accelerator(world.rank, world.size):
        data, seen, model = rows(), Gradients(), llama()
        expected = clipped_mean(model, drawn(data, 8), 8)
        trainer = PrivateTrainer(
            model=model,
            args=arguments(tmp_path, max_steps=2, gradient_accumulation_steps=1),
            train_dataset=data,
            privacy=silent(),
            max_length=MAX_LENGTH,
            callbacks=[seen],
        )
        train(trainer)
        assert error_of(seen.found, expected) < 1e-6
        assert trainer.state.global_step == 2
        world.barrier()
        assert ledger_counts(tmp_path) == (2, 2)


@pytest.mark.full
@ranks(2)
def test_a_sharded_model_is_saved_whole(world, tmp_path):
    def trained(model, name):
        args = arguments(tmp_path / name, max_steps=2, save_strategy="steps", save_steps=2)
        trainer = PrivateTrainer(
            model=model,
            args=args,
            train_dataset=rows(),
            eval_dataset=rows(num_rows=6),
            privacy=privacy(secure_noise=False),
            max_length=MAX_LENGTH,
            data_collator=padded_on_the_left,
        )
        train(trainer)
        trainer.save_model(str(tmp_path / name / "model"))
        world.barrier()
        return trainer, unison.full_state_dict(trainer.model)

    with accelerator(world.rank, world.size):
        trainer, state = trained(unison.auto_shard(llama(num_hidden_layers=2)), "all")
        for folder in ("model", "checkpoint-2"):
            plain = LlamaForCausalLM.from_pretrained(tmp_path / "all" / folder)
            assert all(torch.equal(each, state[name]) for name, each in plain.named_parameters())
        found = trainer.evaluate()["eval_loss"]
        held = padded_on_the_left(rows(num_rows=6))
        # The Trainer's is a mean of batches' means.
        assert found == pytest.approx(float(plain(**held).loss.detach()), rel=0.2)

        lora = get_peft_model(
            llama(num_hidden_layers=2), LoraConfig(r=2, target_modules=["q_proj"])
        )
        _, state = trained(unison.auto_shard(lora), "lora")
        again = PeftModel.from_pretrained(llama(num_hidden_layers=2), tmp_path / "lora" / "model")
        saved = get_peft_model_state_dict(again)
        for name, each in saved.items():
            assert torch.equal(each, state[name.replace(".weight", ".default.weight")]), name

        alone = DeviceMesh("cpu", [[0], [1]], mesh_dim_names=("copies", "parts"))["parts"]
        with pytest.raises(unison.BadInput, match="sharded over 1 of 2 processes"):
            trained(unison.fully_shard(llama(), mesh=alone), "alone")


@ranks(1)
def test_units_on_one_process_are_not_put_into_ddp(world):
    assert _are_sharded(unison.auto_shard(llama()))
    assert not _are_sharded(llama())


def refuse_pickle(*args, **settings):
    raise AssertionError("a pickle is loaded")


def test_a_run_goes_on_and_no_pickle_is_read(tmp_path, monkeypatch):
    def trained(name, *, stops=False, resumes=None, has_groups=False):
        args = arguments(tmp_path / name, save_strategy="steps", save_steps=9, warmup_steps=2)
        trainer = PrivateTrainer(
            model=llama(attention_dropout=0.3),
            args=args,
            train_dataset=rows(),
            privacy=privacy(secure_noise=False),
            max_length=MAX_LENGTH,
            callbacks=[StopAt(1)] if stops else [],
        )
        if not has_groups:
            parameters = trainer.model.parameters()
            trainer.optimizer = torch.optim.NAdam(parameters, lr=0.01)
        train(trainer, resume_from_checkpoint=resumes)
        return list(trainer.model.parameters())

    whole = trained("whole")
    trained("parts", stops=True)
    saved = tmp_path / "parts" / "checkpoint-1"
    pickles = {each.name for each in saved.iterdir() if each.suffix in (".pt", ".pth", ".bin")}
    assert pickles == {"training_args.bin"}  # the Trainer writes it for people; it is not read
    ledger = tmp_path / "parts" / "ledger.jsonl"
    spent = ledger.read_bytes()
    monkeypatch.setattr(torch, "load", refuse_pickle)
    monkeypatch.setattr(torch.serialization, "load", refuse_pickle)

    weights, states = saved / "model.safetensors", saved / "training_state.safetensors"
    weights.rename(saved / "pytorch_model.bin")
    with pytest.raises(unison.BadInput, match=r"pytorch_model.bin is a pickle"):
        trained("parts", resumes=True)
    (saved / "pytorch_model.bin").rename(weights)
    with pytest.raises(unison.BadInput, match="does not fit this run"):
        trained("parts", resumes=True, has_groups=True)
    states.rename(saved / "kept")
    with pytest.raises(unison.BadInput, match="an older unison wrote"):
        trained("parts", resumes=True)
    states.write_bytes((saved / "kept").read_bytes()[:-9])
    with pytest.raises(unison.BadInput, match="is damaged"):
        trained("parts", resumes=True)
    (saved / "kept").rename(states)
    assert ledger.read_bytes() == spent

    for mine, theirs in zip(trained("parts", resumes=True), whole, strict=True):
        assert torch.equal(mine, theirs)


def test_steps_commits_and_logs_agree_and_epsilon_is_the_accountants(tmp_path):
    seen = Gradients()
    trainer = PrivateTrainer(
        model=llama(),
        args=arguments(
            tmp_path,
            max_steps=-1,
            num_train_epochs=5,
            gradient_accumulation_steps=10,  # all rows in every step: ε is computed at once
            lr_scheduler_type="linear",
            logging_strategy="steps",
            logging_steps=1,
        ),
        train_dataset=rows(),
        privacy=privacy(epsilon=3.0),
        max_length=MAX_LENGTH,
        callbacks=[seen],
    )
    done = train(trainer)
    assert done.global_step == seen.num_steps == 5  # 40 rows, 40 in a logical batch
    assert ledger_counts(tmp_path) == (5, 5)
    logs = [each for each in trainer.state.log_history if "grad_norm" in each]
    assert [each["step"] for each in logs] == list(range(1, 6))
    assert [each["epoch"] for each in logs] == [1, 2, 3, 4, 5]
    rates = [each["learning_rate"] for each in logs]
    assert rates == pytest.approx([0.01 * (5 - step) / 5 for step in range(5)])

    num_elements = sum(each.numel() for each in trainer.model.parameters())
    sigma = logs[0]["noise_multiplier"]
    z = sigma / sensitivity_factor(sigma, num_elements)
    for step in (1, 5):
        expected = by_hand(times(sampled(1.0, z), step))
        assert logs[step - 1]["epsilon"] == pytest.approx(expected, rel=1e-6)
        assert logs[step - 1]["epsilon_left"] == 3.0 - logs[step - 1]["epsilon"]
    assert 2.97 < done.metrics["epsilon"] <= 3.0


def by_hand(event) -> float:
    return rdp.RdpAccountant().compose(event).get_epsilon(DELTA)


def test_no_file_tells_of_training_rows_what_epsilon_does_not_cover(tmp_path):
    often = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    args = arguments(tmp_path, **often, logging_strategy="steps", logging_steps=2)
    trainer = PrivateTrainer(
        model=llama(),
        args=args,
        train_dataset=rows(),
        eval_dataset=rows(num_rows=6),
        privacy=privacy(),
        max_length=MAX_LENGTH,
        data_collator=padded_on_the_left,
    )
    done = train(trainer)
    trainer.save_state()
    trainer.save_metrics("train", done.metrics)
    assert math.isnan(done.training_loss)
    files = [*tmp_path.rglob("*.json"), *tmp_path.rglob("*.jsonl")]
    assert {"trainer_state.json", "train_results.json", "privacy.json"} <= {f.name for f in files}
    for each in files:
        text = each.read_text().replace("eval_loss", "")
        assert '"loss"' not in text, each
        assert "train_loss" not in text, each
        assert "norms" not in text, each
    state = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())
    assert state["total_flos"] == state["num_input_tokens_seen"] == 0
    assert any("eval_loss" in each for each in state["log_history"])  # of rows that are held out
    num_elements = sum(each.numel() for each in trainer.model.parameters())
    z = 1.0 / sensitivity_factor(1.0, num_elements)
    expected = by_hand(times(sampled(8 / 40, z), 2))
    logged = [each["epsilon"] for each in state["log_history"] if "grad_norm" in each]
    assert logged == pytest.approx([expected], rel=1e-6)


def padded_on_the_left(records):
    """A collator that pads rows to the longest of a batch, before their first token."""
    longest = max(len(each["input_ids"]) for each in records)
    fill = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    rows = {
        name: [F.pad(r[name], (longest - len(r[name]), 0), value=fill[name]) for r in records]
        for name in fill
    }
    return {name: torch.stack(each) for name, each in rows.items()}


@pytest.mark.full
def test_a_collator_that_pads_to_the_longest_row_does_not_let_rows_meet(tmp_path):
    data, seen, model = rows(), Gradients(), llama()
    expected = clipped_mean(model, drawn(data, 8), 8)
    trainer = PrivateTrainer(
        model=model,
        args=arguments(tmp_path, max_steps=1),
        train_dataset=data,
        privacy=silent(),
        max_length=MAX_LENGTH,
        data_collator=padded_on_the_left,
        callbacks=[seen],
    )
    train(trainer)
    assert error_of(seen.found, expected) < 1e-6


def test_training_ends_at_the_budget(tmp_path):
    def trainer():
        return PrivateTrainer(
            model=llama(),
            args=arguments(tmp_path, max_steps=2, gradient_accumulation_steps=10),
            train_dataset=rows(),
            privacy=privacy(epsilon=2.0),
            max_length=MAX_LENGTH,
        )

    assert train(trainer()).global_step == 2
    again = trainer()  # the ledger is that of the same rows, and is spent
    with unittest.TestCase().assertLogs("unison.hf", "WARNING") as logs:
        assert train(again).global_step == 0
    assert "training ends here" in logs.output[0]
    assert ledger_counts(tmp_path) == (2, 2)


REFUSED = {
    "fp16": ({"fp16": True}, "use bf16=True"),
    "tokens": ({"include_num_input_tokens_seen": "all"}, "tokens of drawn rows are private"),
    "signals": ({"enable_jit_checkpoint": True}, "in the midst of a step"),
    "smoothing": ({"label_smoothing_factor": 0.1}, "divides by a count over all rows"),
    "batch size": ({"auto_find_batch_size": True}, "spent again"),
    "order": ({"train_sampling_strategy": "group_by_length"}, "how rows are drawn"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_arguments_that_contradict_privacy_are_refused(case, tmp_path):
    settings, message = REFUSED[case]
    args = arguments(tmp_path)
    for name, value in settings.items():
        setattr(args, name, value)
    with pytest.raises(unison.UnsupportedOperation, match=message):
        PrivateTrainer(model=llama(), args=args, train_dataset=rows(), privacy=privacy())


class Threefold(Trainer):
    """A loss of its own, as users write it."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        logits, labels = model(input_ids=inputs["input_ids"]).logits, inputs["labels"]
        loss = 3 * per_sample_loss(logits[:, :-1], labels[:, 1:]).mean()
        self.log({"mine": loss.item()})
        return loss


class PrivateThreefold(PrivateTrainer, Threefold):
    pass


class OwnStep(PrivateTrainer):
    """A training step of its own, written out."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        inputs = self._prepare_inputs(inputs)
        loss = 3 * self.compute_loss(model, inputs)
        self.accelerator.backward(loss)
        return loss.detach()


def loose():
    """Without noise, and hardly clipped: lengths of gradients show."""
    found = silent()
    object.__setattr__(found, "max_grad_norm", 1e3)
    return found


@pytest.mark.parametrize("cls", [PrivateThreefold, OwnStep])
def test_losses_and_steps_of_other_classes_are_called_for_every_pass(cls, tmp_path, monkeypatch):
    monkeypatch.setattr("tests.hf.common.CLIP_NORM", 1e3)
    data, seen, model = rows(), Gradients(), llama()
    expected = clipped_mean(model, drawn(data, 8), 8)
    trainer = cls(
        model=model,
        args=arguments(tmp_path, max_steps=1),
        train_dataset=data,
        privacy=loose(),
        max_length=MAX_LENGTH,
        callbacks=[seen],
    )
    if cls is OwnStep:
        train(trainer)
    else:
        with pytest.warns(UserWarning, match="mine, and what else is logged in training steps"):
            train(trainer)
    assert error_of(seen.found, {name: 3 * each for name, each in expected.items()}) < 1e-6
    assert "training_step" not in vars(trainer)
    assert not any("mine" in each for each in trainer.state.log_history)


def gpt2():
    torch.manual_seed(0)
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    sizes = {"vocab_size": VOCAB, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16}
    return GPT2LMHeadModel(GPT2Config(**sizes, **dropouts))


@pytest.mark.parametrize("make", [gpt2, bert])
def test_models_whose_class_does_not_tell_their_loss_and_rows_without_masks(make, tmp_path):
    data = rows("completion" if make is gpt2 else "class")
    data = [{name: each[name] for name in ("input_ids", "labels")} for each in data]
    seen, model = Gradients(), make()
    expected = clipped_mean(model, drawn(data, 8), 8)
    trainer = PrivateTrainer(
        model=model,
        args=arguments(tmp_path, max_steps=1),
        train_dataset=data,
        privacy=silent(),
        max_length=MAX_LENGTH + 3,
        callbacks=[seen],
    )
    trainer.get_train_dataloader()  # as users do, to count batches
    train(trainer)
    assert error_of(seen.found, expected) < 1e-6


class Regularised(LlamaForCausalLM):
    """Adds a term of the outputs to its loss."""

    def forward(self, input_ids, labels=None):
        found = super().forward(input_ids, labels=labels)
        if found.loss is not None:
            found.loss = found.loss + found.logits.square().mean()
        return found


def test_a_loss_with_more_than_its_tokens_is_not_replaced(tmp_path):
    config = llama().config
    for num_labels in (9, 5):
        ids = torch.randint(1, VOCAB, (40, 9))
        labels = ids.clone()
        labels[1, :-num_labels] = -100
        data = [{"input_ids": i, "labels": each} for i, each in zip(ids, labels, strict=True)]
        trainer = PrivateTrainer(
            model=Regularised(config),
            args=arguments(tmp_path, max_steps=1, gradient_accumulation_steps=10),
            train_dataset=data,
            privacy=privacy(),
        )
        if num_labels == 9:
            train(trainer)
            assert trainer._is_shifted is None
        else:
            with pytest.raises(unison.UnsupportedOperation, match="all labelled tokens"):
                train(trainer)


def counted(outputs, labels, num_items_in_batch: Any = None):
    return F.cross_entropy(outputs.logits, labels, reduction="sum") / num_items_in_batch


def summed(outputs, labels, num_items_in_batch=None):
    return F.cross_entropy(outputs.logits, labels, reduction="sum")


def test_losses_over_the_batch_are_refused_with_what_to_do(tmp_path):
    def trained(loss, **settings):
        trainer = PrivateTrainer(
            model=bert(),
            args=arguments(tmp_path, max_steps=1),
            train_dataset=rows("class"),
            privacy=privacy(),
            max_length=MAX_LENGTH,
            compute_loss_func=loss,
            **settings,
        )
        return train(trainer)

    with pytest.raises(unison.BadInput, match="num_items_in_batch, which is None"):
        trained(counted)
    with pytest.raises(unison.UnsupportedOperation, match=r"make_private\(loss_reduction='sum'"):
        trained(summed)
    assert trained(summed, make_private={"loss_reduction": "sum"}).global_step == 1


def test_columns_are_joined_by_what_they_are():
    def joined(records, max_length=6):
        return RowCollator(default_data_collator, max_length, 0, takes_mask=True)(records)

    choices = [{"input_ids": torch.ones(3, size, dtype=torch.long)} for size in (3, 5)]
    assert joined(choices)["attention_mask"].sum(2).tolist() == [[3] * 3, [5] * 3]
    ids = [torch.ones(size, dtype=torch.long) for size in (2, 4)]
    found = joined([{"input_ids": i, "weights": torch.ones(len(i))} for i in ids])
    assert found["weights"].tolist() == [[1.0] * 2 + [0.0] * 4, [1.0] * 4 + [0.0] * 2]
    with pytest.raises(unison.BadInput, match="is for what has one entry per token"):
        joined([{"sound": torch.ones(size)} for size in (2, 3)])

    def collate(records):
        return {"x": {"a": records[0]}, "return_loss": True, "longest": records[0].numel()}

    parts = [torch.ones(1, 2), torch.zeros(1, 2)]
    found = RowCollator(collate, None, 0)(parts)
    assert (found["x"]["a"].shape, found["return_loss"]) == ((2, 2), True)
    with pytest.raises(unison.BadInput, match="makes 'longest' of the records"):
        RowCollator(collate, None, 0)([*parts, torch.ones(2, 2)])
    with pytest.raises(unison.BadInput, match="data_collator returned list"):
        RowCollator(list, None, 0)(parts)


def test_rows_that_are_trained_on_are_seen_in_views():
    data = rows(num_rows=20)
    table = Dataset.from_list([{"labels": each["labels"].tolist()} for each in data])
    shuffled = table.shuffle(seed=1)
    apart = [
        (shuffled.select(range(15)), shuffled.select(range(15, 20))),
        (table.select(range(15)), table.select(range(15, 20))),
        (Subset(data, range(15)), Subset(data, range(15, 20))),
        (data, rows(num_rows=20)),
        (TensorDataset(torch.zeros(3)), TensorDataset(torch.zeros(3))),
    ]
    for trained, evaluated in apart:
        refuse_training_rows({"held out": evaluated}, trained)
    tensors = TensorDataset(torch.zeros(3))
    same = [
        (table, shuffled.select(range(3))),
        (table.select(range(15)), table.select(range(14, 20))),
        (shuffled, concatenate_datasets([table])),
        (Subset(data, range(15)), data),
        (Subset(tensors, [0, 1]), Subset(tensors, [1, 2])),
        (ConcatDataset([tensors, apart[-1][0]]), tensors),
    ]
    for trained, evaluated in same:
        with pytest.raises(unison.BadInput, match="rows that are trained on"):
            refuse_training_rows(evaluated, trained)


def test_data_that_contradict_privacy_are_refused_before_anything_is_spent(tmp_path):
    data = rows()
    for evaluated in (data, {"seen": data}, data[:3], Subset(data, [0])):
        with pytest.raises(unison.BadInput, match="rows that are trained on"):
            PrivateTrainer(
                model=llama(),
                args=arguments(tmp_path),
                train_dataset=data,
                eval_dataset=evaluated,
                privacy=privacy(),
            )
    with pytest.raises(unison.BadInput, match=r"must be a unison\.Privacy"):
        PrivateTrainer(model=llama(), args=arguments(tmp_path), privacy={"epsilon": 3})
    compiled = torch.compile(llama(), backend="eager")
    with pytest.raises(unison.UnsupportedOperation, match="which columns it takes"):
        PrivateTrainer(model=compiled, args=arguments(tmp_path), privacy=privacy())
    trainer = PrivateTrainer(
        model=llama(), args=arguments(tmp_path), train_dataset=data, privacy=privacy()
    )
    for look in (trainer.evaluate, trainer.predict):
        with pytest.raises(unison.BadInput, match="rows that are trained on"):
            look(data)
    with pytest.raises(unison.BadInput, match="max_length="):
        train(trainer)
    assert not (tmp_path / "ledger.jsonl").exists()
