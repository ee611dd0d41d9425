"""Random fills in plain torch: the definition that the fast backends must match to the bit.

Integer operations, gathers, and float64 products and sums, each rounded on its own: nothing else
touches a value before its one final rounding. That is why a CPU, a GPU and the compiled backends
agree. (bfloat16 and float16 are reached through float32: two roundings, the same everywhere.)
"""

import torch

from unison.kernels.random.ciphers import MASK32, chacha20_blocks, philox_blocks
from unison.kernels.random.recipe import Cipher, Distribution, Recipe
from unison.kernels.random.tables import (
    FRACTION_MASK,
    MIDDLE,
    ONE_BITS,
    ORDINARY,
    SECURE,
    SEGMENT_OFFSET,
    SEGMENT_SHIFT,
    TableShape,
    table,
)

# Adding and subtracting 1.5 · 2^52 rounds a float64 below 2^51 to an integer, ties to even.
ROUND_MAGIC = 1.5 * 2.0**52
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
            piece.copy_(draw(recipe, element_words(recipe, begin, piece.shape[1]), out.dtype))


def element_words(recipe: Recipe, starts: torch.Tensor, run: int) -> torch.Tensor:
    """Return the words of each element: int64 [words_per_element, num_rows, run]."""
    per_block, width = recipe.elements_per_block, recipe.words_per_element
    # Block and place within it, never element · width: that product would overflow near 2^63.
    num_blocks = (run + 2 * per_block - 2) // per_block
    blocks = starts[:, None] // per_block + torch.arange(num_blocks, device=starts.device)
    cipher = philox_blocks if recipe.cipher is Cipher.PHILOX else chacha20_blocks
    words = cipher(blocks, recipe.key).reshape(len(starts), num_blocks * per_block, width)
    if len(starts) == 1:
        offset = int(starts[0]) % per_block
        words = words[:, offset : offset + run]
    else:
        place = (starts % per_block)[:, None] + torch.arange(run, device=starts.device)
        words = words.gather(1, place[:, :, None].expand(-1, -1, width))
    return words.movedim(-1, 0)


def draw(recipe: Recipe, words: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Turn the words of elements into values of `dtype`: [words_per_element, ...] -> [...]."""
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
            upper = words[0] & 0x7FFFFFFF
            magnitude = inverse_tail((upper << 32) | words[1] | 1, SECURE)
            scaled = torch.where(words[0] >> 31 == 1, -magnitude, magnitude) * floats[0]
            value = (scaled + ROUND_MAGIC - ROUND_MAGIC) * floats[1]
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
    """Return |z| with P(Z > |z|) = v / 2^bits, float64; `v` is odd, positive and int64."""
    coefficients = table(shape, v.device)
    bits = v.double().view(torch.int64)
    segment = (bits >> SEGMENT_SHIFT) - SEGMENT_OFFSET
    u = ((bits & FRACTION_MASK) | ONE_BITS).view(torch.float64) - MIDDLE
    z = coefficients[-1][segment]
    for coefficient in coefficients[:-1].flip(0):
        z = z * u + coefficient[segment]
    return z


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
