"""Batches of a private loader are those that were drawn, whatever its settings."""

import gc
import itertools
import pickle
import random
import weakref

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.privacy.loaders import (
    KEY,
    POISSON,
    RARE,
    SAMPLINGS,
    Augmented,
    N,
    Numbered,
    Uneven,
    expected,
    joined,
    prepare,
    private,
    run_epoch,
)
from unison.privacy.loader import PrivateLoader
from unison.privacy.sampling import Poisson
from unison.rng import Key


@pytest.mark.parametrize("kind", SAMPLINGS)
@pytest.mark.parametrize("most", [None, 1, 4, 100])
def test_physical_batches_join_to_the_drawn_logical_batch(kind, most):
    loader = private(SAMPLINGS[kind], max_physical_batch_size=most)
    num_steps = len(loader)
    for epoch in range(2):
        steps = run_epoch(loader)
        want = range(epoch * num_steps, (epoch + 1) * num_steps)
        assert joined(steps) == expected(SAMPLINGS[kind], want)
        for passes in steps.values():
            full = [len(each) for each in passes]
            assert full == [full[0]] * (len(full) - 1) + [full[-1]]
            assert max(full) <= (most or N)
            assert all(full) or len(full) == 1


def test_an_empty_draw_is_one_empty_batch():
    steps = run_epoch(private(RARE, max_physical_batch_size=2))
    assert sum(passes == [[]] for passes in steps.values()) > 5
    assert len(steps) == 50


@pytest.mark.parametrize("is_persistent", [False, True])
def test_workers_read_ahead_and_the_plan_stays_with_its_batch(is_persistent):
    inner = DataLoader(
        Uneven(),
        batch_size=1,
        num_workers=2,
        prefetch_factor=3,
        persistent_workers=is_persistent,
        worker_init_fn=prepare,
    )
    loader = PrivateLoader(inner, RARE, KEY, max_physical_batch_size=1)
    state = torch.get_rng_state(), random.getstate()
    assert joined(run_epoch(loader)) == expected(RARE, range(50))
    assert torch.equal(torch.get_rng_state(), state[0])
    assert random.getstate() == state[1]
    # Left in the middle of an epoch and of a logical batch, with batches on the way.
    for _ in loader:
        if loader.is_open:
            break
    left = loader.current.step
    loader.abandon()
    assert joined(run_epoch(loader)) == expected(RARE, range(left, 100))


def test_what_was_left_is_freed_without_a_collector_of_garbage():
    """Which would close queues before workers are told to end, and wait for them."""
    inner = DataLoader(Numbered(), batch_size=10, num_workers=1, persistent_workers=True)
    loader = PrivateLoader(inner, RARE, KEY, max_physical_batch_size=1)
    next(iter(loader))
    loader.abandon()
    freed = weakref.ref(loader._loader)
    gc.disable()
    try:
        del inner, loader
        assert freed() is None
    finally:
        gc.enable()


@pytest.mark.full
def test_spawned_workers_are_given_no_key():
    data = TensorDataset(torch.arange(20.0))
    inner = DataLoader(data, batch_size=4, num_workers=1, multiprocessing_context="spawn")
    loader = PrivateLoader(inner, POISSON, Key.from_entropy())
    for (x,) in loader:
        assert torch.equal(x.long(), loader.current.record_ids)


def test_ranks_draw_one_batch_and_load_their_own_part():
    sampling = Poisson(rate=0.05)
    whole = joined(run_epoch(private(sampling)))
    shared = [
        run_epoch(private(sampling, max_physical_batch_size=1, rank=rank, num_ranks=3))
        for rank in range(3)
    ]
    assert any(len(passes) > 1 for passes in shared[0].values())
    for step, records in whole.items():
        assert len({len(each[step]) for each in shared}) == 1
        assert [*itertools.chain(*(joined(each)[step] for each in shared))] == records


def test_drawing_uses_nobodys_generator():
    generator = torch.Generator().manual_seed(5)
    before = generator.get_state(), torch.get_rng_state(), random.getstate()
    numpy_before = np.random.get_state()[1].tolist()  # noqa: NPY002
    inner = DataLoader(Numbered(), batch_size=10, shuffle=True, generator=generator)
    run_epoch(PrivateLoader(inner, POISSON, KEY))
    assert torch.equal(generator.get_state(), before[0])
    assert torch.equal(torch.get_rng_state(), before[1])
    assert random.getstate() == before[2]
    assert np.random.get_state()[1].tolist() == numpy_before  # noqa: NPY002


def test_learning_the_layout_takes_nothing_from_the_data_sets_generators():
    once, twice = private(RARE, Augmented()), private(RARE, Augmented())
    values = []
    for loader in (once, twice):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        loader.set_start_step(0)
        run_epoch(loader)
        values.append((float(torch.rand(())), random.random(), np.random.rand()))  # noqa: NPY002
        if loader is once:  # the second loader has learned its layout before it is measured
            run_epoch(twice)
    assert values[0] == values[1]


def test_a_global_seed_does_not_choose_the_records():
    orders = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        orders.append(run_epoch(private(key=Key.from_entropy())))
    assert orders[0] != orders[1]
    torch.manual_seed(2)
    assert run_epoch(private()) == run_epoch(private())


def test_lengths_are_logical_steps_and_public():
    # A peer's loaders gave as many batches as the data set, or each rank the whole of it.
    for num_records, batch_size in [(50, 10), (101, 10), (100, 32), (7, 7), (49, 1)]:
        rate = batch_size / num_records
        data = Numbered(num_records)
        for share in ({}, {"max_physical_batch_size": 3}, {"rank": 1, "num_ranks": 2}):
            inner = DataLoader(data, batch_size=batch_size)
            loader = PrivateLoader(inner, Poisson(rate=rate), KEY, **share)
            assert len(loader) == len(inner) == -(-num_records // batch_size)
            assert len(run_epoch(loader)) == len(loader)


def test_reads_like_a_data_loader():
    data = Numbered()
    collate = torch.utils.data.default_collate
    inner = DataLoader(data, batch_size=10, collate_fn=collate)
    loader = PrivateLoader(inner, POISSON, KEY)
    assert loader.dataset is data
    assert (loader.batch_size, loader.num_workers) == (10, 0)
    assert loader.collate_fn is collate
    assert loader.sampling is POISSON
    assert repr(loader) == "PrivateLoader(Poisson(rate=0.2), next_step=0)"


KEPT = {
    "num_workers": 2,
    "pin_memory": True,
    "timeout": 5,
    "worker_init_fn": prepare,
    "multiprocessing_context": torch.multiprocessing.get_context("fork"),
    "prefetch_factor": 7,
    "persistent_workers": True,
    "pin_memory_device": "cpu",
    "in_order": True,
}


def test_the_users_settings_are_kept():
    inner = PrivateLoader(DataLoader(Numbered(), batch_size=10, **KEPT), POISSON, KEY)._loader
    assert {name: getattr(inner, name) for name in KEPT} == KEPT


def test_the_key_cannot_leave_with_the_loader():
    loader = private(POISSON)
    with pytest.raises(TypeError, match="cannot be copied"):
        pickle.dumps(loader)
    assert "key" not in repr(loader).lower()
