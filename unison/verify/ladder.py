"""Two runs compared rung by rung: the first one that differs, where, by how much, and likely why.

A step is a ladder: equal parameters and equal inputs give equal activations, those an equal loss,
and so on to the updated parameters (`RUNGS`). Above the first rung that differs everything differs;
below it nothing does. So that rung says what computed something else, and how the values of the two
runs are related there often says why.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from unison import check
from unison.errors import BadInput
from unison.schema import differing
from unison.verify.quantities import RUNGS, Quantity, Trace, positions

OF_ROWS = {"inputs", "activations", "per-sample norms", "coefficients"}
_ROUNDING = 1e-5  # of what is compared: no fault of a formula is that small
_SMALL = 1e-2  # of the largest values of a rung: smaller ones are compared as if they were so
# The bits of a floating-point number; bfloat16 is the upper half of float32.
_FLOATS: dict[str, tuple[Any, Any, int]] = {
    "float64": (np.float64, np.uint64, 0),
    "float32": (np.float32, np.uint32, 0),
    "float16": (np.float16, np.uint16, 0),
    "bfloat16": (np.float32, np.uint32, 16),
}


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Where two runs first part.

    Attributes:
        step: Counted from 0.
        rung: One of `RUNGS`.
        name: The parameter or module.
        where: The element or row, in words, as far as is known.
        values: Both values at a place where they differ; None if none of those kept does.
        ulps: How many numbers of the dtype lie between the two; None without values.
        distance: Of what is kept of the two, as a part of the larger.
        cause: What likely computed something else; None if nothing is known.
    """

    step: int
    rung: str
    name: str
    where: str
    values: tuple[float, float] | None
    ulps: int | None
    distance: float
    cause: str | None

    def __str__(self) -> str:
        said = f"step {self.step}, {self.rung}: {self.name}, {self.where}"
        if self.values is not None:
            said += f": {self.values[0]!r} and {self.values[1]!r}"
            said += f", {self.ulps:,} ulps apart" if self.ulps is not None else ""
        return f"{said}. {self.cause[0].upper()}{self.cause[1:]}." if self.cause else f"{said}."


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two runs, side by side.

    Attributes:
        sources: Their traces.
        num_ranks: Ranks of each.
        tolerance: Distances up to this are no difference; 0 for the same bits.
        first: Where they first part; None if they agree.
        rungs: All rungs that both have: the `step`, the `rung`, `num_compared` quantities,
            `num_differing` of them, and the `largest` distance.
        left_out: Rungs that only one of them has.
        conditions: What the bits depend on besides the settings, and is not the same for both.
    """

    sources: tuple[str, str]
    num_ranks: tuple[int, int]
    tolerance: float
    first: Difference | None
    rungs: list[dict[str, Any]]
    left_out: list[str]
    conditions: list[str]

    @property
    def is_equal(self) -> bool:
        """Whether nothing differs."""
        return self.first is None

    @property
    def largest(self) -> float:
        """The largest distance of any quantity; 0 if all bits are the same."""
        return max((each["largest"] for each in self.rungs), default=0.0)

    @property
    def verdict(self) -> str:
        """What the comparison came to, in a sentence or two."""
        if self.first is not None:
            return f"They first part at {self.first}"
        num_steps = len({each["step"] for each in self.rungs})
        count = sum(each["num_compared"] for each in self.rungs)
        how = "in every bit" if not self.tolerance else f"to {self.tolerance:.0e}"
        steps = "1 step" if num_steps == 1 else f"{num_steps} steps"
        return f"They agree {how}: {count:,} quantities of {steps}."


@np.errstate(all="ignore")  # runs may have diverged
def compare(
    run_a: Trace | str | Path, run_b: Trace | str | Path, *, tolerance: float = 0.0
) -> Comparison:
    """Compare two runs by their traces; see `unison.verify.trace`.

    Args:
        run_a: The trace of a run, or its file.
        run_b: That of another.
        tolerance: How far quantities may be apart, as a part of their size; 0 compares bits.

    Raises:
        BadInput: If a file holds no trace, or the two have nothing in common.
    """
    check.not_negative(tolerance=tolerance)
    a, b = (each if isinstance(each, Trace) else Trace.open(each) for each in (run_a, run_b))
    # Sorted by step and rung; within one, as the runs computed it.
    keys = sorted(dict.fromkeys([*a.entries, *b.entries]), key=lambda key: key[:2])
    both = {key[:2] for key in a.entries} & {key[:2] for key in b.entries}
    if not both:
        raise BadInput(f"{a.source} and {b.source} have no step in common")
    steps = {step for step, _ in both}
    left_out = {rung for step, rung, _ in keys if (step, rung) not in both and step in steps}
    conditions = both_of(a.conditions, b.conditions)
    floors: dict[tuple[int, int], float] = {}
    for key, entry in a.entries.items():
        floors[key[:2]] = max(floors.get(key[:2], 0.0), _SMALL * _size(entry))
    found: list[Difference] = []
    rungs: dict[tuple[int, int], list[float]] = {}
    for key in keys:
        if key[:2] not in both:
            continue
        x, y = a.entries.get(key), b.entries.get(key)
        if tolerance and RUNGS[key[1]] == "activations" and (x is None or y is None):
            continue  # without granules, whether a tensor has rows is guessed by its shape
        distance = _distance(x, y, floors.get(key[:2], 0.0) if tolerance else 0.0)
        rungs.setdefault(key[:2], []).append(distance)
        if not found and (distance > tolerance or any(e and e.disagree for e in (x, y))):
            found.append(_difference(key, x, y, a, b, conditions))
    for run in (a, b):  # what can be told of a run by itself
        found += itertools.islice(_broken_sums(run), 1)
    first = min(found, key=lambda each: (each.step, RUNGS.index(each.rung)), default=None)
    return Comparison(
        sources=(a.source, b.source),
        num_ranks=(a.num_ranks, b.num_ranks),
        tolerance=tolerance,
        first=first,
        rungs=[
            {
                "step": step,
                "rung": RUNGS[rung],
                "num_compared": len(distances),
                "num_differing": sum(each > tolerance for each in distances),
                "largest": max(distances),
            }
            for (step, rung), distances in rungs.items()
        ],
        left_out=[RUNGS[rung] for rung in sorted(left_out)],
        conditions=conditions,
    )


def both_of(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """What differs between two runs, with both values."""
    return [f"{name} ({a.get(name)!r} and {b.get(name)!r})" for name in differing(a, b)]


def _values(x: Quantity, y: Quantity) -> tuple[np.ndarray, np.ndarray]:
    """The values that both runs kept; none if they kept other ones."""
    if len(x.values) != len(y.values):
        return np.empty(0), np.empty(0)
    return np.array(x.values), np.array(y.values)


def _size(x: Quantity) -> float:
    """The root mean square of the values that were kept."""
    values = np.nan_to_num(np.array(x.values))
    return float(np.sqrt(np.mean(values**2))) if len(values) else 0.0


def _distance(x: Quantity | None, y: Quantity | None, floor: float = 0.0) -> float:
    """How far two quantities are apart, as a part of the larger; 0 only for equal digests.

    Args:
        x: The one.
        y: The other.
        floor: Values below this count as this: what should be zero is nothing but rounding.
    """
    if x is None or y is None or x.shape != y.shape:
        return math.inf
    if (x.blocks, x.dtype) == (y.blocks, y.dtype):
        return 0.0
    a, b = _values(x, y)
    if np.isnan(a).tolist() != np.isnan(b).tolist():
        return math.inf
    scale = max(float(np.linalg.norm(np.nan_to_num(each))) for each in (a, b))
    scale = max(scale, floor * math.sqrt(len(a)))
    by_values = float(np.linalg.norm(np.nan_to_num(a - b))) / scale if scale else 0.0
    norm = max(x.norm, y.norm, floor * math.sqrt(x.numel))
    by_norm = abs(x.norm - y.norm) / norm if norm > 0 and math.isfinite(norm) else 0.0
    # Digests differ: something does, be it too small to show in what is kept.
    found = max(by_values, by_norm, 2**-53)
    return found if math.isfinite(found) else math.inf


def ulps_between(a: float, b: float, dtype: str) -> int | None:
    """How many numbers of a floating-point type lie from one to the other; None for others.

    >>> ulps_between(1.0, 1.0 + 2**-23, "float32"), ulps_between(0.0, -0.0, "float64")
    (1, 0)
    """
    if dtype not in _FLOATS or not (math.isfinite(a) and math.isfinite(b)):
        return None
    one, other = (_bits(abs(each), dtype) for each in (a, b))
    have_one_sign = math.copysign(1.0, a) == math.copysign(1.0, b)
    return abs(one - other) if have_one_sign else one + other


def _bits(value: float, dtype: str) -> int:
    """The bits of a floating-point number, as a number."""
    wide, bits, shift = _FLOATS[dtype]
    return int(np.asarray(value, wide).view(bits)) >> shift


# ---- the first difference ------------------------------------------------------------------------


def _difference(
    key: tuple[int, int, str],
    x: Quantity | None,
    y: Quantity | None,
    a: Trace,
    b: Trace,
    conditions: Sequence[str],
) -> Difference:
    step, rung, name = key[0], RUNGS[key[1]], key[2]
    if x is None or y is None:
        present, other = (a, b) if y is None else (b, a)
        return Difference(
            step=step,
            rung=rung,
            name=name,
            where=f"only in {present.source}",
            values=None,
            ulps=None,
            distance=math.inf,
            cause=f"{other.source} computed no such thing: another model, an unused parameter, or "
            "one counted twice under two names",
        )
    blocks = [place for place, (p, q) in enumerate(zip(x.blocks, y.blocks, strict=False)) if p != q]
    found = _located(x, y, blocks, _cause(_Pair(x, y, blocks, a, b)))
    if conditions and found.distance < 1e-3:
        said = f"they ran under different conditions: {', '.join(conditions)}"
        return replace(found, cause=said)
    return found


def _located(x: Quantity, y: Quantity, blocks: Sequence[int], cause: str | None) -> Difference:
    """The difference between two quantities, of which some blocks differ."""
    where, values = _where(x, y, blocks)
    return Difference(
        step=y.step,
        rung=y.rung,
        name=y.name,
        where=where,
        values=values,
        ulps=None if values is None else ulps_between(*values, x.dtype),
        distance=_distance(x, y),
        cause=cause,
    )


def _where(
    x: Quantity, y: Quantity, blocks: Sequence[int]
) -> tuple[str, tuple[float, float] | None]:
    """Say which elements differ, with two values if there are some among those kept."""
    if x.shape != y.shape or x.dtype != y.dtype:
        return f"{list(x.shape)} {x.dtype} and {list(y.shape)} {y.dtype}", None
    if not blocks:
        return "copies that ranks hold of it", None
    places = positions(x.numel, len(x.values))
    a, b = _values(x, y)
    differ = np.flatnonzero((a != b) & ~(np.isnan(a) & np.isnan(b)))
    if len(differ):
        gaps = np.abs(a[differ] - b[differ])
        place = int(differ[np.argmax(np.nan_to_num(gaps, nan=np.inf))])
        values = float(a[place]), float(b[place])
        return f"element {_element(int(places[place]), x)}", values
    if x.rung in OF_ROWS:
        return _runs("row", blocks, x.shape[0], len(x.blocks)), None
    return _runs("element", blocks, x.numel, len(x.blocks)), None


def _element(place: int, x: Quantity) -> str:
    index = list(map(int, np.unravel_index(place, x.shape))) if x.shape else []
    if x.rung in OF_ROWS:
        return f"{index[1:]} of row {index[0]}" if len(index) > 1 else f"of row {index[0]}"
    return str(index) if index else "itself"


def _runs(what: str, blocks: Sequence[int], total: int, num_blocks: int) -> str:
    """Which of `total` things lie in some blocks: the first run of them.

    >>> _runs("row", [2, 3, 7], 8, 8), _runs("element", [1], 64, 32)
    ('rows 2 to 3, and others', 'elements 2 to 3')
    """
    length = max(1, -(-total // num_blocks))
    end = next((i for i, block in enumerate(blocks) if block != blocks[0] + i), len(blocks))
    first, last = blocks[0] * length, min((blocks[end - 1] + 1) * length, total) - 1
    run = f"{what} {first}" if first == last else f"{what}s {first} to {last}"
    return run + (", and others" if end < len(blocks) else "")


# ---- likely causes -------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Pair:
    """Two quantities that differ, where everything below them on the ladder is equal.

    Attributes:
        x: Of the first run.
        y: Of the second.
        blocks: Which blocks of digests differ.
        a: The first run.
        b: The second.
    """

    x: Quantity
    y: Quantity
    blocks: Sequence[int]
    a: Trace
    b: Trace

    @cached_property
    def ratio(self) -> float | None:
        """By what factor all values of the second are those of the first; None if by none."""
        p, q = _values(self.x, self.y)
        large = np.abs(p) > 1e-3 * np.nanmax(np.abs(p), initial=0.0)
        large &= np.isfinite(p) & np.isfinite(q) & (p != 0)
        if not large.any():
            return None
        ratios = q[large] / p[large]
        middle = float(np.median(ratios))
        # A little of anything added to all is nearly a factor, too: it must stand out.
        near = min(2e-3 * abs(middle), 0.02 * abs(middle - 1))
        is_one = np.all(np.abs(ratios - middle) <= near) and math.isfinite(middle)
        return middle if is_one and abs(middle - 1) > 2e-3 else None

    @cached_property
    def scale(self) -> str | None:
        """That factor in terms of the numbers of ranks, if it is one: "1/world size"."""
        return None if self.ratio is None else self.in_ranks(self.ratio, 5e-3)

    def in_ranks(self, ratio: float, near: float) -> str | None:
        """A factor in terms of the numbers of ranks, if it is one up to a part `near` of it."""
        a, b = self.a.num_ranks, self.b.num_ranks
        powers = {"world size": 1.0, "√world size": 0.5, "world size²": 2.0}
        # Both runs may be off by their own number of ranks, or one of them alone.
        for (name, power), size in itertools.product(powers.items(), (b / a, b, a)):
            for words, factor in ((name, size**power), (f"1/{name}", size**-power)):
                if a != b and size != 1 and abs(ratio / factor - 1) < near:
                    return words
        return None

    @cached_property
    def repeats(self) -> bool:
        """Whether one of the runs drew the same values for two parts of anything at this rung."""
        return any(
            each.repeats
            for run in (self.a, self.b)
            for each in run.entries.values()
            if (each.step, each.rung) == (self.x.step, self.x.rung)
        )

    @property
    def times(self) -> str:
        """That factor in words, if there is one."""
        if self.ratio is None or self.x.numel == 1:  # two numbers always have one
            return ""
        return f"every value is {self.ratio:.4g} times the other's: "

    @property
    def sees_reduction(self) -> bool:
        """Whether the runs show what ranks add up, so that it is known to be equal."""
        after = RUNGS.index("gradients after reduction")
        return all((self.x.step, after, self.x.name) in run.entries for run in (self.a, self.b))

    @property
    def is_part(self) -> bool:
        """Whether a part of the tensor differs, and the rest of it does not."""
        length = max(1, -(-self.x.numel // len(self.x.blocks)))
        return len(self.blocks) <= -(-self.x.numel // length) * 3 // 4

    @property
    def is_flipped_bit(self) -> bool | None:
        """Whether a single element differs, in one bit; None if it is not among those kept."""
        p, q = _values(self.x, self.y)
        if len(self.blocks) != 1 or self.x.numel < 8 or self.x.rung in OF_ROWS:
            return False
        differ = (p != q) & ~(np.isnan(p) & np.isnan(q))
        pairs = list(zip(p[differ], q[differ], strict=True))
        if len(pairs) != 1 or self.x.dtype not in _FLOATS:
            return False if pairs or len(p) == self.x.numel else None
        one, other = (_bits(each, self.x.dtype) for each in pairs[0])
        return (one ^ other).bit_count() == 1


def _cause(pair: _Pair) -> str | None:
    """What is known to make such a difference."""
    x, y = pair.x, pair.y
    for each, run in ((x, pair.a), (y, pair.b)):
        if each.disagree:
            return f"ranks of {run.source} that hold copies of it hold different values"
    if x.dtype != y.dtype:
        return "another precision"
    if x.shape != y.shape:
        if x.rung not in OF_ROWS or x.shape[1:] != y.shape[1:]:
            return "another model"
        return (
            f"{x.shape[0]} samples and {y.shape[0]}: padding is counted, or other samples were "
            "drawn"
        )
    if (is_flipped := pair.is_flipped_bit) is not False:
        return (
            "a few neighbouring elements alone differ: memory that changed, or something that "
            "wrote to them outside of the step" + (" (one flipped bit)" if is_flipped else "")
        )
    is_computed = x.rung not in ("initial parameters", "settings", "inputs")
    if is_computed and _distance(x, y) < _ROUNDING:
        return (
            "no more than rounding: the same thing added up in another order, at another shape or "
            "by another kernel or method"
        )
    return _cause_at_rung(pair)


# Likely causes by rung: where all values differ by a factor of the numbers of ranks, and else.
_SCALED = {
    "activations": "an impure module: its output is scaled by {scale}; a forward must not ask for "
    "the number of ranks",
    "loss": "the loss is scaled by {scale}: a sum for a mean over ranks, or the reverse",
    "coefficients": "coefficients are scaled by {scale}",
    "gradients before reduction": "gradients are scaled by {scale} before they are added over "
    "ranks",
    "gradients after reduction": "the sum over ranks is scaled by {scale}: a sum for a mean, or "
    "the reverse",
    "curvature": "factors are scaled by {scale}: by each rank's own count of tokens",
    "gradients": "what the optimizer finds is scaled by {scale}: a mean for a sum, or the reverse",
}
_CAUSES = {
    "settings": "the runs were asked for different things",
    "activations": "an impure module: {times}of equal parameters and inputs it computes something "
    "else, so that something beside them enters: the rank, earlier calls, a generator, "
    "other samples of the batch, a gather of parameters that was cut short. "
    "unison.verify.purity tries it out in one process",
    "loss": "{times}a mean of per-rank means, a sum for a mean, labels of other rows, or "
    "padding in it; unison.batch_mean is the mean over the global batch",
    "coefficients": "{times}another clip norm C or clipping rule, or coefficients of other rows or "
    "of none",
    "gradients before reduction": "{times}this parameter's gradient itself: a use of it is missing "
    "or counted twice, a granule is computed at another shape, samples are weighted otherwise or "
    "padding counts, or a gather of parameters for the backward pass was cut short",
    "gradients after reduction": "{times}the reduction: a rank's summand is missing, added twice, "
    "or added in another order; before it they are equal",
    "curvature": "{times}factors that are not the sum over ranks of each token's own product: Gram "
    "matrices of tokens that were added up, one rank's update after another's (a "
    "ring), a mean of means, padding that counts, or another count",
    "gradients": "{times}what lies between the reduction and the optimizer: the division by the "
    "batch size, clipping by the whole norm, K-FAC's direction, or code of the loop",
    "optimizer state": "the optimizer computed otherwise from equal gradients: other settings, a "
    "parameter that is stepped twice, or state that was not the same before",
    "updated parameters": "{times}the update itself (a parameter that is stepped twice, or not on "
    "every rank), or something else that wrote to the parameter",
}


def _cause_at_rung(pair: _Pair) -> str:
    x, y, scale, times = pair.x, pair.y, pair.scale, pair.times
    match x.rung:
        case "initial parameters":
            if pair.repeats:
                return "every rank's part holds the same values: drawn by rank, not by element"
            if times:
                return f"{times}another initialisation, or a parameter that was added up twice"
            if not pair.is_part and abs(x.norm - y.norm) < 0.2 * max(x.norm, y.norm):
                return (
                    "another RNG stream: values of one distribution, all others. Another seed, a "
                    "generator that something consumed before, or one that differs between devices"
                )
            return "other values were loaded, or some were changed before the first step"
        case "inputs" if sorted(x.blocks) == sorted(y.blocks):
            rows = ", ".join(map(str, pair.blocks[:6])) + (" …" if len(pair.blocks) > 6 else "")
            return (
                f"the same samples in another order: rows {rows} are swapped; dealing or the "
                "sampler numbers them anew"
            )
        case "inputs":
            shared = len(set(x.blocks) & set(y.blocks))
            what = "rows" if len(x.blocks) == x.shape[0] else "groups of neighbouring rows"
            return (
                f"{shared} of {len(x.blocks)} {what} are in both batches: ranks read other samples "
                "than one process does (a sampler per rank, a generator that was consumed); use "
                "unison.deal, or the loader of make_private"
            )
        case "per-sample norms":
            return _cause_of_norms(pair)
        case "noise":
            return _cause_of_noise(pair)
        case "gradients after reduction" if pair.is_part and not times:
            return "the exchange lost a part of the tensor, or one rank's shard of it"
        case "gradients" if not pair.sees_reduction:
            scaled = f"scaled by {scale}, a mean for a sum or the reverse; or " if scale else times
            return (
                f"{scaled}the gradient itself, its reduction (a rank's summand is missing or added "
                "twice), clipping by the whole norm, or code of the loop: of this sharding nothing "
                "in between is seen"
            )
        case "updated parameters" if pair.is_part:
            return (
                "a part of the tensor alone: a gather that was cut short, or something else than "
                "the optimizer that wrote to it"
            )
    if scale and x.rung in _SCALED:
        return _SCALED[x.rung].format(scale=scale)
    return _CAUSES[x.rung].format(times=times)


def _cause_of_norms(pair: _Pair) -> str:
    if pair.scale == "√world size":
        return "squared norms are summed over the data axis: √world size too large"
    if pair.scale is not None:
        return f"norms are scaled by {pair.scale}: gradients of a loss that each rank divided"
    for mine, other, run in ((pair.y, pair.x, pair.b), (pair.x, pair.y, pair.a)):
        before = run.entries.get((mine.step - 1, RUNGS.index(mine.rung), mine.name))
        if before is not None and set(mine.blocks) & set(before.blocks):
            return "a stale norm: samples have those of the step before"
        if {mine.blocks[place] for place in pair.blocks} & set(other.blocks):
            return (
                "samples have the norms of others: rows are counted to other samples, or norms of "
                "the pass before are used again (stale)"
            )
    if pair.times:
        return f"{pair.times}the divisor of the loss is undone twice, or not at all"
    p, q = _values(pair.x, pair.y)
    if np.any((p == 0) != (q == 0)):
        return (
            "samples without a norm: a rank's part is dropped, or a gather over ranks was cut short"
        )
    if len(p) and np.all(q >= p * (1 - 1e-6)):
        return (
            "all norms are larger: a parameter is counted twice (replicated along a tensor axis, "
            "or under two names), padding is included, or a cross term of a tied one is missing"
        )
    if len(p) and np.all(q <= p * (1 + 1e-6)):
        return (
            "all norms are smaller: a part of the gradient is left out (a parameter, a rank of the "
            "tensor axis, the cross term of a tied one)"
        )
    return (
        "norms of other gradients: a cross term of a tied parameter is missing, a norm of one "
        "parameter is stale, or a gather of parameters for the backward pass was cut short"
    )


def _cause_of_noise(pair: _Pair) -> str:
    x, y = pair.x, pair.y
    if pair.repeats:
        return (
            "every rank's part holds the same noise: drawn by rank, not by element; whoever "
            "subtracts two parts removes it"
        )
    if min(x.norm, y.norm) < 1e-3 * max(x.norm, y.norm):
        return "one of the runs adds no noise"
    about = y.norm / x.norm
    # The sum of n squares of normals has a relative standard deviation of √(2/n).
    near = 4 / math.sqrt(x.numel)
    if pair.ratio is None and (x.numel < 64 or abs(about - 1) < near):
        return "other noise of about the same size: another key, stream, step or element numbers"
    scale = pair.scale or (pair.in_ranks(about, min(near, 0.05)) if pair.ratio is None else None)
    how = "divided by ranks that do not add it up" if about < 1 else "added on every rank"
    ranks = f" ({scale}: {how})" if scale else ""
    return f"noise of another standard deviation: σ is {about:.3g} times the other's{ranks}"


def _broken_sums(run: Trace) -> Iterator[Difference]:
    """Where a private run's sums over ranks are not the sums of its summands."""
    before, after = (RUNGS.index(f"gradients {when} reduction") for when in ("before", "after"))
    for (step, rung, name), x in run.entries.items():
        y = run.entries.get((step, after, name))
        if not run.is_private or rung != before or y is None or x.blocks == y.blocks:
            continue
        blocks = [i for i, (p, q) in enumerate(zip(x.blocks, y.blocks, strict=True)) if p != q]
        cause = _cause_at_rung(_Pair(replace(x, rung=y.rung), y, blocks, run, run))
        found = _located(x, y, blocks, cause)
        yield replace(found, where=f"{found.where}, before and after it in {run.source}")
