"""Linear maps: `x Wᵀ + b`, `x W`, `b + x W`."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from unison.ops.layout import Layout
from unison.ops.records import Dense, Product
from unison.ops.registry import Tap, rule


def of_weight(layout: Layout, g: Tensor, x: Tensor, *, shape: tuple[int, ...]) -> Product:
    """Record of W [d_out, d_in] in y = x Wᵀ."""
    return Product(layout.rows(x), layout.rows(g), is_transposed=False, shape=shape)


def of_transposed(layout: Layout, g: Tensor, x: Tensor, *, shape: tuple[int, ...]) -> Product:
    """Record of W [d_in, d_out] in y = x W."""
    return Product(layout.rows(x), layout.rows(g), is_transposed=True, shape=shape)


def of_left(layout: Layout, g: Tensor, x: Tensor, *, shape: tuple[int, ...]) -> Product:
    """Record of W [d_out, d_in] in y = W x, where tokens are columns."""
    index = None if layout.index is None else layout.index.mT
    turned = Layout(layout.batch, min(layout.axis, g.ndim - 2), index)
    return of_weight(turned, g.mT, x.mT, shape=shape)


def of_vector(layout: Layout, g: Tensor, x: Tensor, *, shape: tuple[int, ...]) -> Dense:
    """Record of w [d_in] in y = x w, one number per token."""
    return Dense(layout.reduced(wide(g).unsqueeze(-1) * x, shape))


def of_bias(layout: Layout, g: Tensor, *_: Tensor, shape: tuple[int, ...]) -> Dense:
    """Record of what was added to the output."""
    return Dense(layout.summed(g, shape))


def wide(value: Tensor) -> Tensor:
    """A tensor in which sums over tokens keep their digits: float32 at least."""
    return value.to(torch.promote_types(value.dtype, torch.float32))


def as_computed(x: Tensor, y: Tensor) -> Tensor:
    """The input in the dtype the operation used it in: autocast casts on the way in."""
    return x.to(y.dtype) if x.is_floating_point() and x.dtype != y.dtype else x


@rule(F.linear)
def linear(tap: Tap, input: Any, weight: Any, bias: Any = None) -> Any:  # noqa: A002
    """`F.linear`."""
    if tap.tracks(input):
        return NotImplemented
    y = F.linear(input, tap.plain(weight), tap.plain(bias))
    uses = [(weight, of_weight), (bias, of_bias)]
    return tap(y, saved=(as_computed(input, y),), uses=uses)


@rule(
    torch.matmul,
    torch.mm,
    Tensor.matmul,
    Tensor.mm,
)
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


@rule(Tensor.__rmatmul__)
def rmatmul(tap: Tap, right: Any, left: Any) -> Any:
    """`x @ W` as Python asks the parameter for it."""
    return matmul(tap, left, right)


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
