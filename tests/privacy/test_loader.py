import gc
import itertools
import random
import time

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset, get_worker_info
from transformers import BatchEncoding

from unison.errors import BadInput, UnsupportedOperation
from unison.privacy.draws import Draws
from unison.privacy.loader import PrivateLoader
from unison.privacy.sampling import Poisson, Shuffled, TruncatedPoisson
from unison.rng import Key

KEY = Key.from_seed(3)
N = 50
POISSON = Poisson(rate=0.2)
RARE = Poisson(rate=0.02)  # a third of its draws are empty
SAMPLINGS = {
    "poisson": POISSON,
    "rare": RARE,
    "truncated": TruncatedPoisson(rate=0.2, capacity=7, num_records=N),
    "shuffled": Shuffled(batch_size=10, num_records=N),
}


class Numbered(Dataset):
    """Record i is the pair ([i, i, i], i)."""

    def __init__(self, num_records: int = N) -> None:
        self.num_records = num_records
        self.is_prepared = False

    def __len__(self) -> int:
        return self.num_records

    def __getitem__(self, index):
        return torch.full((3,), float(index)), index


class Uneven(Numbered):
    """Takes longer for some records than for others, so that workers overtake each other."""

    def __getitem__(self, index):
        assert self.is_prepared
        time.sleep(0.002 * (index % 4))
        return super().__getitem__(index)


class Augmented(Numbered):
    def __getitem__(self, index):
        noise = torch.rand(()) + random.random() + np.random.rand()  # noqa: NPY002
        return torch.full((3,), index + 0 * noise), index


def prepare(_worker_id: int) -> None:
    get_worker_info().dataset.is_prepared = True


def private(sampling=POISSON, data=None, key=KEY, shuffle=True, collate_fn=None, **share):
    loader = DataLoader(data or Numbered(), batch_size=10, shuffle=shuffle, collate_fn=collate_fn)
    return PrivateLoader(loader, sampling, key, **share)


def run_epoch(loader: PrivateLoader) -> dict[int, list[list[int]]]:
    """The records of each pass of each step of one pass over the loader; everything checked."""
    steps: dict[int, list[list[int]]] = {}
    is_closed, start = True, 0
    for x, y in loader:
        now = loader.current
        ids = now.record_ids
        assert torch.equal(y, ids)
        assert torch.equal(x, ids[:, None].float().expand(-1, 3))
        assert (x.dtype, y.dtype) == (torch.float32, torch.int64)
        assert now.is_first == is_closed
        assert now.num_samples == len(ids)
        passes = steps.setdefault(now.step, [])
        if now.is_first:
            start = now.first_position
        assert now.first_position == start + sum(map(len, passes))
        assert (now.step, len(passes)) == (max(steps), now.index)
        passes.append(ids.tolist())
        is_closed = now.is_last
        assert loader.is_open == (not is_closed)
        assert loader.next_step == now.step + is_closed
    assert is_closed
    assert loader.current is None
    return steps


def expected(sampling, steps, key=KEY, num_records=N) -> dict[int, list[int]]:
    draws = Draws(sampling, key, num_records)
    return {step: draws.records(step).tolist() for step in steps}


def joined(steps: dict[int, list[list[int]]]) -> dict[int, list[int]]:
    return {step: [*itertools.chain(*passes)] for step, passes in steps.items()}


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


# ---- steps, epochs, resuming -----------------------------------------------------------------


@pytest.mark.parametrize("kind", ["poisson", "shuffled"])
def test_a_resumed_run_finishes_its_epoch(kind):
    straight = private(SAMPLINGS[kind])
    whole = run_epoch(straight) | run_epoch(straight)
    first = private(SAMPLINGS[kind])
    for _ in first:
        if first.current.step == 2:
            break
    state = first.state_dict()
    assert state == {"next_step": 3}
    resumed = private(SAMPLINGS[kind])
    resumed.load_state_dict(state)
    assert run_epoch(resumed) == {step: whole[step] for step in (3, 4)}
    assert run_epoch(resumed) == {step: whole[step] for step in range(5, 10)}
    # The loader that was left goes on in the same way.
    assert list(run_epoch(first)) == [3, 4]


def test_a_state_in_the_middle_of_a_logical_batch_begins_it_again():
    loader = private(max_physical_batch_size=1)
    batches = iter(loader)
    next(batches)
    assert loader.is_open
    assert loader.state_dict() == {"next_step": 0}


def test_a_fresh_secret_key_draws_anew():
    resumed = [private(key=Key.from_entropy()) for _ in range(2)]
    for loader in resumed:
        loader.set_start_step(5)
    assert run_epoch(resumed[0]) != run_epoch(resumed[1])


