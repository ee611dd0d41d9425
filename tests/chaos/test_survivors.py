"""Replicated ranks of which one is killed: the others hold all state, and no step is lost."""

import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.chaos.runs import SMALL, launch, one_rank, outcome_of, steps_begun, train_straight
from tests.train.private_runs import SEEDED, config_of
from unison.config import TrainConfig
from unison.run_files import read_metrics, read_result
from unison.train.loop import Run
from unison.train.run_folder import checkpoints_of

STEPS = 12
COPIED = SMALL | {"shard": "ddp", "steps": STEPS, "eval_every": 3}


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


def check(straight: Path, run: Path, *, is_private: bool = True, is_exact: bool = True) -> int:
    """Hold a run against one that was not disturbed; returns the step that it went on from."""
    if is_exact:
        assert read_result(run).digest == read_result(straight).digest
    found, expected = (load_file(each / "model.safetensors") for each in (run, straight))
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)
    (line,) = map(json.loads, (run / "resumptions.jsonl").read_text().splitlines())
    # Nobody else wrote a checkpoint; a survivor may have come to the step before.
    found = [int(path.name[5:]) for path in checkpoints_of(run)]
    assert found in ([line["step"]], [line["step"] - 1, line["step"]])
    assert not [*run.glob("checkpoints/.*")]
    trained = [each["step"] for each in read_metrics(run) if "train/lr" in each]
    assert trained == [*range(1, STEPS + 1)]
    evaluated = {each["step"] for each in read_metrics(run) if "eval/loss" in each}
    assert evaluated == {*range(0, STEPS + 1, 3)}
    if is_private:
        begun = steps_begun(run)
        again = {step for step in begun if begun.count(step) > 1}
        assert again <= {line["step"]}, begun  # the one that was cut short, counted twice
        outcome = outcome_of(run, straight, [])
        assert outcome.is_good, outcome
    return line["step"]


def rank_that_dies(config: TrainConfig, rank: int, moment: str, step: int) -> None:
    """A rank that is killed once, at a moment of a step: the first time that ranks are started."""
    if os.environ["RANK"] == str(rank) and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        original = getattr(Run, moment)

        def dying(self: Run, *args, **kwargs):
            # An update begins, and a step, when the step before is the last complete one.
            if self.progress.step == step - (moment in ("advance", "_leave_boundary")):
                os.kill(os.getpid(), signal.SIGKILL)
            return original(self, *args, **kwargs)

        setattr(Run, moment, dying)
    one_rank(config)


# Where a rank dies, of which step, and the last step that the others then have.
MOMENTS = {
    "in a step": ("advance", 5, 4),
    "in an update": ("_leave_boundary", 5, 5),
    "after it": ("record_step", 5, 5),
    "in an evaluation": ("evaluate", 6, 6),
    "in the last update": ("_leave_boundary", STEPS, STEPS),
    "in the last evaluation": ("evaluate", STEPS, STEPS),
}


@pytest.mark.timeout(300)
@pytest.mark.full
@pytest.mark.parametrize("name", MOMENTS)
def test_a_killed_copy_costs_no_step(straight, tmp_path, name):
    moment, step, expected = MOMENTS[name]
    undisturbed, run = straight(2, is_private=True), tmp_path / "run"
    settings = config(run, undisturbed.parent, is_private=True)
    launch(settings, 2, 1, moment, step, max_restarts=1, rank=rank_that_dies)
    assert check(undisturbed, run) == expected


def kill_at(run: Path, num_steps: int, kill: Callable[[list[int]], None]) -> threading.Thread:
    """Call `kill` with the ranks' processes once a run has recorded some steps."""

    def work() -> None:
        while num_recorded(run) < num_steps:
            time.sleep(0.002)
        kill(sorted(each.pid or 0 for each in multiprocessing.active_children()))

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def num_recorded(run: Path) -> int:
    path = run / "metrics.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []
    return max([json.loads(line)["step"] for line in lines], default=0)


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("is_private", [True, False])
@pytest.mark.parametrize(("num_ranks", "victim"), [(2, 0), (3, 0), (3, 1), (3, 2)])
def test_whoever_is_killed(straight, tmp_path, num_ranks, victim, is_private):
    undisturbed, run = straight(num_ranks, is_private=is_private), tmp_path / "run"
    seen: list[int] = []

    def kill(ranks: list[int]) -> None:
        os.kill(ranks[victim], signal.SIGKILL)
        seen.append(num_recorded(run))

    killer = kill_at(run, 5, kill)
    launch(config(run, undisturbed.parent, is_private=is_private), num_ranks, max_restarts=1)
    killer.join()
    # Three numbers have sums of several roundings, and the fast reducer promises none of them.
    how = {"is_private": is_private, "is_exact": is_private or num_ranks == 2}
    # Where the rank that records is gone, it may have been a step ahead of the others.
    assert check(undisturbed, run, **how) >= seen[0] - (victim == 0)


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_guard_that_misses_a_rank_lets_the_others_save(straight, tmp_path):
    undisturbed, run = straight(2, is_private=True), tmp_path / "run"
    killer = kill_at(run, 5, lambda ranks: os.kill(ranks[1], signal.SIGKILL))
    launch(config(run, undisturbed.parent, is_private=True, guard=True), 2, max_restarts=1)
    killer.join()
    assert check(undisturbed, run) >= 5


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_rank_that_waits_in_vain_saves_what_it_has(straight, tmp_path):
    """As of a machine that has vanished: its connections are open, and nothing comes any more."""
    undisturbed, run = straight(2, is_private=True), tmp_path / "run"
    seen: list[int] = []

    def kill(ranks: list[int]) -> None:
        first, second = ranks
        os.kill(second, signal.SIGSTOP)
        time.sleep(1)
        seen.append(num_recorded(run))
        os.kill(first, signal.SIGTERM)
        while not checkpoints_of(run):
            time.sleep(0.05)
        os.kill(first, signal.SIGKILL)
        os.kill(second, signal.SIGKILL)

    killer = kill_at(run, 5, kill)
    launch(config(run, undisturbed.parent, is_private=True), 2, max_restarts=1)
    killer.join()
    assert check(undisturbed, run) == seen[0]
