"""Gradients of many parameters: squared, combined and released, in one launch each.

[Note: the measured tensor] X_b, the gradient of sample b with respect to a parameter, lies in
memory as it was computed, in bfloat16 or float32. `squares` reads these very numbers, and `combine`
adds c_b times these very numbers. How X_b was rounded when it was made is of no concern to the
bound on the sample's share; only the roundings of the two sums are (bounds.py).

Every sum has a fixed order: a tile's by the layout of its registers, a tensor's over its tiles in
float64, samples one after the other.
"""

# Triton's own annotations do not describe what its compiler accepts.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from unison.kernels import random
from unison.kernels.available import on_device_of
from unison.kernels.multi_tensor import NoiseDraw, on_device, tile_map
from unison.kernels.random_triton import decided_steps, secure_steps, secure_words

# Columns of the table, all int64.
VALUES, STRIDE, NUMEL, OUT, FIRST, SAMPLES = (tl.constexpr(i) for i in range(6))
WIDTH = tl.constexpr(6)
RECIPE, FLOATS_AT = tl.constexpr(random.RECIPE_LENGTH), tl.constexpr(random.FLOATS_AT)
MAGIC, PER_BLOCK = tl.constexpr(random.ROUND_MAGIC), tl.constexpr(random.SECURE_PER_BLOCK)