def test_bad_states():
    loader = private()
    with pytest.raises(BadInput, match="step must be 0 or more"):
        loader.set_start_step(-1)
    with pytest.raises(BadInput, match=r"found keys \['step'\]"):
        loader.load_state_dict({"step": 3})
    batches = iter(loader)
    next(batches)
    with pytest.raises(BadInput, match="abandon"):
        loader.set_start_step(3)


# ---- misuse ----------------------------------------------------------------------------------


def test_a_logical_batch_left_open_is_noticed():
    loader = private(max_physical_batch_size=2)
    for _ in loader:
        break
    assert loader.is_open
    left = loader.current
    with pytest.raises(BadInput, match=r"step 0 was left.*is_last.*abandon"):
        iter(loader)
    with pytest.raises(BadInput, match="middle of step 0"):
        loader.set_start_step(0)
    told = []
    loader.on_abandon = told.append
    loader.abandon()
    assert told == [left]
    assert loader.current is None
    assert joined(run_epoch(loader)) == expected(POISSON, range(5))


def test_abandoning_is_refused_by_whoever_cannot():
    loader = private(max_physical_batch_size=2)
    next(iter(loader))

    def refuse(batch):
        raise BadInput(f"step {batch.step} is half done")

    loader.on_abandon = refuse
    with pytest.raises(BadInput, match="step 0 is half done"):
        loader.abandon()
    assert loader.is_open


def test_abandon_inside_the_loop_ends_it():
    loader = private(max_physical_batch_size=2)
    seen = []
    for _ in loader:
        seen.append(loader.current.step)
        loader.abandon()
    assert seen == [0]
    assert loader.next_step == 0
    loader.abandon()  # nothing is open: nothing to give up


def test_a_batch_taken_by_itself_keeps_its_plan():
    loader = private()
    _, y = next(iter(loader))
    gc.collect()
    assert torch.equal(y, loader.current.record_ids)
    assert list(run_epoch(loader)) == [1, 2, 3, 4]


def test_two_live_iterations_raise():
    loader = private()
    first = iter(loader)
    with pytest.raises(BadInput, match="iterated over already"):
        iter(loader)
    next(first)
    with pytest.raises(BadInput, match="iterated over already"):
        zip(loader, loader, strict=True)
    del first
    gc.collect()
    again = iter(loader)
    list(again)
    next(iter(loader))  # an iteration that has ended may still be held


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_collate_function_that_drops_or_repeats_records_raises(num_workers):
    def collate(records):
        records = [record for record in records if record[1] % 2 == 0]
        return torch.utils.data.default_collate(records)

    inner = DataLoader(Numbered(), batch_size=10, collate_fn=collate, num_workers=num_workers)
    loader = PrivateLoader(inner, POISSON, KEY)
    with pytest.raises(BadInput, match=r"given \d+ records and returned \d+ rows in batch\[0\]"):
        run_epoch(loader)
    assert loader.current is None  # the batch was not handed out
    assert loader.next_step == 0


def test_a_collate_function_that_cannot_be_cut_raises_before_the_first_step():
    loader = private(collate_fn=lambda records: torch.cat([x for x, _ in records]))
    with pytest.raises(UnsupportedOperation, match=r"shape \[3\] for one record and \[6\] for two"):
        next(iter(loader))
    assert loader.current is None


def test_a_collate_function_that_fails_on_one_record_says_who_asked():
    def collate(records):
        raise RuntimeError("expected 10 records")

    with pytest.raises(RuntimeError, match="expected 10 records") as caught:
        next(iter(private(collate_fn=collate)))
    assert "record 0 was read once and twice" in caught.value.__notes__[0]


def test_encodings_of_transformers_come_empty_too():
    def collate(records):
        ids = torch.tensor([index for _, index in records])
        return BatchEncoding({"input_ids": ids[:, None], "attention_mask": torch.ones(len(ids), 1)})

    loader = private(RARE, collate_fn=collate)
    sizes = set()
    for batch in loader:
        assert isinstance(batch, BatchEncoding)
        assert torch.equal(batch.input_ids[:, 0], loader.current.record_ids)
        assert batch.attention_mask.shape == (loader.current.num_samples, 1)
        sizes.add(loader.current.num_samples)
    assert {0, 1, 2} <= sizes


def test_batched_reads_of_a_data_set_are_used():
    class Batched(Numbered):
        def __getitem__(self, index):
            raise AssertionError("read one by one")

        def __getitems__(self, indices):
            assert indices
            return [Numbered.__getitem__(self, index) for index in indices]

    assert joined(run_epoch(private(RARE, Batched()))) == expected(RARE, range(50))


def test_a_data_set_of_one_record():
    loader = private(Poisson(rate=0.5), Numbered(1))
    assert all(passes in ([[0]], [[]]) for passes in run_epoch(loader).values())
