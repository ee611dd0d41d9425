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
    return Dense(layout.reduced(wide(g), broadcast or shape).reshape(layout.batch, *shape))


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
    gain = partial(of_gain, normalise=lambda x: F.layer_norm(x, shape, None, None, eps))
    return tap(y, saved=(input,), uses=[(weight, gain), (bias, of_offset)])


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
    gain = partial(of_gain, normalise=lambda x: F.rms_norm(x, shape, None, used))
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
