"""Dropout in one Triton kernel: the mask is drawn where it is used, and never stored.

The bits are those of `fill_rows` with the BERNOULLI distribution: an element is dropped where its
63-bit draw is at or below a limit.
"""

# Triton's own annotations do not describe what its compiler accepts.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from unison.kernels.launcher import Launcher, Prepared
from unison.kernels.random.triton import _philox

TILE = 512  # cipher blocks, of two elements each


@triton.jit
def _drop(x, out, words, n, first, limit, scale, TILE: tl.constexpr):
    block = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    w0, w1, w2, w3 = _philox((first >> 1) + block, words)
    upper = tl.interleave(w0, w2).to(tl.int64)
    lower = tl.interleave(w1, w3).to(tl.int64)
    is_dropped = ((upper << 31) | (lower >> 1)) <= limit
    at = tl.program_id(0).to(tl.int64) * (2 * TILE) + tl.arange(0, 2 * TILE)
    value = tl.load(x + at, mask=at < n, other=0.0).to(tl.float32)
    value = tl.where(is_dropped, 0.0, value * scale)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=at < n)


_launch = Launcher(_drop)
_prepared: dict[tuple, Prepared] = {}  # as often as there are kinds of layers, and granules
_MOST_PREPARED = 256


def drop(x: Tensor, words: Tensor, first: int, limit: int, scale: float) -> Tensor:
    """Return x times scale, with zeros where elements are dropped.

    Args:
        x: Contiguous, of 16 or 32 bits.
        words: int64 [8]; the key's words are at 2 to 5, as in a recipe.
        first: Index of the first element in its stream; even.
        limit: Greatest draw that is dropped.
        scale: Of what stays.
    """
    assert first % 2 == 0
    out = torch.empty_like(x)
    numbers = x.numel(), first, limit, scale
    launch = _prepared.get(numbers)
    if launch is None:
        if len(_prepared) >= _MOST_PREPARED:
            _prepared.clear()
        grid = (-(-x.numel() // (2 * TILE)), 1)
        # Fused multiply-adds cannot change bits here: there is nothing to add.
        launch = _launch.prepared(grid, numbers, TILE=TILE, num_warps=4)
        _prepared[numbers] = launch
    launch(x, out, words)
    return out
