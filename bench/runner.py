"""The shared runner: side-by-side timing, and result files that say where figures come from."""

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.provenance import ROOT, commit
from bench.provenance import write_result as provenance_result

# The 97.5 % point of Student's t by degrees of freedom; beyond the table the last one is used,
# which errs on the wide side.
_T_975 = [math.inf, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201]
_T_975 += [2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069]
_T_975 += [2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042]


@dataclass(frozen=True)
class Ratio:
    """How long `a` takes as a multiple of `b`, with a 95 % interval.

    `low` and `high` bound the geometric mean of the pairs' ratios, taking their logarithms as
    normal: a statement about repeating this run, not about another machine.
    """

    ratio: float
    low: float
    high: float
    repeats: int
    median_seconds_a: float
    median_seconds_b: float

    def figures(self) -> dict[str, float | int]:
        """Return the fields as figures of a result file."""
        return asdict(self)


def wall_seconds(fn: Callable[[], object]) -> float:
    """Return how long a call takes, waiting for the GPU before and after if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    fn()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def interleaved_pairs(
    a: Callable[[], object],
    b: Callable[[], object],
    repeats: int,
    *,
    warmup: int = 1,
    measure: Callable[[Callable[[], object]], float] = wall_seconds,
) -> Ratio:
    """Time two calls side by side, so that a machine that slows down slows both.

    Each pair is timed back to back, and every other pair in the opposite order.

    Args:
        a: what is asked about.
        b: what it is compared with.
        repeats: the number of pairs, at least 2.
        warmup: calls of each that are not counted.
        measure: returns the seconds of a call.

    Returns:
        The ratio of `a` to `b` (below 1: `a` is faster), the same for the same times.
    """
    if repeats < 2:
        raise ValueError(f"an interval needs repeats of at least 2, found {repeats=}")
    for _ in range(warmup):
        measure(a)
        measure(b)
    seconds_a, seconds_b = [], []
    # A collection in the middle of one side would be counted against it alone.
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for pair in range(repeats):
            if pair % 2 == 0:
                seconds_a.append(measure(a))
                seconds_b.append(measure(b))
            else:
                seconds_b.append(measure(b))
                seconds_a.append(measure(a))
    finally:
        if was_enabled:
            gc.enable()
    return ratio_of(seconds_a, seconds_b)


def ratio_of(seconds_a: list[float], seconds_b: list[float]) -> Ratio:
    """Return the geometric mean of paired ratios with its log-normal 95 % interval."""
    logs = [math.log(x / y) for x, y in zip(seconds_a, seconds_b, strict=True)]
    center = statistics.fmean(logs)
    t = _T_975[min(len(logs) - 1, len(_T_975) - 1)]
    half = t * statistics.stdev(logs) / math.sqrt(len(logs))
    return Ratio(
        ratio=math.exp(center),
        low=math.exp(center - half),
        high=math.exp(center + half),
        repeats=len(logs),
        median_seconds_a=statistics.median(seconds_a),
        median_seconds_b=statistics.median(seconds_b),
    )


def write_result(
    name: str, figures: Mapping[str, Any], *, directory: str | Path = "bench/results"
) -> Path:
    """Write figures, and all that is needed to judge and repeat them, as one JSON file.

    Args:
        name: the file's name, without `.json`.
        figures: what was measured; values that JSON can hold.
        directory: where to; a relative one is taken from the root of the repository.

    Returns:
        The path of the file.
    """
    path = ROOT / directory / f"{name}.json"
    provenance_result(path, name, figures)
    return path


def short_commit() -> str:
    """Return the short hash for file names, or `uncommitted`."""
    return (commit()["commit"] or "uncommitted")[:7]


@contextmanager
def joined_ranks() -> Iterator[None]:
    """Join the ranks that the launcher started, on the CPU.

    A rank that breaks keeps its connections until its process ends: were they closed here, the
    others would fail first, with "connection reset", and hide the cause.
    """
    dist.init_process_group("gloo")
    yield
    dist.destroy_process_group()
