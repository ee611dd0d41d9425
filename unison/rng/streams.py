"""Streams, the boxes of elements that a rank asks of them, and the distributions of the elements.

Every distribution takes a stream and what to fill: a `Box` (or a shape, for the whole tensor), and
returns a tensor of the box's shape; or `out=`, filled in place. Elements consume a fixed number of
words each, so no element's value depends on another's.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from unison import check
from unison.errors import BadInput
from unison.kernels.random import (
    Cipher,
    Distribution,
    Network,
    Recipe,
    fill_rows,
    normal_of_rank,
    permute,
)
from unison.rng.keys import Key

MAX_ELEMENTS = 1 << 63


@dataclass(frozen=True)
class Box:
    """A box of an N-dimensional tensor: the elements with start <= index < stop in every dim.

    An element's index is its row-major index in the *whole* tensor, so it does not depend on who
    holds which part.

    Args:
        shape: Shape of the whole tensor.
        start: First index in each dim.
        stop: End index in each dim, excluded.

    >>> Box((4, 6), (1, 2), (3, 5)).rows()
    (tensor([ 8, 14]), 3)
    """

    shape: tuple[int, ...]
    start: tuple[int, ...]
    stop: tuple[int, ...]

    def __post_init__(self) -> None:
        if not len(self.shape) == len(self.start) == len(self.stop):
            raise BadInput(f"expected one start and stop per dim, found {self}")
        sides = zip(self.start, self.stop, self.shape, strict=True)
        if not all(0 <= a <= b <= n for a, b, n in sides):
            raise BadInput(f"expected 0 <= start <= stop <= shape in every dim, found {self}")
        if math.prod(self.shape) >= MAX_ELEMENTS:
            raise BadInput(f"expected fewer than 2^63 elements, found {self.shape=}")

    @classmethod
    def whole(cls, shape: Sequence[int]) -> "Box":
        """Return the box that is the whole tensor."""
        return cls(tuple(shape), (0,) * len(shape), tuple(shape))

    @classmethod
    def flat(cls, start: int, stop: int, total: int | None = None) -> "Box":
        """Return the flat range [start, stop) of a tensor of `total` elements."""
        return cls((stop if total is None else total,), (start,), (stop,))

    @property
    def sides(self) -> tuple[int, ...]:
        """Shape of the box itself."""
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    def numel(self) -> int:
        """Return the number of elements in the box."""
        return math.prod(self.sides)

    def rows(self) -> tuple[Tensor, int]:
        """Return the box as runs of consecutive elements: (index of each run's first, run length).

        Trailing dims that the box spans whole join the run, so a cut along dim 0 is one run.
        """
        if self.numel() == 0:
            return torch.empty(0, dtype=torch.int64), 0
        run, stride, dim = 1, 1, len(self.shape)
        while dim > 0:
            dim -= 1
            run = self.sides[dim] * stride
            stride *= self.shape[dim]
            if self.sides[dim] != self.shape[dim]:
                break
        # Here dims `dim` and after form one run; `stride` is the stride of dim - 1.
        inner = math.prod(self.shape[dim + 1 :])
        starts = torch.tensor([self.start[dim] * inner if self.shape else 0], dtype=torch.int64)
        for d in range(dim - 1, -1, -1):
            steps = torch.arange(self.start[d], self.stop[d], dtype=torch.int64) * stride
            starts = (steps[:, None] + starts).view(-1)
            stride *= self.shape[d]
        return starts, run


@dataclass(frozen=True, eq=False)
class Stream:
    """A named sequence of random words under a key, at a step.

    Guarantees:
        Word i of a stream is a function of (key, purpose, name, step, i). The 128 bits (Philox) or
        320 bits (ChaCha20) that identify a stream come from a keyed hash of the other four, so
        streams of different names, steps or purposes are independent.

    Args:
        key: Root key.
        name: Usually the full name of a parameter.
        step: Training step; 0 for what happens once.
        purpose: Keeps "init", "noise", "dropout" and the like apart under one key.
        cipher: PHILOX for what is public; CHACHA20 for what privacy rests on.
    """

    key: Key
    name: str
    step: int = 0
    purpose: str = "init"
    cipher: Cipher = Cipher.PHILOX
    words: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check.not_negative(step=self.step)
        count = self.cipher.num_key_words
        secret = self.key.derive(
            "stream", self.cipher.name, self.purpose, self.name, self.step, size=4 * count
        )
        words = tuple(int.from_bytes(secret[4 * i : 4 * i + 4], "little") for i in range(count))
        object.__setattr__(self, "words", words)

    def _refuse(self, *_: object) -> None:
        raise TypeError(
            "a Stream holds key material and cannot be copied, pickled or saved: store its name "
            "and step, and build it again from the Key"
        )

    __copy__ = __deepcopy__ = __getstate__ = __reduce__ = __reduce_ex__ = _refuse  # type: ignore[assignment]


def words_of_streams(
    key: Key, names: Sequence[str], *, step: int, purpose: str, cipher: Cipher
) -> Tensor:
    """Return `Stream(key, name, ...).words` of many names: int64 [names, words].

    It holds key material: keep it no longer than it is used.
    """
    check.not_negative(step=step)
    count = cipher.num_key_words
    parts = "stream", cipher.name, purpose
    secrets = [key.derive(*parts, name, step, size=4 * count) for name in names]
    words = np.frombuffer(b"".join(secrets), dtype="<u4").astype(np.int64)
    return torch.from_numpy(words).view(len(names), count)


# --- distributions --------------------------------------------------------------------------------

Where = Box | Sequence[int]
MIN_RANKS = 1 << 12  # of 2^32: fewer would make a truncated normal visibly coarse


def words(stream: Stream, where: Where, *, device: torch.device | str | None = None):
    """Return the raw 32-bit words of a box, one to an element, as int64."""
    return fill(stream, where, Distribution.WORDS, torch.int64, device, None)


def uniform(
    stream: Stream,
    where: Where,
    low: float = 0.0,
    high: float = 1.0,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    out: Tensor | None = None,
) -> Tensor:
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
    return fill(stream, where, kind, dtype, device, out, floats)


def normal(
    stream: Stream,
    where: Where,
    mean: float = 0.0,
    std: float = 1.0,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return normal draws: 32 random bits each, |z| up to 6.3, computed in float64.

    Not for privacy: use `secure_normal` there.
    """
    check.not_negative(std=std)
    _finite(mean=mean)
    dtype = out.dtype if out is not None else dtype
    return fill(stream, where, Distribution.NORMAL, dtype, device, out, (mean + 0.0, std))


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
    out: Tensor | None = None,
) -> Tensor:
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
    return fill(stream, where, Distribution.TRUNCATED, dtype, device, out, floats, ints)


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
    out: Tensor | None = None,
) -> Tensor:
    """Return True with `drawn_probability`: a 63-bit draw against a threshold."""
    check.probability(probability=probability)
    threshold = math.floor(Fraction(probability) * (1 << 63))
    return fill(
        stream, where, Distribution.BERNOULLI, torch.bool, device, out, ints=(threshold - 1,)
    )


