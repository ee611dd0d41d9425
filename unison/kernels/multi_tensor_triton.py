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
# pyright: reportAssignmentType=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false

import math
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from unison.errors import UnsupportedOperation
from unison.kernels import random
from unison.kernels.available import on_device_of
from unison.kernels.multi_tensor import AdamWStep, NoiseDraw, on_device, tile_map
from unison.kernels.products_triton import INTERPRETED
from unison.kernels.random_triton import (
    decided_steps,
    secure_numbers,
    secure_steps,
    secure_word,
    secure_words,
)

# Columns of the table, all int64.
VALUES, STRIDE, NUMEL, OUT, FIRST, SAMPLES, PARAM, MEAN, SQUARE = (
    tl.constexpr(i) for i in range(9)
)
WIDTH = tl.constexpr(9)
RECIPE = tl.constexpr(random.RECIPE_LENGTH)
MAGIC = tl.constexpr(random.ROUND_MAGIC)
TILE, BLOCKS = tl.constexpr(random.SECURE_TILE), tl.constexpr(random.SECURE_BLOCKS)
QUARTER = tl.constexpr(random.SECURE_TILE // 4)
LR, BETA1, BETA2, EPS, DECAY, STEP, ROOT, INVERSE_ROOT = (tl.constexpr(i) for i in range(8))
NUM_RATES = tl.constexpr(8)


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
    table, tensors, first_tiles, weights, batch, factor,
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
def _asked(
    row, weights, at, mask,
    VALUE: tl.constexpr, ALIGNED: tl.constexpr, AT_ONCE: tl.constexpr, IS_ONCE: tl.constexpr,
):  # fmt: skip
    """Return what a tile of the clipped sum is made of, as it is stored: up to four samples.

    Of more samples it is the sum.
    """
    values = _pointer(row, VALUES, VALUE, ALIGNED)
    if (tl.int32 == VALUE) or (tl.int64 == VALUE):
        first = tl.load(values + at, mask=mask, other=0)
        return first, first, first, first
    elif IS_ONCE:  # noqa: RET505 - Triton needs the branches apart
        stride, samples = _number(row, STRIDE, ALIGNED), tl.load(row + SAMPLES).to(tl.int32)
        first = _sample(values, weights, 0, stride, samples, at, mask)
        second, third, fourth = first, first, first
        if AT_ONCE > 1:
            second = _sample(values, weights, 1, stride, samples, at, mask)
        if AT_ONCE > 2:
            third = _sample(values, weights, 2, stride, samples, at, mask)
        if AT_ONCE > 3:
            fourth = _sample(values, weights, 3, stride, samples, at, mask)
        return first, second, third, fourth
    else:
        total = _clipped(row, weights, at, mask, VALUE, ALIGNED, QUARTER, AT_ONCE, IS_ONCE)
        return total, total, total, total


@triton.jit
def _sample(values, weights, i, stride, samples, at, mask):
    """Return a tile of a sample's gradient, as it is stored: zeros if its weight is 0."""
    weight = tl.load(weights + i, mask=i < samples, other=0.0)
    is_read = mask & (tl.zeros((QUARTER,), dtype=tl.float32) + weight != 0.0)
    return tl.load(values + i * stride + at, mask=is_read, other=0)


@triton.jit
def _total(asked, row, weights, VALUE: tl.constexpr, AT_ONCE: tl.constexpr, IS_ONCE: tl.constexpr):
    """Return a tile of the clipped sum, float64, of what was asked for: see `_weighted`."""
    if (tl.int32 == VALUE) or (tl.int64 == VALUE):
        return asked[0].to(tl.float64) * tl.load(weights).to(tl.float64)
    elif IS_ONCE:  # noqa: RET505 - Triton needs the branches apart
        samples, total = tl.load(row + SAMPLES).to(tl.int32), tl.zeros((QUARTER,), tl.float64)
        for i in tl.static_range(AT_ONCE):
            weight = tl.load(weights + i, mask=i < samples, other=0.0).to(tl.float64)
            # A product of two float32 numbers is exact, so that a fused sum rounds as any other.
            total = tl.fma(weight, asked[i].to(tl.float64), total)
        return total
    else:
        return asked[0]


@triton.jit
def _noisy(total, steps, spacing, factor, DTYPE: tl.constexpr):
    """Return a sum, rounded to the noise's grid, with its noise, times `factor`.

    A float64 near 1.5 · 2^52 spacings is a multiple of the spacing: adding that number rounds the
    sum to the grid. Taken off the noise, which is on the grid, it is gone from the total, exactly.
    """
    magic = MAGIC * spacing
    total = (total + magic) + tl.fma(steps, spacing, -magic)
    if tl.float64 != DTYPE:
        total = total.to(tl.float32)
    return (total * factor).to(DTYPE)


# --- AdamW, to the bit as torch's fused one ---------------------------------------------------


@triton.jit
def _reciprocal(x):
    """Return 1 / x, nearly."""
    if INTERPRETED:
        return 1.0 / x
    else:  # noqa: RET505 - Triton needs the branches apart
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def _inverse_root(x):
    """Return 1 / √x, nearly."""
    if INTERPRETED:
        return 1.0 / tl.sqrt(x)
    else:  # noqa: RET505 - Triton needs the branches apart
        return tl.inline_asm_elementwise(
            "rsqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def _rates(rates):
    """Return what `_adamw` takes of a row of rates, or of several."""
    return (
        tl.load(rates + LR) * tl.load(rates + DECAY), tl.load(rates + BETA1),
        tl.load(rates + BETA2), tl.load(rates + EPS), tl.load(rates + STEP),
        tl.load(rates + ROOT), tl.load(rates + INVERSE_ROOT),
    )  # fmt: skip


@triton.jit
def _adamw(param, gradient, mean, square, rates):
    """Return parameter and averages after a step of AdamW, float32: see `multi_tensor.AdamWStep`.

    A quotient and a root are nearly found, and then mended by what is left over, which a fused
    multiply-add has exactly: so they are rounded as divisions and roots are, if numbers are neither
    tiny nor huge, without the branches that those take for numbers that are.
    """
    decay, beta1, beta2, eps, step_size, correction, inverse_correction = rates
    param = tl.fma(-decay, param, param)
    mean = tl.fma(beta1, mean, tl.fma(-beta1, gradient, gradient))
    gradient = gradient * gradient
    square = tl.fma(beta2, square, tl.fma(-beta2, gradient, gradient))
    inverse = _inverse_root(square)
    root = square * inverse
    root = tl.fma(tl.fma(-root, root, square), 0.5 * inverse, root)
    root = tl.where(square < 2.0**-126, 0.0, root)  # of which the hardware takes no root
    ratio = root * inverse_correction
    ratio = tl.fma(tl.fma(-correction, ratio, root), inverse_correction, ratio)
    below, above = ratio + eps, step_size * mean
    inverse = _reciprocal(below)
    inverse = tl.fma(tl.fma(-below, inverse, 1.0), inverse, inverse)
    change = above * inverse
    change = tl.fma(tl.fma(-below, change, above), inverse, change)
    change = tl.fma(tl.fma(-below, change, above), inverse, change)
    change = tl.where(square == float("inf"), 0.0 * above, change)
    return param - change, mean, square


@triton.jit
def _state(row, at, mask, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Return a tile of parameter and both averages, as they are stored."""
    param = tl.load(_pointer(row, PARAM, DTYPE, ALIGNED) + at, mask=mask, other=0.0)
    mean = tl.load(_pointer(row, MEAN, DTYPE, ALIGNED) + at, mask=mask, other=0.0)
    square = tl.load(_pointer(row, SQUARE, DTYPE, ALIGNED) + at, mask=mask, other=0.0)
    return param, mean, square


@triton.jit
def _stored(old, new, is_kept, DTYPE: tl.constexpr):
    """Return what is stored: the old number where it is kept, else the new one, rounded."""
    if INTERPRETED or (tl.bfloat16 != DTYPE):
        return tl.where(is_kept, old, new.to(DTYPE))
    else:  # noqa: RET505 - Triton needs the branches apart
        # Two at a time are rounded, and chosen by bits: the compiler would take one by one.
        keep = tl.where(is_kept, -1, 0).to(tl.int16)
        return tl.inline_asm_elementwise(
            "{.reg .b32 t; cvt.rn.bf16x2.f32 t, $3, $2; lop3.b32 $0, $4, $1, t, 0xCA;}",
            "=r,r,r,r,r",
            [old, new, keep],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )


@triton.jit
def _take_step(
    row, rates, at, mask, state, gradient, is_kept, DTYPE: tl.constexpr, ALIGNED: tl.constexpr
):
    """Take a step of AdamW with a gradient, but for elements that are kept as they are."""
    param, mean = state[0].to(tl.float32), state[1].to(tl.float32)
    square = state[2].to(tl.float32)
    new = _adamw(param, gradient.to(tl.float32), mean, square, rates)
    # Written as they were, and not left out: a thread's stores stay wide.
    param = _stored(state[0], new[0], is_kept, DTYPE)
    mean = _stored(state[1], new[1], is_kept, DTYPE)
    square = _stored(state[2], new[2], is_kept, DTYPE)
    tl.store(_pointer(row, PARAM, DTYPE, ALIGNED) + at, param, mask=mask)
    tl.store(_pointer(row, MEAN, DTYPE, ALIGNED) + at, mean, mask=mask)
    tl.store(_pointer(row, SQUARE, DTYPE, ALIGNED) + at, square, mask=mask)


# --- noise ----------------------------------------------------------------------------------------
#
# A block of the cipher makes sixteen elements, and a thread has four of them at a time. One element
# in 400 is open: more of the cipher says what its noise is. A thread that stopped for it would hold
# up 31 others, so that open elements are put on lists, and a second kernel takes them side by side.


@triton.jit
def _list_open(bits, lists, num_lists, capacity):
    """Put elements of this program's tile on its list; of those that find no room, only the count.

    Args:
        bits: Of each thread's sixteen elements, which are open [BLOCKS].
        lists: A count for every list, and then the lists, of elements by program and place.
        num_lists: How many.
        capacity: Of each.
    """
    lane, which = tl.arange(0, BLOCKS), tl.program_id(0) % num_lists
    own = lists + num_lists + which.to(tl.int64) * capacity
    while tl.max(bits, 0) > 0:
        lowest = bits & -bits
        word = (lowest.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
        place = word // 4 * QUARTER + lane * 4 + word % 4
        at = tl.atomic_add(lists + which + lane * 0, 1, mask=bits != 0, sem="relaxed")
        entry = tl.program_id(0).to(tl.int64) * TILE + place
        tl.store(own + at, entry, mask=(bits != 0) & (at < capacity))
        bits = bits ^ lowest


@triton.jit
def noisy_kernel(
    table, recipes, tensors, first_tiles, weights, coefficients, lists, rates, batch, factor,
    recipe_stride, num_lists, capacity,
    VALUE: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr,
    AT_ONCE: tl.constexpr, IS_ONCE: tl.constexpr, HAS_SUM: tl.constexpr, ADAMW: tl.constexpr,
):  # fmt: skip
    """One tile of the clipped sum with noise, times `factor`: one over the divisor.

    The sum is rounded to the noise's grid, the noise is added exactly, in float64, and the result
    is rounded to float32 and divided ([Note: finalise] in unison/privacy/noise.py); if asked, AdamW
    takes its step with it. What is written for open elements does not count: see `open_kernel`.
    """
    program = tl.program_id(0)
    tensor = tl.load(tensors + program)
    row, rates = table + tensor * WIDTH, rates + tensor * NUM_RATES
    weights += tensor * batch
    recipe, begin = recipes + tensor * recipe_stride, _number(row, FIRST, ALIGNED)
    tile = program - tl.load(first_tiles + tensor)
    block = (begin // TILE + tile) * BLOCKS + tl.arange(0, BLOCKS)
    begin = (begin // TILE + tile) * TILE - begin  # not by %, of which the compiler knows less
    numel = _number(row, NUMEL, ALIGNED)
    out = _pointer(row, OUT, DTYPE, ALIGNED)
    lane = tl.arange(0, QUARTER)
    # So that no access is wider than what a thread has: the compiler believes arithmetic.
    at0 = begin + lane // 4 * 4 + lane % 4
    at1, at2, at3 = at0 + QUARTER, at0 + 2 * QUARTER, at0 + 3 * QUARTER
    mask0, mask1 = (at0 >= 0) & (at0 < numel), (at1 >= 0) & (at1 < numel)
    mask2, mask3 = (at2 >= 0) & (at2 < numel), (at3 >= 0) & (at3 < numel)
    # What the noise is added to is asked for before the cipher runs, and is there when it has. It
    # stays as it is till then: to compute with it would be to wait.
    if HAS_SUM:
        asked0 = _asked(row, weights, at0, mask0, VALUE, ALIGNED, AT_ONCE, IS_ONCE)
        asked1 = _asked(row, weights, at1, mask1, VALUE, ALIGNED, AT_ONCE, IS_ONCE)
        asked2 = _asked(row, weights, at2, mask2, VALUE, ALIGNED, AT_ONCE, IS_ONCE)
        asked3 = _asked(row, weights, at3, mask3, VALUE, ALIGNED, AT_ONCE, IS_ONCE)
    if ADAMW:
        state0 = _state(row, at0, mask0, DTYPE, ALIGNED)
        state1 = _state(row, at1, mask1, DTYPE, ALIGNED)
        state2 = _state(row, at2, mask2, DTYPE, ALIGNED)
        state3 = _state(row, at3, mask3, DTYPE, ALIGNED)
        numbers = _rates(rates)
    scale, spacing, distance = secure_numbers(recipe)
    w0, w1, w2, w3 = secure_words(block, recipe)
    bits = tl.zeros((BLOCKS,), dtype=tl.int32)
    for i in tl.static_range(4):
        at = at0 if i == 0 else (at1 if i == 1 else (at2 if i == 2 else at3))
        mask = mask0 if i == 0 else (mask1 if i == 1 else (mask2 if i == 2 else mask3))
        words = w0 if i == 0 else (w1 if i == 1 else (w2 if i == 2 else w3))
        steps, is_open = secure_steps(words, scale, distance, coefficients)
        total = tl.zeros((QUARTER,), dtype=tl.float64)
        if HAS_SUM:
            asked = asked0 if i == 0 else (asked1 if i == 1 else (asked2 if i == 2 else asked3))
            total = _total(asked, row, weights, VALUE, AT_ONCE, IS_ONCE)
        gradient = _noisy(total, steps, spacing, factor, DTYPE)
        tl.store(out + at, gradient, mask=mask)
        if ADAMW:
            state = state0 if i == 0 else (state1 if i == 1 else (state2 if i == 2 else state3))
            _take_step(row, numbers, at, mask, state, gradient, is_open, DTYPE, ALIGNED)
        marks = (is_open & mask).to(tl.int32) << (4 * i + lane % 4)
        bits |= tl.sum(tl.reshape(marks, (BLOCKS, 4)), 1)
    _list_open(bits, lists, num_lists, capacity)


@triton.jit
def open_kernel(
    table, recipes, tensors, first_tiles, weights, coefficients, lists, rates, batch, factor,
    recipe_stride, num_lists, capacity, num_tiles,
    VALUE: tl.constexpr, DTYPE: tl.constexpr, AT_ONCE: tl.constexpr,
    HAS_SUM: tl.constexpr, ADAMW: tl.constexpr,
):  # fmt: skip
    """What `noisy_kernel` does, for the open elements of one list.

    If there were more than it holds, for those of all tiles whose list it is.
    """
    which = tl.program_id(0)
    count = tl.load(lists + which).to(tl.int32)
    own = lists + num_lists + which.to(tl.int64) * capacity
    num_listed = count
    if count > capacity:
        num_listed, count = 0, tl.cdiv(num_tiles - which, num_lists) * TILE
    for start in range(0, count, AT_ONCE):
        i = start + tl.arange(0, AT_ONCE)
        inside, is_listed = i < count, i < num_listed
        listed = tl.load(own + i, mask=is_listed, other=0)
        entry = (which + i // TILE * num_lists).to(tl.int64) * TILE + i % TILE
        entry = tl.where(is_listed, listed, entry)
        program = tl.where(inside, entry // TILE, 0).to(tl.int32)
        tensor = tl.load(tensors + program)
        row, recipe = table + tensor * WIDTH, recipes + tensor * recipe_stride
        first = tl.load(row + FIRST)
        place = (program - tl.load(first_tiles + tensor)) * TILE + entry % TILE
        at, element = place - first % TILE, first // TILE * TILE + place
        mask = inside & (at >= 0) & (at < tl.load(row + NUMEL))
        words = secure_word(element, recipe)
        scale, spacing, distance = secure_numbers(recipe)
        is_open = secure_steps(words, scale, distance, coefficients)[1]
        steps = decided_steps(element, words, recipe, coefficients)
        mask &= is_open
        total = tl.zeros((AT_ONCE,), dtype=tl.float64)
        if HAS_SUM:
            values, weight = (
                tl.load(row + VALUES).to(tl.pointer_type(VALUE)),
                weights + tensor * batch,
            )
            for sample in range(batch):
                w = tl.load(
                    weight + sample, mask=mask & (sample < tl.load(row + SAMPLES)), other=0.0
                )
                total += _share(values + sample * tl.load(row + STRIDE), w, at, mask, AT_ONCE)
        gradient = _noisy(total, steps, spacing, factor, DTYPE)
        tl.store(tl.load(row + OUT).to(tl.pointer_type(DTYPE)) + at, gradient, mask=mask)
        if ADAMW:
            state, numbers = _state(row, at, mask, DTYPE, False), _rates(rates + tensor * NUM_RATES)
            _take_step(row, numbers, at, mask, state, gradient, mask == 0, DTYPE, False)


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
_SAMPLES_AT_ONCE = 4
_MOST_LISTS, _OPEN_AT_ONCE = 4096, 128
_MOST_ROWS = 1 << 16  # in one launch
_NUM_CHECKED = 1 << 13  # values that a device draws before its noise is used: some twenty are open
_MOST_REGISTERS = 96  # of a thread: 21 programs at a time on a multiprocessor, an eighth faster
# More elements than are open: no list overflows, and all is right if one does.
_OPEN_SHARE = 1 / 256


def _launches(
    values: Sequence[Tensor],
    outs: Sequence[Tensor] | None = None,
    starts: Sequence[int] | None = None,
    size: int = 1,
    stepped: Sequence[Sequence[Tensor]] = (),
) -> Iterator[tuple[Tensor | None, dict[str, Any], tuple[int, ...], Tensor]]:
    """Cut many tensors into launches: of one dtype each, and as aligned as the loads are wide.

    Args:
        values: X [samples, ...] of each.
        outs: Where the results go, if anywhere.
        starts: Each tensor's first element in its parameter; 0 unless given.
        size: Elements of a tile, before which elements are skipped that are not a tensor's own.
        stepped: Parameters, and both averages of AdamW, of the outputs' shapes and dtypes.

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
    for column, tensors in zip((PARAM, MEAN, SQUARE), stepped, strict=False):
        table[:, column] = [each.data_ptr() for each in tensors]
    for column in (VALUES, OUT, PARAM, MEAN, SQUARE):
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
    step: AdamWStep | None = None,
) -> None:
    """See `multi_tensor.release` and `combine`."""
    if noise is not None:
        if outs[0].is_cuda and not torch.cuda.is_current_stream_capturing():
            require_reference_noise(outs[0].device)
        _add_noise(values, weights, noise, divisor, outs, step)
        return
    # Sums and per-sample gradients may come together: a row of weights is as long as the longest.
    device, batch = values[0].device, weights.shape[1]
    for index, constants, numels, table in _launches(values, outs):
        tensors, first = tile_map(numels, _COMBINE_TILE, device)
        with on_device_of(weights):
            release_kernel[(len(tensors),)](
                table, tensors, first, weights if index is None else weights[index], batch,
                1.0 / divisor, **constants, ADD=add, TILE=_COMBINE_TILE, **_samples_of(batch),
                num_warps=8, enable_fp_fusion=False,
            )  # fmt: skip


def _samples_of(batch: int) -> dict[str, Any]:
    at_once = max(1, min(batch, _SAMPLES_AT_ONCE))
    return {"AT_ONCE": at_once, "IS_ONCE": batch <= _SAMPLES_AT_ONCE}


def _add_noise(
    values: Sequence[Tensor],
    weights: Tensor | None,
    noise: NoiseDraw,
    divisor: float,
    outs: Sequence[Tensor],
    step: AdamWStep | None = None,
) -> None:
    """Write sums with noise, or noise alone where there are no weights; and take AdamW's steps."""
    device, batch = outs[0].device, 0 if weights is None else weights.shape[1]
    all_recipes, starts = noise
    stepped = () if step is None else (step.params, step.means, step.squares)
    coefficients = random.kernel_table(random.COARSE, device)
    for index, constants, numels, table in _launches(values, outs, starts, TILE.value, stepped):
        tensors, first = tile_map(numels, TILE.value, device)
        num_lists = min(_MOST_LISTS, len(tensors))
        expected = -(-len(tensors) // num_lists) * TILE.value * _OPEN_SHARE
        capacity = -(-int(expected + 8 * expected**0.5 + 32) // 16) * 16
        lists = torch.empty(num_lists * (1 + capacity), dtype=torch.int64, device=device)
        lists[:num_lists] = 0
        rows = [all_recipes, weights, None if step is None else step.rates]
        if index is not None:
            rows = [x if x is None or len(x) == 1 else x[index] for x in rows]
        recipes, own_weights, rates = (x if x is not None else table for x in rows)
        given = (
            table, recipes, tensors, first, own_weights, coefficients, lists, rates, batch,
            1.0 / divisor, 0 if len(recipes) == 1 else RECIPE.value, num_lists, capacity,
        )  # fmt: skip
        options = constants | {"HAS_SUM": weights is not None, "ADAMW": step is not None}
        with on_device_of(outs[0]):
            noisy_kernel[(len(tensors),)](
                *given, **options, **_samples_of(batch), num_warps=1, maxnreg=_MOST_REGISTERS,
                enable_fp_fusion=False,
            )  # fmt: skip
            del options["ALIGNED"]
            open_kernel[(num_lists,)](
                *given, len(tensors), **options, AT_ONCE=_OPEN_AT_ONCE, num_warps=4,
                enable_fp_fusion=False,
            )  # fmt: skip
        if index is not None and len(recipes) > 1:
            recipes.zero_()  # a copy: the key does not stay behind in device memory


@cache
def require_reference_noise(device: torch.device) -> None:
    """Draw some noise once on a device, and compare it with what plain torch draws.

    Whoever compiled the kernels wrong would take privacy away, and no loss would tell.

    Raises:
        UnsupportedOperation: The bits differ.
    """
    floats = random.secure_floats(0.7, 2.0**-20)
    kind = random.Distribution.SECURE_NORMAL
    recipe = random.Recipe(random.Cipher.CHACHA20, tuple(range(10)), kind, floats)
    expected, found = torch.empty(_NUM_CHECKED), torch.empty(1, _NUM_CHECKED, device=device)
    random.fill_reference(expected, recipe, torch.tensor([5]), expected.numel())
    noise = recipe.pack()[None].to(device), [5]
    _add_noise([found[None, 0]], None, noise, 1.0, [found[0]])
    differ = int((found[0].cpu() != expected).sum())
    if differ:
        raise UnsupportedOperation(
            f"Triton {triton.__version__} on {device} draws other noise than plain torch: {differ} "
            f"of {expected.numel()} values differ, and privacy would not hold. Use another release "
            "of Triton, or train on the CPU"
        )


def draw_rows(out: Tensor, recipe: Tensor, starts: Sequence[int]) -> None:
    """Fill rows with secure normals, each from a number on in the same stream.

    Args:
        out: [rows, elements], float32 or float64.
        recipe: Of the stream; zeros afterwards, wherever it is.
        starts: The first of each row.
    """
    if out.is_cuda and not torch.cuda.is_current_stream_capturing():
        require_reference_noise(out.device)
    recipes = recipe.to(out.device, non_blocking=True)[None]
    if recipes.device != recipe.device:
        recipe.zero_()  # it holds the key
    for first in range(0, len(out), _MOST_ROWS):
        rows, some = out[first : first + _MOST_ROWS], starts[first : first + _MOST_ROWS]
        _add_noise(rows.unsqueeze(1).unbind(), None, (recipes, some), 1.0, rows.unbind())
    recipes.zero_()  # in stream order: the key does not stay behind in device memory


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
