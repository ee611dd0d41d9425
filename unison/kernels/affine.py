"""Per-sample sums over tokens: for the gain and the offset of a norm, and for biases.

Plain torch serves biases where the kernels (affine_triton.py) do not; norms are then computed from
records, as any operation is.
"""

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from unison.kernels.available import takes

MAX_FEATURES = 1 << 14  # a row is held in registers
MOST_AT_ONCE = 8  # tensors that one launch takes


def is_taken(x: Tensor, g: Tensor) -> bool:
    """Return whether there is a kernel for input and gradient [samples, tokens, features]."""
    return (
        takes(x, g)
        and x.stride(2) == g.stride(2) == 1
        and 0 < x.shape[2] <= MAX_FEATURES
        and x.shape[1] > 0
    )


def sums(x: Tensor, g: Tensor, eps: float, *, is_centred: bool, has_offset: bool) -> Tensor:
    """Return Σ_t g_t x̂_t, and Σ_t g_t if asked: [samples, 1 or 2, features], float32.

    Args:
        x: What was normalised [samples, tokens, features].
        g: The gradient of what came out, likewise.
        eps: Added to the variance.
        is_centred: Whether the mean is taken out (layer norm), or not (RMS norm).
        has_offset: Whether something is added after the gain.
    """
    found = sums_of_many([x], [g], eps, is_centred=is_centred, has_offset=has_offset)
    return torch.stack(found, 1)


def sums_of_many(
    xs: Sequence[Tensor], gs: Sequence[Tensor], eps: float, *, is_centred: bool, has_offset: bool
) -> tuple[Tensor, ...]:
    """Return `sums` of up to `MOST_AT_ONCE` norms, one after the other: [samples, features] each.

    Of every norm Σ_t g_t x̂_t, then Σ_t g_t if asked. All x are alike, in strides too, and all g.
    """
    return _kernels().sums(xs, gs, eps, is_centred=is_centred, has_offset=has_offset)


def can_wait(g: Tensor) -> bool:
    """Return whether `column_sums_of_many` takes a contiguous g [samples, tokens, features]."""
    return takes(g)


def column_sums_of_many(gs: Sequence[Tensor]) -> list[Tensor]:
    """Return `column_sums` of up to `MOST_AT_ONCE` tensors, alike but for the features."""
    return _kernels().column_sums(gs)


def column_sums(g: Tensor) -> Tensor:
    """Return Σ_t g_t of g [samples, tokens, features]: [samples, features], float32 at least."""
    if takes(g) and g.stride(2) == 1:
        return column_sums_of_many([g])[0]
    return g.sum(1, dtype=torch.promote_types(g.dtype, torch.float32))


def _kernels() -> Any:
    return import_module("unison.kernels.affine_triton")
