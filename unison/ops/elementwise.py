"""Elementwise operations with a parameter that is broadcast over samples, and in-place ones.

What is written over may be needed for the record, and what a function returns may be nothing, so
in-place operations are never run as they are: the result is made anew, then copied in.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from unison.errors import UnsupportedOperation
from unison.ops.linear import of_bias
from unison.ops.records import Dense, Layout, wide
from unison.ops.registry import Rule, Tap, rule


def of_factor(layout: Layout, g: Tensor, x: Tensor, *, shape: tuple[int, ...]) -> Dense:
    """Record of w in y = x * w."""
    return Dense(layout.reduced(wide(g) * x, shape))


def of_subtracted(layout: Layout, g: Tensor, *_: Tensor, shape: tuple[int, ...]) -> Dense:
    """Record of w in y = x - w."""
    return Dense(layout.reduced(-wide(g), shape))


def of_divisor(layout: Layout, g: Tensor, x: Tensor, w: Tensor, *, shape: tuple[int, ...]) -> Dense:
    """Record of w in y = x / w."""
    return Dense(layout.reduced(-wide(g) * x / (w * w), shape))


def _operands(tap: Tap, left: Any, right: Any) -> tuple[Any, Any] | None:
    """The plain tensor and the parameter; None if both are parameters, or one is a number."""
    x, w = (right, left) if tap.tracks(left) else (left, right)
    return None if tap.tracks(x) or not isinstance(x, Tensor) else (x, w)


@rule(torch.mul, torch.multiply, Tensor.mul)
def scale(tap: Tap, left: Any, right: Any) -> Any:
    """`x * w` in either order."""
    operands = _operands(tap, left, right)
    if operands is None:
        return NotImplemented
    x, w = operands
    return tap(x * tap.plain(w), saved=(x,), uses=[(w, of_factor)])


@rule(torch.add, Tensor.add)
def shift(tap: Tap, left: Any, right: Any, *, alpha: float = 1) -> Any:
    """`x + w` in either order."""
    operands = _operands(tap, left, right)
    if operands is None or alpha != 1:
        return NotImplemented
    x, w = operands
    return tap(x + tap.plain(w), saved=(), uses=[(w, of_bias)])


@rule(torch.sub, torch.subtract, Tensor.sub)
def subtract(tap: Tap, left: Any, right: Any, *, alpha: float = 1) -> Any:
    """`x - w` and `w - x`."""
    operands = _operands(tap, left, right)
    if operands is None or alpha != 1:
        return NotImplemented
    w = operands[1]
    y = tap.plain(left) - tap.plain(right)
    return tap(y, saved=(), uses=[(w, of_bias if tap.tracks(left) else of_subtracted)])


# `x - w` as Python asks the parameter for it.
rule(Tensor.__rsub__)(lambda tap, right, left: subtract(tap, left, right))


@rule(torch.div, torch.true_divide, Tensor.div)
def divide(tap: Tap, left: Any, right: Any, *, rounding_mode: str | None = None) -> Any:
    """`x / w`."""
    is_by_parameter = tap.tracks(right) and not tap.tracks(left) and isinstance(left, Tensor)
    if not is_by_parameter or rounding_mode is not None:
        return NotImplemented
    w = tap.plain(right)
    return tap(left / w, saved=(left, w), uses=[(right, of_divisor)])


def of_chosen(
    layout: Layout, g: Tensor, condition: Tensor, *, shape: tuple[int, ...], is_chosen: bool
) -> Dense:
    """Record of w in y = where(condition, w, x), or the other way round."""
    condition = condition if is_chosen else condition.logical_not()
    return Dense(layout.reduced(torch.where(condition, wide(g), 0.0), shape))


@rule(torch.where)
def where(tap: Tap, condition: Any, left: Any, right: Any) -> Any:
    """`where(condition, w, x)`, as a mask token is put in."""
    if tap.tracks(left) and tap.tracks(right):
        return NotImplemented
    y = torch.where(condition, tap.plain(left), tap.plain(right))
    w = left if tap.tracks(left) else right
    chosen = partial(of_chosen, is_chosen=tap.tracks(left))
    return tap(y, saved=(condition,), uses=[(w, chosen)])


# The same as a method of the first choice.
rule(Tensor.where)(lambda tap, left, condition, right: where(tap, condition, left, right))


@rule(Tensor.expand, Tensor.expand_as, torch.broadcast_to, Tensor.broadcast_to)
def expand(tap: Tap, value: Any, *sizes: Any, **options: Any) -> Any:
    """One value for every sample, as a class token is handed out."""
    if len(sizes) == 1 and isinstance(sizes[0], Tensor):
        sizes = (sizes[0].shape,)
    y = tap.plain(value).expand(*sizes, **options)
    return tap(y, saved=(), uses=[(value, of_bias)], is_fresh=False)


@rule(Tensor.repeat, torch.tile, Tensor.tile)
def repeat(tap: Tap, value: Any, *sizes: Any) -> Any:
    """The same by copies."""
    return tap(tap.plain(value).repeat(*sizes), saved=(), uses=[(value, of_bias)])


# --- in place -------------------------------------------------------------------------------------


def _checked(tap: Tap, target: Any, made: Any) -> Tensor:
    if tap.tracks(target) or tap.tracks(made):
        raise UnsupportedOperation(
            "an in-place operation on something that does not depend on the batch; write "
            "`y = x + w` in place of `x += w`"
        )
    return made


def in_place(function: Callable[..., Tensor]) -> Rule:
    """The rule of a function's in-place form."""

    def run(tap: Tap, target: Any, *args: Any, **options: Any) -> Tensor:
        made = function(tap.plain(target).clone(), *args, **options)
        return target.copy_(_checked(tap, target, made))

    return run


rule(Tensor.add_)(in_place(torch.add))
rule(Tensor.sub_)(in_place(torch.sub))
rule(Tensor.mul_)(in_place(torch.mul))
rule(Tensor.div_)(in_place(torch.div))


@rule(Tensor.copy_)
def copy(tap: Tap, target: Any, value: Any, non_blocking: bool = False) -> Tensor:
    """`x.copy_(w)`."""
    return target.copy_(_checked(tap, target, _expanded(tap, value, target)))


def _expanded(tap: Tap, value: Any, target: Any) -> Any:
    if tap.tracks(target) or not tap.tracks(value):
        return value.expand(tap.plain(target).shape)
    return tap.expand(value, target.shape, target)


@rule(Tensor.__setitem__)
def set_item(tap: Tap, target: Any, index: Any, value: Any) -> None:
    """`x[index] = w`: a slice, or the rows where a mask is true."""
    if tap.tracks(target):
        _checked(tap, target, target)
    if isinstance(index, Tensor) and index.dtype == torch.bool:
        if tap.plain(value).ndim > target.ndim - index.ndim and len(tap.plain(value)) != 1:
            raise UnsupportedOperation(
                "several rows made of parameters alone, written to where a mask is true; make as "
                "many rows as the target has, and use torch.where"
            )
        mask = index.reshape(*index.shape, *(1 for _ in range(target.ndim - index.ndim)))
        target.copy_(_checked(tap, target, torch.where(mask, value, target.clone())))
        return
    for each in index if isinstance(index, tuple) else (index,):
        if isinstance(each, Tensor):
            raise UnsupportedOperation(
                "a parameter written to rows found by tensors of indices; use torch.where"
            )
    target[index] = _checked(tap, target, _expanded(tap, value, target[index]))
