"""What aten's fills and draws mean, as descriptions of `unison.rng.inits`.

An operation that fills a tensor element by element, with one number or from a distribution, has a
description and can be evaluated for any part of the tensor. A draw that is a formula of such draws
is written as that formula. What is in neither table has no rule: it is recorded, and refused only
if a parameter needs it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from unison.errors import UnsupportedOperation
from unison.rng.inits import Bernoulli, Constant, Init, Integers, Normal, Shuffle, Uniform

aten = torch.ops.aten

# Operations that make a tensor and leave its memory as it was.
MAKES_BLANK = {
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_permuted.default,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}


def _zero(*_: Any, **__: Any) -> Init:
    return Constant(value=0)


def _one(*_: Any, **__: Any) -> Init:
    return Constant(value=1)


def _constant(value: Any) -> Init | None:
    return None if isinstance(value, complex) else Constant(value=value)


def _whole_numbers(tensor: Tensor) -> Integers:
    """The range of `Tensor.random_()`: whole numbers that the dtype holds exactly."""
    if tensor.dtype.is_floating_point:
        # eps is the spacing of numbers at 1, so 2 / eps is the first gap: 2^24 for float32.
        return Integers(low=0, high=int(2 / torch.finfo(tensor.dtype).eps) + 1)
    if tensor.dtype == torch.bool:
        return Integers(low=0, high=2)
    highest = torch.iinfo(tensor.dtype).max
    return Integers(low=0, high=highest if tensor.dtype == torch.int64 else highest + 1)


# How to read an aten operation's arguments; the result is what fills the tensor that it writes or
# makes. None where a particular call has no description.
DESCRIBED: dict[Any, Callable[..., Init | None]] = {
    aten.zero_.default: _zero,
    aten.zeros.default: _zero,
    aten.zeros_like.default: _zero,
    aten.new_zeros.default: _zero,
    aten.ones.default: _one,
    aten.ones_like.default: _one,
    aten.new_ones.default: _one,
    aten.fill_.Scalar: lambda tensor, value: _constant(value),
    aten.full.default: lambda size, value, **_: _constant(value),
    aten.full_like.default: lambda tensor, value, **_: _constant(value),
    aten.new_full.default: lambda tensor, size, value, **_: _constant(value),
    aten.scalar_tensor.default: lambda value, **_: _constant(value),
    aten.normal_.default: lambda tensor, mean=0.0, std=1.0: Normal(mean=mean, std=std),
    aten.normal.float_float: lambda mean, std, size, **_: Normal(mean=mean, std=std),
    aten.randn.default: lambda size, **_: Normal(std=1.0),
    aten.randn_like.default: lambda tensor, **_: Normal(std=1.0),
    aten.uniform_.default: lambda tensor, low=0.0, high=1.0: Uniform(low=low, high=high),
    aten.rand.default: lambda size, **_: Uniform(low=0.0, high=1.0),
    aten.rand_like.default: lambda tensor, **_: Uniform(low=0.0, high=1.0),
    aten.bernoulli_.float: lambda tensor, p=0.5: Bernoulli(probability=p),
    aten.bernoulli.p: lambda tensor, p: Bernoulli(probability=p),
    aten.randint.default: lambda high, size, **_: Integers(low=0, high=high),
    aten.randint.low: lambda low, high, size, **_: Integers(low=low, high=high),
    aten.randint_like.default: lambda tensor, high, **_: Integers(low=0, high=high),
    aten.randint_like.low_dtype: lambda tensor, low, high, **_: Integers(low=low, high=high),
    aten.random_.default: _whole_numbers,
    aten.random_.to: lambda tensor, high: Integers(low=0, high=high),
    getattr(aten.random_, "from"): lambda tensor, low, high: (
        None if high is None else Integers(low=low, high=high)
    ),
    aten.randperm.default: lambda size, **_: Shuffle(size=size),
}


def _normal_around(mean: Tensor | float, std: Tensor | float) -> Tensor:
    shapes = [value.shape for value in (mean, std) if isinstance(value, Tensor)]
    dtype = next(value.dtype for value in (mean, std) if isinstance(value, Tensor))
    return torch.randn(torch.broadcast_shapes(*shapes), dtype=dtype) * std + mean


def _bernoulli_from(tensor: Tensor, probability: Tensor) -> Tensor:
    return tensor.copy_(torch.rand(tensor.shape, dtype=torch.float64) < probability)


def _exponential(tensor: Tensor, rate: float = 1.0) -> Tensor:
    unit = torch.rand(tensor.shape, dtype=torch.float64)
    return tensor.copy_(torch.log1p(-unit) / -rate)


def _log_normal(tensor: Tensor, mean: float = 1.0, std: float = 2.0) -> Tensor:
    return tensor.copy_((torch.randn(tensor.shape, dtype=torch.float64) * std + mean).exp())


# Draws that are formulas of described ones.
FORMULAS: dict[Any, Callable[..., Tensor]] = {
    aten.normal.Tensor_float: lambda mean, std=1.0: _normal_around(mean, std),
    aten.normal.float_Tensor: _normal_around,
    aten.normal.Tensor_Tensor: _normal_around,
    aten.bernoulli.default: lambda tensor: _bernoulli_from(torch.empty_like(tensor), tensor),
    aten.bernoulli.Tensor: lambda tensor, p: _bernoulli_from(torch.empty_like(tensor), p),
    aten.bernoulli_.Tensor: _bernoulli_from,
    aten.exponential_.default: _exponential,
    aten.log_normal_.default: _log_normal,
}


def describe(call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Init | None:
    """Return the init that an aten operation fills its tensor with, or None if it is no fill."""
    rule = DESCRIBED.get(call)
    return None if rule is None else rule(*args, **kwargs)


def without_generator(call: object, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return keyword arguments without an unset generator.

    Raises:
        UnsupportedOperation: A generator was given.
    """
    if kwargs.get("generator") is not None:
        raise UnsupportedOperation(
            f"{call} was given a generator. Initial values are drawn later, by "
            "unison.materialize(module, seed=...), as a function of the seed and the parameter's "
            "name. Leave generator= out; for other values, give materialize another seed"
        )
    return {name: value for name, value in kwargs.items() if name != "generator"}
