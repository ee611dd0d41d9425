"""`unison train --private` as a person runs it."""

import json
import math
import os
import signal
import subprocess
import sys
import time

import pytest

from unison.privacy import read_ledger
from unison.run_files import read_result
from unison.train.run_folder import checkpoints_of

FAST = ["--steps", "4", "--batch-size", "16", "--row-length", "32", "--eval-rows", "8"]
FAST += ["--num-layers", "1", "--no-tensorboard"]
PRIVATE = ["--private", "--delta", "1e-4", "--accountant", "rdp"]
EPSILON = ["--epsilon", "8"]


def test_the_epsilon_that_a_run_prints_is_that_of_its_ledger(unison, text, tmp_path):
    run = tmp_path / "run"
    options = [*PRIVATE, "--epsilon", "8", "--clipping", "auto", "--physical-batch", "8"]
    code, out, err = unison("train", "--data", text, "--out", run, *FAST, *options, "--json")
    assert code == 0, err
    result = json.loads(out.splitlines()[-1])
    assert (result["shard"], result["train_loss_after"]) == ("full", None)
    epsilon = result["privacy"]["epsilon"]
    assert epsilon <= 8
    assert f"{epsilon:.3f}, of 8 allowed, by RDP" in err
    assert "not covered by ε" in err
    assert "--layout documents protects documents" in err
    code, out, err = unison("account", "--ledger", run, "--delta", "1e-4", "--json")
    assert code == 0, err
    accounted = json.loads(out)
    assert accounted["epsilon"]["rdp"] == epsilon
    assert (accounted["counted"], accounted["committed"]) == (4, 4)


