"""Tiny models of transformers, rows of unequal length, and what a trainer did with them."""

import json
import os
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    TrainerCallback,
    TrainingArguments,
)

from tests.harness import oracle
from unison import Privacy
from unison.privacy import Poisson, read_ledger
from unison.privacy.sampling import drawn_records
from unison.rng import Key

NUM_ROWS, VOCAB, MAX_LENGTH, CLIP_NORM, DELTA = 40, 32, 9, 0.5, 1e-5
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def llama(**settings: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    given = SIZES | {"num_key_value_heads": 1, "initializer_range": 0.2} | settings
    return LlamaForCausalLM(LlamaConfig(**given))


def bert(kind: Any = BertForSequenceClassification, **settings: Any) -> Any:
    torch.manual_seed(0)
    return kind(BertConfig(**SIZES, **NO_DROPOUT, initializer_range=0.2, **settings))


def masked_bert() -> BertForMaskedLM:
    return bert(BertForMaskedLM)


def rows(labels: str = "completion", num_rows: int = NUM_ROWS) -> list[dict[str, Any]]:
    """Rows of 3 to 9 tokens, with labels of their second half, or of one class each."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(num_rows):
        length = int(torch.randint(3, MAX_LENGTH + 1, (1,), generator=generator))
        ids = torch.randint(1, VOCAB, (length,), generator=generator)
        of_tokens = ids.clone()
        of_tokens[: length // 2] = -100
        found.append(
            {
                "input_ids": ids,
                "attention_mask": torch.ones(length, dtype=torch.long),
                "labels": of_tokens if labels == "completion" else int(ids[0]) % 2,
            }
        )
    return found


def arguments(folder: Path, **settings: Any) -> TrainingArguments:
    given: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_steps": 3,
        "logging_strategy": "no",
        "save_strategy": "no",
        "learning_rate": 0.01,
        "max_grad_norm": 0.0,
    }
    quiet = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "dataloader_pin_memory": False}
    return TrainingArguments(str(folder), **quiet, **given | settings)


def privacy(**settings: Any) -> Privacy:
    given: dict[str, Any] = {"delta": DELTA, "max_grad_norm": CLIP_NORM, "accountant": "rdp"}
    if "epsilon" not in settings:
        given["noise_multiplier"] = 1.0
    return Privacy(**given | settings)


def silent() -> Privacy:
    """Without noise, and drawn by the arguments' seed: what is released is the clipped sum."""
    found = privacy(secure_noise=False)
    object.__setattr__(found, "noise_multiplier", 0.0)
    return found


def whole(value: Any) -> Tensor:
    """A tensor, or what ranks hold of it together."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


class Gradients(TrainerCallback):
    """Keeps what the optimizer got at its first step."""

    def __init__(self) -> None:
        self.found: dict[str, Tensor] = {}
        self.num_steps = 0

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        self.num_steps += 1
        if not self.found:
            self.found = {
                name: whole(each.grad.detach()).clone()
                for name, each in model.named_parameters()
                if each.requires_grad
            }


class StopAt(TrainerCallback):
    """Ends a run after a step, with a checkpoint."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **_):
        if state.global_step == self.step:
            control.should_save = control.should_training_stop = True


def drawn(data: list[Any], batch_size: int, step: int = 0, seed: int = 42) -> list[Any]:
    """The rows of a step under a seed."""
    sampling = Poisson(rate=batch_size / len(data))
    records = next(drawn_records(sampling, Key.from_seed(seed), len(data), [step]))
    return [data[int(each)] for each in records]


def clipped_mean(model: Any, records: list[Any], batch_size: int) -> dict[str, Tensor]:
    """Σ clipped gradients / batch size in float64, of each record alone, unpadded, by the model's
    own loss, which of one record is its mean over its labels."""

    def loss(model: Any, batch: Tensor) -> Tensor:
        record = records[int(batch)]
        one = {name: torch.as_tensor(each)[None] for name, each in record.items()}
        return model(**one).loss

    sums = oracle.clipped_sum(model, loss, torch.arange(len(records)), CLIP_NORM)
    return {name: each / batch_size for name, each in sums.items()}


def error_of(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The distance of two gradients over the length of the second."""
    assert found.keys() == expected.keys()
    theirs = torch.cat([each.flatten() for each in expected.values()])
    ours = torch.cat([found[name].double().flatten() for name in expected])
    return float((ours - theirs).norm() / theirs.norm())


def ledger_counts(folder: Path) -> tuple[int, int]:
    """Intents and commits in a run's ledger."""
    lines = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    kinds = [line["kind"] for line in lines]
    assert not read_ledger(folder / "ledger.jsonl").problems
    return kinds.count("intent"), kinds.count("commit")


def train(trainer: Any, **settings: Any) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="noise and sampling come from a seed")
        return trainer.train(**settings)


def tokenizer(template: str | None = None) -> Any:
    """Letters, a space and special tokens: as many as the tiny models have."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = {letter: number + 3 for number, letter in enumerate("abcdefghijklmnopqrstuvwxyz .:")}
    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | letters
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    found = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    found.chat_template = template
    return found


def folder_of_model(folder: Path, model: Any, template: str | None = None) -> Path:
    """A model and a tokenizer as `from_pretrained` reads them."""
    model.save_pretrained(folder)
    tokenizer(template).save_pretrained(folder)
    return folder


@contextmanager
def accelerator(rank=0, size=1, *, is_launched=False, **settings):
    """An Accelerator of this process, or of the ranks of a test; nothing of it is left behind."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState

    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    before = dict(os.environ)
    if size > 1 or is_launched:  # as torchrun does, also for one process
        os.environ.update({name: str(each) for name, each in numbers.items()})
        os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"})
    try:
        yield Accelerator(cpu=True, **settings)
    finally:
        os.environ.clear()
        os.environ.update(before)
        for each in (AcceleratorState, GradientState, PartialState):
            each._shared_state.clear()
