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
from unison.kernels import affine
from unison.ops.layout import Layout
from unison.ops.linear import wide
from unison.ops.records import Dense
from unison.ops.registry import Tap, rule


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
    reduced = layout.reduced(wide(g) * normalise(wide(x)), broadcast or shape)
    return Dense(reduced.reshape(layout.batch, *shape))


def of_offset(
    layout: Layout,
    g: Tensor,
    *_: Tensor,
    shape: tuple[int, ...],
    broadcast: tuple[int, ...] | None = None,
) -> Dense:
    """Record of what is added."""
    return Dense(layout.summed(g, broadcast or shape).reshape(layout.batch, *shape))


class Affine:
    """Records of a gain and an offset over the last dimension, made in one pass where possible.

    Args:
        eps: Of the norm.
        normalise: The norm without gain and offset.
        is_centred: Whether the norm takes the mean out.
        has_offset: Whether there is an offset whose record is wanted.

    Attributes:
        eps: Likewise.
        is_centred: Likewise.
        has_offset: Likewise.
    """

    def __init__(self, eps: float, normalise: Any, *, is_centred: bool, has_offset: bool) -> None:
        self.eps, self._normalise = eps, normalise
        self.is_centred, self.has_offset = is_centred, has_offset
        self._made: tuple[Tensor, Tensor] | None = None  # the gradient, and its sums over tokens

    def gain(self, layout: Layout, g: Tensor, x: Tensor, *, shape: tuple[int, ...]) -> Dense:
        """Record of the gain."""
        rows, gradients = layout.rows(x), layout.rows(g)
        if not affine.is_taken(rows, gradients):
            return of_gain(layout, g, x, shape=shape, normalise=self._normalise)
        sums = affine.sums(
            rows, gradients, self.eps, is_centred=self.is_centred, has_offset=self.has_offset
        )
        if self.has_offset:
            self._made = (g, sums[:, 1])
        return Dense(sums[:, 0])

    def offset(self, layout: Layout, g: Tensor, *saved: Tensor, shape: tuple[int, ...]) -> Dense:
        """Record of the offset."""
        made, self._made = self._made, None
        if made is not None and made[0] is g:
            return Dense(made[1])
        return of_offset(layout, g, *saved, shape=shape)


def _run_layer_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> Tensor:
    return torch.layer_norm(x, normalized_shape, weight, bias, eps)


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
    normalise = lambda x: F.layer_norm(x, shape, None, None, eps)  # noqa: E731
    if len(shape) > 1:
        gain = partial(of_gain, normalise=normalise)
        return tap(y, saved=(input,), uses=[(weight, gain), (bias, of_offset)])
    both = Affine(eps, normalise, is_centred=True, has_offset=tap.tracks(bias))
    return tap(y, saved=(input,), uses=[(weight, both.gain), (bias, both.offset)])


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
    normalise = lambda x: F.rms_norm(x, shape, None, used)  # noqa: E731
    if len(shape) > 1:
        return tap(y, saved=(input,), uses=[(weight, partial(of_gain, normalise=normalise))])
    gain = Affine(used, normalise, is_centred=False, has_offset=False).gain
    return tap(y, saved=(input,), uses=[(weight, gain)])


def _per_channel(x: Tensor) -> tuple[int, ...]:
    """The shape of one number per channel of [batch, channels, ...]."""
    return (x.shape[1], *(1 for _ in x.shape[2:]))


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
    gain = partial(
        of_gain,
        normalise=lambda x: F.group_norm(x, num_groups, None, None, eps),
        broadcast=_per_channel(input),
    )
    offset = partial(of_offset, broadcast=_per_channel(input))
    return tap(y, saved=(input,), uses=[(weight, gain), (bias, offset)])


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
    gain = partial(
        of_gain,
        normalise=lambda x: F.instance_norm(x, eps=eps),
        broadcast=_per_channel(input),
    )
    offset = partial(of_offset, broadcast=_per_channel(input))
    return tap(y, saved=(input,), uses=[(weight, gain), (bias, offset)])


@rule(F.batch_norm, torch.batch_norm)
def batch_norm(tap: Tap, *_: Any, **__: Any) -> Tensor:
    """Batch norm mixes samples."""
    raise UnsupportedOperation(
        "batch norm, whose statistics mix the samples of a batch: one sample's gradient then "
        "depends on the others, and clipping bounds nothing. Use GroupNorm or LayerNorm"
    )
