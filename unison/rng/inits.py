"""Initial values: what a parameter starts from, described as data, and filled over any box.

A description is a small frozen object (distribution and its numbers). Because it is data and not a
call, the values can be drawn later, on another device, or for one shard only, without building the
module again: `fill_` draws the elements of any box of it, and they are those that the full tensor
would have.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from unison import check
from unison.errors import BadInput
from unison.rng import streams
from unison.rng.streams import Box, Key, Permutation, Stream


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

# What draws each, by the names of its numbers; the latter make tensors of their own dtype.
_ROUNDED = {
    Uniform: streams.uniform,
    Normal: streams.normal,
    TruncatedNormal: streams.truncated_normal,
}
_EXACT = {Bernoulli: streams.bernoulli, Integers: streams.integers}


def fill_(
    tensor: Tensor, init: Init, key: Key, name: str, box: Box | None = None, *, number: int = 0
) -> Tensor:
    """Fill `tensor` with the initial values of parameter `name`, in place.

    Guarantees:
        An element's value depends on (init, key, name, number, its index in the whole parameter)
        and, by the final rounding, on the dtype.

    Args:
        tensor: The whole parameter, or the part of it that `box` describes (any shape with as many
            elements, so that flat shards work).
        init: What to fill with.
        key: Root key.
        name: Full name of the parameter: it names the stream.
        box: Which part of the whole parameter `tensor` is; all of it unless given.
        number: Which draw of the parameter this is, where its value is made of several.
    """
    box = Box.whole(tensor.shape) if box is None else box
    stream = Stream(key, name, step=number, purpose="init")
    kind = type(init)
    with torch.no_grad():
        if isinstance(init, Constant):
            return tensor.fill_(init.value)
        if kind in _ROUNDED:
            return _ROUNDED[kind](stream, box, **vars(init), out=tensor)
        if isinstance(init, Shuffle):
            starts, run = box.rows()
            indices = (starts[:, None] + torch.arange(run)).view(-1)
            drawn = Permutation(stream, init.size)(indices) if init.size else indices
        elif kind in _EXACT:
            drawn = _EXACT[kind](stream, box, **vars(init), device=tensor.device)
        else:
            raise BadInput(f"{name}: expected an Init, found {init!r}")
        return tensor.copy_(drawn.view(tensor.shape))
