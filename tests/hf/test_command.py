"""`unison finetune`, `generate` and `export`: from a folder to a folder that others can load."""

import json
import os
import pickle
from pathlib import Path

import pytest
import torch

pytest.importorskip("accelerate")
pytest.importorskip("peft")

from peft import LoraConfig
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from tests.cli.conftest import unison as unison_fixture
from tests.fuzz.test_no_pickle import Evil, unpickled
from tests.hf.common import bert, folder_of_model, ledger_counts, llama, tokenizer
from unison.errors import BadInput
from unison.hf import FinetuneConfig, PrivateTrainer
from unison.hf.command import _load, _row, generate, read_records, resume
from unison.models import ModelConfig, build, save
from unison.run_files import COUNTERFACTUAL_FILE

unison = unison_fixture
PLAN = ["--epsilon", 3, "--delta", 1e-3, "--accountant", "rdp", "--epochs", 2]
PLAN += ["--batch-size", 16, "--micro-batch-size", 4, "--max-length", 12]
TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}.{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def write(path, records):
    path.write_text("".join(json.dumps(each) + "\n" for each in records))
    return path


def test_a_language_model_is_fine_tuned_generates_and_is_exported(tmp_path, unison):
    base = folder_of_model(tmp_path / "base", llama())
    data = write(tmp_path / "x.jsonl", [{"prompt": "say", "completion": "yes"}] * 16)
    run, out = tmp_path / "run", tmp_path / "out"
    given = ["--model", base, "--data", data, "--out", run, "--lora", 2]
    code, text, _ = unison("finetune", *given, *PLAN)
    assert code == 0
    assert "ε = 2.9" in text
    assert ledger_counts(run) == (2, 2)
    assert "train_loss" not in (run / "result.json").read_text()

    code, text, _ = unison("generate", run, "--prompt", "say", "--max-new-tokens", 3)
    assert code == 0
    code, *_ = unison("export", run, "--to", "hf", "--out", out)
    assert code == 0
    ids = AutoTokenizer.from_pretrained(out)("say", return_tensors="pt")["input_ids"]
    merged = AutoModelForCausalLM.from_pretrained(out)
    made = merged.generate(ids, max_new_tokens=3, do_sample=False)[0, 3:]
    assert tokenizer().decode(made, skip_special_tokens=True) == text.rstrip("\n")

    from peft import PeftModel

    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), run / "model")
    torch.testing.assert_close(merged(ids).logits, adapted(ids).logits, rtol=1e-5, atol=1e-6)
    assert not torch.equal(merged(ids).logits, llama()(ids).logits)

    assert unison("export", run, "--to", "safetensors", "--out", tmp_path / "flat")[0] == 0
    flat = load_file(tmp_path / "flat" / "model.safetensors")
    assert all(torch.equal(flat[name], each) for name, each in merged.named_parameters())


def test_a_classifier_is_fine_tuned_and_exported(tmp_path, unison):
    base = folder_of_model(tmp_path / "base", bert())
    data = write(tmp_path / "x.jsonl", [{"text": "so " * n, "label": n % 2} for n in range(1, 17)])
    given = ["--model", base, "--data", data, "--out", tmp_path / "run"]
    assert unison("finetune", *given, *PLAN)[0] == 0
    assert unison("export", tmp_path / "run", "--out", tmp_path / "out")[0] == 0
    kind = AutoModelForSequenceClassification
    ours = kind.from_pretrained(tmp_path / "run" / "model")
    theirs = kind.from_pretrained(tmp_path / "out")
    ids = torch.tensor([[3, 4, 5]])
    assert torch.equal(ours(ids).logits, theirs(ids).logits)
    code, _, error = unison("generate", tmp_path / "run", "--prompt", "a")
    assert code == 2
    assert "classifier" in error
    code, _, error = unison("finetune", *given, *PLAN)
    assert code == 2
    assert "choose another --out" in error


@pytest.mark.parametrize("name", ["pytorch_model.bin", "adapter_model.bin"])
def test_pickled_weights_are_not_loaded(tmp_path, name):
    base, hacked = folder_of_model(tmp_path / "base", llama()), tmp_path / "hacked"
    folder = base
    if name.startswith("adapter"):
        folder = tmp_path / "adapter"
        tokenizer().save_pretrained(folder)
        LoraConfig(base_model_name_or_path=str(base), task_type="CAUSAL_LM").save_pretrained(folder)
    else:
        (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Evil(hacked)))
    with unpickled() as names, pytest.raises(BadInput, match=r"cannot be loaded.*safetensors"):
        _load(folder, AutoModelForCausalLM)
    assert names == []
    assert not hacked.exists()


