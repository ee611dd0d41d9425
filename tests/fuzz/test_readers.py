"""Damaged files of a run end in exit code 2 and a sentence, whoever reads them."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fuzz.conftest import in_time
from tests.fuzz.inputs import CORPUS, SEED, copy_of, damage_file
from tests.verify.test_traces import loop as loop_with_trace
from unison.errors import Diverged, UnisonError
from unison.models import load
from unison.privacy import PrivacyEngine, read_ledger
from unison.rng import Key, open_sealed_key, seal, seal_key
from unison.train import loop

RUN_FILES = ["config.json", "result.json", "metrics.jsonl", "model.safetensors", "environment.json"]
LEDGER_FILES = ["ledger.jsonl", "ledger.head.json"]
MODEL_FILES = ["model.json", "model.safetensors"]
RECORD_FILES = ["record.jsonl", "record.tree"]

# A few inputs in every run of the tests, and ten blocks of many in the long one.
BLOCKS = [0, *(pytest.param(each, marks=pytest.mark.full) for each in range(1, 11))]
blocks = pytest.mark.parametrize("block", BLOCKS)


def refusal(read: Callable[[Path], object], path: Path) -> str | None:
    """What a reader says of a file that it does not take."""
    try:
        read(path)
    except UnisonError as error:
        return str(error)
    return None


@blocks
def test_runs_that_are_compared(sound, ends_well, tmp_path, block):
    rng = random.Random(f"{SEED} verify {block}")
    for number in range(100 if block else 30):
        run = copy_of(sound / "a", tmp_path / f"a-{number}")
        damage_file(run / rng.choice(RUN_FILES), rng)
        pair = [run, sound / "b"]
        rng.shuffle(pair)
        code, err = ends_well("verify", "runs", *pair, *rng.choice([[], ["--json"]]))
        assert code != 1 or not err


@blocks
def test_traces_that_are_compared(ends_well, tmp_path, block):
    rng = random.Random(f"{SEED} traces {block}")
    sound = loop_with_trace(tmp_path / "sound.jsonl", steps=1, num_values=4)
    for number in range(100 if block else 30):
        file = tmp_path / f"{number}.jsonl"
        file.write_bytes(sound.read_bytes())
        damage_file(file, rng)
        pair = [file, sound]
        rng.shuffle(pair)
        options = rng.choice([[], ["--json"], ["--tolerance", "0.1"]])
        code, err = ends_well("verify", "diff", *pair, *options)
        assert code != 1 or not err


@blocks
def test_ledgers(sound, tmp_path, block):
    rng = random.Random(f"{SEED} ledger {block}")
    for number in range(100 if block else 60):
        run = tmp_path / str(number)
        run.mkdir()
        for name in LEDGER_FILES:
            (run / name).write_bytes((sound / "a" / name).read_bytes())
        damage_file(run / rng.choice(LEDGER_FILES), rng)
        with in_time(run):
            said = refusal(read_ledger, run / "ledger.jsonl")
        assert said is None or str(run) in said


@blocks
def test_models(sound, tmp_path, block):
    rng = random.Random(f"{SEED} model {block}")
    for number in range(40 if block else 20):
        run = tmp_path / str(number)
        run.mkdir()
        for name in MODEL_FILES:
            (run / name).write_bytes((sound / "a" / name).read_bytes())
        damage_file(run / rng.choice(MODEL_FILES), rng)
        with in_time(run):
            said = refusal(load, run)
        assert said is None or str(run) in said


@blocks
def test_runs_that_go_on(sound, ends_well, tmp_path, monkeypatch, block):
    """All that is read of a run that goes on; it is stopped before its next step."""

    def stop(run):
        raise Diverged("as far as this test goes")

    monkeypatch.setattr(loop.Run, "train", stop)
    monkeypatch.setattr(PrivacyEngine, "check", lambda engine, row: None)  # a second of each run
    rng = random.Random(f"{SEED} resume {block}")
    said = set()
    for number in range(20 if block else 6):
        run = copy_of(sound / "stopped", tmp_path / f"run-{number}")
        damage_file(run / rng.choice(files_of(run)), rng)
        code, err = ends_well("train", "--resume", run)
        assert code == 2
        said.add(err)
    assert any("as far as this test goes" in each for each in said)


@blocks
def test_records_that_are_compared(sound, ends_well, tmp_path, block):
    rng = random.Random(f"{SEED} record {block}")
    for number in range(100 if block else 30):
        run = tmp_path / str(number)
        run.mkdir()
        for name in RECORD_FILES:
            (run / name).write_bytes((sound / "a" / name).read_bytes())
        damage_file(run / rng.choice(RECORD_FILES), rng)
        pair = [run, sound / "b"]
        rng.shuffle(pair)
        ends_well("replay", pair[0], "--against", pair[1], *rng.choice([[], ["--json"]]))


@blocks
def test_runs_that_are_replayed(sound, ends_well, tmp_path, monkeypatch, block):
    """All that is read of a run that is replayed; it is stopped before its first step."""

    def stop(run, step, passes):
        raise Diverged("as far as this test goes")

    monkeypatch.setattr(loop.Run, "advance", stop)
    monkeypatch.setattr(PrivacyEngine, "check", lambda engine, row: None)
    rng = random.Random(f"{SEED} replay {block}")
    for number in range(20 if block else 5):
        run = copy_of(sound / "stopped", tmp_path / f"run-{number}")
        damage_file(run / rng.choice([*files_of(run), *RECORD_FILES]), rng)
        code, _ = ends_well("replay", run, "--steps", "3:4" if number % 4 else "0:2")
        assert code == 2


@blocks
def test_sealed_keys(tmp_path, monkeypatch, block):
    monkeypatch.setitem(seal._SCRYPT, "n", 2)
    rng, sealed = random.Random(f"{SEED} key {block}"), tmp_path / "key"
    seal_key(Key.from_seed(0), sealed, "passphrase", "ab" * 32)
    for number in range(200 if block else 60):
        path = tmp_path / str(number)
        path.write_bytes(sealed.read_bytes())
        damage_file(path, rng)
        with in_time(path):
            said = refusal(lambda path: open_sealed_key(path, "passphrase", "ab" * 32), path)
        assert said is None or str(path) in said


EDITS = json.loads((CORPUS / "edits.json").read_text())


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: str(edit["place"]))
def test_edits_that_once_failed(sound, ends_well, tmp_path, monkeypatch, edit):
    """Values that nothing but the reader can refuse: the hash of the manifest is left out."""
    monkeypatch.setattr(PrivacyEngine, "check", lambda engine, row: None)
    run = copy_of(sound / "stopped", tmp_path / "run")
    for folder in ("step-000001", "step-000002", "step-000003"):
        path = run / edit["file"].replace("step-000003", folder)
        content = json.loads(path.read_text())
        content.pop("sha256", None)
        *outer, last = edit["place"]
        inner = content
        for key in outer:
            inner = inner[key]
        if edit.get("drop"):
            inner.pop(last, None)
        else:
            inner[last] = edit["value"]
        path.write_text(json.dumps(content))
    code, err = ends_well("train", "--resume", run)
    assert code == 2
    assert Path(edit["file"]).name in err or "does not take its saved state" in err


def files_of(run: Path) -> list[str]:
    found = [path for path in run.rglob("*") if path.is_file() and path.name != ".lock"]
    newest = [path for path in found if "step-000003" in str(path)]
    return sorted(str(path.relative_to(run)) for path in [*found, *newest, *newest])
