"""The stopwatch that times methods: all parts, within its limits of time and memory."""

import itertools
from dataclasses import replace
from unittest import mock

import pytest
import torch

from tests.clip.test_calibration_costs import (
    ALL_PARTS,
    MADE_BY,
    TOGETHER,
    FakeTimer,
    alone,
    linear,
    table,
)
from tests.kernels.interpreted import as_on_cuda, interpreted
from unison.clip import LayerShape, UseShape, calibration, costs, plan_clipping
from unison.clip.bounds import tensors_of
from unison.clip.calibration import (
    MOST_BYTES,
    Calibration,
    Stopwatch,
    num_bytes,
    wanted_parts,
)
from unison.clip.costs import CHOICES
from unison.clip.plan import alternatives_of
from unison.kernels import factored


def small(kind: str = "product", batch: int = 2, tokens: int = 5) -> LayerShape:
    use = UseShape(kind=kind, tokens=tokens, rows=7, columns=12)
    return LayerShape(name="weight", batch=batch, itemsize=4, uses=(use,))


SMALL = {
    "product": small(),
    "transposed": replace(small(), uses=(replace(small().uses[0], is_transposed=True),)),
    "one token": small(tokens=1),
    "lookup": small("lookup"),
    "tied": replace(small(), uses=(*small("lookup").uses, *small().uses)),
    "with dense": replace(small(), uses=(*small().uses, *small("dense", tokens=1).uses)),
    "halves": replace(small(), itemsize=2),
    "float16": replace(small(), itemsize=2, is_float16=True),
}
WAITING = replace(small(), itemsize=2, uses=(replace(small().uses[0], rows=8, columns=16),))


def watch(**settings) -> Stopwatch:
    numbers = itertools.count(1)

    def seconds_of(run) -> float:
        run()
        return float(next(numbers))

    cpu = torch.device("cpu")
    return Stopwatch(cpu, seconds_of=seconds_of, free_bytes=lambda: 1 << 40, **settings)


@pytest.mark.parametrize("name", SMALL)
@interpreted
def test_every_part_of_every_choice_runs(name):
    layer = SMALL[name]
    before = torch.get_rng_state()
    with as_on_cuda():
        found = watch().time_layer(layer)
    assert found is not None
    assert set(found) == set(wanted_parts(layer))
    assert torch.equal(torch.get_rng_state(), before)  # the training's own numbers are untouched
    options, _ = alternatives_of(layer, "cuda", found)
    assert all(option.measured is not None for option in options)


@interpreted
def test_layers_that_wait_are_timed_together():
    """And each is said to take its part of what all of them took."""
    cpu, limit = torch.device("cpu"), mock.patch.object(calibration, "_MOST_TOGETHER", 3)
    sums, weighted_sums = [], factored.weighted_sums
    timed = Stopwatch(cpu, seconds_of=lambda run: 6.0, free_bytes=lambda: 1 << 40)

    def counted(lefts, rights, weights, outs, *, add):
        assert all(each.dtype == torch.int32 for each in outs)  # as training adds them up
        sums.append(sum(each.nbytes for each in outs))
        weighted_sums(lefts, rights, weights, outs, add=add)

    with as_on_cuda(), limit, mock.patch.object(factored, "weighted_sums", counted):
        found = timed.time_layer(WAITING)
        assert found is not None
        assert set(found) == set(wanted_parts(WAITING)) > set(TOGETHER)
        assert {part: found[part] for part in TOGETHER} == dict.fromkeys(TOGETHER, 2.0)
        assert {found[part] for part in found if part not in TOGETHER} == {6.0}
        assert sums == [3 * 4 * WAITING.numel]
        # On a GPU that is too small for it, it is what is done there: one layer at a time.
        with mock.patch.object(factored, "shared_bytes", return_value=100 << 10):
            assert set((timed.time_layer(WAITING) or {}).values()) == {6.0}
        assert len(sums) == 1


@pytest.mark.parametrize("rows", [64, 1280, 8192, 51200])
def test_the_memory_of_timing_holds_the_sums_of_all(rows):
    layer = linear(batch=1, tokens=1, rows=rows)
    records = calibration.draw_records(layer, torch.device("cpu"))
    (times,) = {times for _, _, times in calibration._together(records, torch.ones(1))}
    assert (times == 64) == (rows == 64)  # no more, however small they are
    held = sum(each.nbytes for each in tensors_of(records[0]))
    assert num_bytes(layer) >= held + times * 4 * layer.numel


