"""Random numbers as functions of (key, stream, step, element): keys, streams, distributions.

Everything random in unison hangs on a root key. A key made from entropy is secret: it never shows
in a repr, cannot be copied, pickled or saved, and dies with its process, unless its owner has it
sealed (seal.py); a fork may not use it, since both would draw the same noise. A key made from a
seed is for experiments that must be repeated; it says so, and nothing private may rest on it.
`NoiseClock` hands out the keys of secure noise: a step is used once in a process, never twice.

Every distribution takes a stream and what to fill: a `Box` (or a shape, for the whole tensor), and
returns a tensor of the box's shape; or `out=`, filled in place. Elements consume a fixed number of
words each, so no element's value depends on another's.

Noise for privacy (`secure_normal`) is ChaCha20's, with as many random bits as a value needs, on a
fixed grid. Floating-point noise added to a floating-point sum leaks through the low-order bits
(Mironov 2012): which sums are reachable depends on the data. Here noise and sum are both multiples
of one public spacing, so they add without rounding and the result's low-order bits say nothing.
docs/rng.md ("Secure normals") has the argument and the bounds.
"""

import hashlib
import hmac
import math
import os
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from unison import check
from unison.errors import BadInput
from unison.kernels.random import (
    ROUND_MAGIC,
    Cipher,
    Distribution,
    Recipe,
    fill_rows,
    normal_of_rank,
    permute,
    secure_floats,
)

KEY_BYTES = 32
FROM_SYSTEM, FROM_SEED = "operating system", "seed"  # where a key may come from
_PERSON = b"unison.rng.v1"  # domain of the hash; at most 16 bytes
MAX_ELEMENTS = 1 << 63

# --- keys -----------------------------------------------------------------------------------------


class Key:
    """A root key of 256 bits. Make one with `from_entropy`, `from_seed` or `shared`.

    Guarantees:
        `repr`, `str` and error messages never hold the bytes. Copying, pickling and `torch.save`
        raise `TypeError`, so a key cannot slip into a checkpoint. Comparison takes the same time
        wherever two keys differ. A secret key is of use in the process that made it, and raises
        in its forks.
    """

    __slots__ = ("_bytes", "_is_reproducible", "_process")

    def __init__(self, secret: bytes, *, is_reproducible: bool) -> None:
        if len(secret) != KEY_BYTES:
            raise BadInput(f"expected a key of {KEY_BYTES} bytes, found {len(secret)}")
        self._bytes = bytes(secret)
        self._is_reproducible = is_reproducible
        self._process = os.getpid()

    @classmethod
    def from_entropy(cls) -> "Key":
        """Return a fresh secret key from the operating system."""
        return cls(os.urandom(KEY_BYTES), is_reproducible=False)

    @classmethod
    def from_seed(cls, seed: int) -> "Key":
        """Return the key of a seed: the same everywhere, and therefore not secret.

        >>> Key.from_seed(1) == Key.from_seed(1), Key.from_seed(1) == Key.from_seed(2)
        (True, False)
        """
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise BadInput(f"expected an integer seed, found {seed!r}")
        digest = _hash(b"\0" * KEY_BYTES, b"seed", str(seed).encode(), size=KEY_BYTES)
        return cls(digest, is_reproducible=True)

    @classmethod
    def shared(cls, group: dist.ProcessGroup | None = None) -> "Key":
        """Return one fresh secret key on every rank of `group`, drawn on its first rank.

        Every rank of the group must call it: it is a collective. Without an initialised process
        group it is `from_entropy`.
        """
        return cls.from_entropy().agree(group)

    @property
    def is_reproducible(self) -> bool:
        """Return whether the key comes from a seed, so that anyone can make it again."""
        return self._is_reproducible

    @property
    def origin(self) -> str:
        """Where the key comes from: `"operating system"`, or `"seed"`.

        >>> Key.from_seed(1).child("noise").origin, Key.from_entropy().origin
        ('seed', 'operating system')
        """
        return FROM_SEED if self._is_reproducible else FROM_SYSTEM

    def agree(self, group: dist.ProcessGroup | None = None) -> "Key":
        """Return the key that the group's first rank holds, on every rank (a collective).

        The bytes travel over the group's own backend, as the gradients do.
        """
        self.check_process()
        return Key(_broadcast(self._bytes, group), is_reproducible=self._is_reproducible)

    def check_process(self) -> None:
        """Make sure that a secret key is used where it was made, and in no fork of that process.

        Forks hold the same bytes and count the same steps: they would draw the same noise, and the
        difference of what they release would have none.

        Raises:
            BadInput: In a fork.
        """
        if not self._is_reproducible and os.getpid() != self._process:
            raise BadInput(
                f"a secret key of process {self._process} was used in process {os.getpid()}, a "
                "fork of it, which would draw the same noise a second time. Call make_private (or "
                "make the key) in the process that trains, after the fork"
            )

    def derive(self, *parts: str | int | bytes, size: int = KEY_BYTES) -> bytes:
        """Return `size` bytes that depend on the key and on every part, by keyed BLAKE2b.

        Parts are length-prefixed and typed before they are hashed, so no two lists collide:

        >>> key = Key.from_seed(0)
        >>> key.derive("ab", "c") == key.derive("a", "bc")
        False
        """
        self.check_process()
        encoded = []
        for part in parts:
            if isinstance(part, bytes):
                encoded.append(b"b" + part)
            elif isinstance(part, str):
                encoded.append(b"s" + part.encode())
            elif isinstance(part, int):
                encoded.append(b"i" + str(int(part)).encode())
            else:
                raise BadInput(f"expected a name, number or bytes, found {part!r}")
        return _hash(self._bytes, *encoded, size=size)

    def child(self, *parts: str | int | bytes) -> "Key":
        """Return a key derived from this one, for another purpose."""
        return Key(self.derive("child", *parts), is_reproducible=self._is_reproducible)

    def fingerprint(self) -> bytes:
        """Return 16 bytes that tell keys apart and reveal nothing else about them."""
        return self.derive("fingerprint", size=16)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Key):
            return NotImplemented
        same_kind = self._is_reproducible == other._is_reproducible
        return hmac.compare_digest(self._bytes, other._bytes) and same_kind

    def __hash__(self) -> int:
        return hash(self.fingerprint())

    def __repr__(self) -> str:
        origin = "seed, not secret" if self._is_reproducible else "entropy"
        return f"Key(from {origin}; bytes withheld)"

    def _refuse(self, *_: object) -> NoReturn:
        raise TypeError(
            "a Key cannot be copied, pickled or saved: a stored key would let whoever reads the "
            "file subtract the noise. Pass the key object itself; after a restart make a new one "
            "with Key.from_entropy() or Key.shared(), or use Key.from_seed(seed) and store the seed"
        )

    __copy__ = __deepcopy__ = __getstate__ = __reduce__ = __reduce_ex__ = _refuse  # type: ignore[assignment]


