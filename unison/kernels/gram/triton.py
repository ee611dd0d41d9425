"""Squared norms from inner products of tokens, on CUDA: Σ_ts ⟨left_t, left_s⟩⟨right_t, right_s⟩.

Only tiles on and below the diagonal are computed; those below count twice. Both Grams of a tile
stay in registers: no memory grows with the square of the tokens.

[Note: two levels] A float32 accumulator loses a digit for every few hundred terms that are added to
it, and where tokens cancel these digits are all there is. So inner products are added in short runs
(`run_of` features), each run to a second accumulator: the roundings that a term meets are those of
one run and of the number of runs.
"""

# Triton's own annotations do not describe what its compiler accepts.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false

import math
import os
from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


def run_of(dtype: torch.dtype) -> int:
    """Return how many features are added at a time; tensor cores add 16 in one step."""
    return 512 if dtype.itemsize == 2 else 64


@triton.jit
def _inner(
    x, i, j, tokens, features, st, sf, PRECISION: tl.constexpr,
    RUN: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Return ⟨x_t, x_s⟩ for t in tile i and s in tile j: [BT, BT]."""
    ti = i * BT + tl.arange(0, BT)
    tj = j * BT + tl.arange(0, BT)
    k = tl.arange(0, BK)
    total = tl.zeros((BT, BT), dtype=tl.float32)
    for run in range(0, features, RUN):
        short = tl.zeros((BT, BT), dtype=tl.float32)
        for start in range(run, min(run + RUN, features), BK):
            f = start + k
            inside = (f < features)[None, :]
            a = tl.load(
                x + ti[:, None].to(tl.int64) * st + f[None, :].to(tl.int64) * sf,
                mask=(ti < tokens)[:, None] & inside, other=0.0,
            )  # fmt: skip
            b = tl.load(
                x + tj[:, None].to(tl.int64) * st + f[None, :].to(tl.int64) * sf,
                mask=(tj < tokens)[:, None] & inside, other=0.0,
            )  # fmt: skip
            if INTERPRETED:
                a, b = a.to(tl.float32), b.to(tl.float32)
            short = tl.dot(a, tl.trans(b), short, input_precision=PRECISION)
        total += short
    return total


@triton.jit
def _place_below(tile):
    """Return row and column of a tile in a lower triangle: i(i+1)/2 <= tile < (i+1)(i+2)/2."""
    # A root in float32 may be off by one.
    i = ((tl.sqrt(8.0 * tile.to(tl.float32) + 1.0) - 1.0) / 2.0).to(tl.int32)
    i = tl.where((i + 1) * (i + 2) // 2 <= tile, i + 1, i)
    i = tl.where(i * (i + 1) // 2 > tile, i - 1, i)
    return i, tile - i * (i + 1) // 2


@triton.jit
def _gram_kernel(
    left, right, squares, masses, tokens, rows, columns, num_tiles, least_left, least_right,
    slb, slt, slf, srb, srt, srf,
    PRECISION: tl.constexpr, RUN: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One tile of the lower triangle; on the diagonal also Σ_t ‖left_t‖‖right_t‖."""
    tile, sample = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i, j = _place_below(tile)
    x = _inner(left + sample * slb, i, j, tokens, rows, slt, slf, PRECISION, RUN, BT, BK)
    y = _inner(right + sample * srb, i, j, tokens, columns, srt, srf, PRECISION, RUN, BT, BK)
    at = tl.arange(0, BT)
    is_own = (at[:, None] == at[None, :]) & (i == j)
    is_token = (i == j) & (i * BT + at < tokens)
    of_left = tl.sqrt(tl.maximum(tl.sum(tl.where(is_own, x, 0.0), axis=1), 0.0)) + least_left
    of_right = tl.sqrt(tl.maximum(tl.sum(tl.where(is_own, y, 0.0), axis=1), 0.0)) + least_right
    mass = tl.where(is_token, of_left.to(tl.float64) * of_right.to(tl.float64), 0.0)
    tl.store(masses + sample * num_tiles + tile, tl.sum(mass))
    factor = tl.where(i == j, 1.0, 2.0)
    # In float64: thousands of terms, which may cancel.
    tl.store(
        squares + sample * num_tiles + tile, tl.sum(x.to(tl.float64) * y.to(tl.float64)) * factor
    )


def least_norm(features: int) -> float:
    """Return what is added to each token's norm in the mass.

    A sum of squares of very small numbers underflows in float32, by at most features · 2⁻¹²⁶. This
    is so much that the error is below 2⁻²⁶ of the product of two norms all the same.
    """
    return math.sqrt(features) * 2.0**-50


def squared_norms(left: Tensor, right: Tensor, precision: str) -> tuple[Tensor, Tensor]:
    """Return squared norms and masses of left [samples, tokens, rows] and right likewise.

    Returns:
        ‖Σ_t left_t right_tᵀ‖² and Σ_t ‖left_t‖‖right_t‖, per tile [samples, tiles], float64 and
        float32.
    """
    (batch, tokens, rows), columns = left.shape, right.shape[2]
    is_half = left.element_size() == 2
    size, depth, warps = (128, 64, 8) if is_half and tokens > 64 else (64, 32, 4)
    count = triton.cdiv(tokens, size)
    num_tiles = count * (count + 1) // 2
    squares = torch.zeros(batch, max(1, num_tiles), dtype=torch.float64, device=left.device)
    masses = torch.zeros_like(squares)
    if batch * num_tiles:
        with torch.cuda.device(left.device) if left.is_cuda else nullcontext():
            _gram_kernel[(num_tiles, batch)](
                left, right, squares, masses, tokens, rows, columns, num_tiles,
                least_norm(rows), least_norm(columns),
                *left.stride(), *right.stride(),
                PRECISION=precision, RUN=run_of(left.dtype), BT=size, BK=depth,
                num_warps=warps, num_stages=3, enable_fp_fusion=True,
            )  # fmt: skip
    return squares, masses
