"""Per-sample gradients squared and combined, in plain torch: float64 tiles, on any device."""

from collections.abc import Iterator

import torch
from torch import Tensor

# Of a float64 tile: on a CPU it should stay in cache, and be small enough for the allocator to use
# its memory again (a page fault per 4 KiB costs more than the arithmetic). On a GPU it should be
# large beside the launch of a kernel.
_BYTES_PER_TILE = {"cpu": 2 << 20}
_BYTES_PER_TILE_ELSEWHERE = 64 << 20


def squared_norms(x: Tensor) -> Tensor:
    """Return Σ_i x[b, i]² of x [batch, numel]: [batch], float64."""
    total = torch.zeros(len(x), dtype=torch.float64, device=x.device)
    for part in _columns(x):
        total += x[:, part].double().square().sum(1)
    return total


def weighted_sum(x: Tensor, weights: Tensor, out: Tensor) -> None:
    """Write Σ_b weights[b] · x[b] of x [batch, numel] to `out` [numel].

    The sum is float64 and is rounded once. A row of weight 0 is left out: it may hold NaN.
    """
    is_out = (weights == 0).unsqueeze(1)
    for part in _columns(x):
        tile = x[:, part].double().masked_fill(is_out, 0.0)  # [batch, elements in the tile]
        out[part] = weights @ tile


def _columns(x: Tensor) -> Iterator[slice]:
    budget = _BYTES_PER_TILE.get(x.device.type, _BYTES_PER_TILE_ELSEWHERE)
    size = max(1, budget // max(1, 8 * len(x)))
    for start in range(0, x.shape[1], size):
        yield slice(start, min(x.shape[1], start + size))
