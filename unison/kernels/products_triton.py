"""Per-sample matrix products on CUDA: X_b = left_bᵀ right_b, stored, squared, or added up.

[Note: the same accumulator] One function, `_product`, makes a tile of X_b in float32 registers, in
an order that depends on the tile's size alone. Three kernels use it: one stores the tile, one only
squares it, one adds w_b times it over samples. So what the first pass has measured and what the
second adds up are the same bits, and the bound on a sample's share needs no worst case over its
tokens (bounds.py, "The measured tensor"). For this all three must run with the same tiles, which
are a function of shapes and dtypes: never of an autotuner's mood.

Sums of squares leave a kernel as one number per tile, to be added in a fixed order: no float is
added atomically, and no program waits for another.

Squared norms are also made from inner products of tokens, Σ_ts ⟨left_t, left_s⟩⟨right_t, right_s⟩:
only tiles on and below the diagonal are computed, and those below count twice. Both Grams of a tile
stay in registers, so that no memory grows with the square of the tokens.

[Note: two levels] A float32 accumulator loses a digit for every few hundred terms that are added to
it, and where tokens cancel these digits are all there is. So inner products are added in short runs
(`run_of` features), each run to a second accumulator: the roundings that a term meets are those of
one run and of the number of runs.
"""

# Triton's own annotations do not describe what its compiler accepts.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false

import math
import os
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice
from triton.tools.tensor_descriptor import TensorDescriptor

from unison.kernels.available import loads_tiles, on_device_of, shared_bytes
from unison.kernels.random import ROUND_MAGIC

# The interpreter multiplies bfloat16 as if they were integers; as float32 the products are exact.
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
_SHARED_BESIDE = 2048  # bytes of shared memory beside the tiles that are loaded
MAGIC = tl.constexpr(ROUND_MAGIC)  # added and subtracted, it rounds a float64 to an integer
GROUP = tl.constexpr(8)  # tiles along rows that share their columns while these are in L2


