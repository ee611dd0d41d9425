"""Random fills and dropout for CUDA in Triton, bit-equal to the reference in random.py.

One program handles a tile of cipher blocks of one row and all their words. Words are interleaved in
registers, so that a thread owns consecutive elements and stores them wide. The kernels are compiled
with `enable_fp_fusion=False`: a fused multiply-add rounds once where the definition rounds twice,
and would change one float32 in about 10^8. Secure normals are fused where it says so: their bits do
not come from roundings.

Every number travels in one small tensor. As scalar arguments, 32-bit key words would make Triton
compile variants by their divisibility, and Python floats would arrive as float32.
"""

# Triton's own annotations do not describe what its compiler accepts.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportAssignmentType=false

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from unison.kernels import random
from unison.kernels.available import on_device_of
from unison.kernels.random import (
    COARSE,
    ORDINARY,
    SECURE,
    Cipher,
    Distribution,
    Recipe,
    kernel_table,
)

PM0, PM1 = tl.constexpr(random.PHILOX_M0), tl.constexpr(random.PHILOX_M1)
PW0, PW1 = tl.constexpr(random.PHILOX_W0), tl.constexpr(random.PHILOX_W1)
C0, C1, C2, C3 = (tl.constexpr(c) for c in random.CHACHA_CONSTANTS)
FLOATS_AT, INTS_AT = tl.constexpr(random.FLOATS_AT), tl.constexpr(random.INTS_AT)
SHIFT, FRACTION = tl.constexpr(SECURE.segment_shift), tl.constexpr(SECURE.fraction_mask)
ONE, MID = tl.constexpr(random.ONE_BITS), tl.constexpr(SECURE.middle)  # ORDINARY's, too
ORDINARY_OFFSET = tl.constexpr(ORDINARY.segment_offset)
SECURE_OFFSET = tl.constexpr(SECURE.segment_offset)
ORDINARY_SEGMENTS = tl.constexpr(ORDINARY.num_segments)
ORDINARY_DEGREE = tl.constexpr(ORDINARY.num_coefficients - 1)
SECURE_SEGMENTS = tl.constexpr(SECURE.num_segments)
SECURE_DEGREE = tl.constexpr(SECURE.num_coefficients - 1)
COARSE_SHIFT, COARSE_MID = tl.constexpr(COARSE.segment_shift), tl.constexpr(COARSE.middle)
COARSE_FRACTION = tl.constexpr(COARSE.fraction_mask)
COARSE_OFFSET = tl.constexpr(random.COARSE_OFFSET)
SECURE_AT = tl.constexpr(random.SECURE_AT)
LEAST, TAILS_AT = tl.constexpr(2.0**SECURE.first_octave), tl.constexpr(random.TAILS_AT)
TAILS = tl.constexpr(random.NUM_TAILS)
TAIL_DEGREE = tl.constexpr(random.NUM_TAIL_COEFFICIENTS - 1)
TAILS_PER_UNIT, CUT = tl.constexpr(float(random.TAIL_STEPS)), tl.constexpr(random.SPLIT)
MORE, MAGIC = tl.constexpr(random.MORE_BLOCKS), tl.constexpr(random.ROUND_MAGIC)
NEAR = tl.constexpr(random.NEAR)
SECURE_TILE, SECURE_BLOCKS = tl.constexpr(random.SECURE_TILE), tl.constexpr(random.SECURE_BLOCKS)
UNIFORM24, UNIFORM53, NORMAL, TRUNCATED, _, BERNOULLI = (
    tl.constexpr(int(each)) for each in list(Distribution)[1:7]
)


@triton.jit
def _real(numbers, i):
    return tl.load(numbers + FLOATS_AT + i).to(tl.float64, bitcast=True)