# options and what the sentence must say
REFUSED = {
    "delta alone": (["--delta", "1e-5"], "only private runs have --delta; add --private"),
    "several alone": (
        ["--epsilon", "8", "--clipping", "ghost", "--no-secure-noise"],
        "only private runs have --clipping, --epsilon, --secure-noise",
    ),
    "unsafe alone": (["--unsafe-diagnostics"], "only private runs have --unsafe-diagnostics"),
    "no delta": (["--private", "--epsilon", "8"], "--private needs --delta"),
    "no noise": ([*PRIVATE], "found neither"),
    "both": ([*PRIVATE, "--epsilon", "8", "--noise-multiplier", "1"], "found both"),
    "recompute": (
        [*PRIVATE, "--epsilon", "8", "--clipping", "recompute_bk"],
        "--shard ddp or none, found 'full'",
    ),
    "granule": (
        [*PRIVATE, *EPSILON, "--reducer", "ordered", "--granule", "4", "--physical-batch", "6"],
        "--micro-batch-size must be a multiple of --granule, found 6 and 4",
    ),
    "large delta": (
        ["--private", "--epsilon", "8", "--delta", "0.1"],
        "delta must lie below 1 / number of rows",
    ),
    "capacity": ([*PRIVATE, "--epsilon", "8", "--capacity", "9"], "--sampling truncated"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_contradictions_are_one_sentence_and_code_2(unison, text, tmp_path, case):
    options, expected = REFUSED[case]
    code, _, err = unison("train", "--data", text, "--out", tmp_path / "run", *FAST, *options)
    assert code == 2
    assert expected in err
    assert err.startswith("unison: ")
    assert len(err.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_seeded_noise_is_called_what_it_is(unison, text, tmp_path):
    options = [*PRIVATE, "--noise-multiplier", "1", "--no-secure-noise", "--seed", "5"]
    train = ["train", "--data", text, *FAST, *options]
    code, out, err = unison(*train, "--out", tmp_path / "run", "--unsafe-diagnostics")
    assert code == 0, err
    assert "noise and sampling come from seed 5" in out
    assert "seeded noise: nothing here is private" in out
    assert "infinite: the noise came from a seed" in out
    assert "seeded: ε if secret" in out
    assert "not covered by ε: loss" in out
    saved = json.loads((tmp_path / "run" / "result.json").read_text(), parse_constant=pytest.fail)
    assert saved["privacy"]["epsilon"] == "inf"
    if_secret = saved["privacy"]["epsilon_if_secret"]
    assert read_result(tmp_path / "run").privacy.epsilon == math.inf
    metrics = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert '"privacy/epsilon_if_secret"' in metrics
    assert '"privacy/epsilon"' not in metrics
    code, out, _ = unison("account", tmp_path / "run", "--delta", "1e-4", "--json")
    accounted = json.loads(out)
    assert (code, accounted["epsilon"]["rdp"]) == (0, "inf")
    assert accounted["epsilon_if_secret"]["rdp"] == if_secret


def test_runs_on_one_data_set_are_linked_by_its_salt(unison, text, tmp_path):
    salt = text.with_suffix(".salt")
    common = ["train", "--data", text, *FAST, *PRIVATE, "--noise-multiplier", "1"]
    common += ["--steps", "1", "--data-salt"]
    for name in ("a", "b"):
        code, _, err = unison(*common, salt, "--out", tmp_path / name)
        assert code == 0, err
    code, out, _ = unison("account", tmp_path / "a", tmp_path / "b", "--delta", "1e-4", "--json")
    result = json.loads(out)
    assert (code, len(result["linked"][0]), result["unlinked"]) == (0, 2, [])
    covered = [run["committed_to"] for run in result["runs"]]
    assert covered == [["number of records and data_id"]] * 2
    # Other rows are other data, under the same salt.
    other = text.with_name("other.txt")
    other.write_text(text.read_text().replace("the", "one"))
    common[2] = other
    code, _, err = unison(*common, salt, "--out", tmp_path / "c")
    assert code == 0, err
    code, _, err = unison("account", tmp_path / "a", tmp_path / "c", "--delta", "1e-4")
    assert code == 2
    assert "commit to different data" in err
    code, _, err = unison(*common, tmp_path / "d" / "salt", "--out", tmp_path / "d")
    assert code == 2
    assert "lies in the run's folder" in err


@pytest.mark.full
@pytest.mark.usefixtures("forked_ranks")
def test_two_ranks_and_one_leave_runs_that_agree(unison, text, tmp_path):
    options = [*FAST, *PRIVATE, "--noise-multiplier", "1", "--no-secure-noise"]
    train = ["train", "--data", text, *options, "--reducer", "ordered", "--granule", "4"]
    runs = [tmp_path / "two", tmp_path / "one"]
    for run, ranks in zip(runs, (["--shard", "full", "--nproc", "2"], []), strict=True):
        code, _, err = unison(*train, "--out", run, *ranks)
        assert code == 0, err
    code, out, err = unison("verify", "runs", *runs, "--json")
    assert code == 0, err
    found = json.loads(out)
    assert (found["num_ranks"], found["has_same_bits"]) == ([2, 1], True)


def test_the_help_says_what_is_protected(unison, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = unison("train", "--help")
    assert code == 0
    assert "one row is one record" in out
    assert "What is protected is one row" in " ".join(out.replace("│", " ").split())


def wait_for_intents(ledger, number, process):
    """Wait until a ledger holds so many intents."""
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        assert process.poll() is None, process.stderr.read()
        if ledger.exists() and ledger.read_bytes().count(b'"kind": "intent"') >= number:
            return
        time.sleep(0.002)
    raise AssertionError("the run did not get there in time")


@pytest.mark.full
def test_a_killed_run_counts_every_intent_when_it_goes_on(unison, text, tmp_path):
    run, num_steps = tmp_path / "run", 40
    options = [*FAST, *PRIVATE, "--noise-multiplier", "1", "--steps", num_steps]
    options += ["--checkpoint-every", "3", "--eval-every", "0"]
    command = ["train", "--data", text, "--out", run, *options]
    process = subprocess.Popen(
        [sys.executable, "-m", "unison", *map(str, command)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    with process:
        wait_for_intents(run / "ledger.jsonl", 8, process)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    before = read_ledger(run / "ledger.jsonl")
    assert before.problems == []
    saved = int(checkpoints_of(run)[-1].name[5:])
    assert 8 <= before.num_intents < num_steps

    code, out, err = unison("train", "--resume", run, "--json")
    assert code == 0, err
    after = read_ledger(run / "ledger.jsonl")
    assert after.problems == []
    assert after.num_intents == before.num_intents + num_steps - saved
    repeated = [release.step for release in after.releases[: before.num_intents]]
    assert [release.step for release in after.releases] == [*repeated, *range(saved, num_steps)]
    result = json.loads(out.splitlines()[-1])
    assert result["privacy"]["num_counted"] == after.num_intents
    code, _, err = unison("train", "--resume", run, "--private", "--epsilon", "3")
    assert (code, "is complete" in err) == (2, True)
