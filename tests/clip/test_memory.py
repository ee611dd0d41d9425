"""What clipping holds: records no longer than they are needed, and never tokens × tokens."""

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

from bench.memory import Category, MemoryTracker
from tests.clip.models import Deep, ids, losses
from unison.capture import Capture, probes
from unison.clip import MODES, Clipping, clipped_gradients, learn
from unison.ops import Dense, Record

TWO_BACKWARDS = [mode for mode in MODES if MODES[mode].num_backwards == 2]


class Watched:
    """Counts the records that are alive, as they come and in the end."""

    def __init__(self) -> None:
        self.records: list[weakref.ref] = []
        self.gradients: list[weakref.ref] = []
        self.most = 0

    def note(self, record: Record) -> None:
        g = record.value if isinstance(record, Dense) else record.g
        self.records.append(weakref.ref(record))
        self.gradients.append(weakref.ref(g.untyped_storage()))
        self.most = max(self.most, self.num_alive)

    @property
    def num_alive(self) -> int:
        return sum(each() is not None for each in self.records)

    @property
    def num_gradients(self) -> int:
        return sum(each() is not None for each in self.gradients)


def first_pass(model: nn.Module, batch: torch.Tensor, mode: str) -> tuple[Watched, Clipping]:
    """Run forward and backward, and end the pass as `clipped_gradients` does."""
    learned = learn(model, losses, batch)
    plan = learned.plan(len(batch), mode=mode, memory_budget=None, machine="cpu")
    clipping, watched = Clipping(plan, len(batch), learned.storage), Watched()

    def seen(take: Callable) -> Callable:
        def run(name: str, record: Record) -> bool | None:
            watched.note(record)
            return take(name, record)

        return run

    capture = Capture(
        model,
        len(batch),
        axes=learned.axes,
        on_record=seen(clipping.take),
        on_product=seen(clipping.take_product) if plan.num_forwards == 2 else None,
    )
    with capture.installed():
        losses(model, batch).sum().backward(retain_graph=plan.num_backwards == 2)
        clipping.norms()
    return watched, clipping


@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize("mode", TWO_BACKWARDS)
def test_records_are_dropped_as_soon_as_they_are_measured(mode, is_checkpointed):
    torch.manual_seed(0)
    model, batch = Deep(depth=4, is_checkpointed=is_checkpointed), ids()
    watched, _ = first_pass(model, batch, mode)
    assert len(watched.records) == 26
    assert watched.most == 1  # the one that comes
    assert watched.num_alive == watched.num_gradients == 0


def test_the_records_of_several_uses_wait_for_one_another():
    torch.manual_seed(0)
    model, batch = Deep(depth=4, is_tied=True), ids()
    watched, _ = first_pass(model, batch, "flash_fuse")
    assert watched.most == 2  # that of the head, used first by the backward pass, and another
    assert watched.num_alive == 0


def test_book_keeping_keeps_them():
    """The checks can fail."""
    torch.manual_seed(0)
    watched, clipping = first_pass(Deep(depth=4), ids(), "flash_fuse_bk")
    assert watched.num_alive == len(watched.records) == 26
    assert clipping.num_forwards == 1
    by_name = dict.fromkeys(clipping.norms(), torch.ones(5, dtype=torch.float64))
    dict(clipping.clipped_sums(by_name))
    assert watched.num_alive == 0


def test_recomputing_keeps_no_product():
    torch.manual_seed(0)
    watched, clipping = first_pass(Deep(depth=4), ids(), "recompute_bk")
    kept = [record() for record in watched.records if record() is not None]
    # Of each block a gain, an offset and two biases; and the table.
    assert sorted(type(record).__name__ for record in kept) == ["Dense"] * 16 + ["Lookup"]
    assert clipping.num_forwards == 2


def peak_of(model: nn.Module, batch: torch.Tensor, mode: str) -> int:
    """The most that a batch's tensors take, parameters not counted."""
    learn(model, losses, batch)
    with MemoryTracker() as tracker:
        tracker.label(Category.PARAMETERS, model.parameters())
        clipped_gradients(model, losses, batch, max_norm=1.0, mode=mode)
    counted = set(Category) - {Category.PARAMETERS}
    peak = tracker.peak(counted)
    return sum(peak[each] for each in counted)


def test_modes_hold_what_the_table_says(monkeypatch):
    """Under checkpointing, where a is not there anyway."""
    # A process keeps one key for fingerprints, as long as the largest model needed it so far.
    monkeypatch.setattr(probes, "_keys", {})
    torch.manual_seed(0)
    width, depth, batch = 32, 12, ids(batch=4, tokens=128, vocab=16)
    model = Deep(width=width, depth=depth, vocab=16)
    peaks = {mode: peak_of(model, batch, mode) for mode in MODES if mode != "grad_materialize"}
    tokens = 4 * 4 * 128  # bytes of one feature of all tokens
    a = g = depth * 5 * width * tokens
    assert peaks["ghost"] < peaks["ghost_bk"] - 0.8 * (a + g)
    assert peaks["flash_fuse"] < peaks["flash_fuse_bk"] - 0.8 * (a + g)
    assert peaks["recompute_bk"] < peaks["flash_fuse_bk"] - 0.8 * a
    assert peaks["flash_fuse"] < peaks["recompute_bk"] - 0.8 * g


@pytest.mark.parametrize(
    "mode", [pytest.param("ghost_bk", marks=pytest.mark.full), "flash_fuse_bk", "recompute_bk"]
)
def test_memory_grows_with_tokens_and_not_with_their_square(mode):
    torch.manual_seed(0)
    model = Deep(width=8, depth=1, vocab=8, is_tied=True)
    peaks = {tokens: peak_of(model, ids(1, tokens, 8), mode) for tokens in (2048, 8192)}
    assert peaks[8192] < 4.2 * peaks[2048]
    assert peaks[8192] < 8192 * 8192 * 4 / 20
