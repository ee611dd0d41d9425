"""Per-sample gradients squared and combined: two operations, each one read of all gradients.

The backend is chosen by device, dtype and size alone, never by what ran before: the backends round
differently, and a step must not. On 2 cores numba (numba_kernels.py) is 20 times as fast as the
reference for norms, and 10 times for sums.
"""

from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

# numba compiles for a second (once: the result is cached on disk), and small work is not worth it.
LEAST_ELEMENTS = 1 << 16
_COMPILED_DTYPES = (torch.float32, torch.float64)

# Of a float64 tile: on a CPU it should stay in cache, and be small enough for the allocator to use
# its memory again (a page fault per 4 KiB costs more than the arithmetic). On a GPU it should be
# large beside the launch of a kernel.
_BYTES_PER_TILE = {"cpu": 2 << 20}
_BYTES_PER_TILE_ELSEWHERE = 64 << 20


@cache
def _has_numba() -> bool:
    return find_spec("numba") is not None


def _compiled_for(x: Tensor) -> Any:
    """Return the compiled functions where they take x, else None."""
    is_suited = x.device.type == "cpu" and x.dtype in _COMPILED_DTYPES
    if is_suited and x.numel() >= LEAST_ELEMENTS and _has_numba():
        return import_module("unison.kernels.numba_kernels")
    return None


@torch.library.custom_op("unison::per_sample_squared_norms", mutates_args=())
def _squared_norms(x: Tensor) -> Tensor:
    compiled = _compiled_for(x)
    return squared_norms_reference(x) if compiled is None else compiled.squared_norms(x)


@_squared_norms.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], dtype=torch.float64)


@torch.library.custom_op("unison::per_sample_weighted_sum", mutates_args=("out",))
def _weighted_sum(x: Tensor, weights: Tensor, out: Tensor) -> None:
    compiled = _compiled_for(x)
    (weighted_sum_reference if compiled is None else compiled.weighted_sum)(x, weights, out)


@_weighted_sum.register_fake
def _(x: Tensor, weights: Tensor, out: Tensor) -> None:
    return None


def squared_norms(x: Tensor) -> Tensor:
    """Return Σ_i x[b, i]² of x [batch, numel]: [batch], float64, added in float64."""
    return _squared_norms(x.detach())


def weighted_sum(x: Tensor, weights: Tensor, out: Tensor) -> Tensor:
    """Write Σ_b weights[b] · x[b] to `out` [numel] and return it.

    Args:
        x: [batch, numel].
        weights: [batch], float64. A row of weight 0 is left out: it may hold NaN.
        out: [numel], float32 or float64. The sum is float64 and is rounded once, to its dtype.
    """
    assert weights.dtype == torch.float64, weights.dtype
    _weighted_sum(x.detach(), weights, out)
    return out


def squared_norms_reference(x: Tensor) -> Tensor:
    """See `squared_norms`: in plain torch, by float64 tiles, on any device."""
    total = torch.zeros(len(x), dtype=torch.float64, device=x.device)
    for part in _columns(x):
        total += x[:, part].double().square().sum(1)
    return total


def weighted_sum_reference(x: Tensor, weights: Tensor, out: Tensor) -> None:
    """See `weighted_sum`: in plain torch, by float64 tiles, on any device."""
    is_out = (weights == 0).unsqueeze(1)
    for part in _columns(x):
        tile = x[:, part].double().masked_fill(is_out, 0.0)  # [batch, elements in the tile]
        out[part] = weights @ tile


def _columns(x: Tensor) -> Iterator[slice]:
    budget = _BYTES_PER_TILE.get(x.device.type, _BYTES_PER_TILE_ELSEWHERE)
    size = max(1, budget // max(1, 8 * len(x)))
    for start in range(0, x.shape[1], size):
        yield slice(start, min(x.shape[1], start + size))
