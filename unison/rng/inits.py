"""Initial values, described: what a parameter starts from, as data.

A description is a small frozen object (distribution and its numbers). Because it is data and not a
call, the values can be drawn later, on another device, or for one shard only, without building the
module again.
"""

import math
from dataclasses import dataclass

from unison import check
from unison.errors import BadInput


@dataclass(frozen=True, kw_only=True)
class Constant:
    """Every element equals `value`."""

    value: float


@dataclass(frozen=True, kw_only=True)
class Uniform:
    """Uniform on [low, high)."""

    low: float
    high: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low <= self.high):
            raise BadInput(f"expected low <= high, found {self.low=} {self.high=}")


@dataclass(frozen=True, kw_only=True)
class Normal:
    """Normal with the given mean and standard deviation."""

    mean: float = 0.0
    std: float

    def __post_init__(self) -> None:
        check.not_negative(std=self.std)


@dataclass(frozen=True, kw_only=True)
class TruncatedNormal:
    """Normal conditioned to lie in [low, high] (absolute bounds, not multiples of `std`)."""

    mean: float = 0.0
    std: float
    low: float
    high: float

    def __post_init__(self) -> None:
        check.positive(std=self.std)
        if not self.low < self.high:
            raise BadInput(f"expected low < high, found {self.low=} {self.high=}")


@dataclass(frozen=True, kw_only=True)
class Bernoulli:
    """One with the given probability, else zero."""

    probability: float

    def __post_init__(self) -> None:
        check.probability(probability=self.probability)


@dataclass(frozen=True, kw_only=True)
class Integers:
    """Whole numbers in [low, high), each as likely as the others."""

    low: int
    high: int

    def __post_init__(self) -> None:
        if not self.low < self.high:
            raise BadInput(f"expected low < high, found {self.low=} {self.high=}")


@dataclass(frozen=True, kw_only=True)
class Shuffle:
    """The numbers 0 ... size - 1 in a random order."""

    size: int

    def __post_init__(self) -> None:
        check.not_negative(size=self.size)


Init = Constant | Uniform | Normal | TruncatedNormal | Bernoulli | Integers | Shuffle