@triton.jit
def _number(row, column, ALIGNED: tl.constexpr):
    """Return a count of elements from the table; if aligned, a multiple of 8.

    The compiler believes arithmetic, not hints on what was loaded: else it would load one by one.
    """
    number = tl.load(row + column)
    if ALIGNED:
        number = (number // 8) * 8
    return number


@triton.jit
def _pointer(row, column, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Return an address from the table; if aligned, a multiple of 16 bytes."""
    pointer = tl.load(row + column).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _values(row, sample, at, mask, VALUE: tl.constexpr, ALIGNED: tl.constexpr):
    """Return elements of one sample's gradient, float32."""
    first = sample * _number(row, STRIDE, ALIGNED)
    values = _pointer(row, VALUES, VALUE, ALIGNED) + first
    return tl.load(values + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def squares_kernel(
    table, tensors, first_tiles, out, num_tiles,
    VALUE: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Σ x² of one tile of one sample: out [samples, tiles]."""
    program, sample = tl.program_id(0), tl.program_id(1).to(tl.int64)
    tensor = tl.load(tensors + program)
    row = table + tensor * WIDTH
    at = (program - tl.load(first_tiles + tensor)) * TILE + tl.arange(0, TILE)
    x = _values(row, sample, at, at < _number(row, NUMEL, ALIGNED), VALUE, ALIGNED)
    tl.store(out + sample * num_tiles + program, tl.sum(x * x))


@triton.jit
def total_kernel(parts, first_tiles, out, num_tensors, num_tiles, BLOCK: tl.constexpr):
    """Add a tensor's tiles up in float64: out [tensors, samples]."""
    tensor, sample = tl.program_id(0), tl.program_id(1).to(tl.int64)
    begin = tl.load(first_tiles + tensor)
    end = tl.load(first_tiles + tensor + 1, mask=tensor + 1 < num_tensors, other=num_tiles)
    total = tl.zeros((BLOCK,), dtype=tl.float64)
    for start in range(begin, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        part = tl.load(parts + sample * num_tiles + at, mask=at < end, other=0.0)
        total += part.to(tl.float64)
    tl.store(out + tensor * tl.num_programs(1) + sample, tl.sum(total))


@triton.jit
def _share(values, weight, at, mask, TILE: tl.constexpr):
    """Return w_b X_b of a tile, float64: exact, of two float32 numbers."""
    # A sample of weight 0 is not read: it may hold NaN, or not be there.
    is_read = mask & (tl.zeros((TILE,), dtype=tl.float32) + weight != 0.0)
    return weight.to(tl.float64) * tl.load(values + at, mask=is_read, other=0).to(tl.float64)


@triton.jit
def _weighted(
    values, stride, samples, weights, at, mask,
    TILE: tl.constexpr, AT_ONCE: tl.constexpr, IS_ONCE: tl.constexpr,
):  # fmt: skip
    """Return Σ_b w_b X_b of a tile, samples one after the other, float64.

    Some are read at once: a tile of one sample is too little to be waited for by itself. If that
    is all of them there is no loop, and the compiler may put their loads where it likes.
    """
    total = tl.zeros((TILE,), dtype=tl.float64)
    if IS_ONCE:
        total = _with_some(total, 0, values, stride, samples, weights, at, mask, TILE, AT_ONCE)
    else:
        for first in range(0, samples, AT_ONCE):
            total = _with_some(
                total, first, values, stride, samples, weights, at, mask, TILE, AT_ONCE
            )
    return total


@triton.jit
def _with_some(
    total, first, values, stride, samples, weights, at, mask,
    TILE: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Return a total with the shares of the next AT_ONCE samples, or of as many as there are."""
    for i in tl.static_range(AT_ONCE):
        sample = first + i
        weight = tl.load(weights + sample, mask=sample < samples, other=0.0)
        total += _share(values + sample * stride, weight, at, mask, TILE)
    return total


@triton.jit
def _clipped(
    row, weights, at, mask,
    VALUE: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr,
    AT_ONCE: tl.constexpr, IS_ONCE: tl.constexpr,
):  # fmt: skip
    """Return a tile of the clipped sum Σ_b c_b X_b, float64."""
    values = _pointer(row, VALUES, VALUE, ALIGNED)
    if (tl.int32 == VALUE) or (tl.int64 == VALUE):  # a sum in units of its weight
        total = _share(values, tl.load(weights), at, mask, TILE)
    else:
        stride, samples = _number(row, STRIDE, ALIGNED), tl.load(row + SAMPLES).to(tl.int32)
        total = _weighted(values, stride, samples, weights, at, mask, TILE, AT_ONCE, IS_ONCE)
    return total


@triton.jit
def release_kernel(
    table, recipes, tensors, first_tiles, weights, coefficients, batch, factor,
    VALUE: tl.constexpr, DTYPE: tl.constexpr, ADD: tl.constexpr, ALIGNED: tl.constexpr,
    TILE: tl.constexpr, AT_ONCE: tl.constexpr, IS_ONCE: tl.constexpr,
):  # fmt: skip
    """One tile of the clipped sum, times `factor`.

    That is one over the divisor, or over the spacing of a grid on which it is rounded to integers.
    """
    program = tl.program_id(0)
    tensor = tl.load(tensors + program)
    row = table + tensor * WIDTH
    at = (program - tl.load(first_tiles + tensor)) * TILE + tl.arange(0, TILE)
    mask = at < _number(row, NUMEL, ALIGNED)
    weights += tensor * batch
    total = _clipped(row, weights, at, mask, VALUE, ALIGNED, TILE, AT_ONCE, IS_ONCE)
    out = _pointer(row, OUT, DTYPE, ALIGNED)
    if (tl.int32 == DTYPE) or (tl.int64 == DTYPE):
        made = ((total * factor + MAGIC) - MAGIC).to(DTYPE)
        if ADD:
            made += tl.load(out + at, mask=mask, other=0)
    else:
        if ADD:
            total += tl.load(out + at, mask=mask, other=0.0).to(tl.float64)
        if tl.float64 != DTYPE:
            total = total.to(tl.float32)
        made = (total * factor).to(DTYPE)
    tl.store(out + at, made, mask=mask)


@triton.jit
def _noisy(total, steps, spacing, factor, DTYPE: tl.constexpr):
    """Return a sum, rounded to the noise's grid, with its noise, times `factor`.

    A float64 near 1.5 · 2^52 spacings is a multiple of the spacing: adding that number rounds the
    sum to the grid. Taken off the noise, which is on the grid, it is gone from the total, exactly.
    """
    magic = MAGIC * spacing
    total = (total + magic) + (steps * spacing - magic)
    if tl.float64 != DTYPE:
        total = total.to(tl.float32)
    return (total * factor).to(DTYPE)


@triton.jit
def _decide(
    candidates, begin, first, row, weights, recipe, coefficients, factor,
    VALUE: tl.constexpr, DTYPE: tl.constexpr, AT_ONCE: tl.constexpr, IS_ONCE: tl.constexpr,
):  # fmt: skip
    """Write those elements again whose noise is open, one after the other.

    Args:
        candidates: Which they are, and -1 for those that are not.
        begin: Where their tile begins, in this tensor.
        first: The same in the stream of noise.
        row: Of the table.
        weights: Of the tensor's samples.
        recipe: Of its noise.
        coefficients: See `decided_steps`.
        factor: See `noisy_kernel`, as all others.
        VALUE: Of the sums.
        DTYPE: Of the output.
        AT_ONCE: See `_weighted`.
        IS_ONCE: The same.
    """
    spacing = tl.load(recipe + FLOATS_AT + 1).to(tl.float64, bitcast=True)
    last = tl.max(candidates, 0)
    while last >= 0:
        at = begin + last + tl.arange(0, 1)
        total = _clipped(row, weights, at, at >= 0, VALUE, False, 1, AT_ONCE, IS_ONCE)
        steps = decided_steps(first + last, recipe, coefficients)
        out = _pointer(row, OUT, DTYPE, False)
        tl.store(out + at, _noisy(total, steps, spacing, factor, DTYPE))
        last = tl.max(tl.where(candidates < last, candidates, -1), 0)


@triton.jit
def noisy_kernel(
    table, recipes, tensors, first_tiles, weights, coefficients, batch, factor,
    VALUE: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr,
    TILE: tl.constexpr, AT_ONCE: tl.constexpr, IS_ONCE: tl.constexpr,
):  # fmt: skip
    """One tile of the clipped sum with noise, times `factor`: one over the divisor.

    The sum is rounded to the noise's grid, the noise is added exactly, in float64, and the result
    is rounded to float32 and divided ([Note: finalise] in unison/privacy/noise.py). A block of the
    cipher makes twelve elements, and a thread has four of them at a time.
    """
    program = tl.program_id(0)
    tensor = tl.load(tensors + program)
    row = table + tensor * WIDTH
    weights += tensor * batch
    recipe, begin = recipes + tensor * RECIPE, _number(row, FIRST, ALIGNED)
    tile = program - tl.load(first_tiles + tensor)
    block = (begin // TILE + tile) * (TILE // PER_BLOCK)
    lane = tl.arange(0, TILE // 3)
    place = (lane // 4) * PER_BLOCK + lane % 4
    begin = tile * TILE - begin % TILE
    numel = _number(row, NUMEL, ALIGNED)
    spacing = tl.load(recipe + FLOATS_AT + 1).to(tl.float64, bitcast=True)
    out = _pointer(row, OUT, DTYPE, ALIGNED)
    at0, at1, at2 = begin + place, begin + 4 + place, begin + 8 + place
    mask0 = (at0 >= 0) & (at0 < numel)
    mask1 = (at1 >= 0) & (at1 < numel)
    mask2 = (at2 >= 0) & (at2 < numel)
    # What the noise is added to is asked for before the cipher runs, and is there when it has.
    total0 = _clipped(row, weights, at0, mask0, VALUE, ALIGNED, TILE // 3, AT_ONCE, IS_ONCE)
    total1 = _clipped(row, weights, at1, mask1, VALUE, ALIGNED, TILE // 3, AT_ONCE, IS_ONCE)
    total2 = _clipped(row, weights, at2, mask2, VALUE, ALIGNED, TILE // 3, AT_ONCE, IS_ONCE)
    w0, w1, w2, shared = secure_words(block + tl.arange(0, TILE // PER_BLOCK), recipe)
    steps, is_open = secure_steps(w0, shared, recipe, coefficients)
    tl.store(out + at0, _noisy(total0, steps, spacing, factor, DTYPE), mask=mask0)
    open0 = tl.where(is_open & mask0, place, -1)
    steps, is_open = secure_steps(w1, shared << 9, recipe, coefficients)
    tl.store(out + at1, _noisy(total1, steps, spacing, factor, DTYPE), mask=mask1)
    open1 = tl.where(is_open & mask1, place, -1)
    steps, is_open = secure_steps(w2, shared << 18, recipe, coefficients)
    tl.store(out + at2, _noisy(total2, steps, spacing, factor, DTYPE), mask=mask2)
    open2 = tl.where(is_open & mask2, place, -1)
    if tl.max(tl.maximum(tl.maximum(open0, open1), open2), 0) >= 0:
        tl.debug_barrier()  # what is decided here is written after what is written above
        for i in tl.static_range(3):
            candidates = open0 if i == 0 else (open1 if i == 1 else open2)
            _decide(
                candidates, begin + 4 * i, block * PER_BLOCK + 4 * i, row, weights, recipe,
                coefficients, factor, VALUE, DTYPE, AT_ONCE, IS_ONCE,
            )  # fmt: skip


# --- launches: tables for the kernels, and nothing that waits for the device ----------------------

_DTYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float64: tl.float64,
    torch.int32: tl.int32,
    torch.int64: tl.int64,
}
_SQUARE_TILE, _COMBINE_TILE = 8192, 4096
_NOISY_TILE = 384  # one block of the cipher to each thread of a single warp
_SAMPLES_AT_ONCE = 4


def _launches(
    values: Sequence[Tensor],
    outs: Sequence[Tensor] | None = None,
    starts: Sequence[int] | None = None,
    size: int = 1,
) -> Iterator[tuple[Tensor | None, dict[str, Any], tuple[int, ...], Tensor]]:
    """Cut many tensors into launches: of one dtype each, and as aligned as the loads are wide.

    Args:
        values: X [samples, ...] of each.
        outs: Where the results go, if anywhere.
        starts: Each tensor's first element in its parameter; 0 unless given.
        size: Elements of a tile, before which elements are skipped that are not a tensor's own.

    Yields:
        Which of all tensors they are, or None for all; what a kernel is compiled for (VALUE,
        ALIGNED and, with outputs, DTYPE); elements of each sample, with those skipped before its
        first tile; and the table.
    """
    table = np.zeros((len(values), WIDTH.value), np.int64)
    shapes = [each.shape for each in values]
    table[:, VALUES] = [each.data_ptr() for each in values]
    table[:, STRIDE] = [each.stride(0) for each in values]
    table[:, NUMEL] = [math.prod(shape[1:]) for shape in shapes]
    table[:, SAMPLES] = [shape[0] for shape in shapes]
    table[table[:, SAMPLES] <= 1, STRIDE] = 0
    if outs is not None:
        table[:, OUT] = [each.data_ptr() for each in outs]
    if starts is not None:
        table[:, FIRST] = starts
    is_aligned = (table[:, NUMEL] | table[:, STRIDE] | table[:, FIRST]) % 8 == 0
    for column in (VALUES, OUT):
        is_aligned &= table[:, column] % 16 == 0
    made = values if outs is None else outs
    dtypes = [(a.dtype, b.dtype) for a, b in zip(values, made, strict=True)]
    kinds = list(zip(dtypes, is_aligned.tolist(), strict=True))
    device = values[0].device
    for (dtype, out_dtype), aligned in dict.fromkeys(kinds):
        which = [i for i, kind in enumerate(kinds) if kind == ((dtype, out_dtype), aligned)]
        constants = {"VALUE": _DTYPES[dtype], "ALIGNED": aligned}
        if outs is not None:
            constants["DTYPE"] = _DTYPES[out_dtype]
        index = None if len(which) == len(values) else on_device(which, device)
        rows = table[which]
        numels = tuple((rows[:, NUMEL] + rows[:, FIRST] % size).tolist())
        yield index, constants, numels, on_device(torch.from_numpy(rows), device)


def squares(values: Sequence[Tensor]) -> Tensor:
    """See `multi_tensor.squares`."""
    device, batch = values[0].device, values[0].shape[0]
    out = torch.empty(len(values), batch, dtype=torch.float64, device=device)
    for index, constants, numels, table in _launches(values) if batch else ():
        num = len(numels)
        tensors, first = tile_map(numels, _SQUARE_TILE, device)
        num_tiles = len(tensors)
        parts = torch.empty(batch, num_tiles, device=device)
        totals = out if index is None else out.new_empty(num, batch)
        with on_device_of(out):
            squares_kernel[(num_tiles, batch)](
                table, tensors, first, parts, num_tiles,
                **constants, TILE=_SQUARE_TILE, num_warps=8, enable_fp_fusion=True,
            )  # fmt: skip
            total_kernel[(num, batch)](
                parts, first, totals, num, num_tiles,
                BLOCK=256, num_warps=4, enable_fp_fusion=True,
            )  # fmt: skip
        if index is not None:
            out.index_copy_(0, index, totals)
    return out


def release(
    values: Sequence[Tensor],
    weights: Tensor,
    noise: NoiseDraw | None,
    divisor: float,
    outs: Sequence[Tensor],
    *,
    add: bool = False,
) -> None:
    """See `multi_tensor.release` and `combine`."""
    # Sums and per-sample gradients may come together: a row of weights is as long as the longest.
    device, batch = values[0].device, weights.shape[1]
    size = _COMBINE_TILE if noise is None else _NOISY_TILE
    all_recipes, starts = (weights, None) if noise is None else noise
    for index, constants, numels, table in _launches(values, outs, starts, size):
        tensors, first = tile_map(numels, size, device)
        recipes = all_recipes if noise is None or index is None else all_recipes[index]
        given = (
            table, recipes, tensors, first, weights if index is None else weights[index],
            random.kernel_table(random.COARSE, device), batch, 1.0 / divisor,
        )  # fmt: skip
        options = constants | {
            "TILE": size,
            "AT_ONCE": max(1, min(batch, _SAMPLES_AT_ONCE)),
            "IS_ONCE": batch <= _SAMPLES_AT_ONCE,
        }
        with on_device_of(weights):
            if noise is None:
                release_kernel[(len(tensors),)](
                    *given, **options, ADD=add, num_warps=8, enable_fp_fusion=False
                )
            else:
                noisy_kernel[(len(tensors),)](
                    *given, **options, num_warps=1, enable_fp_fusion=False
                )
        if noise is not None and index is not None:
            recipes.zero_()  # a copy: the key does not stay behind in device memory


# --- sums over tokens, for biases and for the gain and the offset of a norm -----------------------
#
# One pass over x and g. The normalised input is made again from the input, row by row, in float32;
# nothing of the size of the input is written. A program adds a few tokens of one sample; their sums
# are added in order.

_TOKENS, _ROWS = 16, 4  # of a program, and of one step of it
_COLUMNS = 32  # of a program that adds columns up


@triton.jit
def _add_tokens(
    x, g, place, apart, part, tokens, features, sxt, sgt, eps,
    CENTRED: tl.constexpr, OFFSET: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
):  # fmt: skip
    """Write the sums over a few tokens of a sample that begins at x and g.

    Those for the offset are written `apart` elements behind those for the gain.
    """
    at = tl.arange(0, FEATURES)
    inside = at < features
    gain = tl.zeros((FEATURES,), dtype=tl.float32)
    offset = tl.zeros((FEATURES,), dtype=tl.float32)
    for step in tl.static_range(TOKENS // ROWS):
        token = part * TOKENS + step * ROWS + tl.arange(0, ROWS)
        mask = (token < tokens)[:, None] & inside[None, :]
        rows = x + token[:, None].to(tl.int64) * sxt + at[None, :]
        row = tl.load(rows, mask=mask, other=0.0).to(tl.float32)  # [ROWS, FEATURES]
        gradients = g + token[:, None].to(tl.int64) * sgt + at[None, :]
        value = tl.load(gradients, mask=mask, other=0.0).to(tl.float32)
        if CENTRED:
            row = tl.where(mask, row - (tl.sum(row, axis=1) / features)[:, None], 0.0)
        variance = tl.sum(row * row, axis=1) / features
        scaled = row * tl.rsqrt(variance + eps)[:, None]
        # Past the last token all is 0, and 0 · rsqrt(0) is not: eps may be 0.
        gain += tl.sum(tl.where(mask, value * scaled, 0.0), axis=0)
        if OFFSET:
            offset += tl.sum(value, axis=0)
    tl.store(place + at, gain, mask=inside)
    if OFFSET:
        tl.store(place + apart + at, offset, mask=inside)


@triton.jit
def _sums_kernel(
    x, g, out, tokens, features, sxb, sxt, sgb, sgt, eps, num_parts,
    CENTRED: tl.constexpr, OFFSET: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
):  # fmt: skip
    """Sums over a few tokens of one sample: out [1 or 2, samples, parts, features]."""
    part = tl.program_id(0)
    sample, num_samples = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    place = out + (sample * num_parts + part) * features
    apart = num_samples.to(tl.int64) * num_parts * features
    _add_tokens(
        x + sample * sxb, g + sample * sgb, place, apart, part, tokens, features, sxt, sgt, eps,
        CENTRED, OFFSET, TOKENS, ROWS, FEATURES,
    )  # fmt: skip


def norm_sums(x: Tensor, g: Tensor, eps: float, *, is_centred: bool, has_offset: bool) -> Tensor:
    """See `unison.kernels.multi_tensor.norm_sums`."""
    batch, tokens, features = x.shape
    count, num_parts = 2 if has_offset else 1, -(-tokens // _TOKENS)
    if batch * num_parts * features == 0:
        return x.new_zeros(count, batch, features, dtype=torch.float32)
    parts = x.new_empty(count * batch, num_parts, features, dtype=torch.float32)
    size = 1 << (features - 1).bit_length()
    with on_device_of(x):
        _sums_kernel[(num_parts, batch)](
            x, g, parts, tokens, features, *x.stride()[:2], *g.stride()[:2], float(eps), num_parts,
            CENTRED=is_centred, OFFSET=has_offset, TOKENS=_TOKENS, ROWS=_ROWS, FEATURES=size,
            num_warps=max(1, min(8, size // 128)), enable_fp_fusion=True,
        )  # fmt: skip
    return column_sums(parts).view(count, batch, features)


@triton.jit
def _add_columns(
    g, out, at, tokens, features, sgt,
    TOKENS: tl.constexpr, STEPS: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """Write Σ_t g_t of a few features of the sample that begins at g."""
    inside = at < features
    # Threads keep sums of their own tokens to the end: one exchange between them, not one a step.
    total = tl.zeros((TOKENS, FEATURES), dtype=tl.float32)
    for first in range(0, tokens, TOKENS * STEPS):
        for step in tl.static_range(STEPS):  # loads that do not wait for each other
            token = first + step * TOKENS + tl.arange(0, TOKENS)
            mask = (token < tokens)[:, None] & inside[None, :]
            places = g + token[:, None].to(tl.int64) * sgt + at[None, :]
            total += tl.load(places, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at, tl.sum(total, axis=0), mask=inside)


@triton.jit
def _columns_kernel(
    g, out, tokens, features, sgb, sgt,
    TOKENS: tl.constexpr, STEPS: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """Σ_t g_t of a few features of one sample: out [samples, features]."""
    sample = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    place = out + sample * features
    _add_columns(g + sample * sgb, place, at, tokens, features, sgt, TOKENS, STEPS, FEATURES)


def column_sums(g: Tensor) -> Tensor:
    """Return Σ_t g_t of g [samples, tokens, features]: [samples, features], float32."""
    batch, tokens, features = g.shape
    out = g.new_empty(batch, features, dtype=torch.float32)
    is_short = tokens <= 32
    if out.numel():
        with on_device_of(g):
            _columns_kernel[(-(-features // _COLUMNS), batch)](
                g, out, tokens, features, *g.stride()[:2],
                TOKENS=32 if is_short else 128, STEPS=1 if is_short else 4,
                FEATURES=_COLUMNS, num_warps=2 if is_short else 8, enable_fp_fusion=True,
            )  # fmt: skip
    return out
