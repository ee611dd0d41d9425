"""Distributions over boxes of a stream.

Every function takes a stream and what to fill: a `Box` (or a shape, for the whole tensor), and
returns a tensor of the box's shape; or `out=`, filled in place. Elements consume a fixed number of
words each, so no element's value depends on another's.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache

import torch

from unison import check
from unison.errors import BadInput
from unison.kernels.random import Distribution, Recipe, fill_rows
from unison.kernels.random.reference import normal_of_rank
from unison.rng.streams import Box, Stream

Where = Box | Sequence[int]

MIN_RANKS = 1 << 12  # of 2^32: fewer would make a truncated normal visibly coarse


def words(stream: Stream, where: Where, *, device: torch.device | str | None = None):
    """Return the raw 32-bit words of a box, one to an element, as int64."""
    return _fill(stream, where, Distribution.WORDS, torch.int64, device, None)


def uniform(
    stream: Stream,
    where: Where,
    low: float = 0.0,
    high: float = 1.0,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return draws from the uniform distribution on [low, high).

    24 random bits for float32 and shorter types (one word), 53 for float64 (two words).

    Guarantees:
        Never returns `high` nor anything outside [low, high), also after rounding to `dtype`: a
        draw that would round outside takes the nearest value of `dtype` inside.
    """
    if not (math.isfinite(low) and math.isfinite(high) and low <= high):
        raise BadInput(f"expected low <= high, both finite, found {low=} {high=}")
    dtype = out.dtype if out is not None else dtype
    if not dtype.is_floating_point:
        raise BadInput(f"uniform draws fill floating-point tensors, found {dtype}")
    if low == high:
        least = greatest = _value_in(dtype, low)
    else:
        least = _round_up(dtype, low)
        greatest = _next_below(dtype, _round_up(dtype, high))
    if least > greatest:
        raise BadInput(f"no {dtype} lies in [{low}, {high}): use a wider dtype or range")
    kind = Distribution.UNIFORM53 if dtype == torch.float64 else Distribution.UNIFORM24
    floats = (low, high - low, least, greatest)
    return _fill(stream, where, kind, dtype, device, out, floats)