@triton.jit
def _place(tile, rows, columns, BM: tl.constexpr, BN: tl.constexpr):
    """Return row and column of a tile's first element, neighbours in time near in memory."""
    num_m, num_n = tl.cdiv(rows, BM), tl.cdiv(columns, BN)
    in_group = GROUP * num_n
    first = (tile // in_group) * GROUP
    height = min(num_m - first, GROUP)
    m = first + (tile % in_group) % height
    n = (tile % in_group) // height
    return m * BM, n * BN


@triton.jit
def as_sum(share, DTYPE: tl.constexpr):
    """Return a sample's share as what it is added to: float32, or the nearest integers."""
    if tl.float32 == DTYPE:
        return share
    elif INTERPRETED:  # noqa: RET505 - Triton needs the branches apart
        return ((share.to(tl.float64) + MAGIC) - MAGIC).to(DTYPE)
    else:
        return libdevice.float2int_rn(share)


@triton.jit
def _load(
    x, sample, token, feature, tokens, features, sb, st, sf,
    BK: tl.constexpr, BF: tl.constexpr, TMA: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Return [BK tokens, BF features] of one sample, zeros outside."""
    if TMA:
        return x.load([sample, token, feature]).reshape(BK, BF)
    else:  # noqa: RET505 - Triton needs the branches apart
        t = token + tl.arange(0, BK)
        f = feature + tl.arange(0, BF)
        first = (tl.zeros((), tl.int64) + sample) * sb
        at = x + first + t[:, None].to(tl.int64) * st + f[None, :].to(tl.int64) * sf
        if EVEN:
            return tl.load(at)
        else:  # noqa: RET505
            return tl.load(at, mask=(t < tokens)[:, None] & (f < features)[None, :], other=0.0)


@triton.jit
def _product(
    left, right, sample, row, column, tokens, rows, columns,
    slb, slt, slf, srb, srt, srf,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    TMA_L: tl.constexpr, TMA_R: tl.constexpr, EVEN_L: tl.constexpr, EVEN_R: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Return a tile [BM, BN] of one sample's product: see [Note: the same accumulator]."""
    accumulator = tl.zeros((BM, BN), dtype=tl.float32)
    for token in range(0, tokens, BK):
        x = _load(left, sample, token, row, tokens, rows, slb, slt, slf, BK, BM, TMA_L, EVEN_L)
        y = _load(
            right, sample, token, column, tokens, columns, srb, srt, srf, BK, BN, TMA_R, EVEN_R
        )
        if INTERPRETED:
            x, y = x.to(tl.float32), y.to(tl.float32)
        accumulator = tl.dot(tl.trans(x), y, accumulator, input_precision=PRECISION)
    return accumulator


@triton.jit
def _per_sample_kernel(
    left, right, out, squares, tokens, rows, columns, num_tiles,
    slb, slt, slf, srb, srt, srf, sob,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    TMA_L: tl.constexpr, TMA_R: tl.constexpr, EVEN_L: tl.constexpr, EVEN_R: tl.constexpr,
    PRECISION: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    """One tile of one sample's product: stored if asked, and squared as it is stored."""
    sample = tl.program_id(0) // num_tiles
    tile = tl.program_id(0) % num_tiles
    row, column = _place(tile, rows, columns, BM, BN)
    value = _product(
        left, right, sample, row, column, tokens, rows, columns, slb, slt, slf, srb, srt, srf,
        BM, BN, BK, TMA_L, TMA_R, EVEN_L, EVEN_R, PRECISION,
    )  # fmt: skip
    if STORE:
        stored = value.to(out.dtype.element_ty)
        m = row + tl.arange(0, BM)
        n = column + tl.arange(0, BN)
        at = out + sample.to(tl.int64) * sob + m[:, None].to(tl.int64) * columns + n[None, :]
        tl.store(at, stored, mask=(m < rows)[:, None] & (n < columns)[None, :])
        value = stored.to(tl.float32)
    tl.store(squares + tl.program_id(0), tl.sum(value * value))


@triton.jit
def _weighted_kernel(
    left, right, weights, out, batch, tokens, rows, columns,
    slb, slt, slf, srb, srt, srf,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    TMA_L: tl.constexpr, TMA_R: tl.constexpr, EVEN_L: tl.constexpr, EVEN_R: tl.constexpr,
    PRECISION: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """One tile of Σ_b w_b X_b, samples one after the other; those of weight 0 are not read."""
    row, column = _place(tl.program_id(0), rows, columns, BM, BN)
    total = tl.zeros((BM, BN), dtype=out.dtype.element_ty)
    for sample in range(batch):
        weight = tl.load(weights + sample)
        if weight != 0.0:
            value = _product(
                left, right, sample, row, column, tokens, rows, columns,
                slb, slt, slf, srb, srt, srf,
                BM, BN, BK, TMA_L, TMA_R, EVEN_L, EVEN_R, PRECISION,
            )  # fmt: skip
            total += as_sum(weight * value, out.dtype.element_ty)
    m = row + tl.arange(0, BM)
    n = column + tl.arange(0, BN)
    at = out + m[:, None].to(tl.int64) * columns + n[None, :]
    mask = (m < rows)[:, None] & (n < columns)[None, :]
    if ADD:
        total += tl.load(at, mask=mask, other=0)
    tl.store(at, total, mask=mask)


def choose_tiles(
    rows: int, columns: int, dtype: torch.dtype, shared: int = 1 << 30
) -> dict[str, int]:
    """Return the tiles for a product: a function of its shape and dtype alone.

    Args:
        rows: Of the product.
        columns: Likewise.
        dtype: Of what is multiplied.
        shared: Bytes of shared memory that a program may have. Fewer loads are in flight where
            there is little, which changes no bit of the product.

    Returns:
        Rows BM and columns BN of a tile, tokens BK that are loaded at once, warps of a program, and
        loads in flight.
    """
    high, wide, deep, warps, stages = 64, 64, 32, 4, 3
    if dtype in (torch.bfloat16, torch.float16):
        deep = 64
        if min(rows, columns) >= 256:
            high, wide = (128, 256) if columns >= rows else (256, 128)
            warps = 8
        else:
            high, wide = (
                16 if size <= 16 else 32 if size <= 32 else 64 if size <= 64 else 128
                for size in (rows, columns)
            )
            stages = 4
    of_stage = (high + wide) * deep * dtype.itemsize
    stages = min(stages, max(1, (shared - _SHARED_BESIDE) // of_stage))
    return {"BM": high, "BN": wide, "BK": deep, "num_warps": warps, "num_stages": stages}


def _can_describe(x: Tensor) -> bool:
    """Return whether the hardware's tile loads (TMA) take a tensor [batch, tokens, features]."""
    if x.numel() == 0 or not loads_tiles(x.device):
        return False
    sizes = [stride * x.element_size() for stride in x.stride()]
    return (
        x.stride(2) == 1
        and all(size % 16 == 0 and 0 < size < 1 << 40 for size in sizes[:2])
        and x.data_ptr() % 16 == 0
    )


def _launch(
    left: Tensor, right: Tensor, precision: str, tiles: dict[str, int] | None = None
) -> tuple[list[Any], int, dict[str, Any]]:
    """Return how a product is launched.

    Returns:
        The descriptors by which tiles are loaded, or the tensors where there are none; the number
        of tiles; constants and launch options.
    """
    tokens, rows, columns = left.shape[1], left.shape[2], right.shape[2]
    if tiles is None:
        tiles = choose_tiles(rows, columns, left.dtype, shared_bytes(left.device))
    sides, has_descriptors = [], []
    for x, length in ((left, tiles["BM"]), (right, tiles["BN"])):
        has_descriptors.append(_can_describe(x))
        shape = [1, tiles["BK"], length]
        sides.append(TensorDescriptor.from_tensor(x, shape) if has_descriptors[-1] else x)
    is_even = tokens % tiles["BK"] == 0
    return (
        sides,
        triton.cdiv(rows, tiles["BM"]) * triton.cdiv(columns, tiles["BN"]),
        {
            **tiles,
            "TMA_L": has_descriptors[0],
            "TMA_R": has_descriptors[1],
            "EVEN_L": is_even and rows % tiles["BM"] == 0,
            "EVEN_R": is_even and columns % tiles["BN"] == 0,
            "PRECISION": precision,
            "enable_fp_fusion": True,  # by name: its default changes with the version
        },
    )


def per_sample(
    left: Tensor,
    right: Tensor,
    out: Tensor | None,
    precision: str,
    tiles: dict[str, int] | None = None,
) -> Tensor:
    """Make X_b = left_bᵀ right_b, store it in `out` if given, and square it.

    Args:
        left: [batch, tokens, rows].
        right: [batch, tokens, columns].
        out: [batch, rows, columns], each sample's contiguous; any dtype.
        precision: Of float32 products, `"ieee"` or `"tf32"`.
        tiles: Chosen by shape unless given.

    Returns:
        Sums of squares per tile [batch, tiles], float32.
    """
    (batch, tokens, rows), columns = left.shape, right.shape[2]
    sides, num_tiles, options = _launch(left, right, precision, tiles)
    squares = torch.empty(batch, num_tiles, dtype=torch.float32, device=left.device)
    if squares.numel() == 0:
        return squares
    with on_device_of(squares):
        _per_sample_kernel[(batch * num_tiles,)](
            *sides, squares if out is None else out, squares,
            tokens, rows, columns, num_tiles, *left.stride(), *right.stride(),
            0 if out is None else out.stride(0), STORE=out is not None, **options,
        )  # fmt: skip
    return squares


def weighted(
    left: Tensor,
    right: Tensor,
    weights: Tensor,
    out: Tensor,
    precision: str,
    *,
    add: bool,
) -> None:
    """Write Σ_b w_b X_b to `out` [rows, columns], or add it; samples of weight 0 are left out.

    In float32, or in int32: then each sample's w_b X_b is rounded to integers first.
    """
    (batch, tokens, rows), columns = left.shape, right.shape[2]
    if out.numel() == 0:
        return
    sides, num_tiles, options = _launch(left, right, precision)
    with on_device_of(out):
        _weighted_kernel[(num_tiles,)](
            *sides, weights, out, batch, tokens, rows, columns, *left.stride(), *right.stride(),
            ADD=add, **options,
        )  # fmt: skip


# --- norms from inner products of tokens ----------------------------------------------------------


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
        with on_device_of(left):
            _gram_kernel[(num_tiles, batch)](
                left, right, squares, masses, tokens, rows, columns, num_tiles,
                least_norm(rows), least_norm(columns),
                *left.stride(), *right.stride(),
                PRECISION=precision, RUN=run_of(left.dtype), BT=size, BK=depth,
                num_warps=warps, num_stages=3, enable_fp_fusion=True,
            )  # fmt: skip
    return squares, masses


# --- numbers of 11 bits ---------------------------------------------------------------------------


@triton.jit
def split_kernel(value, high, low, rows, columns, sb, st, BLOCK: tl.constexpr):
    """Float32 numbers as those of 11 bits nearest to them, and what is left: a part of one row."""
    row = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = value + (row // rows).to(tl.int64) * sb + (row % rows).to(tl.int64) * st
    x = tl.load(place + at, mask=at < columns, other=0.0)
    nearest = ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    out = row.to(tl.int64) * columns + at
    tl.store(high + out, nearest, mask=at < columns)
    tl.store(low + out, x - nearest, mask=at < columns)


def split(value: Tensor) -> tuple[Tensor, Tensor]:  # [..., rows, columns]
    """Return `value` in two parts, the first of numbers that TF32 takes as they are.

    Args:
        value: One float32 matrix, or many; columns lie side by side.
    """
    high, low = (torch.empty(value.shape, device=value.device) for _ in range(2))
    rows, columns = value.shape[-2:]
    apart = value.stride(0) if value.ndim == 3 else 0
    block = 1024
    with on_device_of(value):
        split_kernel[(value.shape[:-1].numel(), triton.cdiv(columns, block))](
            value, high, low, rows, columns, apart, value.stride(-2), BLOCK=block, num_warps=4
        )
    return high, low
