"""Steps, epochs and resuming of a private loader, and loops that misuse it."""

import gc
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import BatchEncoding

from tests.privacy.loaders import (
    KEY,
    POISSON,
    RARE,
    SAMPLINGS,
    Numbered,
    expected,
    joined,
    private,
    run_epoch,
)
from unison.errors import BadInput, UnsupportedOperation
from unison.privacy.loader import PrivateLoader
from unison.privacy.sampling import Poisson
from unison.rng import Key


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


def stand_in(on_abandon):
    """What a loader knows of its training, where nothing is trained."""
    return SimpleNamespace(on_abandon=on_abandon, recorder=SimpleNamespace(leave=lambda: None))


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
    loader.training = stand_in(lambda: told.append(loader.current))
    loader.abandon()
    loader.training = None
    assert told == [left]
    assert loader.current is None
    assert joined(run_epoch(loader)) == expected(POISSON, range(5))


def test_abandoning_is_refused_by_whoever_cannot():
    loader = private(max_physical_batch_size=2)
    next(iter(loader))

    def refuse():
        raise BadInput(f"step {loader.current.step} is half done")

    loader.training = stand_in(refuse)
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
