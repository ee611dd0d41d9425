"""`unison replay` refuses what it cannot replay, in one sentence."""

import pytest

from tests.train.private_runs import config_of
from unison.train import train


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    root = tmp_path_factory.mktemp("replay")
    (root / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 60)
    settings = {"reducer": "ordered", "batch_size": 4, "granule": 2, "steps": 1, "record": True}
    train(config_of(root / "run", root / "text.txt", None, **settings, shard="full"))
    return root / "run"


def test_one_step_on_this_rank(unison, run):
    code, out, err = unison("replay", run, "--device", "cpu")
    assert (code, err) == (0, "")
    assert "step 1 is equal to the bit, replayed on 1 rank from step 0" in out


CASES = {
    "--steps 3": "--steps takes A:B",
    "--steps 1:1": "found --steps 1:1",
    "--steps 0:9": "a record of steps 0 to 1",
    "--without x": "--without takes row numbers",
    "--without 1": "go together",
    "--out here": "go together",
    "--trace pyproject.toml": "choose another --trace",
    "--trace no/such/a.trace": "its folder is not there",
    "--trace a.trace --against nowhere": "leave the rest out",
    "--device tpu": "device must be one of",
    "--seal-key nowhere": "no sealed key",
    "--against nowhere": "holds no record.jsonl",
    "--against nowhere --bisect": "leave the rest out",
}


@pytest.mark.parametrize("options", CASES)
def test_what_is_refused(unison, run, options):
    code, _, err = unison("replay", run, *options.split())
    assert code == 2
    assert CASES[options] in err
    assert err.count("\n") == 1


def test_a_folder_without_a_record(unison, run, tmp_path):
    code, _, err = unison("replay", tmp_path)
    assert code == 2
    assert "config.json" in err
    (tmp_path / "config.json").write_bytes((run / "config.json").read_bytes())
    code, _, err = unison("replay", tmp_path)
    assert code == 2
    assert "only a run of unison train --record can be replayed" in err


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--record", "--record needs --reducer ordered"),
        ("--seal-key key", "only private runs have --seal-key"),
        (
            "--private --epsilon 8 --delta 1e-5 --seal-key key --reducer ordered --granule 2",
            "it needs --private, secure noise and --record",
        ),
    ],
)
def test_settings_that_do_not_go_together(unison, tmp_path, options, sentence):
    code, _, err = unison("train", "--out", tmp_path / "run", *options.split())
    assert code == 2
    assert sentence in err
