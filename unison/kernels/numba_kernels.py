"""What numba compiles for the CPU: random fills, permutations, and sums of per-sample gradients.

Threads are plain Python threads running compiled code without the interpreter lock: no threading
layer to configure, and nothing that breaks in a forked process. They share nothing, so their number
cannot change a bit.

Random numbers are bit-equal to the references: no `fastmath`, so that LLVM keeps every float64
product and sum apart (tests compare the bits). Work goes in tiles that stay in the first-level
cache: words first (a loop over blocks that LLVM turns into vector code), then the distribution,
then the rounding into the output.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numba as nb
import numpy as np
import torch
from torch import Tensor

from unison.kernels import random
from unison.kernels.random import COARSE, ORDINARY, Cipher, Distribution, Recipe

MIN_PER_THREAD = 1 << 15  # elements below which another thread costs more than it saves


def jit(function: Any = None, *, fastmath: Iterable[str] = ()) -> Any:
    """Compile without the interpreter lock, and keep the result on disk where that is possible.

    Args:
        function: What to compile.
        fastmath: Names of LLVM's liberties. Without any, it keeps every product and sum apart.
    """
    if function is None:
        return lambda each: jit(each, fastmath=fastmath)
    options = {"nogil": True, "error_model": "numpy", "fastmath": set(fastmath)}
    try:
        return nb.njit(cache=True, **options)(function)
    except RuntimeError:  # neither the package's folder nor the user's cache can be written
        return nb.njit(**options)(function)


def num_pieces(num_elements: int) -> int:
    """Return into how many pieces to cut work: one for each of torch's threads it can occupy."""
    return max(1, min(torch.get_num_threads(), num_elements // MIN_PER_THREAD))


def run_pieces(function: Callable[..., None], pieces: Sequence[tuple]) -> None:
    """Call a compiled function with each tuple of arguments, in threads if there are several."""
    if len(pieces) <= 1:
        for piece in pieces:
            function(*piece)
        return
    with ThreadPoolExecutor(len(pieces), thread_name_prefix="unison-kernel") as pool:
        for job in [pool.submit(function, *piece) for piece in pieces]:
            job.result()


# --- random fills ---------------------------------------------------------------------------------

_ROOM = 64
TILE = 1024  # elements
LANES = 64  # ChaCha20 blocks computed side by side

_U = np.uint64
_M = _U(random.MASK32)
_M0, _M1, _B32 = _U(random.PHILOX_M0), _U(random.PHILOX_M1), _U(32)
_W0, _W1 = _U(random.PHILOX_W0), _U(random.PHILOX_W1)
_PHILOX = int(Cipher.PHILOX)
_CONSTANTS = np.array(random.CHACHA_CONSTANTS, np.uint32)
_ROTATES = tuple(np.uint32(n) for n in (16, 12, 8, 7, 20, 24, 25))
_R16, _R12, _R8, _R7, _R20, _R24, _R25 = _ROTATES
_UNIFORM24, _UNIFORM53 = int(Distribution.UNIFORM24), int(Distribution.UNIFORM53)
_NORMAL, _TRUNCATED = int(Distribution.NORMAL), int(Distribution.TRUNCATED)
_SECURE_NORMAL = int(Distribution.SECURE_NORMAL)
_SECURE_TILE, _SECURE_BLOCKS = random.SECURE_TILE, random.SECURE_BLOCKS


@jit
def _philox(c0, c1, c2, c3, k0, k1):
    """Return the 4 words of a block, each in 64 bits."""
    for _ in range(random.PHILOX_ROUNDS):
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c1 = (p1 >> _B32) ^ c1 ^ k0, p1 & _M
        c2, c3 = (p0 >> _B32) ^ c3 ^ k1, p0 & _M
        k0, k1 = (k0 + _W0) & _M, (k1 + _W1) & _M
    return c0, c1, c2, c3


@jit
def _philox_words(words, first, num_blocks, key):
    """Write the 4 words of each block."""
    k0, k1, c2, c3 = _U(key[0]), _U(key[1]), _U(key[2]), _U(key[3])
    for j in range(num_blocks):
        block = first + _U(j)
        w0, w1, w2, w3 = _philox(block & _M, block >> _B32, c2, c3, k0, k1)
        words[4 * j] = np.uint32(w0)
        words[4 * j + 1] = np.uint32(w1)
        words[4 * j + 2] = np.uint32(w2)
        words[4 * j + 3] = np.uint32(w3)


@jit
def _quarter_round(x, a, b, c, d):
    """Apply a quarter round to four words of x, in every lane."""
    for j in range(LANES):
        x0, x1, x2, x3 = x[a + j], x[b + j], x[c + j], x[d + j]
        x0 = np.uint32(x0 + x1)
        x3 = np.uint32(x3 ^ x0)
        x3 = np.uint32((x3 << _R16) | (x3 >> _R16))
        x2 = np.uint32(x2 + x3)
        x1 = np.uint32(x1 ^ x2)
        x1 = np.uint32((x1 << _R12) | (x1 >> _R20))
        x0 = np.uint32(x0 + x1)
        x3 = np.uint32(x3 ^ x0)
        x3 = np.uint32((x3 << _R8) | (x3 >> _R24))
        x2 = np.uint32(x2 + x3)
        x1 = np.uint32(x1 ^ x2)
        x1 = np.uint32((x1 << _R7) | (x1 >> _R25))
        x[a + j], x[b + j], x[c + j], x[d + j] = x0, x1, x2, x3


@jit
def _double_round(x):
    """Apply a column round and a diagonal round to x [16 * LANES].

    Flat with a constant row length, so that LLVM sees the rows do not overlap and vectorises.
    """
    for turn in range(2):
        for i in range(4):
            b, c, d = (i + turn) % 4, (i + 2 * turn) % 4, (i + 3 * turn) % 4
            _quarter_round(x, i * LANES, (4 + b) * LANES, (8 + c) * LANES, (12 + d) * LANES)


@jit
def _chacha_words(words, blocks, num_blocks, key):
    """Write the 16 words of each of the first blocks, of which there are at least LANES."""
    state = np.empty(16 * LANES, np.uint32)
    x = np.empty(16 * LANES, np.uint32)
    for j in range(LANES):
        for i in range(4):
            state[i * LANES + j] = _CONSTANTS[i]
        for i in range(8):
            state[(4 + i) * LANES + j] = np.uint32(key[i])
        for i in range(2):
            state[(14 + i) * LANES + j] = np.uint32(key[8 + i])
    for group in range(0, num_blocks, LANES):
        for j in range(LANES):
            block = _U(blocks[min(group + j, num_blocks - 1)])
            state[12 * LANES + j] = np.uint32(block & _M)
            state[13 * LANES + j] = np.uint32(block >> _B32)
        for i in range(16):  # a loop: `x[:] = state` would compile numba's broadcasting for seconds
            for j in range(LANES):
                x[i * LANES + j] = state[i * LANES + j]
        for _ in range(random.CHACHA_DOUBLE_ROUNDS):
            _double_round(x)
        for i in range(16):
            for j in range(LANES):
                x[i * LANES + j] = np.uint32(x[i * LANES + j] + state[i * LANES + j])
        for j in range(min(LANES, num_blocks - group)):
            at = 16 * (group + j)
            for i in range(16):
                words[at + i] = x[i * LANES + j]


@jit
def _inverse_tails(tile, v, tables, n):
    """Write |z| for each v: see `random.inverse_tail`."""
    # Which is compiled once and kept on disk, so that numbers which may change are arguments.
    coefficients, _, numbers, middles = tables
    degree, shift, offset = numbers[0]
    mask = (np.int64(1) << shift) - 1
    bits = tile.view(np.int64)
    segment = np.empty(TILE, np.int64)
    u = np.empty(TILE, np.float64)
    u_bits = u.view(np.int64)
    for i in range(n):
        tile[i] = np.float64(v[i])
    for i in range(n):
        segment[i] = (bits[i] >> shift) - offset
        u_bits[i] = (bits[i] & mask) | random.ONE_BITS
    top = coefficients[degree]
    for i in range(n):
        u[i] = u[i] - middles[0]
        tile[i] = top[segment[i]]
    for d in range(degree - 1, -1, -1):
        row = coefficients[d]
        for i in range(n):
            tile[i] = tile[i] * u[i] + row[segment[i]]


@jit
def _coarse_steps(tile, v, floats, tables, n):
    """Write |steps| for each v, and -1 to v where they are open: see `random.coarse_steps`."""
    _, table, numbers, middles = tables
    _, shift, offset = numbers[1]
    mask = (np.int64(1) << shift) - 1
    bits = tile.view(np.int64)
    u, c0, c1 = np.empty(TILE, np.float64), np.empty(TILE, np.float64), np.empty(TILE, np.float64)
    c2, reach = np.empty(TILE, np.float64), np.empty(TILE, np.float64)
    u_bits, bits0, bits1 = u.view(np.int64), c0.view(np.int64), c1.view(np.int64)
    bits2, reach_bits = c2.view(np.int64), reach.view(np.int64)
    for i in range(n):
        tile[i] = (np.float64(v[i]) + 0.5) * 2.0**-31
    for i in range(n):
        row = 2 * ((bits[i] >> shift) - offset)
        u_bits[i] = (bits[i] & mask) | random.ONE_BITS
        bits0[i], bits1[i] = table[row], table[row + 1]
    for i in range(n):
        bits2[i], reach_bits[i] = bits1[i] << 40, bits0[i] << 48
    num_open = 0
    for i in range(n):
        place = u[i] - middles[1]
        scaled = ((c2[i] * place + c1[i]) * place + c0[i]) * floats[0]
        tile[i] = scaled + random.ROUND_MAGIC - random.ROUND_MAGIC
        is_open = abs(scaled - tile[i]) > floats[2] - reach[i] * floats[0]
        v[i] = -1 if is_open else v[i]
        num_open += is_open
    return num_open


@jit
def _secure_words(v, is_negative, words, skipped, n):
    """Write 31 bits and the sign of each element, of tiles of which some elements are skipped."""
    for i in range(n):
        tile, place = (skipped + i) // _SECURE_TILE, (skipped + i) % _SECURE_TILE
        block = tile * _SECURE_BLOCKS + place % (4 * _SECURE_BLOCKS) // 4
        word = np.int64(words[16 * block + place // (4 * _SECURE_BLOCKS) * 4 + place % 4])
        v[i] = word & 0x7FFFFFFF
        is_negative[i] = word >> 31


@jit
def _draw_floats(tile, words, at, n, distribution, floats, ints, tables, v, is_negative):
    """Write the float64 values of n elements whose words begin at words[at].

    Secure normals have v and signs instead of words. Returns how many of them are open, to be
    decided by more bits: their v[i] is -1 from then on.
    """
    if distribution == _UNIFORM24:
        for i in range(n):
            tile[i] = np.float64(np.int64(words[at + i]) >> 8) * 2.0**-24
    elif distribution == _UNIFORM53:
        for i in range(n):
            upper, lower = np.int64(words[at + 2 * i]), np.int64(words[at + 2 * i + 1])
            tile[i] = np.float64((upper << 21) | (lower >> 11)) * 2.0**-53
    elif distribution == _NORMAL:
        for i in range(n):
            w = np.int64(words[at + i])
            v[i] = ((w & 0x7FFFFFFF) << 1) | 1
            is_negative[i] = w >> 31
    elif distribution == _TRUNCATED:
        upper_n, lower_n = ints[1] >> 16, ints[1] & 0xFFFF
        for i in range(n):
            w = np.int64(words[at + i])
            rank = ints[0] + ((w * upper_n + ((w * lower_n) >> 16)) >> 16)
            is_negative[i] = rank < (1 << 31)
            v[i] = ((rank if rank < (1 << 31) else random.MASK32 - rank) << 1) | 1

    num_open = 0
    if distribution == _SECURE_NORMAL:
        num_open = _coarse_steps(tile, v, floats, tables, n)
    elif distribution != _UNIFORM24 and distribution != _UNIFORM53:
        _inverse_tails(tile, v, tables, n)
    if distribution != _UNIFORM24 and distribution != _UNIFORM53:
        for i in range(n):
            tile[i] = -tile[i] if is_negative[i] else tile[i]
    scale, offset = floats[1], 0.0 if distribution == _SECURE_NORMAL else floats[0]
    for i in range(n):
        tile[i] = tile[i] * scale + offset
    if distribution != _NORMAL and distribution != _SECURE_NORMAL:
        for i in range(n):
            tile[i] = min(max(tile[i], floats[2]), floats[3])
    return num_open


@jit
def _fill_tiles(
    outs, opens, starts, run, area, cipher, distribution, per_block, key, floats, ints, tables
):
    """Fill rows area[0]:area[1], columns area[2]:area[3] of the output [num_rows * run].

    The output is the one of `outs` (float32, float64, uint8) that is not empty: one function for
    all types compiles in a quarter of the time that one function for each would take.

    Where the output holds secure normals that are open is written to `opens`, as far as there is
    room, after their number.
    """
    out_float32, out_float64, out_uint8 = outs
    words_per_block = 4 if cipher == _PHILOX else 16
    room = TILE // per_block + 2 + _SECURE_BLOCKS
    words, blocks = np.empty(room * words_per_block, np.uint32), np.empty(room, np.int64)
    values = np.empty(TILE, np.float64)
    v, is_negative = np.empty(TILE, np.int64), np.empty(TILE, np.int64)
    for row in range(area[0], area[1]):
        for column in range(area[2], area[3], TILE):
            n = min(TILE, area[3] - column)
            first = starts[row] + column
            block, offset = first // per_block, first % per_block
            num_blocks = (offset + n + per_block - 1) // per_block
            if distribution == _SECURE_NORMAL:
                block, offset = first // _SECURE_TILE * _SECURE_BLOCKS, first % _SECURE_TILE
                num_blocks = (offset + n + _SECURE_TILE - 1) // _SECURE_TILE * _SECURE_BLOCKS
            if cipher == _PHILOX:
                _philox_words(words, _U(block), num_blocks, key)
            else:
                for j in range(num_blocks):
                    blocks[j] = block + j
                _chacha_words(words, blocks, num_blocks, key)
            at, to = offset * (words_per_block // per_block), row * run + column
            if distribution == _SECURE_NORMAL:
                _secure_words(v, is_negative, words, offset, n)
            if len(out_uint8):  # BERNOULLI
                for i in range(n):
                    upper, lower = np.int64(words[at + 2 * i]), np.int64(words[at + 2 * i + 1])
                    out_uint8[to + i] = ((upper << 31) | (lower >> 1)) <= ints[0]
                continue
            num_open = _draw_floats(
                values, words, at, n, distribution, floats, ints, tables, v, is_negative
            )
            if num_open:
                for i in range(n):
                    if v[i] == -1:
                        opens[0] += 1
                        if opens[0] < len(opens):
                            opens[opens[0]] = to + i
            if len(out_float32):
                for i in range(n):
                    out_float32[to + i] = values[i]
            else:
                for i in range(n):
                    out_float64[to + i] = values[i]


def _cut(num_rows: int, run: int, count: int) -> list[tuple[int, int, int, int]]:
    """Cut rows x columns into pieces of about equal size, by rows if there are enough of them."""
    if num_rows >= count:
        cuts = [num_rows * i // count for i in range(count + 1)]
        return [(a, b, 0, run) for a, b in pairwise(cuts) if a < b]
    cuts = [run * i // count // TILE * TILE for i in range(count)] + [run]
    return [(0, num_rows, a, b) for a, b in pairwise(cuts) if a < b]


def fill(out: Tensor, recipe: Recipe, starts: Tensor, run: int) -> None:
    """Fill `out` as the reference does, on the CPU, with `torch.get_num_threads()` threads."""
    if out.dtype in (torch.bfloat16, torch.float16):
        for piece, begin in random.chunks(out, starts, run, 1 << 20):
            full = torch.empty(piece.shape, dtype=torch.float32)
            fill(full, recipe, begin, piece.shape[1])
            piece.copy_(full)
        return
    target = (out.view(torch.uint8) if out.dtype == torch.bool else out).view(-1).numpy()
    outs = tuple(
        target if target.dtype == dtype else np.empty(0, dtype)
        for dtype in (np.float32, np.float64, np.uint8)
    )
    cpu = torch.device("cpu")
    coarse = random.kernel_table(COARSE, cpu)[: random.SECURE_AT].view(torch.int64)
    numbers = [
        (s.num_coefficients - 1, s.segment_shift, s.segment_offset) for s in (ORDINARY, COARSE)
    ]
    numbers[1] = (*numbers[1][:2], random.COARSE_OFFSET)
    rest = (
        int(recipe.cipher),
        int(recipe.distribution),
        recipe.per_block,
        np.array(recipe.key, np.int64),
        np.array(recipe.floats or (0.0,), np.float64),
        np.array(recipe.ints or (0,), np.int64),
        (
            random.inverse_table(ORDINARY, cpu).numpy(),
            coarse.numpy(),
            np.array(numbers),
            np.array([ORDINARY.middle, COARSE.middle]),
        ),
    )
    first_elements = starts.numpy()
    areas = _cut(len(first_elements), run, num_pieces(out.numel()))
    opens = [np.zeros(_ROOM + (out.numel() >> 6), np.int64) for _ in areas]
    pieces = zip(opens, areas, strict=True)
    run_pieces(
        _fill_tiles, [(outs, each, first_elements, run, area, *rest) for each, area in pieces]
    )
    if any(each[0] for each in opens):
        _decide(out.view(-1), recipe, starts, run, opens)


def _decide(out: Tensor, recipe: Recipe, starts: Tensor, run: int, opens: list[np.ndarray]) -> None:
    """Decide the secure normals that are open by more bits: one in 400, at the usual spacing."""
    if any(each[0] >= len(each) for each in opens):  # on a much finer grid it may be all of them
        which = torch.arange(out.numel())
    else:
        which = torch.from_numpy(np.concatenate([each[1 : 1 + each[0]] for each in opens]))
    key = np.array(recipe.key, np.int64)
    for at in which.split(1 << 16):
        elements = starts[at // run] + at % run
        block, word = random.secure_places(elements)
        own = _words_of_blocks(block, key).gather(1, word[:, None]).squeeze(1)
        more = _words_of_blocks(elements + random.MORE_BLOCKS, key)[:, :3].T
        steps = random.decided_steps(own & 0x7FFFFFFF, more, recipe.floats[0])
        steps = torch.where(own >> 31 == 1, -steps, steps) + 0.0
        out[at] = (steps * recipe.floats[1]).to(out.dtype)


def _words_of_blocks(blocks: Tensor, key: np.ndarray) -> Tensor:
    words = np.empty(16 * len(blocks), np.uint32)
    _chacha_words(words, blocks.numpy(), len(blocks), key)
    return torch.from_numpy(words.astype(np.int64)).view(-1, 16)


# --- permutations ---------------------------------------------------------------------------------


@jit
def _permute(x, out, words, n, num_left, num_right, is_inverse):
    for i in range(len(x)):
        value = _U(x[i])
        while True:
            left, right = value // num_right, value % num_right
            for step in range(random.NUM_ROUNDS):
                r = random.NUM_ROUNDS - 1 - step if is_inverse else step
                size, half = (num_left, right) if r % 2 == 0 else (num_right, left)
                c0, c1, _, _ = _philox(half, _U(r), words[2], words[3], words[0], words[1])
                shift = (c0 * size + ((c1 * size) >> _B32)) >> _B32
                if is_inverse:
                    shift = (size - shift) % size
                if r % 2 == 0:
                    left = (left + shift) % num_left
                else:
                    right = (right + shift) % num_right
            value = left * num_right + right
            if value < n:
                break
        out[i] = np.int64(value)


def permute(
    x: Tensor, words: Sequence[int], n: int, sides: Sequence[int], is_inverse: bool
) -> Tensor:
    """As the reference, on the CPU."""
    source = x.reshape(-1).contiguous()
    out = torch.empty_like(source)
    sizes = map(_U, (n, *sides))
    _permute(source.numpy(), out.numpy(), np.array(words, np.uint64), *sizes, is_inverse)
    return out.view(x.shape)


# --- sums of per-sample gradients -----------------------------------------------------------------

_SUM_TILE = 512  # elements: a float64 tile stays in the first-level cache


# Squares are added in the order LLVM's vector code takes; the order is the same in every call, and
# a row is never shared by two threads.
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
    tile = np.empty(_SUM_TILE, np.float64)
    for at in range(start, stop, _SUM_TILE):
        size = min(_SUM_TILE, stop - at)
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
    cuts = [cut // _SUM_TILE * _SUM_TILE for cut in _cuts(len(result), num_pieces(x.numel()))]
    cuts[-1] = len(result)
    pieces = [(x.numpy(), rows, factors, result, a, b) for a, b in pairwise(cuts) if a < b]
    run_pieces(_weighted_sum, pieces)


def _cuts(total: int, count: int) -> list[int]:
    return [total * i // count for i in range(count + 1)]
