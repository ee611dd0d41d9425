"""What clipping costs a training step: every case beside ordinary training, in one run.

[Note: how steps are timed] A *visit* builds a contender, warms it up, times a block of steps
without waiting for the device in between, first eager and then, on CUDA, from a graph, and frees
everything: two large models need not fit side by side. A *round* visits, length by length, the
baseline, a few cases, the baseline again, and so on to the end. A case is compared with the mean of
the baselines before and after it, so a machine that slows down slows both. Every round starts with
another case.

[Note: peak memory] On CUDA it is what torch's allocator had handed out at most during the eager
block; a graph has memory of its own, which this does not count. On a CPU it is the sum of all
tensor storages that lived at one moment of the first steps, see `MemoryTracker`.
"""

import gc
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass

import torch

from bench.clipping_speed.experiment import (
    BASELINE,
    Case,
    Experiment,
    Planned,
    planned_visits,
)
from bench.clipping_speed.steps import Contender, Step
from bench.memory import MemoryTracker
from unison.errors import UnisonError

WARM_UP_STEPS = 3
OUT_OF_MEMORY = "out of memory"
_SIGNS_OF_FULL_MEMORY = ("out of memory", "DefaultCPUAllocator", "CUBLAS_STATUS_ALLOC_FAILED")


@dataclass(kw_only=True)
class Visit:
    """What was measured of a case at one length in one round.

    Attributes:
        case: Which one.
        tokens: The length.
        round: From 0 on.
        eager_ms: A step, in milliseconds; None if there is none.
        graph_ms: The same with CUDA graphs.
        peak_bytes: Memory at its peak.
        leftover_bytes: What earlier visits had not freed, which is part of that; 0 on a CPU.
        passes: Backward and forward passes of the plan, where there is one.
        methods: How many parameters it clips with which methods.
        timed_on: The GPU on which methods were timed for it; None if it follows shapes alone.
        trouble: Why there are no figures.
        graph_trouble: Why there are none of the graph.
        is_bug: Whether the trouble is neither memory nor something known to be unsupported.
    """

    case: Case
    tokens: int
    round: int
    eager_ms: float | None = None
    graph_ms: float | None = None
    peak_bytes: int | None = None
    leftover_bytes: int = 0
    passes: tuple[int, int] | None = None
    methods: dict[str, int] | None = None
    timed_on: str | None = None
    trouble: str | None = None
    graph_trouble: str | None = None
    is_bug: bool = False


def measure(
    experiment: Experiment,
    *,
    before: Callable[[Planned], None] = lambda _: None,
    after: Callable[[Visit], None] = lambda _: None,
) -> tuple[list[Visit], list[Planned]]:
    """Make all visits for which there is time.

    Args:
        experiment: What is measured.
        before: Called with a visit that is about to be made.
        after: Called with every visit made.

    Returns:
        The visits, and those that were left out when the time was used up.
    """
    started = time.monotonic()
    visits: list[Visit] = []
    left_out: list[Planned] = []
    for planned in planned_visits(experiment):
        limit = experiment.time_limit
        if limit is not None and time.monotonic() - started >= limit:
            left_out.append(planned)
            continue
        before(planned)
        visits.append(visit(experiment, planned, baseline_peak(visits, planned.tokens)))
        after(visits[-1])
    return visits, left_out


def baseline_peak(visits: Sequence[Visit], tokens: int) -> int | None:
    """The memory of the non-private training at one length, at its peak; None if not known."""
    peaks = [v.peak_bytes for v in visits if v.case == BASELINE and v.tokens == tokens]
    return max((peak for peak in peaks if peak is not None), default=None)


def visit(experiment: Experiment, planned: Planned, peak: int | None) -> Visit:
    """Measure a case. What goes wrong is part of the result."""
    found = Visit(case=planned.case, tokens=planned.tokens, round=planned.round)
    with warnings.catch_warnings():
        if planned.case.is_peer:
            warnings.simplefilter("ignore")
        try:
            _measure_into(found, experiment, peak)
        except Exception as error:  # a session on a GPU must not end with one case
            found.trouble, found.is_bug = _reason(error)
    try:
        _free_memory(experiment)  # here, where the error and all that its frames held are gone
    except RuntimeError as error:  # the device is lost; what was measured before is not
        found.trouble, found.is_bug = found.trouble or _reason(error)[0], True
    return found


def _measure_into(found: Visit, experiment: Experiment, peak: int | None) -> None:
    """Fill in a visit's figures as they come."""
    workload = experiment.workload(found.tokens)
    tracker = None if experiment.is_cuda else MemoryTracker()
    found.leftover_bytes = torch.cuda.memory_allocated() if experiment.is_cuda else 0
    with ExitStack() as stack:
        with tracker or nullcontext():
            contender = stack.enter_context(closing(found.case.build(workload, peak)))
            # The second is the first with an optimizer's state; watched steps are slow.
            for _ in range(WARM_UP_STEPS if tracker is None else 2):
                contender.step()
        if tracker is None:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        found.eager_ms = block_ms(contender.step, experiment)
        found.peak_bytes = (
            torch.cuda.max_memory_allocated() if tracker is None else sum(tracker.peak().values())
        )
        plan = contender.plan()
        if plan is not None:
            found.passes = (plan.num_backwards, plan.num_forwards)
            found.methods = dict(Counter(str(each.chosen.choice) for each in plan.layers))
            found.timed_on = plan.timed_on
        if experiment.has_graphs:
            _measure_graph_into(found, contender, experiment)


def _measure_graph_into(found: Visit, contender: Contender, experiment: Experiment) -> None:
    _free_memory(experiment)  # a graph takes its memory from a pool of its own
    try:
        step = contender.record()
        for _ in range(WARM_UP_STEPS):
            step()
        found.graph_ms = block_ms(step, experiment)
    except Exception as error:  # what was measured without a graph stays
        found.graph_trouble, found.is_bug = _reason(error)


def block_ms(step: Step, experiment: Experiment) -> float:
    """Time a block of steps in one go, after one more, and return the milliseconds of a step."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()  # a collection in the middle would be counted against this case alone
    try:
        step()
        elapsed_ms = _stop_watch(experiment)
        for _ in range(experiment.steps):
            step()
        return elapsed_ms() / experiment.steps
    finally:
        if was_enabled:
            gc.enable()


def _stop_watch(experiment: Experiment) -> Callable[[], float]:
    """Start a watch, on CUDA among what was launched; the function returned waits and reads it."""
    if not experiment.is_cuda:
        began = time.perf_counter()
        return lambda: (time.perf_counter() - began) * 1e3
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()

    def read() -> float:
        last.record()
        last.synchronize()
        return first.elapsed_time(last)

    return read


def _reason(error: BaseException) -> tuple[str, bool]:
    """What to say of an error, and whether it is a bug."""
    if any(map(_is_of_memory, _chain(error))):
        return OUT_OF_MEMORY, False
    first_line = (str(error).strip().splitlines() or ["no message"])[0]
    if isinstance(error, UnisonError):
        return first_line, False
    return f"{type(error).__name__}: {first_line}", True


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and those it was raised in the wake of: tidying up may fail too."""
    while error is not None:
        yield error
        error = error.__context__


def _is_of_memory(error: BaseException) -> bool:
    is_named = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return is_named or any(sign in str(error) for sign in _SIGNS_OF_FULL_MEMORY)


def _free_memory(experiment: Experiment) -> None:
    gc.collect()
    if experiment.is_cuda:
        torch.cuda.empty_cache()
