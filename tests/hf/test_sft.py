"""TRL's SFTTrainer with private steps."""

from typing import Any

import pytest

pytest.importorskip("trl")
pytest.importorskip("datasets")

from datasets import Dataset
from trl import SFTConfig

import unison
from tests.hf.common import (
    Gradients,
    clipped_mean,
    drawn,
    error_of,
    ledger_counts,
    llama,
    privacy,
    silent,
    tokenizer,
    train,
)
from unison.hf import PrivateSFTTrainer

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def rows(form):
    texts = ["abc" * (1 + number % 3) + "xyz"[: number % 4] for number in range(24)]
    if form == "text":
        return Dataset.from_list([{"text": each} for each in texts])
    return Dataset.from_list([{"prompt": each[:2], "completion": each[2:]} for each in texts])


def trainer(folder, form="text", *, seen=(), spends=None, **settings):
    quiet = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "dataloader_pin_memory": False}
    given = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_steps": 2,
        "max_length": 16,
        "max_grad_norm": 0.0,
        "save_strategy": "no",
        "bf16": False,
        "gradient_checkpointing": False,
    }
    return PrivateSFTTrainer(
        model=llama(),
        args=SFTConfig(str(folder), **quiet, **given | settings),
        train_dataset=rows(form),
        processing_class=tokenizer(),
        privacy=spends or privacy(),
        callbacks=list(seen),
    )


@pytest.mark.parametrize("form", [pytest.param("text", marks=pytest.mark.full), "completion"])
def test_the_first_step_is_the_clipped_sum_of_single_rows(form, tmp_path):
    seen = Gradients()
    private = trainer(tmp_path, form, seen=[seen], spends=silent(), max_steps=1)
    prepared: Any = private.train_dataset
    records = [{name: each[name] for name in ("input_ids", "labels")} for each in prepared]
    if form == "completion":
        assert all(-100 in each["labels"] for each in records)
    expected = clipped_mean(llama(), drawn(records, 8), 8)
    train(private)
    assert error_of(seen.found, expected) < 1e-6


def test_steps_commits_and_logs_agree_and_tell_nothing_else(tmp_path):
    private = trainer(tmp_path, logging_steps=1, max_steps=2)
    assert train(private).global_step == 2
    assert ledger_counts(tmp_path) == (2, 2)
    logs = [each for each in private.state.log_history if "grad_norm" in each]
    assert [each["step"] for each in logs] == [1, 2]
    known = {"grad_norm", "learning_rate", "epsilon", "delta", "noise_multiplier", "epoch", "step"}
    assert all(set(each) == known for each in logs)


@pytest.mark.parametrize("name", ["packing", "padding_free", "activation_offloading"])
def test_packed_rows_are_refused(name, tmp_path):
    with pytest.raises(unison.UnsupportedOperation, match=f"{name}=True cannot be used"):
        trainer(tmp_path, **{name: True})
