"""The order of rows is a function of seed and step."""

import numpy as np
import pytest
import torch

from unison.config import MechanismConfig
from unison.train.loop import eval_passes
from unison.train.regime import rows_of_step
from unison.train.step import lr_factor
from unison.train.world import World


@pytest.mark.parametrize(("num_rows", "batch_size"), [(12, 4), (13, 4), (5, 16), (1, 1)])
def test_every_row_once_per_epoch(num_rows, batch_size):
    sizes = {"num_rows": num_rows, "batch_size": batch_size}
    epochs = 4
    steps = -(-epochs * num_rows // batch_size)
    rows = np.concatenate([rows_of_step(step, seed=3, **sizes) for step in range(steps)])
    for epoch in range(epochs):
        seen = rows[epoch * num_rows : (epoch + 1) * num_rows]
        assert sorted(seen) == list(range(num_rows))


def test_epochs_and_seeds_differ():
    def first(seed, step):
        return rows_of_step(step, num_rows=1000, batch_size=1000, seed=seed).tolist()

    assert first(0, 0) == first(0, 0)
    assert first(0, 0) != first(0, 1)
    assert first(0, 0) != first(1, 0)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_ranks_evaluate_every_row_once_in_the_passes_of_one_rank(world_size):
    def passes_of(rank, size):
        place = {"local_rank": rank, "node": 0, "device": torch.device("cpu")}
        return eval_passes(23, 3, World(rank=rank, size=size, **place))

    expected = [each.tolist() for each in passes_of(0, 1)]
    found = [passes_of(rank, world_size) for rank in range(world_size)]
    assert {len(passes) for passes in found} == {-(-8 // world_size)}  # they gather in each
    cut = [each.tolist() for passes in found for each in passes if len(each)]
    assert cut == expected
    assert [row for rows in cut for row in rows] == list(range(23))


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_schedules_start_warm_and_end_low(schedule):
    mechanism = MechanismConfig(steps=50, warmup_steps=5, schedule=schedule)
    factors = [lr_factor(step, mechanism) for step in range(50)]
    assert factors[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert all(0 < factor <= 1 for factor in factors)
    assert factors[5:] == sorted(factors[5:], reverse=True)
    assert factors[-1] == 1 if schedule == "constant" else factors[-1] < 0.05


def test_schedule_of_a_run_shorter_than_its_warmup():
    assert lr_factor(0, MechanismConfig(steps=1, warmup_steps=20)) == 1.0
