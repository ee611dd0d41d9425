"""Random fills in plain torch: the definition that the fast backends must match to the bit.

Integer operations, gathers, and float64 products and sums, each rounded on its own: nothing else
touches a value before its one final rounding. That is why a CPU, a GPU and the compiled backends
agree. (bfloat16 and float16 are reached through float32: two roundings, the same everywhere.)
"""

from collections.abc import Callable
from functools import partial

import torch

from unison.kernels.random.ciphers import MASK32, chacha20_blocks, philox_blocks
from unison.kernels.random.recipe import FAR_UPPER, MORE_BLOCKS, Cipher, Distribution, Recipe
from unison.kernels.random.tables import (
    FRACTION_MASK,
    MIDDLE,
    ONE_BITS,
    ORDINARY,
    SECURE,
    SEGMENT_SHIFT,
    TAIL_STEPS,
    TableShape,
    table,
    tail_table,
)

# Adding and subtracting 1.5 · 2^52 rounds a float64 below 2^51 to an integer, ties to even.
ROUND_MAGIC = 1.5 * 2.0**52
SPLIT = 2.0**27 + 1  # Veltkamp's: cuts 53 bits into two halves, whose products are exact
SIGN64 = -(1 << 63)
CHUNK_WORDS = 1 << 16  # half a megabyte of int64: a chunk stays in the processor's cache