def test_a_run_that_stopped_goes_on_with_its_settings(tmp_path, unison, monkeypatch):
    base = folder_of_model(tmp_path / "base", llama())
    data = write(tmp_path / "x.jsonl", [{"text": "say yes"}] * 16)
    run = tmp_path / "run"
    given = ["--model", base, "--data", data, "--out", run, "--lora", 2, "--checkpoint-every", 1]
    own = PrivateTrainer.training_step

    def stopped(self, *args):
        if self.state.global_step == 1:
            raise KeyboardInterrupt
        return own(self, *args)

    monkeypatch.setattr(PrivateTrainer, "training_step", stopped)
    assert unison("finetune", *given, *PLAN)[0] != 0
    monkeypatch.setattr(PrivateTrainer, "training_step", own)
    assert ledger_counts(run) == (1, 1)
    code, _, error = unison("finetune", *given, *PLAN)
    assert code == 2
    assert "--resume it" in error
    code, _, error = unison("finetune", "--resume", run, "--lr", 1)
    assert code == 2
    assert "leave --lr out" in error
    code, text, _ = unison("finetune", "--resume", run)
    assert code == 0
    assert "after 2 steps" in text
    assert ledger_counts(run) == (2, 2)
    code, _, error = unison("finetune", "--resume", run)
    assert code == 2
    assert "has ended" in error
    assert unison("export", run, "--out", tmp_path / "out")[0] == 0


@pytest.mark.parametrize("family", ["decoder", "gpt2"])
def test_a_run_of_train_is_exported(family, tmp_path, unison):
    sizes = {"vocab_size": 40, "context_length": 8, "d_model": 16, "d_ff": 24}
    config = ModelConfig(family=family, num_layers=1, num_heads=2, tie_head=False, **sizes)
    ours = build(config)
    save(config, dict(ours.named_parameters()), tmp_path)
    assert unison("export", tmp_path, "--out", tmp_path / "out")[0] == 0
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = torch.arange(7)[None]
    torch.testing.assert_close(theirs(ids).logits, ours(ids), rtol=1e-4, atol=1e-5)
    (tmp_path / COUNTERFACTUAL_FILE).write_text("{}")  # as a replay without some rows leaves it
    code, _, error = unison("export", tmp_path, "--out", tmp_path / "other")
    assert code == 2
    assert "ε = ∞" in error
    assert not (tmp_path / "other").exists()


def test_paths_may_be_given_as_text():
    config = FinetuneConfig(model="base", data="x.jsonl", out="run")
    assert (config.model, config.data, config.out) == (Path("base"), Path("x.jsonl"), Path("run"))


def test_only_what_is_answered_has_labels():
    model, words = llama(), tokenizer(TEMPLATE)
    row = _row({"prompt": "ab", "completion": "cd"}, words, model, 9, "here")
    assert row["labels"].tolist() == [-100, -100, 5, 6, 1]  # and the end
    asked = [{"role": "user", "content": "b"}, {"role": "assistant", "content": "d"}]
    row = _row({"messages": asked}, words, model, 20, "here")
    text = words.decode(row["input_ids"][row["labels"] != -100]).replace(" ", "")
    assert text == "d."
    row = _row({"text": "abc"}, words, model, 2, "here")
    assert row["labels"].tolist() == row["input_ids"].tolist() == [3, 4]
    with pytest.raises(BadInput, match="the last message must be the assistant's"):
        _row({"messages": asked[:1]}, words, model, 9, "here")
    with pytest.raises(BadInput, match="has no chat template"):
        _row({"messages": asked}, tokenizer(), model, 9, "here")
    with pytest.raises(BadInput, match="label 2 of a model with 2 labels"):
        _row({"text": "a", "label": 2}, words, bert(), 9, "here")


BROKEN = {
    "no JSON": ('{"text": "a"}\nnot', r":2 is damaged: it is no whole JSON"),
    "too deep": ("[" * 100_000, r":1 is damaged: it is nested too deeply"),
    "a list": ("[1]", r":1 has no text"),
    "two forms": ('{"text": "a"}\n{"prompt": "a", "completion": "b"}', r":2 has no text"),
    "a number": ('{"text": 3}', "text must be of type str"),
    "a truth": ('{"text": "a", "label": true}', "label must be of type int"),
    "nothing": ("", "has no records"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_data_that_cannot_be_read_are_refused_by_line(case, tmp_path):
    text, message = BROKEN[case]
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    with pytest.raises(BadInput, match=message):
        read_records(path)
    with pytest.raises(BadInput, match="cannot be read"):
        read_records(tmp_path / "none.jsonl")


def test_records_end_where_lines_end(tmp_path):
    """JSON may hold other characters at which Python would cut a text into lines."""
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "a\u2028b\x85"}\r\n{"text": "c"}')
    assert [each["text"] for each in read_records(path)] == ["a\u2028b\x85", "c"]


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadInput, match="is no ordinary file"):
        read_records(tmp_path / "pipe")


HOSTILE = {
    "no object": ("[]", "it must be an object"),
    "another type": (
        '{"config": {"model": 1, "data": "d", "out": "o"}, "privacy": {}}',
        "model: .*must be a text",
    ),
    "a field of another": ('{"config": {"x": 1}, "privacy": {}}', "unknown to this unison"),
    "nothing to train": (
        '{"config": {"model": "m", "data": "d", "out": "o", "epochs": -1}, "privacy": {}}',
        "epochs must be above 0",
    ),
    "too deep": ("[" * 100_000, "nested too deeply"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_settings_that_anybody_may_have_written_are_refused_by_field(case, tmp_path):
    text, message = HOSTILE[case]
    (tmp_path / "finetune.json").write_text(text)
    with pytest.raises(BadInput, match=message):
        resume(tmp_path)
    (tmp_path / "result.json").write_text(text)
    with pytest.raises(BadInput, match=r"is no run of `unison finetune` that|nested too deeply"):
        generate(tmp_path, "a")
