"""Elementwise operations with a parameter that is broadcast over samples, and in-place ones.

What is written over may be needed for the record, and what a function returns may be nothing, so
in-place operations are never run as they are: the result is made anew, then copied in.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from unison.ops.linear import of_bias
from unison.ops.records import Dense, Layout, sum_to, wide
from unison.ops.registry import Builder, Rule, Tap, rule


def of_factor(layout: Layout, g: Tensor, x: Tensor, *, shape: tuple[int, ...]) -> Dense:
    """Record of w in y = x * w."""
    return Dense(sum_to(layout, wide(g) * x, shape))


def of_subtracted(layout: Layout, g: Tensor, *_: Tensor, shape: tuple[int, ...]) -> Dense:
    """Record of w in y = x - w."""
    return Dense(sum_to(layout, -wide(g), shape))


def of_divisor(layout: Layout, g: Tensor, x: Tensor, w: Tensor, *, shape: tuple[int, ...]) -> Dense:
    """Record of w in y = x / w."""
    return Dense(sum_to(layout, -wide(g) * x / (w * w), shape))


def binary(
    function: Callable[..., Tensor],
    of_left: Builder | None,
    of_right: Builder,
    num_saved: int = 0,
) -> Rule:
    """The rule of a function of two tensors, of which one is a parameter.

    Args:
        function: The torch function.
        of_left: Makes the record of a parameter on its left; None if that has no rule.
        of_right: Likewise on its right.
        num_saved: How many tensors they read: the other operand, then the parameter.
    """

    def run(
        tap: Tap, left: Any, right: Any, *, alpha: float = 1, rounding_mode: str | None = None
    ) -> Any:
        is_left = tap.tracks(left)
        x, w = (right, left) if is_left else (left, right)
        builder = of_left if is_left else of_right
        is_plain = isinstance(x, Tensor) and not tap.tracks(x)  # neither a number nor a parameter
        if builder is None or not is_plain or alpha != 1 or rounding_mode is not None:
            return NotImplemented
        y = function(tap.plain(left), tap.plain(right))
        return tap(y, saved=(x, tap.plain(w))[:num_saved], uses=[(w, builder)])

    return run


subtract = binary(torch.sub, of_bias, of_subtracted)
rule(torch.mul, torch.multiply, Tensor.mul)(binary(torch.mul, of_factor, of_factor, num_saved=1))
rule(torch.add, Tensor.add)(binary(torch.add, of_bias, of_bias))
rule(torch.sub, torch.subtract, Tensor.sub)(subtract)
rule(torch.div, torch.true_divide, Tensor.div)(binary(torch.div, None, of_divisor, num_saved=2))
# `x - w` as Python asks the parameter for it.
rule(Tensor.__rsub__)(lambda tap, right, left: subtract(tap, left, right))


def of_chosen(
    layout: Layout, g: Tensor, condition: Tensor, *, shape: tuple[int, ...], is_chosen: bool
) -> Dense:
    """Record of w in y = where(condition, w, x), or the other way round."""
    condition = condition if is_chosen else condition.logical_not()
    return Dense(sum_to(layout, torch.where(condition, wide(g), 0.0), shape))


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


def put(tap: Tap, target: Any, made: Any) -> Any:
    """Let `target` be what an in-place operation would have made of it."""
    if tap.tracks(target) or tap.tracks(made):
        return tap.become(target, made)
    return target.copy_(made)


def in_place(function: Callable[..., Tensor]) -> Rule:
    """The rule of a function's in-place form."""

    def run(tap: Tap, target: Any, *args: Any, **options: Any) -> Tensor:
        # A parameter is followed by its own clone, and other tensors are written below.
        made = function(target.clone(), *args, **options)
        return put(tap, target, made)

    return run


rule(Tensor.add_)(in_place(torch.add))
rule(Tensor.sub_)(in_place(torch.sub))
rule(Tensor.mul_)(in_place(torch.mul))
rule(Tensor.div_)(in_place(torch.div))


@rule(Tensor.copy_)
def copy(tap: Tap, target: Any, value: Any, non_blocking: bool = False) -> Tensor:
    """`x.copy_(w)`."""
    return put(tap, target, _expanded(tap, value, target))


def _expanded(tap: Tap, value: Any, target: Any) -> Any:
    if tap.tracks(target) or not tap.tracks(value):
        return value.expand(tap.plain(target).shape)
    return tap.expand(value, target.shape, target)


def with_item(target: Tensor, index: Any, value: Any) -> Tensor:
    """Return what `target[index] = value` makes of a tensor."""
    given = (target, value)
    if has_torch_function(given):
        return handle_torch_function(with_item, given, target, index, value)
    made = target.clone()
    made[index] = value
    return made


@rule(Tensor.__setitem__)
def set_item(tap: Tap, target: Any, index: Any, value: Any) -> None:
    """`x[index] = w`: a slice, the rows where a mask is true, or those that indices find."""
    keys = index if isinstance(index, tuple) else (index,)
    if isinstance(index, Tensor) and index.dtype == torch.bool and not tap.tracks(target):
        if tap.plain(value).ndim <= target.ndim - index.ndim or len(tap.plain(value)) == 1:
            mask = index.reshape(*index.shape, *(1 for _ in range(target.ndim - index.ndim)))
            put(tap, target, torch.where(mask, value, target.clone()))
            return
    elif not tap.tracks(target) and not any(isinstance(each, Tensor) for each in keys):
        made = _expanded(tap, value, target[index])
        if not tap.tracks(made):
            target[index] = made
            return
    put(tap, target, with_item(target, index, value))
