"""`unison verify runs` as a person runs it."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.train.private_runs import GIVEN, SEEDED, config_of
from unison.train import train

ORDERED = {"reducer": "ordered", "granule": 4, "batch_size": 8, "steps": 3}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """Runs of one experiment, and some of others."""
    folder = tmp_path_factory.mktemp("runs")
    text = folder / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 100)
    runs = {
        "none": (SEEDED, ORDERED | {"unsafe_diagnostics": True}),
        "full": (SEEDED, ORDERED | {"unsafe_diagnostics": True, "shard": "full"}),
        "fast": (SEEDED, ORDERED | {"reducer": "fast"}),
        "secure": (GIVEN, ORDERED),
    }
    for name, (privacy, settings) in runs.items():
        train(config_of(folder / name, text, privacy, **settings), on_stderr=True)
    return folder


@pytest.fixture
def copied(made, tmp_path):
    """A copy of the sharded run, to be changed."""
    return Path(shutil.copytree(made / "full", tmp_path / "copy [/b]"))  # as rich's marks look


def test_runs_that_agree(unison, made, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(made)
    code, out, err = unison("verify", "runs", "none", "full")
    assert code == 0, err
    assert "the two runs agree bit for bit: 25,312 parameters" in out
    for word in (
        "train/loss (3)",
        "train/grad_norm (3)",
        "ε spent",
        "noise multiplier σ",
        "3 of 3",
    ):
        assert word in out
    assert "tokens_per_second" not in out
    assert max(map(len, out.splitlines())) <= 80
    code, out, _ = unison("verify", "runs", "none", "full", "--json")
    found = json.loads(out)
    assert (code, found["has_same_bits"], found["shardings"]) == (0, True, ["none", "full"])
    assert found["parameters"]["num_differing"] == 0


def change_metric(run: Path) -> str:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    for number, line in enumerate(lines):
        record = json.loads(line)
        if record["step"] == 2 and "train/loss" in record:
            record["train/loss"] *= 1 + 1e-15
            lines[number] = json.dumps(record)
    (run / "metrics.jsonl").write_text("\n".join(lines))
    return "the ordered reducer must give the same bits, but train/loss differs from step 2 on"


def forget_metric(run: Path) -> str:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join(lines[:-1]))
    return "eval/train_loss differs from step 3 on"


def change_parameter(run: Path) -> str:
    parameters = load_file(run / "model.safetensors")
    next(iter(parameters.values())).view(-1)[0] += 1e-7
    save_file(parameters, run / "model.safetensors")
    return "all figures are equal, but 1 of 25,312 parameters differ, by up to"


def change_digest(run: Path) -> str:
    result = json.loads((run / "result.json").read_text())
    (run / "result.json").write_text(json.dumps(result | {"digest": "0" * 64}))
    return "the parameters in the files are equal, but not the digests that the runs gave"


def change_conditions(run: Path) -> str:
    change_digest(run)
    config = json.loads((run / "config.json").read_text())
    config["fingerprint"]["threads"] = 77
    (run / "config.json").write_text(json.dumps(config))
    return "they ran under different conditions: threads"


@pytest.mark.parametrize(
    "change", [change_metric, forget_metric, change_parameter, change_digest, change_conditions]
)
def test_where_two_runs_part_is_said(unison, made, copied, change):
    message = change(copied)
    code, out, _ = unison("verify", "runs", made / "none", copied)
    assert code == 1
    assert message in " ".join(out.split())


def test_the_fast_reducer_promises_no_bits(unison, made, tmp_path):
    other = Path(shutil.copytree(made / "fast", tmp_path / "other"))
    change_parameter(other)
    code, out, _ = unison("verify", "runs", made / "fast", other)
    assert code == 0
    assert "the fast reducer promises no bits" in " ".join(out.split())


# the other run and what the sentence must say
REFUSED = {
    "secure": "came from a secret key, which no other run has; for a comparison train both with",
    "fast": "the runs are different experiments: reducer ('ordered' and 'fast'); compare runs",
    "missing": "is not the folder of a run that has ended: no config.json, result.json",
}


@pytest.mark.parametrize("other", REFUSED)
def test_what_cannot_be_compared_is_one_sentence_and_code_2(unison, made, other):
    code, _, err = unison("verify", "runs", made / "none", made / other)
    assert code == 2
    assert REFUSED[other] in err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("group", "name", "message"),
    [
        ("rows", "train", "were trained on different rows"),
        ("mechanism", "preset", "different experiments: preset ('tiny' and 'other')"),
        ("mechanism", "lr", "config.json: mechanism.lr must be a number, found 'other'"),
    ],
)
def test_other_experiments_are_refused(unison, made, copied, group, name, message):
    config = json.loads((copied / "config.json").read_text())
    config[group][name] = "other"
    (copied / "config.json").write_text(json.dumps(config))
    code, _, err = unison("verify", "runs", made / "none", copied)
    assert (code, message in err) == (2, True), err
