"""Writing a parameter into a tensor: made anew beside it, then copied in.

What is written over may be needed for the record, and what a function returns may be nothing, so
in-place operations are never run as they are.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from unison.errors import UnsupportedOperation
from unison.ops.registry import Rule, Tap, rule


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
