"""Per-sample gradients of many parameters at once: squared, combined, and released with noise.

On CUDA each is a launch or two, however many parameters there are; elsewhere plain torch goes from
one to the next.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from operator import attrgetter

from torch import Tensor

from unison.kernels.available import has_triton
from unison.kernels.many import reference
from unison.kernels.many.asked import Asked, Facts
from unison.kernels.many.table import KINDS

__all__ = ["Asked", "Facts", "NoiseDraw", "combine", "is_fast", "release", "squares"]


def is_fast(values: Sequence[Tensor]) -> bool:
    """Whether the kernels take these tensors: on CUDA, of a dtype in KINDS, samples contiguous."""
    if isinstance(values, Asked):
        return values.is_fast
    # Question by question, and not tensor by tensor: no line of Python runs for each of hundreds.
    if not (values and has_triton() and _are_on_cuda(values)):
        return False
    are_kinds = KINDS.keys() >= set(map(_dtype_of, values))
    return are_kinds and (all(map(Tensor.is_contiguous, values)) or all(map(is_dense, values)))


def _are_on_cuda(values: Sequence[Tensor]) -> bool:
    return all(map(_is_on_cuda, values))


_is_on_cuda, _dtype_of = attrgetter("is_cuda"), attrgetter("dtype")


def is_dense(x: Tensor) -> bool:
    """Whether each sample of x [samples, ...] lies in one piece of memory."""
    return x.is_contiguous() or (x.ndim == 2 and x.stride(1) == 1) or x[:1].is_contiguous()


def squares(values: Sequence[Tensor]) -> Tensor:
    """Return Σ x² of every tensor [samples, ...] and sample: [tensors, samples], float64.

    On CUDA a tile is added in float32 (its roundings: `SQUARE_ROUNDINGS`), tiles in float64.
    """
    if is_fast(values):
        return _fast().squares(values)
    return reference.squares(values)


def combine(
    values: Sequence[Tensor],
    weights: Tensor,
    outs: Sequence[Tensor],
    *,
    add: bool = False,
    spacing: float = 1.0,
) -> None:
    """Write Σ_b w_b X_b of every tensor to its output, or add it.

    Args:
        values: X [samples, ...] of each.
        weights: [tensors, samples], float32. A sample of weight 0 is left out: it may hold NaN.
        outs: Contiguous, as many elements as one sample's X. The sum is made in float64 and rounded
            once, to their dtype: float32, float64, or int32 and int64, which count spacings.
        add: Whether to add to what is there.
        spacing: A power of two.
    """
    if is_fast(values):
        _fast().release(values, weights, None, spacing, outs, add=add)
    else:
        reference.combine(values, weights, outs, add=add, spacing=spacing)


@dataclass(frozen=True, eq=False)
class NoiseDraw:
    """The noise of one step for many tensors.

    Attributes:
        recipes: Of each tensor, packed: int64 [tensors, RECIPE_LENGTH], on the tensors' device.
        starts: Each tensor's first element in its parameter.
    """

    recipes: Tensor
    starts: Sequence[int]


def release(
    values: Sequence[Tensor],
    weights: Tensor,
    noise: NoiseDraw | None,
    divisor: float,
    outs: Sequence[Tensor],
) -> None:
    """Combine in float64, round to the noise's grid, add the noise exactly, divide, and cast.

    Args:
        values: X [samples, ...] of each tensor; clipped sums are one sample of weight 1, or
            integers of which each is worth the weight.
        weights: [tensors, samples], float32.
        noise: What to add; nothing, if it is not given.
        divisor: A public constant.
        outs: Contiguous; their dtype is that of the result.
    """
    if is_fast(values):
        _fast().release(values, weights, noise, divisor, outs)
        return
    recipes, starts = (None, [0] * len(outs)) if noise is None else (noise.recipes, noise.starts)
    reference.release(values, weights, recipes, starts, divisor, outs)


@cache
def _fast():
    return import_module("unison.kernels.many.launch")
