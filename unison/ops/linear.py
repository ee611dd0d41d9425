"""Linear maps: `x Wᵀ + b`, `x W`, `b + x W`; convolutions, einsums and the experts of a mixture."""

import string
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from unison.errors import UnsupportedOperation
from unison.kernels.available import takes
from unison.ops.records import (
    Dense,
    Layout,
    Product,
    Record,
    grouped,
    rows_of,
    sum_to,
    wide,
    wide_sum_to,
    with_index,
)
from unison.ops.registry import Tap, rule

ALIGNED = 8  # elements that matrix units load at once
LEAST_PADDED = 1 << 24  # of a weight, for which it pays to copy it


def of_weight(layout: Layout, g: Tensor, x: Tensor, *, shape: tuple[int, ...]) -> Product:
    """Record of W [d_out, d_in] in y = x Wᵀ."""
    return Product(rows_of(layout, x), rows_of(layout, g), is_transposed=False, shape=shape)


def of_transposed(layout: Layout, g: Tensor, x: Tensor, *, shape: tuple[int, ...]) -> Product:
    """Record of W [d_in, d_out] in y = x W."""
    return Product(rows_of(layout, x), rows_of(layout, g), is_transposed=True, shape=shape)


def of_left(layout: Layout, g: Tensor, x: Tensor, *, shape: tuple[int, ...]) -> Product:
    """Record of W [d_out, d_in] in y = W x, where tokens are columns."""
    index = None if layout.index is None else layout.index.mT
    turned = Layout(layout.batch, min(layout.axis, g.ndim - 2), index)
    return of_weight(turned, g.mT, x.mT, shape=shape)


def of_vector(layout: Layout, g: Tensor, x: Tensor, *, shape: tuple[int, ...]) -> Dense:
    """Record of w [d_in] in y = x w, one number per token."""
    return Dense(sum_to(layout, wide(g).unsqueeze(-1) * x, shape))


def of_bias(layout: Layout, g: Tensor, *_: Tensor, shape: tuple[int, ...]) -> Dense:
    """Record of what was added to the output."""
    return Dense(wide_sum_to(layout, g, shape))


def as_computed(x: Tensor, y: Tensor) -> Tensor:
    """The input in the dtype the operation used it in: autocast casts on the way in."""
    return x.to(y.dtype) if x.is_floating_point() and x.dtype != y.dtype else x


@rule(F.linear)
def linear(tap: Tap, input: Any, weight: Any, bias: Any = None) -> Any:  # noqa: A002
    """`F.linear`, on a GPU with rows of outputs that begin where a GEMM wants them.

    Of a vocabulary of 50257 both GEMMs, this one and that of the inputs' gradient, are a quarter as
    fast as they can be. A copy without the rows' ends costs less than a tenth of one of them.
    """
    if tap.tracks(input):
        return NotImplemented
    w, b = tap.plain(weight), tap.plain(bias)
    extra = -len(w) % ALIGNED
    if not extra or w.numel() < LEAST_PADDED or not takes(input, w):
        y = F.linear(input, w, b)
    else:
        b = None if b is None else F.pad(b, (0, extra))
        y = F.linear(input, F.pad(w, (0, 0, 0, extra)), b)[..., :-extra].contiguous()
    uses = [(weight, of_weight), (bias, of_bias)]
    return tap(y, saved=(as_computed(input, y),), uses=uses)


@rule(torch.matmul, torch.mm, Tensor.matmul, Tensor.mm)
def matmul(tap: Tap, left: Any, right: Any) -> Any:
    """`x @ W`, `x @ w` and `W @ x`."""
    if tap.tracks(left) and tap.tracks(right):
        return NotImplemented
    is_left = tap.tracks(left)
    w, x = (left, right) if is_left else (right, left)
    num_dims = tap.plain(w).ndim
    if x.ndim < 2 or num_dims > 2 or (is_left and num_dims == 1):
        return NotImplemented
    y = torch.matmul(tap.plain(left), tap.plain(right))
    builder = of_left if is_left else of_vector if num_dims == 1 else of_transposed
    return tap(y, saved=(as_computed(x, y),), uses=[(w, builder)])


