"""Per-sample gradients X_b = left_bᵀ right_b of many layers, measured and added up in one launch.

[Note: many layers in one launch] A layer's clipped sum has 50 to 200 tiles, and a GPU works on 132
at a time: layer by layer, a third of it would wait for the last tiles. All layers together are a
hundred rounds, and only the last of them is not full. A table on the device says where each layer's
factors lie; every program makes descriptors of its own two of them, so that tiles are loaded by the
hardware (TMA) where there is such.

[Note: one loop] A sample has few tokens, and whoever waits for the first of them at every sample
waits as long as for the arithmetic. So the loops over samples and over their tokens (and over runs
and their features) are made one (`flatten`): loads run ahead over their ends.

Tiles are as in products_triton.py, where a layer comes alone.
"""

# Triton's own annotations do not describe what its compiler accepts.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from unison.kernels.available import on_device_of
from unison.kernels.multi_tensor import on_device, tile_map
from unison.kernels.products_triton import (
    INTERPRETED,
    _place,
    _place_below,
    as_sum,
    least_norm,
    run_of,
)

try:
    from triton.runtime._allocation import _allocator
except ImportError:  # a Triton that keeps its allocator elsewhere
    _allocator = None

# Columns of the table of layers, all int64: each side's address and what follows, and the address
# of the sum.
LEFT, RIGHT, OUT, WIDTH = (tl.constexpr(i) for i in (0, 8, 16, 24))
# After a side's address: strides of a sample and of a token, how many features it has, steps of a
# run of features, and what is added to a token's norm, as the bits of a float64.
SAMPLE, TOKEN, FEATURES, RUN, LEAST = (tl.constexpr(i) for i in range(1, 6))


