"""Per-sample gradients X_b = left_bᵀ right_b of many layers, measured and added up in one launch.

[Note: many layers in one launch] A layer's clipped sum has 50 to 200 tiles, and a GPU works on 132
at a time: layer by layer, a third of it would wait for the last tiles. All layers together are a
hundred rounds, and only the last of them is not full. A table on the device says where each layer's
factors lie; every program makes descriptors of its own two of them, so that tiles are loaded by the
hardware (TMA) where there is such.

[Note: one loop] A sample has few tokens, and whoever waits for the first of them at every sample
waits as long as for the arithmetic. So the loops over samples and over their tokens (and over runs
and their features) are made one (`flatten`): loads run ahead over their ends.

Tiles are as in `unison.kernels.products` and `unison.kernels.gram`, where a layer comes alone.
"""

# Triton's own annotations do not describe what its compiler accepts.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false

import triton
import triton.language as tl

from unison.kernels.factored import table as t
from unison.kernels.gram.triton import _place_below
from unison.kernels.products.triton import INTERPRETED, _place, as_sum

WIDTH, OUT, RUN = tl.constexpr(t.WIDTH), tl.constexpr(t.OUT), tl.constexpr(t.RUN)
LEFT, RIGHT = tl.constexpr(t.LEFT), tl.constexpr(t.RIGHT)
SAMPLE, TOKEN = tl.constexpr(t.SAMPLE), tl.constexpr(t.TOKEN)
FEATURES, LEAST = tl.constexpr(t.FEATURES), tl.constexpr(t.LEAST)


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


# Not specialised: of one token, tiles that are loaded and the one that is stored would not share
# memory, and there would not be enough.
@triton.jit(do_not_specialize=["batch", "tokens"])
def weighted_kernel(
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
    pointer = tl.multiple_of(tl.load(row + OUT).to(tl.pointer_type(TOTAL)), 16)
    of_row = (columns.to(tl.int64) // 8) * 8
    out = tl.make_tensor_descriptor(pointer, [rows, columns], [of_row, 1], [BM, BN])
    if ADD:
        total += out.load([at_row, at_column])
    out.store([at_row, at_column], total)


@triton.jit
def _inner(
    side, sample, ti, tj, features, run,
    BT: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Return ⟨x_t, x_s⟩ for BT tokens from ti and from tj; [Note: two levels] in kernels/gram."""
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
def gram_kernel(
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
