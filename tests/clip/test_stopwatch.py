"""The stopwatch that times methods: all parts, within its limits of time and memory."""

import itertools
from dataclasses import replace

import pytest
import torch

from tests.clip.test_calibration_costs import ALL_PARTS, MADE_BY, FakeTimer, linear, table
from tests.kernels.interpreted import as_on_cuda, interpreted
from unison.clip import MACHINES, Layer, Use, kernel_costs, plan_clipping, stopwatch
from unison.clip.alternatives import alternatives_of
from unison.clip.calibration import Calibration
from unison.clip.cost_file import CostFile
from unison.clip.modes import CHOICES
from unison.clip.stopwatch import MOST_BYTES, Limits, Stopwatch, num_bytes, wanted_parts


def small(kind: str = "product", batch: int = 2, tokens: int = 5) -> Layer:
    use = Use(kind=kind, tokens=tokens, rows=7, columns=12)
    return Layer(name="weight", batch=batch, itemsize=4, uses=(use,))


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
    options = alternatives_of(layer, "cuda", found)
    assert all(option.measured is not None for option in options)


@interpreted
def test_a_stopwatch_keeps_to_its_limits():
    with as_on_cuda():
        assert watch(limits=Limits(timing=0.0)).time_layer(small()) is None
        assert watch(limits=Limits(warming=0.0)).time_layer(small()) is None
        clock = itertools.count(0.0, 1.0).__next__
        slow = watch(limits=Limits(timing=50.0, warming=50.0), clock=clock)
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
    assert kernel_costs.gram_cost(long).seconds(MACHINES["cuda"]) > 0.1
    parts = wanted_parts(long)
    assert "gram" not in parts
    assert {"tile", "materialize", "kept", "records", "forward"} <= set(parts)
    assert "gram" in wanted_parts(linear())
    assert "rank_one" in wanted_parts(linear(tokens=1))
    known = {*ALL_PARTS, "forward"}
    assert set().union(*(kernel_costs.parts_of(linear(), each) for each in CHOICES)) <= known


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
    timed = Calibration("GPU", stopwatch.time_layer, CostFile(tmp_path, MADE_BY))
    found = plan_clipping(layers, machine="cuda", timed=timed)
    assert torch.equal(torch.cuda.get_rng_state(), before)
    assert "3 of 3 layers timed on GPU" in str(found)
    for layer in found.layers:
        assert 1e-6 < layer.chosen.time < 1e-1
    timer = FakeTimer()
    again = Calibration("GPU", timer, CostFile(tmp_path, MADE_BY))
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
    assert stopwatch._event_seconds(lambda: None, 5) == pytest.approx(expected)