@interpreted
def test_a_stopwatch_keeps_to_its_limits():
    with as_on_cuda():
        assert watch(timing=0.0).time_layer(small()) is None
        assert watch(warming=0.0).time_layer(small()) is None
        clock = itertools.count(0.0, 1.0).__next__
        slow = watch(timing=50.0, warming=50.0, clock=clock)
        results = [slow.time_layer(small()) for _ in range(20)]
    assert results[0] is not None
    assert results[-1] is None


@interpreted
def test_fewer_samples_are_timed_where_memory_is_short():
    layer = small(batch=8)
    cpu = torch.device("cpu")
    whole, half = (
        Stopwatch(cpu, seconds_of=lambda run: 1.0, free_bytes=lambda each=each: 2 * each)
        for each in (num_bytes(layer), num_bytes(replace(layer, batch=2)))
    )
    none = Stopwatch(cpu, seconds_of=lambda run: 1.0, free_bytes=lambda: 100)
    with as_on_cuda():
        assert set((whole.time_layer(layer) or {}).values()) == {1.0}
        assert set((half.time_layer(layer) or {}).values()) == {4.0}
        assert none.time_layer(layer) is None


def test_the_memory_of_timing_is_bounded():
    large = linear(batch=1024, tokens=4096, rows=51200)
    assert num_bytes(large) > MOST_BYTES
    fitting = Stopwatch(torch.device("cpu"), free_bytes=lambda: 1 << 50)._that_fits(large)
    assert fitting is not None
    assert num_bytes(fitting) <= MOST_BYTES < num_bytes(replace(fitting, batch=2 * fitting.batch))


def test_what_is_hopeless_is_not_timed():
    long = linear(batch=1, tokens=131_072, rows=4096)
    assert costs.method_costs(long, "cuda")["gram"].seconds("cuda") > 0.1
    parts = wanted_parts(long)
    assert {"gram", *TOGETHER}.isdisjoint(parts)
    assert {"tile", "materialize", "kept", "records", "forward"} <= set(parts)
    assert {"gram", *TOGETHER} <= set(wanted_parts(linear()))
    assert "rank_one" in wanted_parts(linear(tokens=1))
    assert {"gram", "records"} <= set(wanted_parts(alone()))
    assert set(TOGETHER).isdisjoint(wanted_parts(alone()))
    known = {*ALL_PARTS, "forward"}
    for layer in (linear(), alone()):
        assert set().union(*(costs.parts_of(layer, each) for each in CHOICES)) <= known


def test_plain_torch_is_not_timed():
    """Without kernels the costs of costs.py hold, and records would be those of a CPU."""
    assert watch().time_layer(small()) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("itemsize", [2, 4])
def test_on_the_gpu(itemsize, tmp_path):
    layers = [
        replace(each, itemsize=itemsize) for each in (linear(), linear("x", tokens=1), table())
    ]
    stopwatch = Stopwatch(torch.device("cuda"))
    before = torch.cuda.get_rng_state()
    timed = Calibration("GPU", stopwatch.time_layer, tmp_path, MADE_BY)
    found = plan_clipping(layers, machine="cuda", timed=timed)
    assert torch.equal(torch.cuda.get_rng_state(), before)
    assert "3 of 3 layers timed on GPU" in str(found)
    for layer in found.layers:
        assert 1e-6 < layer.chosen.time < 1e-1
    timer = FakeTimer()
    again = Calibration("GPU", timer, tmp_path, MADE_BY)
    assert plan_clipping(layers, machine="cuda", timed=again) == found
    assert timer.asked == []


class FakeEvent:
    """An event of a GPU that begins as soon as it has waited long enough for the host."""

    waited = 0
    needed = 0

    def __init__(self, enable_timing: bool) -> None:
        pass

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return FakeEvent.waited < FakeEvent.needed

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other) -> float:
        return 100.0 if self.query() else 5.0


@pytest.mark.parametrize(("needed", "expected"), [(0, 0.001), (30_000_000, 0.001), (10**12, 0.02)])
def test_a_slow_host_is_not_what_is_timed(monkeypatch, needed, expected):
    def sleep(cycles: int) -> None:
        FakeEvent.waited = cycles

    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "_sleep", sleep)
    FakeEvent.needed = needed
    assert calibration._event_seconds(lambda: None, 5) == pytest.approx(expected)
