"""The order of rows is a function of seed and step."""

import numpy as np
import pytest

from unison.config import Mechanism
from unison.train.batches import RowOrder, part_of_rank
from unison.train.optimization import lr_factor


@pytest.mark.parametrize(("num_rows", "batch_size"), [(12, 4), (13, 4), (5, 16), (1, 1)])
def test_every_row_once_per_epoch(num_rows, batch_size):
    order = RowOrder(num_rows=num_rows, batch_size=batch_size, seed=3)
    epochs = 4
    steps = -(-epochs * num_rows // batch_size)
    rows = np.concatenate([order.rows_of_step(step) for step in range(steps)])
    for epoch in range(epochs):
        seen = rows[epoch * num_rows : (epoch + 1) * num_rows]
        assert sorted(seen) == list(range(num_rows))


def test_epochs_and_seeds_differ():
    def first(seed, step):
        order = RowOrder(num_rows=1000, batch_size=1000, seed=seed)
        return order.rows_of_step(step).tolist()

    assert first(0, 0) == first(0, 0)
    assert first(0, 0) != first(0, 1)
    assert first(0, 0) != first(1, 0)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_ranks_cut_the_global_batch_into_contiguous_parts(world_size):
    rows = RowOrder(num_rows=100, batch_size=7, seed=0).rows_of_step(2)
    parts = [part_of_rank(rows, rank=r, world_size=world_size) for r in range(world_size)]
    assert np.concatenate(parts).tolist() == rows.tolist()


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_schedules_start_warm_and_end_low(schedule):
    mechanism = Mechanism(steps=50, warmup_steps=5, schedule=schedule)
    factors = [lr_factor(step, mechanism) for step in range(50)]
    assert factors[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert all(0 < factor <= 1 for factor in factors)
    assert factors[5:] == sorted(factors[5:], reverse=True)
    assert factors[-1] == 1 if schedule == "constant" else factors[-1] < 0.05


def test_schedule_of_a_run_shorter_than_its_warmup():
    assert lr_factor(0, Mechanism(steps=1, warmup_steps=20)) == 1.0
