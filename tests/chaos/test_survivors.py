"""Replicated ranks of which one is killed: the others hold all state, and no step is lost."""

import json
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from tests.chaos.runs import SMALL, launch, outcome_of, steps_begun, train_straight
from tests.train.private_runs import SEEDED, config_of
from unison.config import TrainConfig
from unison.run_files import read_metrics, read_result
from unison.train.run_folder import checkpoints_of

STEPS = 12
COPIED = SMALL | {"shard": "ddp", "steps": STEPS}


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Runs that nobody disturbs, each made once; gradients in granules need privacy or shards."""
    found: dict[int, Path] = {}

    def make(num_ranks: int, *, is_private: bool) -> Path:
        key = 0 if is_private else num_ranks
        if key not in found:
            folder = tmp_path_factory.mktemp("straight")
            found[key] = train_straight(folder, steps=STEPS)
            if not is_private:
                found[key] = folder / "copies"
                launch(config(found[key], folder, is_private=False), num_ranks, max_restarts=0)
        return found[key]

    return make


def config(run: Path, folder: Path, *, is_private: bool, **settings) -> TrainConfig:
    settings = COPIED | settings | ({} if is_private else {"reducer": "fast"})
    return config_of(run, folder / "text.txt", SEEDED if is_private else None, **settings)


def kill_one(run: Path, rank: int, after: int, seen: list[int]) -> threading.Thread:
    """Kill a rank once a run has recorded some steps; `seen` gets how many it had."""

    def num_recorded() -> int:
        path = run / "metrics.jsonl"
        lines = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []
        return max([json.loads(line)["step"] for line in lines], default=0)

    def work() -> None:
        while num_recorded() < after:
            time.sleep(0.002)
        ranks = sorted(each.pid or 0 for each in multiprocessing.active_children())
        os.kill(ranks[rank], signal.SIGKILL)
        seen.append(num_recorded())

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def check(straight: Path, run: Path, *, num_ranks: int, victim: int, is_private: bool) -> None:
    seen: list[int] = []
    killer = kill_one(run, victim, after=5, seen=seen)
    launch(
        config(run, straight.parent, is_private=is_private, eval_every=3), num_ranks, max_restarts=1
    )
    killer.join()

    assert read_result(run).digest == read_result(straight).digest
    (resumed,) = map(json.loads, (run / "resumptions.jsonl").read_text().splitlines())
    assert resumed["step"] >= seen[0] - (victim == 0)  # what a rank that is gone had done alone
    (made,) = checkpoints_of(run)  # there is no other checkpoint
    assert int(made.name[5:]) == resumed["step"]
    assert not [*run.glob("checkpoints/.*")]
    trained = [each["step"] for each in read_metrics(run) if "train/lr" in each]
    assert trained == [*range(1, STEPS + 1)]
    evaluated = {each["step"] for each in read_metrics(run) if "eval/loss" in each}
    assert evaluated == {*range(0, STEPS + 1, 3)}
    if is_private:
        begun = steps_begun(run)
        again = [step for step in begun if begun.count(step) > 1]
        assert set(again) <= {resumed["step"]}, begun  # the one that was cut short, counted twice
        found = outcome_of(run, straight, [])
        assert found.is_good, found


def test_a_killed_copy_costs_no_step(straight, tmp_path):
    check(straight(2, is_private=True), tmp_path / "run", num_ranks=2, victim=1, is_private=True)


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("is_private", [True, False])
@pytest.mark.parametrize(("num_ranks", "victim"), [(2, 0), (3, 0), (3, 1), (3, 2)])
def test_whichever_is_killed(straight, tmp_path, num_ranks, victim, is_private):
    ranks = {"num_ranks": num_ranks, "victim": victim}
    check(
        straight(num_ranks, is_private=is_private), tmp_path / "run", **ranks, is_private=is_private
    )


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_rank_that_waits_in_vain_saves_what_it_has(straight, tmp_path):
    """As of a machine that has vanished: its connections are open, and nothing comes any more."""
    expected, run = straight(2, is_private=True), tmp_path / "run"

    def disturb() -> None:
        while len(steps_begun(run)) < 5:
            time.sleep(0.002)
        first, second = sorted(each.pid or 0 for each in multiprocessing.active_children())
        os.kill(second, signal.SIGSTOP)
        time.sleep(1)
        os.kill(first, signal.SIGTERM)
        while not checkpoints_of(run):
            time.sleep(0.05)
        os.kill(first, signal.SIGKILL)
        os.kill(second, signal.SIGKILL)

    thread = threading.Thread(target=disturb)
    thread.start()
    launch(config(run, expected.parent, is_private=True), 2, max_restarts=1)
    thread.join()
    found, begun = outcome_of(run, expected, []), steps_begun(run)
    assert found.is_good, found
    assert len(begun) <= STEPS + 1, begun  # the step that was under way, at most
