"""Per-sample gradients that are given by factors, X_b = left_bᵀ right_b, of many layers at once.

None of them is ever formed: they are measured by inner products of tokens, and added up tile by
tile. On CUDA each is one launch, however many layers there are.
"""

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from unison.kernels.available import loads_tiles, shared_bytes, takes

_DTYPES = (torch.bfloat16, torch.float16)
_ALIGNED = 8  # elements: rows begin at 16 bytes
_SHARED = 150 << 10  # bytes of shared memory, for tiles that are loaded and one that is stored


def are_taken(left: Tensor, right: Tensor) -> bool:
    """Return whether there are kernels for a layer with these factors [samples, tokens, features].

    If they lie at addresses that are multiples of 16, too: see `aligned`.
    """
    return (
        takes(left, right)
        and _suits(left.device)
        and left.dtype == right.dtype
        and left.dtype in _DTYPES
        and left.shape[:2].numel() > 0
        and is_aligned(left)
        and is_aligned(right)
    )


def _suits(device: torch.device) -> bool:
    """Return whether the kernels are fast on a device: where the hardware loads tiles, they are."""
    is_fast = loads_tiles(device) or device.type != "cuda"
    return is_fast and shared_bytes(device) >= _SHARED


def is_aligned(x: Tensor) -> bool:
    """Return whether the hardware's loads of tiles take x [samples, tokens, features]."""
    return (
        x.shape[2] > 0
        and x.shape[2] % _ALIGNED == 0
        and x.stride(2) == 1
        and x.stride(1) % _ALIGNED == x.stride(0) % _ALIGNED == 0
        and x.stride(0) > 0
        and x.stride(1) > 0
    )


def aligned(x: Tensor) -> Tensor:
    """Return a factor, or a copy of it at an address that kernels take.

    A copy and no other way: what comes of it must not depend on where memory happened to lie.
    """
    return x if x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.preserve_format)


def grams(lefts: Sequence[Tensor], rights: Sequence[Tensor]) -> Tensor:
    """Return the norms of all X_b without forming them, and what their errors are bounded by.

    Norms of tokens are counted a little above what they are (`products_triton.least_norm`).

    Args:
        lefts: Of each layer [samples, tokens, rows], alike but for the rows; each is taken.
        rights: Of each layer [samples, tokens, columns], likewise.

    Returns:
        [6, layers, samples], float64: squares ‖X_b‖² = Σ_ts ⟨left_t, left_s⟩⟨right_t, right_s⟩;
        masses Σ_t ‖left_t‖‖right_t‖; traces Σ_t ‖left_t‖² and Σ_t ‖right_t‖²; and the sums
        Σ_ts ⟨left_t, left_s⟩² and Σ_ts ⟨right_t, right_s⟩², added in float32 within a tile.
    """
    return _kernels().grams(lefts, rights)


def weighted_sums(
    lefts: Sequence[Tensor],
    rights: Sequence[Tensor],
    weights: Tensor,
    outs: Sequence[Tensor],
    *,
    add: bool = False,
) -> None:
    """Write Σ_b w_b X_b of every layer to its output, or add it.

    Args:
        lefts: As for `grams`.
        rights: Likewise.
        weights: [layers, samples], float32, contiguous. A sample of weight 0 is left out: it may
            hold NaN.
        outs: As many elements as X, contiguous, at addresses that are multiples of 16. All float32,
            or int32: then each sample's w_b X_b is rounded to integers first.
        add: Whether to add to what is there.
    """
    _kernels().weighted_sums(lefts, rights, weights, outs, add=add)


def _kernels() -> Any:
    return import_module("unison.kernels.factored_triton")