@triton.jit
def _philox(block, numbers):
    k0 = tl.load(numbers + 2).to(tl.uint32)
    k1 = tl.load(numbers + 3).to(tl.uint32)
    c0 = block.to(tl.uint32)
    c1 = (block >> 32).to(tl.uint32)
    c2 = tl.zeros_like(c0) + tl.load(numbers + 4).to(tl.uint32)
    c3 = tl.zeros_like(c0) + tl.load(numbers + 5).to(tl.uint32)
    for _ in tl.static_range(10):
        p0 = c0.to(tl.uint64) * PM0
        p1 = c2.to(tl.uint64) * PM1
        c0 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c1 = p1.to(tl.uint32)
        c2 = (p0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c3 = p0.to(tl.uint32)
        k0 = (k0.to(tl.uint64) + PW0).to(tl.uint32)
        k1 = (k1.to(tl.uint64) + PW1).to(tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def _quarter_round(a, b, c, d):
    a = a + b
    d = d ^ a
    d = (d << 16) | (d >> 16)
    c = c + d
    b = b ^ c
    b = (b << 12) | (b >> 20)
    a = a + b
    d = d ^ a
    d = (d << 8) | (d >> 24)
    c = c + d
    b = b ^ c
    b = (b << 7) | (b >> 25)
    return a, b, c, d


@triton.jit
def _double_round(x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15):
    x0, x4, x8, x12 = _quarter_round(x0, x4, x8, x12)
    x1, x5, x9, x13 = _quarter_round(x1, x5, x9, x13)
    x2, x6, x10, x14 = _quarter_round(x2, x6, x10, x14)
    x3, x7, x11, x15 = _quarter_round(x3, x7, x11, x15)
    x0, x5, x10, x15 = _quarter_round(x0, x5, x10, x15)
    x1, x6, x11, x12 = _quarter_round(x1, x6, x11, x12)
    x2, x7, x8, x13 = _quarter_round(x2, x7, x8, x13)
    x3, x4, x9, x14 = _quarter_round(x3, x4, x9, x14)
    return x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15


@triton.jit
def _chacha(block, numbers, UNROLLED: tl.constexpr = True):
    low = block.to(tl.uint32)
    high = (block >> 32).to(tl.uint32)
    zero = tl.zeros_like(low)
    s4 = tl.load(numbers + 2).to(tl.uint32)
    s5 = tl.load(numbers + 3).to(tl.uint32)
    s6 = tl.load(numbers + 4).to(tl.uint32)
    s7 = tl.load(numbers + 5).to(tl.uint32)
    s8 = tl.load(numbers + 6).to(tl.uint32)
    s9 = tl.load(numbers + 7).to(tl.uint32)
    s10 = tl.load(numbers + 8).to(tl.uint32)
    s11 = tl.load(numbers + 9).to(tl.uint32)
    s14 = tl.load(numbers + 10).to(tl.uint32)
    s15 = tl.load(numbers + 11).to(tl.uint32)
    x0, x1, x2, x3 = zero + C0, zero + C1, zero + C2, zero + C3
    x4, x5, x6, x7 = zero + s4, zero + s5, zero + s6, zero + s7
    x8, x9, x10, x11 = zero + s8, zero + s9, zero + s10, zero + s11
    x12, x13, x14, x15 = low, high, zero + s14, zero + s15
    if UNROLLED:
        for _ in tl.static_range(10):
            x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15 = _double_round(
                x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15
            )
    else:
        for _ in range(10):
            x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15 = _double_round(
                x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15
            )
    x0, x1, x2, x3 = x0 + C0, x1 + C1, x2 + C2, x3 + C3
    x4, x5, x6, x7 = x4 + s4, x5 + s5, x6 + s6, x7 + s7
    x8, x9, x10, x11 = x8 + s8, x9 + s9, x10 + s10, x11 + s11
    x12, x13, x14, x15 = x12 + low, x13 + high, x14 + s14, x15 + s15
    return x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15


@triton.jit
def _weave4(a, b, c, d):
    """Interleave four vectors: a[0], b[0], c[0], d[0], a[1], ..."""
    return tl.interleave(tl.interleave(a, c), tl.interleave(b, d))


@triton.jit
def _weave8(a, b, c, d, e, f, g, h):
    return tl.interleave(_weave4(a, c, e, g), _weave4(b, d, f, h))


@triton.jit
def _inverse_tail(
    x, coefficients, SEGMENTS: tl.constexpr, DEGREE: tl.constexpr, OFFSET: tl.constexpr
):
    """Return |z| for each x, float64: see `random.inverse_tail`."""
    bits = x.to(tl.int64, bitcast=True)
    segment = ((bits >> SHIFT) - OFFSET).to(tl.int32)
    u = ((bits & FRACTION) | ONE).to(tl.float64, bitcast=True) - MID
    z = tl.load(coefficients + DEGREE * SEGMENTS + segment)
    for d in tl.static_range(DEGREE):
        z = z * u + tl.load(coefficients + (DEGREE - 1 - d) * SEGMENTS + segment)
    return z


@triton.jit
def _ordinary(v, coefficients):
    x = v.to(tl.float64)
    return _inverse_tail(x, coefficients, ORDINARY_SEGMENTS, ORDINARY_DEGREE, ORDINARY_OFFSET)


@triton.jit
def _product(a, b):
    """Return a · b rounded, and what is lost by it, exactly: see `random`."""
    product = a * b
    cut_a, cut_b = a * CUT, b * CUT
    a1, b1 = cut_a - (cut_a - a), cut_b - (cut_b - b)
    a0, b0 = a - a1, b - b1
    return product, (((a1 * b1 - product) + a1 * b0) + a0 * b1) + a0 * b0


@triton.jit
def _exact_steps(w, more0, more1, scale, coefficients):
    """Return scale · Q(p), rounded to an integer: see `random.exact_steps`; words are int64."""
    after = (((more0 & 0x1FF) << 32) | more1).to(tl.float64) * 2.0**-41 + 2.0**-42
    top, low = w.to(tl.float64) * 8388608.0, (more0 >> 9).to(tl.float64)
    whole = top + low
    rest = ((top - whole) + low) + after
    x = whole + rest
    rest = rest - (x - whole)
    rest = tl.where(x < LEAST, 0.0, rest)
    x = tl.where(x < LEAST, LEAST, x)
    secure = coefficients + SECURE_AT
    z = _inverse_tail(x, secure, SECURE_SEGMENTS, SECURE_DEGREE, SECURE_OFFSET)
    nearest = (z * TAILS_PER_UNIT + MAGIC) - MAGIC
    h = z - nearest * (1 / TAILS_PER_UNIT)
    pair = coefficients + TAILS_AT + 2 * TAIL_DEGREE * TAILS + nearest.to(tl.int32)
    slope = z * 0.0
    tail, tail_rest = tl.load(pair), tl.load(pair + TAILS)
    for _ in range(TAIL_DEGREE):
        pair -= 2 * TAILS
        slope = slope * h + tail
        product, error = _product(tail, h)
        error = error + tail_rest * h
        coefficient = tl.load(pair)
        total = coefficient + product
        back = total - coefficient
        lost = (coefficient - (total - back)) + (product - back)
        lost = lost + (error + tl.load(pair + TAILS))
        tail = total + lost
        tail_rest = lost - (tail - total)
    excess = (tail - x * 2.0**-64) + (tail_rest - rest * 2.0**-64)
    change = -excess / slope
    change = change + 0.5 * z * change * change
    y, y_rest = _product(scale, z)
    steps = (y + MAGIC) - MAGIC
    y_rest = y_rest + scale * change
    off = y - steps
    up, down = (off - 0.5) + y_rest > 0, (off + 0.5) + y_rest < 0
    return steps + up.to(tl.float64) - down.to(tl.float64)


@triton.jit
def _pick4(lane, a, b, c, d):
    return tl.where(lane < 2, tl.where(lane == 0, a, b), tl.where(lane == 2, c, d))


@triton.jit
def secure_word(element, numbers):
    """Return the word of each element of secure normals, by its number in the stream."""
    w0, w1, w2, w3, w4, w5, w6, w7, w8, w9, w10, w11, w12, w13, w14, w15 = _chacha(
        element // SECURE_TILE * SECURE_BLOCKS + element % (4 * SECURE_BLOCKS) // 4,
        numbers,
        UNROLLED=False,
    )
    lane = element % 4
    first, second = _pick4(lane, w0, w1, w2, w3), _pick4(lane, w4, w5, w6, w7)
    third, last = _pick4(lane, w8, w9, w10, w11), _pick4(lane, w12, w13, w14, w15)
    return _pick4(element % SECURE_TILE // (4 * SECURE_BLOCKS), first, second, third, last)


@triton.jit
def decided_steps(element, words, numbers, coefficients):
    """Return secure noise in spacings, integers in float64, of open elements: by 73 bits more.

    Args:
        element: Their numbers in the stream.
        words: Their own words.
        numbers: Their recipes.
        coefficients: `kernel_table(COARSE)`.
    """
    more = _chacha(element + MORE, numbers, UNROLLED=False)
    more0, more1, more2 = more[0].to(tl.int64), more[1].to(tl.int64), more[2].to(tl.int64)
    w = ((words & 0x7FFFFFFF).to(tl.int64) << 9) | (more0 >> 23)
    more0 = ((more0 & 0x7FFFFF) << 9) | (more1 >> 23)
    more1 = ((more1 & 0x7FFFFF) << 9) | (more2 >> 23)
    scale = _real(numbers, 0)
    x = more0.to(tl.float64) * 2.0**-9 + more1.to(tl.float64) * 2.0**-41
    x = tl.maximum(w.to(tl.float64) * 8388608.0 + x, LEAST)
    secure = coefficients + SECURE_AT
    y = _inverse_tail(x, secure, SECURE_SEGMENTS, SECURE_DEGREE, SECURE_OFFSET) * scale
    steps = (y + MAGIC) - MAGIC
    is_near = tl.abs(y - steps) > 0.5 - NEAR * scale
    if tl.max(is_near.to(tl.int32), 0) > 0:  # as good as never
        exact = _exact_steps(w, more0, more1, scale, coefficients)
        steps = tl.where(is_near, exact, steps)
    return tl.where((words >> 31) == 1, -steps, steps) + 0.0  # no -0.0


@triton.jit
def secure_steps(words, scale, distance, coefficients):
    """Return secure noise in spacings, integers in float64, and where `decided_steps` is to say.

    Args:
        words: The words of elements.
        scale: The first number of the recipe, see `secure_numbers`.
        distance: The third.
        coefficients: `kernel_table(COARSE)`.
    """
    # x = (v + 1/2) / 2^31 of the last 31 bits: behind them in a mantissa, with a 1 after them.
    upper = ((words & 0x7FFFFFFF) >> 11) | 0x3FF00000
    lower = (words << 21) | 0x100000
    one = ((upper.to(tl.uint64) << 32) | lower.to(tl.uint64)).to(tl.float64, bitcast=True)
    bits = (one - 1.0).to(tl.uint64, bitcast=True)
    u = ((bits & COARSE_FRACTION) | ONE).to(tl.float64, bitcast=True) - COARSE_MID
    row = coefficients - 2 * COARSE_OFFSET + 2 * (bits >> COARSE_SHIFT).to(tl.uint32)
    c0, c1 = tl.load(row), tl.load(row + 1)
    c2 = (c1.to(tl.uint64, bitcast=True) << 40).to(tl.float64, bitcast=True)
    reach = (c0.to(tl.uint64, bitcast=True) << 48).to(tl.float64, bitcast=True)
    # The bound of z's error holds however often it is rounded, so fused is as good.
    z = tl.fma(tl.fma(c2, u, c1), u, c0)
    sign = (words & 0x80000000).to(tl.uint64) << 32
    z = (z.to(tl.uint64, bitcast=True) ^ sign).to(tl.float64, bitcast=True)
    steps = tl.fma(z, scale, MAGIC) - MAGIC
    return steps, tl.abs(tl.fma(z, scale, -steps)) > tl.fma(-scale, reach, distance)


@triton.jit
def secure_numbers(numbers):
    """Return the three numbers of a recipe: see `random.secure_floats`."""
    return _real(numbers, 0), _real(numbers, 1), _real(numbers, 2)


@triton.jit
def secure_words(block, numbers):
    """Return the words of the elements of whole tiles, a quarter of each tile at a time."""
    w0, w1, w2, w3, w4, w5, w6, w7, w8, w9, w10, w11, w12, w13, w14, w15 = _chacha(block, numbers)
    return (
        _weave4(w0, w1, w2, w3),
        _weave4(w4, w5, w6, w7),
        _weave4(w8, w9, w10, w11),
        _weave4(w12, w13, w14, w15),
    )


@triton.jit
def _draw1(w, numbers, coefficients, DIST: tl.constexpr):
    """Values of elements that consume one word."""
    word = w.to(tl.int64)
    if DIST == UNIFORM24:
        x = (word >> 8).to(tl.float64) * 5.9604644775390625e-08  # 2^-24
        x = x * _real(numbers, 1) + _real(numbers, 0)
        return tl.minimum(tl.maximum(x, _real(numbers, 2)), _real(numbers, 3))
    elif DIST == NORMAL:  # noqa: RET505 - Triton needs the branches apart
        z = _ordinary((w << 1) | 1, coefficients)  # 32 bits: the sign falls out
        return tl.where((w >> 31) == 1, -z, z) * _real(numbers, 1) + _real(numbers, 0)
    else:
        tl.static_assert(DIST == TRUNCATED)
        n = tl.load(numbers + INTS_AT + 1)
        rank = (word * (n >> 16) + ((word * (n & 0xFFFF)) >> 16)) >> 16
        rank += tl.load(numbers + INTS_AT)
        is_negative = (rank >> 31) == 0
        from_tail = tl.where(is_negative, rank, 4294967295 - rank).to(tl.uint32)
        z = _ordinary((from_tail << 1) | 1, coefficients)
        x = tl.where(is_negative, -z, z) * _real(numbers, 1) + _real(numbers, 0)
        return tl.minimum(tl.maximum(x, _real(numbers, 2)), _real(numbers, 3))


@triton.jit
def _draw2(w0, w1, numbers, DIST: tl.constexpr):
    """Values of elements that consume two words."""
    upper = w0.to(tl.int64)
    lower = w1.to(tl.int64)
    if DIST == UNIFORM53:
        x = ((upper << 21) | (lower >> 11)).to(tl.float64) * 1.1102230246251565e-16  # 2^-53
        x = x * _real(numbers, 1) + _real(numbers, 0)
        return tl.minimum(tl.maximum(x, _real(numbers, 2)), _real(numbers, 3))
    else:  # noqa: RET505
        tl.static_assert(DIST == BERNOULLI)
        return ((upper << 31) | (lower >> 1)) <= tl.load(numbers + INTS_AT)


@triton.jit
def _fill(
    out,
    numbers,
    starts,
    coefficients,
    run,
    tiles_per_row,
    CHACHA: tl.constexpr,
    DIST: tl.constexpr,
    WIDTH: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Fill one tile of one row; `ALIGNED` says that every row begins at a block boundary."""
    row = tl.program_id(0) // tiles_per_row
    tile = (tl.program_id(0) % tiles_per_row).to(tl.int64)
    PER_BLOCK: tl.constexpr = (16 if CHACHA else 4) // WIDTH
    start = tl.load(starts + row)
    block = start // PER_BLOCK + tile * TILE + tl.arange(0, TILE)
    if CHACHA:
        w0, w1, w2, w3, w4, w5, w6, w7, w8, w9, w10, w11, w12, w13, w14, w15 = _chacha(
            block, numbers
        )
        if WIDTH == 1:
            w = tl.interleave(
                _weave8(w0, w2, w4, w6, w8, w10, w12, w14),
                _weave8(w1, w3, w5, w7, w9, w11, w13, w15),
            )
            value = _draw1(w, numbers, coefficients, DIST)
        else:
            a = _weave8(w0, w2, w4, w6, w8, w10, w12, w14)
            b = _weave8(w1, w3, w5, w7, w9, w11, w13, w15)
            value = _draw2(a, b, numbers, DIST)
    else:
        w0, w1, w2, w3 = _philox(block, numbers)
        if WIDTH == 1:
            w = _weave4(w0, w1, w2, w3)
            value = _draw1(w, numbers, coefficients, DIST)
        else:
            a, b = tl.interleave(w0, w2), tl.interleave(w1, w3)
            value = _draw2(a, b, numbers, DIST)
    column = tile * (TILE * PER_BLOCK) + tl.arange(0, TILE * PER_BLOCK)
    if not ALIGNED:
        column -= start % PER_BLOCK
    if value.dtype == tl.float64 and out.dtype.element_ty != tl.float64:
        value = value.to(tl.float32)
    mask = (column >= 0) & (column < run)
    tl.store(out + row.to(tl.int64) * run + column, value.to(out.dtype.element_ty), mask=mask)


# Cipher blocks in a tile and warps, by cipher: one ChaCha20 block, or two Philox blocks, a thread.
LAUNCH: dict[Cipher, dict[str, int]] = {
    Cipher.PHILOX: {"TILE": 256, "num_warps": 4},
    Cipher.CHACHA20: {"TILE": 32, "num_warps": 1},
}


def compile_options(recipe: Recipe, run: int, is_aligned: bool) -> dict[str, Any]:
    """Return the constants and launch options of the kernel for a recipe."""
    options: dict[str, Any] = dict(LAUNCH[recipe.cipher])
    blocks_in_row = -(-run // recipe.per_block) + (not is_aligned)
    while options["TILE"] > 32 and options["TILE"] >= 2 * blocks_in_row:
        options["TILE"] //= 2  # short rows: no more threads than blocks, but a full warp
    options["num_warps"] = max(1, min(options["num_warps"], options["TILE"] // 32))
    options |= {"ALIGNED": is_aligned, "enable_fp_fusion": False}
    return options | {
        "CHACHA": recipe.cipher is Cipher.CHACHA20,
        "DIST": int(recipe.distribution),
        "WIDTH": recipe.distribution.num_words,
    }


def fill(out: Tensor, recipe: Recipe, starts: Tensor, run: int) -> None:
    """Fill `out` as the reference does; `starts` lives on the CPU, where its alignment shows."""
    packed, per_block = recipe.pack(), recipe.per_block
    if recipe.distribution is Distribution.SECURE_NORMAL:
        # Every row is a tensor of its own for the kernel that adds noise to many.
        from unison.kernels.multi_tensor_triton import draw_rows

        draw_rows(out.view(len(starts), run), packed, starts.tolist())
        return
    is_aligned = bool((starts % per_block == 0).all())
    options = compile_options(recipe, run, is_aligned)
    num_skipped = int((starts % per_block).max())
    tiles_per_row = -(-(run + num_skipped) // (per_block * options["TILE"]))
    flat = out.view(-1)
    rows_at_once = max(1, (2**31 - 1) // tiles_per_row)  # a grid has fewer than 2^31 programs
    with on_device_of(out):
        # non_blocking: pageable memory is staged before the call returns, so the source may go,
        # and the host does not wait for the stream (noise is drawn while a backward pass runs).
        numbers = packed.to(out.device, non_blocking=True)
        if numbers is not packed:
            packed.zero_()  # it holds the key
        coefficients = kernel_table(ORDINARY, out.device)
        for row in range(0, len(starts), rows_at_once):
            begin = starts[row : row + rows_at_once].to(out.device, non_blocking=True)
            part = flat[row * run : (row + len(begin)) * run]
            _fill[(len(begin) * tiles_per_row,)](
                part, numbers, begin, coefficients, run, tiles_per_row, **options
            )
        numbers.zero_()  # in stream order: the key does not stay behind in device memory


# --- dropout --------------------------------------------------------------------------------------

_DROP_TILE = 512  # cipher blocks, of two elements each


@triton.jit(do_not_specialize=["first", "limit"])
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


def drop(x: Tensor, key: tuple[int, ...], first: int, limit: int, scale: float) -> Tensor:
    """Return x times scale, with zeros where elements are dropped: `random.drop` of one run.

    Args:
        x: Contiguous, of 16 or 32 bits.
        key: The words of a Philox stream.
        first: Index of the first element in its stream; even.
        limit: Greatest draw that is dropped.
        scale: Of what stays.
    """
    assert first % 2 == 0
    out = torch.empty_like(x)
    words = torch.tensor([0, 0, *key]).to(x.device, non_blocking=True)  # as in a recipe
    with on_device_of(x):
        # Fused multiply-adds cannot change bits here: there is nothing to add.
        _drop[(-(-x.numel() // (2 * _DROP_TILE)),)](
            x, out, words, x.numel(), first, limit, scale, TILE=_DROP_TILE, num_warps=4
        )
    return out
