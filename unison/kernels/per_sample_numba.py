"""Per-sample gradients squared and combined, compiled for the CPU: one read of memory each.

Additions are float64. Squares are added in the order LLVM's vector code takes; the order is the
same in every call, and a row is never shared by two threads.
"""

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from unison.kernels.numba_jit import jit, num_pieces, run_pieces

TILE = 512  # elements: a float64 tile stays in the first-level cache


@jit(fastmath=("reassoc", "contract", "nsz"))
def _squared_norms(x, out):
    for b in range(x.shape[0]):
        total = 0.0
        for i in range(x.shape[1]):
            value = np.float64(x[b, i])
            total += value * value
        out[b] = total


@jit(fastmath=("contract",))
def _weighted_sum(x, rows, weights, out, start, stop):
    """Add four rows at a time: each reading of the tile then serves four of them."""
    tile = np.empty(TILE, np.float64)
    for at in range(start, stop, TILE):
        size = min(TILE, stop - at)
        for j in range(size):
            tile[j] = 0.0
        k = 0
        while k + 4 <= len(rows):
            b0, b1, b2, b3 = rows[k], rows[k + 1], rows[k + 2], rows[k + 3]
            w0, w1, w2, w3 = weights[b0], weights[b1], weights[b2], weights[b3]
            for j in range(size):
                i = at + j
                tile[j] += (w0 * np.float64(x[b0, i]) + w1 * np.float64(x[b1, i])) + (
                    w2 * np.float64(x[b2, i]) + w3 * np.float64(x[b3, i])
                )
            k += 4
        while k < len(rows):
            b0 = rows[k]
            for j in range(size):
                tile[j] += weights[b0] * np.float64(x[b0, at + j])
            k += 1
        for j in range(size):
            out[at + j] = tile[j]


def squared_norms(x: Tensor) -> Tensor:
    """As the reference, of a float32 or float64 matrix on the CPU."""
    rows, out = x.numpy(), np.empty(len(x))
    cuts = _cuts(len(rows), num_pieces(x.numel()))
    run_pieces(_squared_norms, [(rows[a:b], out[a:b]) for a, b in pairwise(cuts) if a < b])
    return torch.from_numpy(out)


def weighted_sum(x: Tensor, weights: Tensor, out: Tensor) -> None:
    """As the reference, of a float32 or float64 matrix on the CPU."""
    factors, result = weights.numpy(), out.numpy()
    rows = np.flatnonzero(factors)  # those of weight 0 are not multiplied: they may hold NaN
    cuts = [cut // TILE * TILE for cut in _cuts(len(result), num_pieces(x.numel()))]
    cuts[-1] = len(result)
    pieces = [(x.numpy(), rows, factors, result, a, b) for a, b in pairwise(cuts) if a < b]
    run_pieces(_weighted_sum, pieces)


def _cuts(total: int, count: int) -> list[int]:
    return [total * i // count for i in range(count + 1)]
