"""Private, sharded runs whose ranks are killed: the bits of a run that never stopped."""

import random
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from tests.chaos.runs import (
    NUM_RUNS,
    SEED,
    SMALL,
    Killer,
    disturb,
    launch,
    outcome_of,
    train_straight,
)
from tests.train.private_runs import SEEDED, config_of
from tests.train.ranks import forked_ranks

__all__ = ["forked_ranks"]


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Path:
    return train_straight(tmp_path_factory.mktemp("straight"))


def test_a_killed_rank_costs_no_bit(tmp_path):
    straight, run = train_straight(tmp_path, steps=4), tmp_path / "killed"
    settings = SMALL | {"steps": 4, "checkpoint_every": 1}
    config = config_of(run, tmp_path / "text.txt", SEEDED, **settings)
    with Killer(run, random.Random(SEED), 1, only=signal.SIGKILL, steps=3) as killer:
        launch(config, 2, max_restarts=1)
    found = outcome_of(run, straight, killer.kills)
    assert found.is_good, found
    assert killer.kills, "nobody was killed"
    # The check itself: a step that comes again although a checkpoint covered it.
    late = [replace(kill, covered=4, num_begun=len(found.begun) - 1) for kill in killer.kills]
    assert outcome_of(run, straight, late).repeated == [3]
    assert not replace(found, epsilon=found.true_epsilon / 2).is_good


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("number", range(NUM_RUNS))
def test_runs_that_are_disturbed(straight, tmp_path, number):
    kills, _ = disturb(tmp_path / "run", straight.parent / "text.txt", number)
    found = outcome_of(tmp_path / "run", straight, kills)
    assert found.is_good, (kills, found)