# `x @ W` as Python asks the parameter for it.
rule(Tensor.__rmatmul__)(lambda tap, right, left: matmul(tap, left, right))


@rule(torch.addmm, Tensor.addmm)
def addmm(
    tap: Tap,
    input: Any,  # noqa: A002
    mat1: Any,
    mat2: Any,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> Any:
    """`b + x W`, as the GPT-2 of transformers computes."""
    if tap.tracks(mat1) or beta != 1 or alpha != 1:
        return NotImplemented
    y = torch.addmm(tap.plain(input), mat1, tap.plain(mat2))
    uses = [(mat2, of_transposed), (input, of_bias)]
    return tap(y, saved=(as_computed(mat1, y),), uses=uses)


# --- convolutions: linear maps of their unfolded inputs -------------------------------------------


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
    patches, outputs = rows_of(layout, patches), rows_of(layout, outputs)  # [batch, places, ...]
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
    return Dense(sum_to(layout, wide(g), per_image).reshape(layout.batch, *shape))


def _per_dim(value: int | Sequence[int], num_dims: int) -> tuple[int, ...]:
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
    return [(side, side) for side in _per_dim(value, len(kernel))]


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
    gaps = _per_dim(dilation, num_dims)
    kernel = partial(
        of_kernel,
        stride=_per_dim(stride, num_dims),
        padding=_padding(padding, kernel_size, gaps),
        dilation=gaps,
        groups=groups,
    )
    return tap(y, saved=(as_computed(input, y),), uses=[(weight, kernel), (bias, of_channels)])


# --- `torch.einsum` of an input and a parameter: a linear map where its letters say so ------------


def of_operand(
    layout: Layout,
    g: Tensor,
    x: Tensor,
    *,
    shape: tuple[int, ...],
    terms: tuple[str, str, str],
) -> Record:
    """Record of w in y = einsum("x,w->y"); `terms` are the letters of x, w and y.

    Raises:
        UnsupportedOperation: If the parameter, or the output alone, has the letter of the samples.
    """
    of_x, of_w, of_y = terms
    index = layout.index
    dims = [] if index is None else [dim for dim, size in enumerate(index.shape) if size != 1]
    if len(dims) > 1:
        raise UnsupportedOperation(
            f"einsum({of_x},{of_w}->{of_y}) where samples lie in several dimensions of the output"
        )
    sample = of_y[dims[0] if dims else layout.axis]
    if sample in of_w or sample not in of_x:
        raise UnsupportedOperation(
            f"einsum({of_x},{of_w}->{of_y}) where {sample!r} holds the samples: only the input and "
            "the output may have it"
        )
    # A new letter for the samples, in front; the old one stays for what is flattened into it.
    new = next(letter for letter in string.ascii_letters if letter not in of_x + of_w + of_y)
    x, of_x = _split_samples(x, of_x, sample, layout, new)
    g, of_y = _split_samples(g, of_y, sample, layout, new)
    incoming = [letter for letter in of_w if letter in of_x and letter not in of_y]
    outgoing = [letter for letter in of_w if letter in of_y and letter not in of_x]
    tokens = [letter for letter in of_x if letter in of_y and letter not in of_w]
    is_map = len(incoming) + len(outgoing) == len(of_w) and set(of_x) == {*tokens, *incoming}
    for is_transposed, order in ((False, outgoing + incoming), (True, incoming + outgoing)):
        if is_map and list(of_w) == order:
            a = _by_letters(x, of_x, tokens, incoming)
            return Product(a, _by_letters(g, of_y, tokens, outgoing), is_transposed, shape)
    return Dense(torch.einsum(f"{of_x},{of_y}->{new}{of_w}", wide(x), wide(g)))


def _split_samples(
    value: Tensor, term: str, sample: str, layout: Layout, new: str
) -> tuple[Tensor, str]:
    """[..., samples * rest, ...] to [samples, rest, ...]."""
    axis = term.index(sample)
    front = value.movedim(axis, 0)
    index = (
        None if layout.index is None else layout.index.reshape(-1, *(1 for _ in front.shape[1:]))
    )
    rows = rows_of(Layout(layout.batch, 0, index), front, num_features=front.ndim - 1)
    return rows, new + sample + term[:axis] + term[axis + 1 :]


def _by_letters(value: Tensor, term: str, tokens: list[str], features: list[str]) -> Tensor:
    """Bring a tensor to [batch, tokens, features]; the first of `tokens` is the batch."""
    ordered = value.permute([term.index(letter) for letter in tokens + features])
    sizes = ordered.shape
    num_rows = sizes[1 : len(tokens)].numel()
    return ordered.reshape(sizes[0], num_rows, sizes[len(tokens) :].numel())


@rule(torch.einsum)
def einsum(tap: Tap, *args: Any) -> Any:
    """`torch.einsum` of two operands, without an ellipsis or a letter twice in one term."""
    equation, operands = args[0], args[1:]
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    tracked = [tap.tracks(each) for each in operands]
    if not isinstance(equation, str) or "->" not in equation or "." in equation:
        return NotImplemented
    inputs, of_y = equation.replace(" ", "").split("->")
    terms = inputs.split(",")
    if tracked.count(True) != 1 or len(operands) != 2:
        return NotImplemented
    place = tracked.index(True)
    of_w, of_x = terms[place], terms[1 - place]
    is_plain = all(len(set(term)) == len(term) for term in (of_w, of_x, of_y))
    if not is_plain or not set(of_w) <= set(of_x + of_y):
        return NotImplemented
    x, y = operands[1 - place], torch.einsum(equation, *(tap.plain(each) for each in operands))
    sizes = dict(zip(of_x + of_y, (*x.shape, *y.shape), strict=True))
    if any(sizes[i] != n for i, n in zip(of_w, tap.plain(operands[place]).shape, strict=True)):
        return NotImplemented  # a dimension of 1 that is broadcast
    builder = partial(of_operand, terms=(of_x, of_w, of_y))
    return tap(y, saved=(as_computed(x, y),), uses=[(operands[place], builder)])


# --- experts in one product: `torch._grouped_mm`, and transformers' stand-in for it ---------------


def of_experts(
    layout: Layout, g: Tensor, x: Tensor, offsets: Tensor, *, shape: tuple[int, ...]
) -> Dense:
    """Record of W [experts, d_in, d_out] in y_s = x_s W[expert of s]: the gradients themselves.

    Tokens are sorted by expert; offsets say where the tokens of each one end. That a sample's
    tokens lie anywhere among them is the layout's business: see [Note: rows with an index]. Every
    sample is cut into its tokens of each expert, as if they were samples of their own.
    """
    num_experts = shape[0]
    rows = torch.arange(len(x), device=x.device)
    experts = torch.searchsorted(offsets.to(torch.int64), rows, right=True)
    experts = experts.clamp(max=num_experts - 1)  # rows after the last offset have no gradient
    by_expert = grouped(with_index(layout, g), experts, num_experts)
    a, b = (
        wide(rows_of(by_expert, each)) for each in (x, g)
    )  # [batch * experts, tokens, features]
    return Dense(torch.bmm(a.mT, b).reshape(layout.batch, *shape))


def _run_experts(tap: Tap, run: Any, x: Any, weight: Any, offsets: Any) -> Any:
    is_plain = tap.tracks(weight) and not tap.tracks(x)
    if offsets is None or not is_plain or x.ndim != 2 or tap.plain(weight).ndim != 3:
        return NotImplemented
    y = run(x, tap.plain(weight))
    return tap(y, saved=(as_computed(x, y), offsets), uses=[(weight, of_experts)])


@rule(torch._grouped_mm)
def grouped_mm(
    tap: Tap,
    input: Any,  # noqa: A002
    mat2: Any,
    offs: Any = None,
    bias: Any = None,
    out_dtype: Any = None,
) -> Any:
    """`F.grouped_mm`."""
    if bias is not None:
        return NotImplemented
    run = partial(torch._grouped_mm, offs=offs, out_dtype=out_dtype)
    return _run_experts(tap, run, input, mat2, offs)


@rule("transformers::grouped_mm_fallback")
def grouped_mm_fallback(tap: Tap, input: Any, weight: Any, offs: Any) -> Any:  # noqa: A002
    """The same where the kernel does not run."""
    run = partial(torch.ops.transformers.grouped_mm_fallback, offs=offs)
    return _run_experts(tap, run, input, weight, offs)