def _broadcast(secret: bytes, group: dist.ProcessGroup | None) -> bytes:
    if not (dist.is_available() and dist.is_initialized()):
        return secret
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    buffer = torch.tensor(list(secret), dtype=torch.uint8, device=device)
    dist.broadcast(buffer, src=dist.get_global_rank(group, 0) if group else 0, group=group)
    agreed = bytes(buffer.tolist())
    buffer.zero_()
    return agreed


def _hash(secret: bytes, *parts: bytes, size: int) -> bytes:
    digest = hashlib.blake2b(key=secret, digest_size=size, person=_PERSON)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


# --- the clock of secure noise --------------------------------------------------------------------

_last_steps: dict[tuple[bytes, str], int] = {}
_lock = threading.Lock()


class NoiseClock:
    """Hands out the key of each step, and refuses a step that was used before.

    Two releases under one noise value differ by the data alone: subtracting them removes the noise.
    Loading an old checkpoint would replay its steps, so the record of used steps lives in the
    process, outside anything a checkpoint holds.

    Guarantees:
        For a secret key, no two calls of `advance` in one process get the same (key, purpose,
        step), whichever clock objects make them. For a key from a seed the rule holds for each
        clock object: repeating a run in one process is what such keys are for.

    Args:
        key: Root key of the noise.
        purpose: Names an independent use of the same key, such as "noise" or "sampling".
    """

    def __init__(self, key: Key, purpose: str = "noise") -> None:
        self.purpose = purpose
        self._own: dict[tuple[bytes, str], int] = {}
        self._set_key(key)

    def _set_key(self, key: Key) -> None:
        self._key = key.child("clock", self.purpose)
        self._steps = self._own if key.is_reproducible else _last_steps
        self._id = (self._key.fingerprint(), self.purpose)

    @property
    def last_step(self) -> int | None:
        """The largest step used so far, or None."""
        return self._steps.get(self._id)

    def advance(self, step: int) -> Key:
        """Mark `step` as used and return the key for its streams.

        Raises:
            BadInput: `step` is not above the last one used in this process, or the process is a
                fork of the one that made a secret key.
        """
        self._key.check_process()
        with _lock:
            last = self._steps.get(self._id)
            if last is not None and step <= last:
                raise BadInput(
                    f"{self.purpose} of step {step} was already drawn in this process (last step "
                    f"{last}); drawing it again would let two releases be subtracted. Remedy: go "
                    f"on from step {last + 1}, or call renew() on every rank after loading an "
                    "older state"
                )
            self._steps[self._id] = step
        return self._key

    def renew(self, group: dist.ProcessGroup | None = None) -> None:
        """Mix fresh entropy into the key, so that steps may count from anywhere again.

        A collective: every rank of `group` calls it, and all agree on the entropy. The key is
        secret afterwards, even if it came from a seed, and the run can no longer be repeated.
        """
        secret = self._key.derive("renewed", _broadcast(os.urandom(16), group))
        self._set_key(Key(secret, is_reproducible=False))

    def __repr__(self) -> str:
        return f"NoiseClock(purpose={self.purpose!r}, last_step={self.last_step})"


