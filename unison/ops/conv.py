"""Convolutions: linear maps of their unfolded inputs."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from unison.ops.layout import Layout
from unison.ops.linear import as_computed, wide
from unison.ops.records import Dense, Product, Record
from unison.ops.registry import Tap, rule


def unfolded(
    x: Tensor, kernel: Sequence[int], *, stride: Sequence[int], dilation: Sequence[int]
) -> Tensor:
    """The patches of a padded input [batch, channels, *space]: [batch, places, channels * kernel].

    One view per spatial dimension, then one copy: it works for any number of them.
    """
    num_dims = len(kernel)
    for dim, (size, step, gap) in enumerate(zip(kernel, stride, dilation, strict=True)):
        x = x.unfold(2 + dim, gap * (size - 1) + 1, step)[..., ::gap]
    # [batch, channels, *places, *kernel] -> [batch, *places, channels, *kernel]
    order = (0, *range(2, 2 + num_dims), 1, *range(2 + num_dims, 2 + 2 * num_dims))
    x = x.permute(order)
    places, size = x.shape[1 : 1 + num_dims].numel(), x.shape[1 + num_dims :].numel()
    return x.reshape(x.shape[0], places, size)


def of_kernel(
    layout: Layout,
    g: Tensor,
    x: Tensor,
    *,
    shape: tuple[int, ...],
    stride: Sequence[int],
    padding: Sequence[tuple[int, int]],
    dilation: Sequence[int],
    groups: int,
) -> Record:
    """Record of a kernel [out, in / groups, *kernel]."""
    sides = [side for pair in reversed(padding) for side in pair]
    patches = unfolded(F.pad(x, sides), shape[2:], stride=stride, dilation=dilation)
    outputs = g.flatten(2).transpose(1, 2)  # [images, places, out]
    patches, outputs = layout.rows(patches), layout.rows(outputs)  # [batch, places, ...]
    if groups == 1:
        return Product(patches, outputs, is_transposed=False, shape=shape)
    # Channels are ordered by group on both sides.
    o, i = (
        wide(each).unflatten(2, (groups, each.shape[2] // groups)) for each in (outputs, patches)
    )
    return Dense(torch.einsum("btgo,btgi->bgoi", o, i).reshape(layout.batch, *shape))


def of_channels(layout: Layout, g: Tensor, *_: Tensor, shape: tuple[int, ...]) -> Dense:
    """Record of one number per channel, added."""
    if layout.index is None and len(g) == layout.batch:
        return Dense(wide(g).flatten(2).sum(dim=2))
    per_image = (*shape, *(1 for _ in g.shape[2:]))
    return Dense(layout.reduced(wide(g), per_image).reshape(layout.batch, *shape))


def _each(value: int | Sequence[int], num_dims: int) -> tuple[int, ...]:
    return (value,) * num_dims if isinstance(value, int) else tuple(value)


def _padding(
    value: str | int | Sequence[int], kernel: Sequence[int], dilation: Sequence[int]
) -> list[tuple[int, int]]:
    """Zeros before and after, per dimension; `same` puts the odd one after."""
    if value == "same":
        totals = [gap * (size - 1) for size, gap in zip(kernel, dilation, strict=True)]
        return [(total // 2, total - total // 2) for total in totals]
    if value == "valid":
        value = 0
    assert not isinstance(value, str)
    return [(side, side) for side in _each(value, len(kernel))]


@rule(F.conv1d, F.conv2d, F.conv3d)
def convolution(
    tap: Tap,
    input: Any,  # noqa: A002
    weight: Any,
    bias: Any = None,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Any:
    """`F.conv1d`, `conv2d` and `conv3d`."""
    kernel_size = tap.plain(weight).shape[2:]
    num_dims = len(kernel_size)
    if input.ndim != num_dims + 2 or tap.tracks(input):
        return NotImplemented
    run = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[num_dims]
    y = run(input, tap.plain(weight), tap.plain(bias), stride, padding, dilation, groups)  # type: ignore[arg-type]
    gaps = _each(dilation, num_dims)
    kernel = partial(
        of_kernel,
        stride=_each(stride, num_dims),
        padding=_padding(padding, kernel_size, gaps),
        dilation=gaps,
        groups=groups,
    )
    return tap(y, saved=(as_computed(input, y),), uses=[(weight, kernel), (bias, of_channels)])