def integers(
    stream: Stream,
    where: Where,
    low: int,
    high: int,
    *,
    device: torch.device | str | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return integers in [low, high): floor(r · (high - low) / 2^128) for a 128-bit draw r.

    Every value's probability is within 2^-128 of 1 / (high - low); there is no redraw.
    """
    if not (-(1 << 63) <= low < high <= (1 << 63) - 1 and high - low < (1 << 63)):
        raise BadInput(f"expected low < high within int64, less than 2^63 apart: {low=} {high=}")
    ints = (low, high - low)
    return fill(stream, where, Distribution.INTEGERS, torch.int64, device, out, ints=ints)


def fill(
    stream: Stream,
    where: Where,
    distribution: Distribution,
    dtype: torch.dtype,
    device: torch.device | str | None,
    out: Tensor | None,
    floats: tuple[float, ...] = (),
    ints: tuple[int, ...] = (),
) -> Tensor:
    """Return draws of a distribution with these numbers, see `Recipe`, over a box."""
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


# --- which records, and in which order ------------------------------------------------------------


def poisson_sample(
    stream: Stream, num_records: int, q: float, *, start: int = 0, stop: int | None = None
) -> Tensor:
    """Return the indices of the records that take part, each with probability q, ascending.

    Guarantees:
        Membership of a record is a function of (stream, record), exact to 2^-63. The set over
        [0, num_records) is the union of the sets over any partition of it; memory beyond the
        result is a few megabytes for any number of records.

    Args:
        stream: CHACHA20 for private training: amplification by sampling needs secret membership.
        num_records: Size of the data set.
        q: Probability of each record.
        start: First record to decide.
        stop: End of the range to decide, excluded; `num_records` unless given.
    """
    check.probability(q=q)
    stop = num_records if stop is None else stop
    if not 0 <= start <= stop <= num_records:
        raise BadInput(f"expected 0 <= start <= stop <= {num_records}, found {start=} {stop=}")
    chunks = [torch.empty(0, dtype=torch.int64)]
    for at in range(start, stop, 1 << 22):
        end = min(stop, at + (1 << 22))
        chunks.append(bernoulli(stream, Box.flat(at, end, num_records), q).nonzero().view(-1) + at)
    return torch.cat(chunks)


class Permutation:
    """A keyed permutation of [0, n) and its inverse, with random access: shuffling without a table.

    A Feistel network on pairs (left, right) in [0, a) x [0, b) with a · b >= n, and cycle walking
    past n (`unison.kernels.random`). Since a · b exceeds n by less than a, walking is rare.
    `a` is even, so that a round can be an odd permutation too.

    Guarantees:
        A bijection of [0, n) for every key and 1 <= n <= 2^62; the image of an index depends on
        (stream, n, index) only. Public: for shuffling, not for secrecy.

    Args:
        stream: A Philox stream; its name and step make the shuffle.
        n: Number of items.
    """

    def __init__(self, stream: Stream, n: int) -> None:
        if not 1 <= n <= 1 << 62:
            raise BadInput(f"expected 1 <= n <= 2^62, found {n=}")
        if stream.cipher is not Cipher.PHILOX:
            raise BadInput(f"a permutation takes a Philox stream, found {stream!r}")
        self.n = n
        half = math.isqrt(n - 1) + 1  # the square root, rounded up
        num_left = half + half % 2
        self.network = Network(stream.words, n, num_left, -(-n // num_left))

    def __len__(self) -> int:
        return self.n

    def __call__(self, indices: Tensor) -> Tensor:
        """Return the images of `indices` (int64, any shape and device)."""
        return permute(self._checked(indices), self.network, is_inverse=False)

    def inverse(self, images: Tensor) -> Tensor:
        """Return the indices whose images these are."""
        return permute(self._checked(images), self.network, is_inverse=True)

    def _checked(self, indices: Tensor) -> Tensor:
        if indices.dtype != torch.int64:
            raise BadInput(f"expected int64 indices, found {indices.dtype}")
        if indices.numel() and not (int(indices.min()) >= 0 and int(indices.max()) < self.n):
            raise BadInput(f"expected indices in [0, {self.n})")
        return indices

    def __repr__(self) -> str:
        return f"Permutation(n={self.n})"