# --- streams --------------------------------------------------------------------------------------


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

    @cached_property
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
        dim, run, stride = len(self.shape), 1, 1  # dims from `dim` on form a run of one element
        while dim > 0 and run == stride:
            dim -= 1
            run, stride = run * self.sides[dim], stride * self.shape[dim]
        # Here dims `dim` and after form one run; `stride` is the stride of dim - 1.
        first = self.start[dim] * (stride // self.shape[dim]) if self.shape else 0
        starts = torch.tensor([first], dtype=torch.int64)
        for d in range(dim - 1, -1, -1):
            steps = torch.arange(self.start[d], self.stop[d], dtype=torch.int64) * stride
            starts = (steps[:, None] + starts[None, :]).view(-1)
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
        object.__setattr__(self, "words", struct.unpack(f"<{count}I", secret))

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
    dtype = _floating("uniform", dtype, out)
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
    dtype = _floating("truncated_normal", dtype, out)
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
    """Return draws of a distribution with these numbers, see `Recipe`, over a box.

    `dtype` and `device` are those of `out`, where that is given.
    """
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


def _floating(kind: str, dtype: torch.dtype, out: Tensor | None) -> torch.dtype:
    dtype = out.dtype if out is not None else dtype
    if not dtype.is_floating_point:
        raise BadInput(f"{kind} draws fill floating-point tensors, found {dtype}")
    return dtype


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


# --- secure normals -------------------------------------------------------------------------------

GRID_BITS = 20
MAX_MAGNITUDE = 10.25  # no |z| exceeds the quantile of 2^-80, 10.22
# Total variation between one value and a normal one rounded to the grid, for spacings of 2^-20
# standard deviations or more (`draw_distance` in bench/make_normal_table.py computes the bound, and
# docs/rng.md proves it). Finer ones have proportionally more, and so an end.
DRAW_DISTANCE = 2.0**-75
_MAX_SCALE = 2.0**31
_MAX_INTEGER = {torch.float32: 2.0**24, torch.float64: 2.0**51}
_CHUNK = 1 << 22


def noise_spacing(std: float) -> float:
    """Return the spacing of the noise grid: a power of two in [2^-20, 2^-19) · std.

    A function of the public `std` alone. At this spacing every noise value is exact in float32.

    >>> noise_spacing(1.0) == 2.0**-20, noise_spacing(1.5) == 2.0**-19
    (True, True)
    """
    check.positive(std=std)
    mantissa, exponent = math.frexp(std)  # std = mantissa · 2^exponent, mantissa in [1/2, 1)
    return math.ldexp(1.0, exponent - (mantissa == 0.5) - GRID_BITS)


def grid_sensitivity(clip_norm: float, spacing: float, num_elements: int) -> float:
    """Return the L2 sensitivity of a clipped sum after it is rounded to the grid.

    Rounding moves each coordinate of either neighbour's sum by at most spacing / 2, so their
    difference grows by at most spacing · sqrt(num_elements).
    """
    check.positive(clip_norm=clip_norm, spacing=spacing)
    return clip_norm + spacing * math.sqrt(num_elements)


def secure_normal(
    stream: Stream,
    where: Where,
    std: float,
    *,
    spacing: float | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return normal noise of mean 0 on the grid of multiples of `spacing`.

    Guarantees:
        A value differs from a normal one that is rounded to the nearest multiple of `spacing` with
        probability `DRAW_DISTANCE` at most, times how often the spacing goes into 2^-20 · std if
        that is more than once; ChaCha20 is taken for random. Every value is an exact multiple of
        `spacing`; float32 and float64 hold the same values. The noise does not depend on any data,
        so it may be drawn at any time, on any CUDA stream.

    Args:
        stream: Must use `Cipher.CHACHA20`.
        where: Box or shape.
        std: Standard deviation of the noise.
        spacing: A power of two, at least 2^-31 · std; `noise_spacing(std)` unless given. Finer
            grids than that need float64.
        dtype: float32 or float64; bfloat16 and float16 cannot hold the grid.
        device: Where to put the result.
        out: Tensor to fill instead.
    """
    if stream.cipher is not Cipher.CHACHA20:
        raise BadInput(f"secure noise needs a stream of Cipher.CHACHA20, found {stream!r}")
    spacing = noise_spacing(std) if spacing is None else spacing
    dtype = out.dtype if out is not None else dtype
    check.positive(std=std, spacing=spacing)
    if math.frexp(spacing)[0] != 0.5:
        raise BadInput(f"spacing must be a power of two, found {spacing!r}")
    if dtype not in _MAX_INTEGER:
        raise BadInput(f"secure noise needs float32 or float64 to hold its grid, found {dtype}")
    if std / spacing * MAX_MAGNITUDE >= _MAX_INTEGER[dtype]:
        raise BadInput(
            f"{dtype} cannot hold noise of {std=} on a grid of {spacing=}: use a wider spacing "
            "or float64"
        )
    if std / spacing > _MAX_SCALE:
        raise BadInput(
            f"noise of {std=} is not known well enough on a grid of {spacing=}: use a spacing of "
            f"at least {std / _MAX_SCALE:.3g}"
        )
    floats = secure_floats(std, spacing)
    return fill(stream, where, Distribution.SECURE_NORMAL, dtype, device, out, floats)


def round_to_grid(tensor: Tensor, spacing: float) -> Tensor:
    """Return float64 multiples of `spacing`, the nearest to each element (ties to even).

    Raises:
        BadInput: An element is not finite or exceeds 2^51 · spacing, where rounding would fail.
    """
    check.positive(spacing=spacing)
    if math.frexp(spacing)[0] != 0.5:
        raise BadInput(f"spacing must be a power of two, found {spacing!r}")
    scaled = tensor.double() * (1.0 / spacing)
    if not bool((scaled.abs() < 2.0**51).all()):
        raise BadInput(
            f"expected finite values below {2.0**51 * spacing:.3g} to round to multiples of "
            f"{spacing!r}: the clipped sum is too large or not finite"
        )
    return (scaled + ROUND_MAGIC - ROUND_MAGIC) * spacing


def add_noise_(total: Tensor, noise: Tensor, spacing: float) -> Tensor:
    """Round `total` to the grid, add noise of the same grid exactly, and round once, in place.

    Guarantees:
        The sum is exact in float64 (multiples of one power of two below 2^52 of them), so the
        result is a function of (rounded total + noise) alone; its rounding to the dtype of `total`
        is post-processing.
    """
    if total.shape != noise.shape:
        raise BadInput(
            f"expected one shape, found total: {list(total.shape)}, noise: {list(noise.shape)}"
        )
    if noise.dtype not in _MAX_INTEGER:
        raise BadInput(f"expected noise from secure_normal, found {noise.dtype=}")
    flat_noise = noise.reshape(-1)
    flat = total.view(-1) if total.is_contiguous() else total.reshape(-1)
    with torch.no_grad():
        for at in range(0, flat.numel(), _CHUNK):  # bounds the float64 copies
            part = flat[at : at + _CHUNK]
            part.copy_(round_to_grid(part, spacing) + flat_noise[at : at + _CHUNK].double())
        if not total.is_contiguous():
            total.copy_(flat.view_as(total))
    return total


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
        self.sides = [num_left, -(-n // num_left)]
        self._words = torch.tensor(stream.words)

    def __len__(self) -> int:
        return self.n

    def __call__(self, indices: Tensor) -> Tensor:
        """Return the images of `indices` (int64, any shape and device)."""
        return self._permute(indices, is_inverse=False)

    def inverse(self, images: Tensor) -> Tensor:
        """Return the indices whose images these are."""
        return self._permute(images, is_inverse=True)

    def _permute(self, indices: Tensor, is_inverse: bool) -> Tensor:
        if indices.dtype != torch.int64:
            raise BadInput(f"expected int64 indices, found {indices.dtype}")
        if indices.numel() and not (int(indices.min()) >= 0 and int(indices.max()) < self.n):
            raise BadInput(f"expected indices in [0, {self.n})")
        return permute(indices, self._words, self.n, self.sides, is_inverse)

    def __repr__(self) -> str:
        return f"Permutation(n={self.n})"
