"""Normalisations: what is multiplied and added after the samples' own statistics were taken out.

Their statistics belong to one sample each, so only the affine part has a rule. The normalised input
is made again in the backward pass from the input, which autograd keeps anyway.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from unison.errors import UnsupportedOperation
from unison.kernels.multi_tensor import norm_sums, takes_norm
from unison.ops.records import Dense, Layout, rows_of, sum_to, wide, wide_sum_to
from unison.ops.registry import Builder, Tap, rule


def of_gain(
    layout: Layout,
    g: Tensor,
    x: Tensor,
    *,
    shape: tuple[int, ...],
    normalise: Any,
    broadcast: tuple[int, ...] | None = None,
) -> Dense:
    """Record of the gain; `broadcast` is its shape as it is broadcast to the input."""
    reduced = sum_to(layout, wide(g) * normalise(wide(x)), broadcast or shape)
    return Dense(reduced.reshape(layout.batch, *shape))


def of_offset(
    layout: Layout,
    g: Tensor,
    *_: Tensor,
    shape: tuple[int, ...],
    broadcast: tuple[int, ...] | None = None,
) -> Dense:
    """Record of what is added."""
    return Dense(wide_sum_to(layout, g, broadcast or shape).reshape(layout.batch, *shape))


def _affine(
    eps: float, normalise: Any, *, is_centred: bool, has_offset: bool
) -> tuple[Builder, Builder]:
    """Return builders for a gain and an offset over the last dimension: one pass where possible.

    Args:
        eps: Of the norm.
        normalise: The norm without gain and offset.
        is_centred: Whether the norm takes the mean out.
        has_offset: Whether there is an offset whose record is wanted.
    """
    made: list[tuple[Tensor, Tensor]] = []  # the gradient, and its sums over tokens

    def gain(layout: Layout, g: Tensor, x: Tensor, *, shape: tuple[int, ...]) -> Dense:
        rows, gradients = rows_of(layout, x), rows_of(layout, g)
        if not takes_norm(rows, gradients):
            return of_gain(layout, g, x, shape=shape, normalise=normalise)
        sums = norm_sums(rows, gradients, eps, is_centred=is_centred, has_offset=has_offset)
        if has_offset:
            made[:] = [(g, sums[1])]
        return Dense(sums[0])

    def offset(layout: Layout, g: Tensor, *saved: Tensor, shape: tuple[int, ...]) -> Dense:
        found = made.pop() if made else None
        if found is not None and found[0] is g:
            return Dense(found[1])
        return of_offset(layout, g, *saved, shape=shape)

    return gain, offset


@rule(F.layer_norm, torch.layer_norm)
def layer_norm(
    tap: Tap,
    input: Any,  # noqa: A002
    normalized_shape: Sequence[int],
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    *_: Any,
) -> Any:
    """`F.layer_norm`."""
    if tap.tracks(input):
        return NotImplemented
    shape = list(normalized_shape)
    y = F.layer_norm(input, shape, tap.plain(weight), tap.plain(bias), eps)
    normalise = partial(F.layer_norm, normalized_shape=shape, eps=eps)
    gain, offset = partial(of_gain, normalise=normalise), of_offset
    if len(shape) == 1:
        gain, offset = _affine(eps, normalise, is_centred=True, has_offset=tap.tracks(bias))
    return tap(y, saved=(input,), uses=[(weight, gain), (bias, offset)])


@rule(F.rms_norm, torch.rms_norm)
def rms_norm(
    tap: Tap,
    input: Any,  # noqa: A002
    normalized_shape: Sequence[int],
    weight: Any = None,
    eps: float | None = None,
) -> Any:
    """`F.rms_norm`."""
    if tap.tracks(input):
        return NotImplemented
    shape = list(normalized_shape)
    y = F.rms_norm(input, shape, tap.plain(weight), eps)
    # Where eps is left out, it is that of the dtype the operation ran in.
    used = torch.finfo(input.dtype).eps if eps is None else eps
    normalise = partial(F.rms_norm, normalized_shape=shape, eps=used)
    gain = partial(of_gain, normalise=normalise)
    if len(shape) == 1:
        gain, _ = _affine(used, normalise, is_centred=False, has_offset=False)
    return tap(y, saved=(input,), uses=[(weight, gain)])


def _tap_channels(tap: Tap, y: Tensor, x: Tensor, weight: Any, bias: Any, normalise: Any) -> Tensor:
    """Record one gain and one offset per channel of x [batch, channels, ...]."""
    broadcast = (x.shape[1], *(1 for _ in x.shape[2:]))
    gain = partial(of_gain, normalise=normalise, broadcast=broadcast)
    offset = partial(of_offset, broadcast=broadcast)
    return tap(y, saved=(x,), uses=[(weight, gain), (bias, offset)])


@rule(F.group_norm, torch.group_norm)
def group_norm(
    tap: Tap,
    input: Any,  # noqa: A002
    num_groups: int,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    *_: Any,
) -> Any:
    """`F.group_norm`."""
    if tap.tracks(input):
        return NotImplemented
    y = F.group_norm(input, num_groups, tap.plain(weight), tap.plain(bias), eps)
    normalise = partial(F.group_norm, num_groups=num_groups, eps=eps)
    return _tap_channels(tap, y, input, weight, bias, normalise)


@rule(F.instance_norm)
def instance_norm(
    tap: Tap,
    input: Any,  # noqa: A002
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """`F.instance_norm`, with each sample's own statistics."""
    if tap.tracks(input):
        return NotImplemented
    if not use_input_stats or running_mean is not None:
        raise UnsupportedOperation(
            "instance norm with running statistics, which couple samples over time; build it with "
            "track_running_stats=False"
        )
    y = F.instance_norm(input, None, None, tap.plain(weight), tap.plain(bias), True, momentum, eps)
    return _tap_channels(tap, y, input, weight, bias, partial(F.instance_norm, eps=eps))


@rule(F.batch_norm)
def batch_norm(
    tap: Tap,
    input: Any,  # noqa: A002
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """`F.batch_norm` with given statistics (eval mode); those of the batch mix samples."""
    if training or running_mean is None or running_var is None:
        raise UnsupportedOperation(
            "batch norm, whose statistics mix the samples of a batch: no sample has a gradient of "
            "its own then, to be clipped or to make curvature of. Use GroupNorm or LayerNorm"
        )
    if tap.tracks(input):
        return NotImplemented
    statistics = running_mean, running_var
    affine = tap.plain(weight), tap.plain(bias)
    y = F.batch_norm(input, *statistics, *affine, training=False, eps=eps)

    def normalise(x: Tensor) -> Tensor:
        return F.batch_norm(x, *(each.to(x.dtype) for each in statistics), eps=eps)

    return _tap_channels(tap, y, input, weight, bias, normalise)


# The same with its arguments in another order.
rule(torch.batch_norm)(
    lambda tap, input, weight, bias, running_mean, running_var, training, momentum, eps, *_: (  # noqa: A006
        batch_norm(tap, input, running_mean, running_var, weight, bias, training, momentum, eps)
    )
)