@triton.jit
def _side(row, batch, tokens, DTYPE: tl.constexpr, BT: tl.constexpr, BF: tl.constexpr):
    """Return a descriptor of one side [batch, tokens, features], and its features."""
    # The compiler believes arithmetic, not hints on what was loaded.
    pointer = tl.multiple_of(tl.load(row).to(tl.pointer_type(DTYPE)), 16)
    features = tl.load(row + FEATURES).to(tl.int32)
    of_sample = (tl.load(row + SAMPLE) // 8) * 8
    of_token = (tl.load(row + TOKEN) // 8) * 8
    side = tl.make_tensor_descriptor(
        pointer, [batch, tokens, features], [of_sample, of_token, 1], [1, BT, BF]
    )
    return side, features


@triton.jit
def _tile(side, sample, token, feature, BT: tl.constexpr, BF: tl.constexpr):
    """Return [BT tokens, BF features] of one sample, zeros outside."""
    tile = side.load([sample, token, feature]).reshape(BT, BF)
    if INTERPRETED:  # it multiplies bfloat16 as if they were integers
        tile = tile.to(tl.float32)
    return tile


# Not specialised: a kernel for all batches.
@triton.jit(do_not_specialize=["batch", "tokens"])
def _weighted_kernel(
    table, layers, first_tiles, weights, batch, tokens,
    DTYPE: tl.constexpr, TOTAL: tl.constexpr, ADD: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One tile of one layer's Σ_b w_b X_b, samples one after the other, each summed by itself.

    Their sum is float32, or int32: then each sample's w_b X_b is rounded to integers first.
    """
    layer = tl.load(layers + tl.program_id(0))
    row = table + layer * WIDTH
    left, rows = _side(row + LEFT, batch, tokens, DTYPE, BK, BM)
    right, columns = _side(row + RIGHT, batch, tokens, DTYPE, BK, BN)
    tile = tl.program_id(0) - tl.load(first_tiles + layer).to(tl.int32)
    at_row, at_column = _place(tile, rows, columns, BM, BN)

    total = tl.zeros((BM, BN), dtype=TOTAL)
    for sample in tl.range(0, batch, flatten=True):  # see [Note: one loop]
        weight = tl.load(weights + layer * batch + sample)
        value = tl.zeros((BM, BN), dtype=tl.float32)
        for token in tl.range(0, tokens, BK):
            x = _tile(left, sample, token, at_row, BK, BM)
            y = _tile(right, sample, token, at_column, BK, BN)
            value = tl.dot(tl.trans(x), y, value)
        # A sample of weight 0 is left out: it may hold NaN.
        total = tl.where(weight != 0.0, total + as_sum(weight * value, TOTAL), total)
    # From registers: nobody waits for the memory, and the multiprocessor begins its next tile.
    pointer = tl.multiple_of(tl.load(row + OUT).to(tl.pointer_type(TOTAL)), 16)
    columns = (columns // 8) * 8
    m, n = at_row + tl.arange(0, BM), at_column + tl.arange(0, BN)
    at = pointer + (m[:, None].to(tl.int64) * columns + n[None, :])
    mask = (m < rows)[:, None] & (n < columns)[None, :]
    if ADD:
        total += tl.load(at, mask=mask, other=0)
    tl.store(at, total, mask=mask)


@triton.jit
def _inner(
    side, sample, ti, tj, features, run,
    BT: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Return ⟨x_t, x_s⟩ for BT tokens from ti and from tj; see [Note: two levels]."""
    total = tl.zeros((BT, BT), dtype=tl.float32)
    for first in tl.range(0, tl.cdiv(features, run * BK), flatten=True):  # see [Note: one loop]
        short = tl.zeros((BT, BT), dtype=tl.float32)
        for step in tl.range(0, run):
            feature = (first * run + step) * BK
            x = _tile(side, sample, ti, feature, BT, BK)
            y = _tile(side, sample, tj, feature, BT, BK)
            short = tl.dot(x, tl.trans(y), short)
        total += short
    return total


@triton.jit
def _norms(gram, least, is_own, is_token):
    """Return the norm of every token, from the diagonal of its Gram matrix, a little above."""
    norms = tl.sqrt(tl.maximum(tl.sum(tl.where(is_own, gram, 0.0), axis=1), 0.0)) + least
    return tl.where(is_token, norms, 0.0).to(tl.float64)


@triton.jit(do_not_specialize=["batch", "tokens", "num_tiles"])
def _gram_kernel(
    table, parts, batch, tokens, num_tiles,
    DTYPE: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One tile of the lower triangle of one sample of one layer: parts [6, layers, batch, tiles].

    They are those of `Grams`, in its order.
    """
    program = tl.program_id(0)
    tile, sample = program % num_tiles, (program // num_tiles) % batch
    row = table + (program // (num_tiles * batch)) * WIDTH
    left, rows = _side(row + LEFT, batch, tokens, DTYPE, BT, BK)
    right, columns = _side(row + RIGHT, batch, tokens, DTYPE, BT, BK)
    i, j = _place_below(tile)
    run_left = tl.load(row + LEFT + RUN).to(tl.int32)
    run_right = tl.load(row + RIGHT + RUN).to(tl.int32)
    x = _inner(left, sample, i * BT, j * BT, rows, run_left, BT, BK)
    y = _inner(right, sample, i * BT, j * BT, columns, run_right, BT, BK)
    at = tl.arange(0, BT)
    is_own = (at[:, None] == at[None, :]) & (i == j)
    least_left = tl.load(row + LEFT + LEAST).to(tl.float64, bitcast=True).to(tl.float32)
    least_right = tl.load(row + RIGHT + LEAST).to(tl.float64, bitcast=True).to(tl.float32)
    is_token = (i == j) & (i * BT + at < tokens)
    of_left = _norms(x, least_left, is_own, is_token)
    of_right = _norms(y, least_right, is_own, is_token)
    factor = tl.where(i == j, 1.0, 2.0)
    out, step = parts + program, tl.num_programs(0).to(tl.int64)
    # In float64: thousands of terms, which may cancel.
    tl.store(out, tl.sum(x.to(tl.float64) * y.to(tl.float64)) * factor)
    tl.store(out + step, tl.sum(of_left * of_right))
    tl.store(out + 2 * step, tl.sum(of_left * of_left))
    tl.store(out + 3 * step, tl.sum(of_right * of_right))
    tl.store(out + 4 * step, (tl.sum(x * x) * factor).to(tl.float64))
    tl.store(out + 5 * step, (tl.sum(y * y) * factor).to(tl.float64))


# --- launches: tables for the kernels, and nothing that waits for the device ----------------------

_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_TOTALS = {torch.float32: tl.float32, torch.int32: tl.int32}
_ROWS, _COLUMNS, _TOKENS = 128, 256, 64  # of a tile of a sum
_STEP = 64  # features that are multiplied at a time, for Gram matrices


def _table(
    lefts: Sequence[Tensor], rights: Sequence[Tensor], outs: Sequence[Tensor] | None = None
) -> Tensor:
    """Return where the factors of all layers, and their sums, lie: on their device."""
    table = np.zeros((len(lefts), WIDTH.value), np.int64)
    for first, sides in ((LEFT.value, lefts), (RIGHT.value, rights)):
        for row, side in zip(table, sides, strict=True):
            features = side.shape[2]
            row[first] = side.data_ptr()
            row[first + SAMPLE.value : first + FEATURES.value] = side.stride()[:2]
            row[first + FEATURES.value] = features
            row[first + RUN.value] = _steps_of_run(features, side.dtype)
            row[first + LEAST.value] = np.float64(least_norm(features)).view(np.int64)
    if outs is not None:
        table[:, OUT] = [each.data_ptr() for each in outs]
    return on_device(torch.from_numpy(table), lefts[0].device)


def _steps_of_run(features: int, dtype: torch.dtype) -> int:
    """Return how many steps of features to add before the sum is added to others.

    As many as `run_of` allows, and fewer where then the last run is as long as the others.
    """
    steps = -(-features // _STEP)
    runs = -(-steps // (run_of(dtype) // _STEP))
    return -(-steps // runs)


def _allocate(size: int, alignment: int, stream: int | None) -> Tensor:
    """Return memory on the current device; torch aligns by more than any descriptor needs."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


@contextmanager
def scratch() -> Iterator[None]:
    """Let launches in this block have memory for the descriptors that programs make themselves.

    The user's own allocator is as it was afterwards. What is launched is done with the memory
    before the stream gives it to the next: torch's rule for all memory, in a CUDA graph too.
    """
    if _allocator is None:
        triton.set_allocator(_allocate)
        yield
        return
    token = _allocator.set(_allocate)
    try:
        yield
    finally:
        _allocator.reset(token)


def grams(lefts: Sequence[Tensor], rights: Sequence[Tensor]) -> Tensor:
    """See `unison.kernels.factored.grams`."""
    batch, tokens, _ = lefts[0].shape
    size, warps = (128, 8) if tokens > 64 else (64, 4)
    count = -(-tokens // size)
    num_tiles = count * (count + 1) // 2
    shape = (6, len(lefts), batch, num_tiles)
    parts = torch.empty(shape, dtype=torch.float64, device=lefts[0].device)
    with scratch(), on_device_of(parts):
        _gram_kernel[(parts[0].numel(),)](
            _table(lefts, rights), parts, batch, tokens, num_tiles,
            DTYPE=_DTYPES[lefts[0].dtype], BT=size, BK=_STEP,
            num_warps=warps, num_stages=4, enable_fp_fusion=True,
        )  # fmt: skip
    return parts.sum(3)


def weighted_sums(
    lefts: Sequence[Tensor],
    rights: Sequence[Tensor],
    weights: Tensor,
    outs: Sequence[Tensor],
    *,
    add: bool,
) -> None:
    """See `unison.kernels.factored.weighted_sums`."""
    batch, tokens, _ = lefts[0].shape
    num_tiles = tuple(
        -(-left.shape[2] // _ROWS) * -(-right.shape[2] // _COLUMNS)
        for left, right in zip(lefts, rights, strict=True)
    )
    which, first = tile_map(num_tiles, 1, weights.device)
    with scratch(), on_device_of(weights):
        _weighted_kernel[(len(which),)](
            _table(lefts, rights, outs), which, first, weights, batch, tokens,
            DTYPE=_DTYPES[lefts[0].dtype], TOTAL=_TOTALS[outs[0].dtype], ADD=add,
            BM=_ROWS, BN=_COLUMNS, BK=_TOKENS,
            num_warps=8, num_stages=3, enable_fp_fusion=True,
        )  # fmt: skip