def normal(
    stream: Stream,
    where: Where,
    mean: float = 0.0,
    std: float = 1.0,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return normal draws: 32 random bits each, |z| up to 6.3, computed in float64.

    Not for privacy: use `secure_normal` there.
    """
    check.not_negative(std=std)
    _finite(mean=mean)
    dtype = out.dtype if out is not None else dtype
    return _fill(stream, where, Distribution.NORMAL, dtype, device, out, (mean + 0.0, std))


def truncated_normal(
    stream: Stream,
    where: Where,
    mean: float = 0.0,
    std: float = 1.0,
    low: float = -2.0,
    high: float = 2.0,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return normal draws conditioned to [low, high] (absolute bounds): one draw each, no redraw.

    The bounds become integer ranks by bisection on our own inverse; a word picks a rank between.

    Raises:
        BadInput: The interval holds less than a millionth of the distribution.
    """
    check.positive(std=std)
    _finite(mean=mean)
    if not low < high:
        raise BadInput(f"expected low < high, found {low=} {high=}")
    first = _rank_of((low - mean) / std)
    num_ranks = _rank_of((high - mean) / std) - first
    if num_ranks < MIN_RANKS:
        raise BadInput(
            f"[{low}, {high}] holds less than {MIN_RANKS / 2**32:.0e} of a normal distribution "
            f"with {mean=} {std=}: too little to draw from in 32 bits"
        )
    dtype = out.dtype if out is not None else dtype
    if not dtype.is_floating_point:
        raise BadInput(f"truncated_normal draws fill floating-point tensors, found {dtype}")
    least = _round_up(dtype, low) if math.isfinite(low) else low
    greatest = -_round_up(dtype, -high) if math.isfinite(high) else high
    floats, ints = (mean + 0.0, std, least, greatest), (first, num_ranks)
    return _fill(stream, where, Distribution.TRUNCATED, dtype, device, out, floats, ints)


def drawn_probability(probability: float) -> float:
    """Return the probability of `bernoulli`'s True: rounded down to a multiple of 2^-63.

    A float64 from 2^-11 on is such a multiple, and any such multiple below is a float64.

    >>> drawn_probability(1 / 2047) == 1 / 2047, drawn_probability(1e-19)
    (True, 0.0)
    """
    return math.floor(probability * 2.0**63) * 2.0**-63


def bernoulli(
    stream: Stream,
    where: Where,
    probability: float,
    *,
    device: torch.device | str | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return True with `drawn_probability`: a 63-bit draw against a threshold."""
    check.probability(probability=probability)
    threshold = math.floor(Fraction(probability) * (1 << 63))
    return _fill(
        stream, where, Distribution.BERNOULLI, torch.bool, device, out, ints=(threshold - 1,)
    )


def integers(
    stream: Stream,
    where: Where,
    low: int,
    high: int,
    *,
    device: torch.device | str | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return integers in [low, high): floor(r · (high - low) / 2^128) for a 128-bit draw r.

    Every value's probability is within 2^-128 of 1 / (high - low); there is no redraw.
    """
    if not (-(1 << 63) <= low < high <= (1 << 63) - 1 and high - low < (1 << 63)):
        raise BadInput(f"expected low < high within int64, less than 2^63 apart: {low=} {high=}")
    ints = (low, high - low)
    return _fill(stream, where, Distribution.INTEGERS, torch.int64, device, out, ints=ints)


def _fill(
    stream: Stream,
    where: Where,
    distribution: Distribution,
    dtype: torch.dtype,
    device: torch.device | str | None,
    out: torch.Tensor | None,
    floats: tuple[float, ...] = (),
    ints: tuple[int, ...] = (),
) -> torch.Tensor:
    box = where if isinstance(where, Box) else Box.whole(where)
    if out is None:
        out = torch.empty(box.sides, dtype=dtype, device=device or "cpu")
    elif out.numel() != box.numel():
        raise BadInput(f"out has {out.numel()} elements, the box {box.sides} has {box.numel()}")
    recipe = Recipe(stream.cipher, stream.words, distribution, floats, ints)
    target = out if out.is_contiguous() else torch.empty_like(out).contiguous()
    starts, run = box.rows()
    fill_rows(target, recipe, starts, run)
    if target is not out:
        with torch.no_grad():
            out.copy_(target)
    return out


def _finite(**values: float) -> None:
    for name, value in values.items():
        if not math.isfinite(value):
            raise BadInput(f"{name} must be finite, found {value!r}")


def _value_in(dtype: torch.dtype, x: float) -> float:
    narrow = torch.tensor(x, dtype=torch.float64).float() if dtype.itemsize < 4 else x
    return float(torch.as_tensor(narrow, dtype=torch.float64).to(dtype))


def _next_below(dtype: torch.dtype, x: float) -> float:
    """Return the greatest value of `dtype` below x, itself a value of `dtype`."""
    at = torch.tensor(x, dtype=dtype)
    return float(torch.nextafter(at, torch.tensor(-math.inf, dtype=dtype)))


def _round_up(dtype: torch.dtype, x: float) -> float:
    """Return the least value of `dtype` that is at least x."""
    rounded = _value_in(dtype, x)
    return rounded if rounded >= x else -_next_below(dtype, -rounded)


@lru_cache(maxsize=1024)
def _rank_of(x: float) -> int:
    """Return the number of ranks in [0, 2^32) whose normal value is below x."""
    low, high = 0, 1 << 32
    while low < high:
        middle = (low + high) // 2
        if float(normal_of_rank(torch.tensor(middle))) >= x:
            high = middle
        else:
            low = middle + 1
    return low
