"""Streams, and the boxes of elements that a rank asks of them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from unison import check
from unison.errors import BadInput
from unison.kernels.random import Cipher
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

    def rows(self) -> tuple[torch.Tensor, int]:
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
) -> torch.Tensor:
    """Return `Stream(key, name, ...).words` of many names: int64 [names, words].

    It holds key material: keep it no longer than it is used.
    """
    check.not_negative(step=step)
    count = cipher.num_key_words
    secret = key.derive_many(["stream", cipher.name, purpose], names, [step], size=4 * count)
    words = np.frombuffer(secret, dtype="<u4").astype(np.int64)
    return torch.from_numpy(words).view(len(names), count)