def fill(out: torch.Tensor, recipe: Recipe, starts: torch.Tensor, run: int) -> None:
    """Fill `out` row by row; row r holds elements starts[r] ... starts[r] + run - 1.

    Args:
        out: [num_rows * run], contiguous; the dtype decides the final rounding.
        recipe: What to draw.
        starts: int64 [num_rows], at least 0, on any device.
        run: Elements in a row.
    """
    rows = out.view(-1, run)
    starts = starts.to(out.device)
    columns = CHUNK_WORDS // recipe.words_per_element
    rows_at_once = max(1, columns // run)
    for row in range(0, rows.shape[0], rows_at_once):
        part = rows[row : row + rows_at_once]
        for column in range(0, run, columns):
            piece = part[:, column : column + columns]
            begin = starts[row : row + rows_at_once] + column
            words = element_words(recipe, begin, piece.shape[1])
            more_words = partial(element_words, recipe, begin, piece.shape[1], MORE_BLOCKS)
            piece.copy_(draw(recipe, words, out.dtype, more_words))


def element_words(
    recipe: Recipe, starts: torch.Tensor, run: int, first_block: int = 0
) -> torch.Tensor:
    """Return the words of each element: int64 [words_per_element, num_rows, run]."""
    per_block, width = recipe.elements_per_block, recipe.words_per_element
    # Block and place within it, never element · width: that product would overflow near 2^63.
    num_blocks = (run + 2 * per_block - 2) // per_block
    blocks = starts[:, None] // per_block + torch.arange(num_blocks, device=starts.device)
    blocks += first_block
    cipher = philox_blocks if recipe.cipher is Cipher.PHILOX else chacha20_blocks
    words = cipher(blocks, recipe.key).reshape(len(starts), num_blocks * per_block, width)
    if len(starts) == 1:
        offset = int(starts[0]) % per_block
        words = words[:, offset : offset + run]
    else:
        place = (starts % per_block)[:, None] + torch.arange(run, device=starts.device)
        words = words.gather(1, place[:, :, None].expand(-1, -1, width))
    return words.movedim(-1, 0)


def draw(
    recipe: Recipe,
    words: torch.Tensor,
    dtype: torch.dtype,
    more_words: Callable[[], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Turn the words of elements into values of `dtype`: [words_per_element, ...] -> [...].

    `more_words` returns as many further words, for the few secure normals that need them.
    """
    floats, ints = recipe.floats, recipe.ints
    match recipe.distribution:
        case Distribution.WORDS:
            return words[0]
        case Distribution.UNIFORM24:
            unit = (words[0] >> 8).double() * 2.0**-24
            value = _bounded(unit * floats[1] + floats[0], floats[2], floats[3])
        case Distribution.UNIFORM53:
            unit = ((words[0] << 21) | (words[1] >> 11)).double() * 2.0**-53
            value = _bounded(unit * floats[1] + floats[0], floats[2], floats[3])
        case Distribution.NORMAL:
            magnitude = inverse_tail(((words[0] & 0x7FFFFFFF) << 1) | 1, ORDINARY)
            value = torch.where(words[0] >> 31 == 1, -magnitude, magnitude) * floats[1] + floats[0]
        case Distribution.TRUNCATED:
            rank = ints[0] + scale_word(words[0], ints[1])
            value = _bounded(normal_of_rank(rank) * floats[1] + floats[0], floats[2], floats[3])
        case Distribution.SECURE_NORMAL:
            assert more_words is not None
            value = _secure_steps(words, more_words, floats[0], floats[2]) * floats[1]
        case Distribution.BERNOULLI:
            return ((words[0] << 31) | (words[1] >> 1)) <= ints[0]
        case Distribution.INTEGERS:
            return ints[0] + scale_128(words, ints[1])
        case _:
            raise AssertionError(f"no rule for {recipe.distribution!r}")
    return value.float().to(dtype) if dtype.itemsize < 4 else value.to(dtype)


def _bounded(value: torch.Tensor, low: float, high: float) -> torch.Tensor:
    return value.clamp(low, high)


def inverse_tail(v: torch.Tensor, shape: TableShape) -> torch.Tensor:
    """Return |z| with P(Z > |z|) = v / 2^bits, float64; `v` is positive, int64 or float64."""
    coefficients = table(shape, v.device)
    bits = v.double().view(torch.int64)
    segment = (bits >> SEGMENT_SHIFT) - shape.segment_offset
    u = ((bits & FRACTION_MASK) | ONE_BITS).view(torch.float64) - MIDDLE
    z = coefficients[-1][segment]
    for coefficient in coefficients[:-1].flip(0):
        z = z * u + coefficient[segment]
    return z


def _secure_steps(
    words: torch.Tensor, more_words: Callable[[], torch.Tensor], scale: float, near: float
) -> torch.Tensor:
    """Return secure noise in spacings: integers, float64."""
    upper, lower = words[0] & 0x7FFFFFFF, words[1]
    scaled = inverse_tail((upper << 32) | lower | 1, SECURE) * scale
    steps = scaled + ROUND_MAGIC - ROUND_MAGIC
    is_open = ((scaled - steps).abs() > 0.5 - near) | (upper < FAR_UPPER)
    if bool(is_open.any()):
        more = more_words()[:, is_open]
        steps[is_open] = exact_steps(upper[is_open], lower[is_open], more, scale)
    return torch.where(words[0] >> 31 == 1, -steps, steps) + 0.0  # no -0.0


def exact_steps(
    upper: torch.Tensor, lower: torch.Tensor, more: torch.Tensor, scale: float
) -> torch.Tensor:
    """Return scale · Q(p), Q the upper quantile, rounded to the nearest integer: docs/rng.md.

    Args:
        upper: The first 31 bits of p · 2^64 [...].
        lower: The 32 bits after them.
        more: Two words [2, ...], of which the first 52 bits come after the point.
        scale: The standard deviation in spacings.
    """
    # p · 2^64 as the sum of two floats, the second less than half a unit of the first.
    after = ((more[0] << 20) | (more[1] >> 12)).double() * 2.0**-52 + 2.0**-53
    top, low = upper.double() * 2.0**32, lower.double()
    whole = top + low
    rest = ((top - whole) + low) + after
    x = whole + rest
    rest = rest - (x - whole)
    is_cut = x < 2.0**SECURE.first_octave
    x, rest = x.masked_fill(is_cut, 2.0**SECURE.first_octave), rest.masked_fill(is_cut, 0.0)
    # One of Newton's steps, from a float64 of which the error is below 1e-14.
    z = inverse_tail(x, SECURE)
    tail, tail_rest, slope = upper_tail(z)
    excess = (tail - x * 2.0**-64) + (tail_rest - rest * 2.0**-64)
    change = -excess / slope
    change = change + 0.5 * z * change * change
    y, y_rest = _product(torch.full_like(z, scale), z)
    steps = y + ROUND_MAGIC - ROUND_MAGIC
    y_rest = y_rest + scale * change
    off = y - steps
    return steps + ((off - 0.5) + y_rest > 0).double() - ((off + 0.5) + y_rest < 0).double()


def upper_tail(z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return P(Z > z) as the sum of two floats, and its derivative as one, for 0 <= z <= 10.3."""
    nearest = z * TAIL_STEPS + ROUND_MAGIC - ROUND_MAGIC
    segment, h = nearest.long(), z - nearest * (1 / TAIL_STEPS)
    pairs = tail_table(z.device)[:, :, segment].flip(0)
    slope, (total, rest) = torch.zeros_like(z), pairs[0]
    for coefficient, coefficient_rest in pairs[1:]:
        slope = slope * h + total
        product, error = _product(total, h)
        error = error + rest * h
        total = coefficient + product
        back = total - coefficient
        lost = (coefficient - (total - back)) + (product - back)
        rest = lost + (error + coefficient_rest)
        product = total  # of which the rest may be more than half a unit
        total = product + rest
        rest = rest - (total - product)
    return total, rest, slope


def _product(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a · b rounded, and what is lost by it, exactly (Dekker)."""
    product = a * b
    cut_a, cut_b = SPLIT * a, SPLIT * b
    a1, b1 = cut_a - (cut_a - a), cut_b - (cut_b - b)
    a0, b0 = a - a1, b - b1
    return product, (((a1 * b1 - product) + a1 * b0) + a0 * b1) + a0 * b0


def normal_of_rank(rank: torch.Tensor) -> torch.Tensor:
    """Return the normal value of a rank in [0, 2^32): float64, not decreasing in the rank."""
    is_negative = rank < (1 << 31)
    from_tail = torch.where(is_negative, rank, MASK32 - rank)
    magnitude = inverse_tail((from_tail << 1) | 1, ORDINARY)
    return torch.where(is_negative, -magnitude, magnitude)


def scale_word(word: torch.Tensor, n: int) -> torch.Tensor:
    """Return floor(word · n / 2^32) for a 32-bit word and 0 < n <= 2^32, exactly."""
    return (word * (n >> 16) + ((word * (n & 0xFFFF)) >> 16)) >> 16


def _upper(product: torch.Tensor) -> torch.Tensor:
    return (product >> 32) & MASK32


def _multiply(a1: torch.Tensor, a0: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return upper and lower 64 bits of (a1 · 2^32 + a0) · n, for n below 2^63."""
    n1, n0 = n >> 32, n & MASK32
    p00, p01, p10, p11 = a0 * n0, a0 * n1, a1 * n0, a1 * n1
    middle = _upper(p00) + (p01 & MASK32) + (p10 & MASK32)
    upper = p11 + _upper(p01) + _upper(p10) + (middle >> 32)
    return upper, (middle << 32) | (p00 & MASK32)


def scale_128(words: torch.Tensor, n: int) -> torch.Tensor:
    """Return floor(r · n / 2^128), r the 128-bit number of four words, most significant first.

    Of the 2^128 values of r each result gets floor or ceil of 2^128 / n: no probability is off by
    more than 2^-128, which is below 2^-65 of its size for every n < 2^63.
    """
    upper, lower = _multiply(words[0], words[1], n)
    carried, _ = _multiply(words[2], words[3], n)
    total = lower + carried
    overflowed = (total ^ SIGN64) < (carried ^ SIGN64)  # unsigned comparison
    return upper + overflowed.to(torch.int64)
