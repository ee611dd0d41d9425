"""Fill tensors with random numbers: one operation, three backends, one set of bits.

`fill_rows` is the entrance. It calls the `unison::random_fill` operation, which picks a backend by
device: Triton on CUDA (random_triton.py), numba on the CPU (numba_kernels.py: secure normals 18
times, other draws 5 to 11 times as fast as the reference on 2 cores), and the plain-torch reference
of this file where neither is there. Which backend ran cannot be told from the values.

What to draw travels as data, a `Recipe`: one small int64 tensor on the CPU. It is a tensor and not
a list of integers because profilers record scalar arguments, and the key of a secure stream must
not end up in a trace.
"""

import struct
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from functools import cache, cached_property, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unison import check
from unison.errors import BadInput
from unison.kernels.available import TAKEN


class Cipher(IntEnum):
    """Which function turns (key, counter) into words.

    Attributes:
        words_per_block: 32-bit words that one counter value yields.
        num_key_words: 32-bit words that identify a stream: the key, then the fixed part of the
            counter.
    """

    PHILOX = 0, 4, 4  # Philox4x32-10: fast, public
    CHACHA20 = 1, 16, 10  # ChaCha20: cryptographic, for what privacy rests on

    words_per_block: int
    num_key_words: int

    def __new__(cls, value: int, words_per_block: int, num_key_words: int) -> "Cipher":
        """Return a member that knows its sizes."""
        member = int.__new__(cls, value)
        member._value_ = value
        member.words_per_block, member.num_key_words = words_per_block, num_key_words
        return member


class Distribution(IntEnum):
    """How the words of an element become its value.

    Attributes:
        num_words: 32-bit words that one element consumes; none straddles two blocks.
    """

    WORDS = 0, 1
    UNIFORM24 = 1, 1
    UNIFORM53 = 2, 2
    NORMAL = 3, 1
    TRUNCATED = 4, 1
    SECURE_NORMAL = 5, 1
    BERNOULLI = 6, 2
    INTEGERS = 7, 4

    num_words: int

    def __new__(cls, value: int, num_words: int) -> "Distribution":
        """Return a member that knows its words."""
        member = int.__new__(cls, value)
        member._value_, member.num_words = value, num_words
        return member


_ROUNDED = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
OUTPUT_DTYPES = {
    Distribution.WORDS: (torch.int64,),
    Distribution.UNIFORM24: (torch.float32, torch.bfloat16, torch.float16),
    Distribution.UNIFORM53: (torch.float64,),
    Distribution.NORMAL: _ROUNDED,
    Distribution.TRUNCATED: _ROUNDED,
    # Half precision cannot hold the grid: see docs/rng.md, "Secure normals".
    Distribution.SECURE_NORMAL: (torch.float32, torch.float64),
    Distribution.BERNOULLI: (torch.bool,),
    Distribution.INTEGERS: (torch.int64,),
}

# A secure normal has one word: a sign and 31 bits. Where these say too little, once in 400 values
# at the usual spacing, 73 more are drawn, and all of them decide (docs/rng.md, "How a value is
# decided"). Elements are dealt to the words of 32 blocks, four at a time, so that a GPU's 32
# threads, each of which computes a block, write side by side.
SECURE_TILE, SECURE_BLOCKS = 512, 32
MORE_BLOCKS = 1 << 62  # one block of further bits an element, from here on; none is another's own
MIDDLE_LESS = 0.5 - 2.0**-40  # half a spacing, less what its comparison is rounded by
NEAR = 2.0**-46  # times the scale: as near to half a spacing, float64 of p does not decide

NUM_KEY, NUM_FLOATS, NUM_INTS = 10, 4, 2
KEY_AT = 2
FLOATS_AT = KEY_AT + NUM_KEY
INTS_AT = FLOATS_AT + NUM_FLOATS
RECIPE_LENGTH = INTS_AT + NUM_INTS


def secure_floats(std: float, spacing: float) -> tuple[float, float, float]:
    """Return the floats of a SECURE_NORMAL recipe.

    The third says how far from a multiple a value may be, in spacings and with all that its first
    bits leave open, and not be decided exactly. Less of it changes no value; tests have many
    decided so.
    """
    return std / spacing, spacing, MIDDLE_LESS


@dataclass(frozen=True, repr=False)
class Recipe:
    """A cipher, the words that identify a stream, a distribution and its numbers.

    The floats and integers mean, by distribution:

    | distribution | floats | integers |
    |---|---|---|
    | UNIFORM24, UNIFORM53 | low, high - low, least and greatest allowed result | |
    | NORMAL | mean, standard deviation | |
    | TRUNCATED | mean, standard deviation, least and greatest result | first rank, count of ranks |
    | SECURE_NORMAL | standard deviation / spacing, spacing, a distance (see `secure_floats`) | |
    | BERNOULLI | | greatest 63-bit draw that counts as success, -1 for none |
    | INTEGERS | | low, high - low |
    """

    cipher: Cipher
    key: tuple[int, ...]
    distribution: Distribution
    floats: tuple[float, ...] = ()
    ints: tuple[int, ...] = ()

    @property
    def per_block(self) -> int:
        """How many elements a block of the cipher makes."""
        return self.cipher.words_per_block // self.distribution.num_words

    def pack(self) -> Tensor:  # int64 [RECIPE_LENGTH], CPU
        """Return the recipe as a tensor."""
        if self.distribution is Distribution.SECURE_NORMAL:  # it would not be secure without
            assert self.cipher is Cipher.CHACHA20
            assert self.floats[2] <= MIDDLE_LESS, "floats come from secure_floats"
        assert len(self.key) == self.cipher.num_key_words
        key = [*self.key, *[0] * (NUM_KEY - len(self.key))]
        floats = struct.pack("<4d", *self.floats, *[0.0] * (NUM_FLOATS - len(self.floats)))
        ints = [*self.ints, *[0] * (NUM_INTS - len(self.ints))]
        kinds = int(self.cipher), int(self.distribution)
        return torch.tensor([*kinds, *key, *struct.unpack("<4q", floats), *ints])

    @classmethod
    def unpack(cls, packed: Tensor) -> "Recipe":
        """Read a recipe back from `pack`'s tensor."""
        numbers = packed.tolist()
        cipher = Cipher(numbers[0])  # type: ignore[call-arg]
        floats = struct.pack("<4q", *numbers[FLOATS_AT:INTS_AT])
        return cls(
            cipher=cipher,
            key=tuple(numbers[KEY_AT : KEY_AT + cipher.num_key_words]),
            distribution=Distribution(numbers[1]),  # type: ignore[call-arg]
            floats=struct.unpack("<4d", floats),
            ints=tuple(numbers[INTS_AT:]),
        )

    def __repr__(self) -> str:
        return f"Recipe({self.cipher.name}, {self.distribution.name}, key withheld)"


# --- ciphers: Philox4x32-10 and ChaCha20, pure functions of (key, counter) ------------------------
# int64 tensors hold 32-bit words. Sums and products are masked to 32 bits after each operation;
# products of two 32-bit words wrap in int64, which keeps their low 64 bits, and a masked shift
# reads the upper half as if the product were unsigned.

MASK32 = 0xFFFFFFFF
PHILOX_M0, PHILOX_M1 = 0xD2511F53, 0xCD9E8D57
PHILOX_W0, PHILOX_W1 = 0x9E3779B9, 0xBB67AE85
PHILOX_ROUNDS = 10
CHACHA_CONSTANTS = (0x61707865, 0x3320646E, 0x79622D32, 0x6B206574)  # "expand 32-byte k"
CHACHA_DOUBLE_ROUNDS = 10


def philox(counter: Sequence[Tensor], key: Sequence[int]) -> tuple[Tensor, ...]:
    """Apply Philox4x32-10 (Salmon et al., 2011) to a batch of 128-bit counters.

    Args:
        counter: Four int64 tensors of one shape, each holding 32-bit words.
        key: Two 32-bit words.

    Returns:
        Four int64 tensors of that shape, each holding 32-bit words.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(PHILOX_ROUNDS):
        p0, p1 = c0 * PHILOX_M0, c2 * PHILOX_M1
        c0, c2 = ((p1 >> 32) & MASK32) ^ c1 ^ k0, ((p0 >> 32) & MASK32) ^ c3 ^ k1
        c1, c3 = p1 & MASK32, p0 & MASK32
        k0, k1 = (k0 + PHILOX_W0) & MASK32, (k1 + PHILOX_W1) & MASK32
    return c0, c1, c2, c3


def philox_blocks(block: Tensor, key: Sequence[int]) -> Tensor:
    """Return the words of the given blocks: int64 [*block.shape, 4].

    Args:
        block: int64 block numbers, at least 0: counter words 0 and 1.
        key: Two key words, then counter words 2 and 3, fixed for a stream.
    """
    fixed = torch.zeros_like(block)
    counter = (block & MASK32, block >> 32, fixed + key[2], fixed + key[3])
    return torch.stack(philox(counter, key[:2]), dim=-1)


def chacha20(state: Tensor) -> Tensor:
    """Apply the ChaCha20 block function, feed-forward included (RFC 8439, section 2.3).

    Args:
        state: int64 [16, ...]: constants, 8 key words, then the four counter and nonce words.
            The function does not care how those four are split, so the RFC's 32-bit counter with
            a 96-bit nonce and the 64-bit counter that unison uses are the same code.

    Returns:
        int64 [16, ...]: the key stream block.
    """
    a, b, c, d = state.view(4, 4, *state.shape[1:]).unbind(0)
    for i in range(2 * CHACHA_DOUBLE_ROUNDS):
        for of_d, of_b in ((16, 12), (8, 7)):  # rotations
            a = (a + b) & MASK32
            d = d ^ a
            d = ((d << of_d) & MASK32) | (d >> (32 - of_d))
            c = (c + d) & MASK32
            b = b ^ c
            b = ((b << of_b) & MASK32) | (b >> (32 - of_b))
        turn = 1 if i % 2 else -1  # columns become diagonals, and diagonals columns again
        b, c, d = b.roll(turn, 0), c.roll(2 * turn, 0), d.roll(3 * turn, 0)
    return (torch.cat((a, b, c, d)) + state) & MASK32


def chacha20_blocks(block: Tensor, key: Sequence[int]) -> Tensor:
    """Return the words of the given blocks: int64 [*block.shape, 16].

    Args:
        block: int64 block numbers, at least 0: the 64-bit block counter.
        key: Eight key words, then two nonce words.
    """
    fixed = torch.zeros_like(block)
    state = [fixed + word for word in (*CHACHA_CONSTANTS, *key[:8])]
    state += [block & MASK32, block >> 32, fixed + key[8], fixed + key[9]]
    return chacha20(torch.stack(state)).movedim(0, -1)


# --- tables of the normal distribution ------------------------------------------------------------
# `normal_table.txt` holds the coefficients as hexadecimal floats, one segment to a line, written by
# `python -m bench.make_normal_table`. They are constants: nothing is fitted when unison runs, so
# every machine reads the same bits.
#
# The inverse, for a float64 x with tail probability p = x / 2^bits:
# * the exponent of x is the octave, the next `sub_bits` bits the part of the octave;
# * `u` = the mantissa of x with those bits cleared, minus the middle of the part, exactly;
# * `|z| = ((c_n · u + c_{n-1}) · u + ...) + c_0`, each product and each sum rounded on its own.
#
# The tail, T(z) = P(Z > z), for what secure draws decide exactly: Taylor coefficients around each
# multiple of 1 / `TAIL_STEPS`, as pairs of float64 whose sum is the coefficient to 2^-106.

TABLE_FILE = Path(__file__).with_name("normal_table.txt")

# [Note: u, the place within a segment]
# For 8 segments, x = 2^e · (1 + s/8 + f) with f in [0, 1/8). Clearing the exponent and the three
# bits of s and setting the exponent of 1.0 gives 1 + f; subtracting 1 + 1/16 leaves u in
# [-1/16, 1/16). Both numbers are multiples of 2^-52 below 2, so the difference is exact.
ONE_BITS = 1023 << 52


@dataclass(frozen=True)
class TableShape:
    """Which numbers a table of the inverse maps, and its number of segments and coefficients."""

    name: str
    bits: int  # p = x / 2^bits
    num_octaves: int
    num_coefficients: int
    first_octave: int = 0  # x is at least 2^first_octave
    sub_bits: int = 3  # an octave has 2^sub_bits segments

    @cached_property
    def num_segments(self) -> int:
        """Number of polynomials."""
        return self.num_octaves << self.sub_bits

    @cached_property
    def segment_offset(self) -> int:
        """Number of segments below x = 2^first_octave, counted from the exponent's bits."""
        return (1023 + self.first_octave) << self.sub_bits

    @cached_property
    def segment_shift(self) -> int:
        """Number of a float64's bits behind those that say which segment it is in."""
        return 52 - self.sub_bits

    @cached_property
    def fraction_mask(self) -> int:
        """Those bits."""
        return (1 << self.segment_shift) - 1

    @cached_property
    def middle(self) -> float:
        """The middle of a segment that begins at 1."""
        return 1.0 + 2.0 ** -(self.sub_bits + 1)


# One 32-bit word: a sign and 31 bits of v. Largest error of |z| about 1e-10.
ORDINARY = TableShape(name="ordinary", bits=33, num_octaves=32, num_coefficients=6)
# The 31 bits of a secure normal, as the middle of what they leave open, where they say something
# worth a look: p > 2^-14. See `coarse_polynomials`.
COARSE = TableShape(
    name="coarse", bits=32, num_octaves=13, num_coefficients=3, first_octave=18, sub_bits=8
)
# 104 bits, for what is decided exactly. Largest error of |z| about 4e-15. The last octave holds the
# single value 2^63, to which x can round up.
SECURE = TableShape(name="secure", bits=64, num_octaves=80, num_coefficients=9, first_octave=-16)

TAIL_STEPS = 4
NUM_TAILS, NUM_TAIL_COEFFICIENTS = 42, 32  # |z| <= 10.25, one step past the quantile of 2^-80
# Where the parts of the one table are that kernels of secure normals get. The coarse part has rows
# for x = (v + ½) / 2^31 from 2^-32 on; the lower ones say that they know nothing.
COARSE_ROWS, COARSE_OFFSET = 32 << COARSE.sub_bits, (1023 - 32) << COARSE.sub_bits
SECURE_AT = 2 * COARSE_ROWS
TAILS_AT = SECURE_AT + SECURE.num_segments * SECURE.num_coefficients
KNOWS_NOTHING = 0x7FF0  # the upper 16 bits of infinity


@cache
def kernel_table(shape: TableShape, device: torch.device) -> Tensor:
    """Return all that draws by a shape look up, one after the other.

    Kernels of secure normals get one address: it is the same table for COARSE and SECURE.
    """
    if shape is SECURE:
        return kernel_table(COARSE, device)
    sizes = {
        "ordinary": (ORDINARY.num_segments, ORDINARY.num_coefficients),
        "coarse": (COARSE.num_segments, 2),
        "secure": (SECURE.num_segments, SECURE.num_coefficients),
        "tail": (NUM_TAILS, 2 * NUM_TAIL_COEFFICIENTS),
    }
    lines = TABLE_FILE.read_text(encoding="ascii").splitlines()
    parts = []
    for name, (num_rows, num_columns) in sizes.items():
        wanted, found, rows = f"{name} {num_rows} {num_columns}", lines[0], lines[1 : 1 + num_rows]
        assert found == wanted, f"{TABLE_FILE.name}: expected {wanted!r}, found {found!r}"
        if (name == "ordinary") == (shape is ORDINARY):
            values = [[float.fromhex(word) for word in row.split()] for row in rows]
            part = torch.tensor(values, dtype=torch.float64)
            if name == "coarse":  # both numbers of a segment side by side
                nothing = torch.tensor([KNOWS_NOTHING, 0]).view(torch.float64)
                parts += [nothing.repeat(COARSE_ROWS - num_rows), part.reshape(-1)]
            else:  # coefficient-major, so that one gather of a warp touches few cache lines
                parts.append(part.t().reshape(-1))
        lines = lines[1 + num_rows :]
    assert not lines, f"{TABLE_FILE.name} has {len(lines)} lines too many"
    table = torch.cat(parts).to(device)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()  # later uses may be on other streams
    return table


@cache
def inverse_table(shape: TableShape, device: torch.device) -> Tensor:
    """Return the coefficients on `device`: float64 [num_coefficients, num_segments]."""
    assert shape is not COARSE, "see coarse_polynomials"
    begin = SECURE_AT if shape is SECURE else 0
    numel = shape.num_coefficients * shape.num_segments
    table = kernel_table(shape, device)[begin : begin + numel]
    return table.view(shape.num_coefficients, shape.num_segments)


def coarse_polynomials(rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return c0, c1, c2 of rows of the coarse table, and how far c0 + c1 u + c2 u² may be off.

    Two gathers do for a row: of its first number the last 16 bits are the upper ones of the bound,
    of its second, c1, the last 24 are those of c2. So c0 is good to 2^-37, c1 to 2^-29 of itself.
    """
    table = kernel_table(COARSE, rows.device)[:SECURE_AT].view(-1, 2)
    c0, c1 = table[rows].unbind(-1)
    bits0, bits1 = c0.view(torch.int64), c1.view(torch.int64)
    return c0, c1, (bits1 << 40).view(torch.float64), (bits0 << 48).view(torch.float64)


# --- the reference, in plain torch ----------------------------------------------------------------
# The definition that the fast backends must match to the bit. Integer operations, gathers, and
# float64 products and sums, each rounded on its own: nothing else touches a value before its one
# final rounding. That is why a CPU, a GPU and the compiled backends agree. (bfloat16 and float16
# are reached through float32: two roundings, the same everywhere.)

# Adding and subtracting 1.5 · 2^52 rounds a float64 below 2^51 to an integer, ties to even.
ROUND_MAGIC = 1.5 * 2.0**52
SPLIT = 2.0**27 + 1  # Veltkamp's: cuts 53 bits into two halves, whose products are exact
SIGN64 = -(1 << 63)
CHUNK_WORDS = 1 << 16  # half a megabyte of int64: a chunk stays in the processor's cache


def fill_reference(out: Tensor, recipe: Recipe, starts: Tensor, run: int) -> None:
    """Fill `out` row by row; row r holds elements starts[r] ... starts[r] + run - 1.

    Args:
        out: [num_rows * run], contiguous; the dtype decides the final rounding.
        recipe: What to draw.
        starts: int64 [num_rows], at least 0, on any device.
        run: Elements in a row.
    """
    size = CHUNK_WORDS // recipe.distribution.num_words
    for piece, begin in chunks(out, starts.to(out.device), run, size):
        words = element_words(recipe, begin, piece.shape[1])
        more_words = partial(_more_words, recipe, begin, piece.shape[1])
        piece.copy_(draw(recipe, words, out.dtype, more_words))


def chunks(out: Tensor, starts: Tensor, run: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Cut rows of `run` elements into some rows at a time, or into parts of one: of about `size`.

    Yields:
        Each part of the output [rows, elements], and the index of each of its rows' first element.
    """
    at_once = max(1, size // run)
    for rows, begin in zip(out.view(-1, run).split(at_once), starts.split(at_once), strict=True):
        for column in range(0, run, size):
            yield rows[:, column : column + size], begin + column


def element_words(recipe: Recipe, starts: Tensor, run: int) -> Tensor:
    """Return the words of each element: int64 [num_words, num_rows, run]."""
    if recipe.distribution is Distribution.SECURE_NORMAL:
        return secure_words(recipe, starts, run)[None]
    per_block = recipe.per_block
    # Block and place within it, never element · width: that product would overflow near 2^63.
    num_blocks = (run + 2 * per_block - 2) // per_block
    blocks = starts[:, None] // per_block + torch.arange(num_blocks, device=starts.device)
    cipher = philox_blocks if recipe.cipher is Cipher.PHILOX else chacha20_blocks
    words = cipher(blocks, recipe.key).reshape(len(starts), num_blocks * per_block, -1)
    return _from_place(words, starts % per_block, run).movedim(-1, 0)


def _from_place(words: Tensor, place: Tensor, run: int) -> Tensor:
    """Return `run` rows of words [num_rows, elements, width] from a place on, its own for each."""
    if len(place) == 1:
        return words[:, int(place) : int(place) + run]
    at = place[:, None] + torch.arange(run, device=place.device)
    return words.gather(1, at[:, :, None].expand(-1, -1, words.shape[-1]))


def secure_words(recipe: Recipe, starts: Tensor, run: int) -> Tensor:
    """Return the word of each element of secure normals: int64 [num_rows, run]."""
    if run < SECURE_TILE // 16:  # a block for each element, instead of all of a tile
        block, word = secure_places(starts[:, None] + torch.arange(run, device=starts.device))
        return chacha20_blocks(block, recipe.key).gather(-1, word[..., None]).squeeze(-1)
    num_tiles = (run + 2 * SECURE_TILE - 2) // SECURE_TILE
    blocks = torch.arange(num_tiles * SECURE_BLOCKS, device=starts.device)
    words = chacha20_blocks((starts // SECURE_TILE * SECURE_BLOCKS)[:, None] + blocks, recipe.key)
    dealt = words.view(len(starts), num_tiles, SECURE_BLOCKS, 4, 4).transpose(2, 3)
    return _from_place(dealt.reshape(len(starts), -1, 1), starts % SECURE_TILE, run).squeeze(-1)


def secure_places(elements: Tensor) -> tuple[Tensor, Tensor]:
    """Return the block of each element of secure normals, and which of its 16 words it has."""
    tile, place = elements // SECURE_TILE, elements % SECURE_TILE
    block = tile * SECURE_BLOCKS + place % (4 * SECURE_BLOCKS) // 4
    return block, place // (4 * SECURE_BLOCKS) * 4 + place % 4


def _more_words(recipe: Recipe, starts: Tensor, run: int, which: Tensor) -> Tensor:
    """Return three further words of each element that a mask [num_rows, run] chooses."""
    elements = starts[:, None] + torch.arange(run, device=starts.device)
    blocks = chacha20_blocks(MORE_BLOCKS + elements[which], recipe.key)
    return blocks[..., :3].movedim(-1, 0)


def draw(
    recipe: Recipe,
    words: Tensor,
    dtype: torch.dtype,
    more_words: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Turn the words of elements into values of `dtype`: [num_words, ...] -> [...].

    `more_words` returns further words of the few secure normals that need them.
    """
    floats, ints = recipe.floats, recipe.ints
    match recipe.distribution:
        case Distribution.WORDS:
            return words[0]
        case Distribution.UNIFORM24:
            unit = (words[0] >> 8).double() * 2.0**-24
            value = (unit * floats[1] + floats[0]).clamp(floats[2], floats[3])
        case Distribution.UNIFORM53:
            unit = ((words[0] << 21) | (words[1] >> 11)).double() * 2.0**-53
            value = (unit * floats[1] + floats[0]).clamp(floats[2], floats[3])
        case Distribution.NORMAL:
            magnitude = inverse_tail(((words[0] & 0x7FFFFFFF) << 1) | 1, ORDINARY)
            value = torch.where(words[0] >> 31 == 1, -magnitude, magnitude) * floats[1] + floats[0]
        case Distribution.TRUNCATED:
            rank = ints[0] + scale_word(words[0], ints[1])
            value = (normal_of_rank(rank) * floats[1] + floats[0]).clamp(floats[2], floats[3])
        case Distribution.SECURE_NORMAL:
            v = words[0] & 0x7FFFFFFF
            steps, is_open = coarse_steps(v, floats[0], floats[2])
            if bool(is_open.any()):
                assert more_words is not None
                steps[is_open] = decided_steps(v[is_open], more_words(is_open), floats[0])
            steps = torch.where(words[0] >> 31 == 1, -steps, steps) + 0.0  # no -0.0
            value = steps * floats[1]
        case Distribution.BERNOULLI:
            return ((words[0] << 31) | (words[1] >> 1)) <= ints[0]
        case Distribution.INTEGERS:
            return ints[0] + scale_128(words, ints[1])
        case _:
            raise AssertionError(f"no rule for {recipe.distribution!r}")
    return value.float().to(dtype) if dtype.itemsize < 4 else value.to(dtype)


def inverse_tail(v: Tensor, shape: TableShape) -> Tensor:
    """Return |z| with P(Z > |z|) = v / 2^bits, float64; `v` is positive, int64 or float64."""
    coefficients = inverse_table(shape, v.device)
    bits = v.double().view(torch.int64)
    segment = (bits >> shape.segment_shift) - shape.segment_offset
    u = ((bits & shape.fraction_mask) | ONE_BITS).view(torch.float64) - shape.middle
    z = coefficients[-1][segment]
    for coefficient in coefficients[:-1].flip(0):
        z = z * u + coefficient[segment]
    return z


def coarse_steps(v: Tensor, scale: float, distance: float) -> tuple[Tensor, Tensor]:
    """Return scale · Q(p) rounded to an integer, and where that may be wrong.

    Args:
        v: The first 31 bits of p · 2^32.
        scale: The standard deviation in spacings.
        distance: See `secure_floats`.
    """
    bits = ((v.double() + 0.5) * 2.0**-31).view(torch.int64)
    c0, c1, c2, reach = coarse_polynomials((bits >> COARSE.segment_shift) - COARSE_OFFSET)
    u = ((bits & COARSE.fraction_mask) | ONE_BITS).view(torch.float64) - COARSE.middle
    scaled = ((c2 * u + c1) * u + c0) * scale
    steps = scaled + ROUND_MAGIC - ROUND_MAGIC
    return steps, (scaled - steps).abs() > distance - reach * scale


def decided_steps(v: Tensor, more: Tensor, scale: float) -> Tensor:
    """Return scale · Q(p), rounded to the nearest integer, by 104 bits of p.

    Args:
        v: The first 31 bits of p · 2^105 [...].
        more: Three words [3, ...], of which the first 73 bits come after them.
        scale: The standard deviation in spacings.
    """
    w = (v << 9) | (more[0] >> 23)
    rest = ((more[:2] & 0x7FFFFF) << 9) | (more[1:] >> 23)
    # A float64 of p nearly always does: y is off by 2^-47 of the scale at most.
    x = w.double() * 2.0**23 + (rest[0].double() * 2.0**-9 + rest[1].double() * 2.0**-41)
    y = inverse_tail(x.clamp(min=2.0**SECURE.first_octave), SECURE) * scale
    steps = y + ROUND_MAGIC - ROUND_MAGIC
    is_near = (y - steps).abs() > 0.5 - NEAR * scale
    if bool(is_near.any()):
        steps[is_near] = exact_steps(w[is_near], rest[:, is_near], scale)
    return steps


def exact_steps(w: Tensor, more: Tensor, scale: float) -> Tensor:
    """Return scale · Q(p), Q the upper quantile, rounded to the nearest integer: docs/rng.md.

    Args:
        w: The first 40 bits of p · 2^41 [...].
        more: Two words [2, ...], the 64 bits after them.
        scale: The standard deviation in spacings.
    """
    # p · 2^64 as the sum of two floats, the second less than half a unit of the first: 63 bits
    # before the point, 41 after it.
    after = (((more[0] & 0x1FF) << 32) | more[1]).double() * 2.0**-41 + 2.0**-42
    top, low = w.double() * 2.0**23, (more[0] >> 9).double()
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


def upper_tail(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return P(Z > z) as the sum of two floats, and its derivative as one, for 0 <= z <= 10.3."""
    nearest = z * TAIL_STEPS + ROUND_MAGIC - ROUND_MAGIC
    segment, h = nearest.long(), z - nearest * (1 / TAIL_STEPS)
    table = kernel_table(SECURE, z.device)[TAILS_AT:].view(NUM_TAIL_COEFFICIENTS, 2, NUM_TAILS)
    pairs = table[:, :, segment].flip(0)
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


def _product(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return a · b rounded, and what is lost by it, exactly (Dekker)."""
    product = a * b
    cut_a, cut_b = SPLIT * a, SPLIT * b
    a1, b1 = cut_a - (cut_a - a), cut_b - (cut_b - b)
    a0, b0 = a - a1, b - b1
    return product, (((a1 * b1 - product) + a1 * b0) + a0 * b1) + a0 * b0


def normal_of_rank(rank: Tensor) -> Tensor:
    """Return the normal value of a rank in [0, 2^32): float64, not decreasing in the rank."""
    is_negative = rank < (1 << 31)
    from_tail = torch.where(is_negative, rank, MASK32 - rank)
    magnitude = inverse_tail((from_tail << 1) | 1, ORDINARY)
    return torch.where(is_negative, -magnitude, magnitude)


def scale_word(word: Tensor, n: int) -> Tensor:
    """Return floor(word · n / 2^32) for a 32-bit word and 0 < n <= 2^32, exactly."""
    return (word * (n >> 16) + ((word * (n & 0xFFFF)) >> 16)) >> 16


def _upper(product: Tensor) -> Tensor:
    return (product >> 32) & MASK32


def _multiply(a1: Tensor, a0: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Return upper and lower 64 bits of (a1 · 2^32 + a0) · n, for n below 2^63."""
    n1, n0 = n >> 32, n & MASK32
    p00, p01, p10, p11 = a0 * n0, a0 * n1, a1 * n0, a1 * n1
    middle = _upper(p00) + (p01 & MASK32) + (p10 & MASK32)
    upper = p11 + _upper(p01) + _upper(p10) + (middle >> 32)
    return upper, (middle << 32) | (p00 & MASK32)


def scale_128(words: Tensor, n: int) -> Tensor:
    """Return floor(r · n / 2^128), r the 128-bit number of four words, most significant first.

    Of the 2^128 values of r each result gets floor or ceil of 2^128 / n: no probability is off by
    more than 2^-128, which is below 2^-65 of its size for every n < 2^63.
    """
    upper, lower = _multiply(words[0], words[1], n)
    carried, _ = _multiply(words[2], words[3], n)
    total = lower + carried
    overflowed = (total ^ SIGN64) < (carried ^ SIGN64)  # unsigned comparison
    return upper + overflowed.to(torch.int64)


# --- dispatch -------------------------------------------------------------------------------------

# numba compiles for seconds (once: the result is cached on disk), torch operations start at once.
# Until this many elements have been asked for, the reference serves the CPU. A request of a few
# counts for more: torch takes as long for it as for some thousand, since it is many operations.
PATIENCE = 1 << 18
_LEAST_COUNTED = 1 << 10

_num_served = 0
_forced: str | None = None


@cache
def _is_installed(package: str) -> bool:
    is_there = find_spec(package) is not None
    if not is_there:
        warnings.warn(
            f"{package} is not installed: unison draws random numbers with plain torch operations, "
            f"which give the same bits about ten times slower. Remedy: pip install {package}",
            RuntimeWarning,
            stacklevel=2,
        )
    return is_there


@contextmanager
def using_backend(name: str):
    """Force one backend ("reference", "numba" or "triton") inside the context, for comparisons."""
    global _forced
    check.one_of(["reference", "numba", "triton"], backend=name)
    previous, _forced = _forced, name
    try:
        yield
    finally:
        _forced = previous


def is_numba_chosen(num_elements: int) -> bool:
    """Return whether numba serves a request of this size on the CPU."""
    global _num_served
    if _forced is not None:
        return _forced == "numba"
    _num_served += max(num_elements, _LEAST_COUNTED)
    return _num_served > PATIENCE and _is_installed("numba")


def _is_triton_chosen(x: Tensor) -> bool:
    if _forced is not None:
        return _forced == "triton"
    return x.is_cuda and _is_installed("triton")


@torch.library.custom_op("unison::random_fill", mutates_args={"out"})
def _random_fill(out: Tensor, recipe: Tensor, starts: Tensor, run: int) -> None:
    fill = fill_reference  # of words and integers nobody draws so many that more would pay
    if out.dtype != torch.int64 and (out.is_cuda or _forced) and _is_triton_chosen(out):
        fill = import_module("unison.kernels.random_triton").fill
    elif out.dtype != torch.int64 and out.device.type == "cpu" and is_numba_chosen(out.numel()):
        fill = import_module("unison.kernels.numba_kernels").fill
    if out.numel():
        fill(out, Recipe.unpack(recipe), starts, run)


@_random_fill.register_fake
def _(out: Tensor, recipe: Tensor, starts: Tensor, run: int) -> None:
    return None


def fill_rows(out: Tensor, recipe: Recipe, starts: Tensor, run: int) -> None:
    """Fill `out` in place, row after row, from one stream.

    Guarantees:
        The value of an element depends on the recipe and on the element's index alone: not on the
        device, the backend, the number of threads, or which other elements are asked for.

    Args:
        out: Contiguous, with `len(starts) * run` elements; any shape.
        recipe: What to draw.
        starts: int64 [num_rows] on the CPU: the index of each row's first element.
        run: Number of elements in a row, with consecutive indices.
    """
    allowed = OUTPUT_DTYPES[recipe.distribution]
    if out.dtype not in allowed:
        listed = ", ".join(str(dtype) for dtype in allowed)
        kind = recipe.distribution.name.lower()
        raise BadInput(f"{kind} draws fill {listed}, found {out.dtype=}")
    if not out.is_contiguous():
        raise BadInput(f"expected a contiguous output, found strides {out.stride()}")
    if starts.dtype != torch.int64 or starts.device.type != "cpu" or starts.dim() != 1:
        raise BadInput(f"expected starts as int64 [num_rows] on the CPU, found {starts!r}")
    if out.numel() != len(starts) * run:
        raise BadInput(
            f"expected {len(starts)} rows of {run} elements, found an output of {out.numel()}"
        )
    if out.numel() == 0 or out.device.type == "meta":
        return
    packed = recipe.pack()
    _random_fill(out.detach(), packed, starts.contiguous(), run)
    packed.zero_()  # it holds the key


def drop(
    x: Tensor, key: tuple[int, ...], starts: Tensor, run: int, limit: int, scale: float
) -> Tensor:
    """Return x times `scale`, with zeros where an element's BERNOULLI draw is a success.

    Args:
        x: Elements in the order of rows; any shape.
        key: The words of a Philox stream.
        starts: int64 [num_rows] on the CPU: the index of each row's first element.
        run: Number of elements in a row.
        limit: Greatest 63-bit draw that is dropped.
        scale: Factor of what stays.
    """
    if _is_triton_chosen(x) and x.dtype in TAKEN and x.numel():
        # One kernel for one run of elements: the mask is drawn where it is used, never stored.
        first = int(starts[0])
        if first % 2 == 0 and bool((starts.diff() == run).all()):
            triton = import_module("unison.kernels.random_triton")
            return triton.drop(x.contiguous(), key, first, limit, scale)
    is_dropped = torch.empty(x.shape, dtype=torch.bool, device=x.device)
    recipe = Recipe(Cipher.PHILOX, key, Distribution.BERNOULLI, (), (limit,))
    fill_rows(is_dropped, recipe, starts, run)
    return torch.where(is_dropped, 0.0, x * scale)


# --- a keyed permutation of [0, n) by a Feistel network -------------------------------------------
# Pairs (left, right) with left in [0, num_left) and right in [0, num_right). Rounds alternate:
# left += F(right) mod num_left, then right += F(left) mod num_right, with F from Philox4x32-10.
# Results of n and above are walked: the network is applied again until one falls below n. Both
# backends, plain torch and numba, give equal bits.

NUM_ROUNDS = 12
_WALK_CHUNK = 1 << 14


@torch.library.custom_op("unison::permute", mutates_args=())
def permute(x: Tensor, words: Tensor, n: int, sides: list[int], is_inverse: bool) -> Tensor:
    """Return the images (or, inverted, the sources) of indices in [0, n).

    Args:
        x: The indices, int64, any shape.
        words: Of a stream, two of key and two of counter: int64 [4] on the CPU.
        n: How many indices there are.
        sides: Of the pairs: num_left, num_right.
        is_inverse: Whether to undo the permutation.
    """
    key = words.tolist()
    if x.device.type == "cpu" and is_numba_chosen(x.numel()):  # 6 times as fast on 2 cores
        compiled = import_module("unison.kernels.numba_kernels").permute
        return compiled(x, key, n, sides, is_inverse)
    parts = []
    for part in x.reshape(-1).split(_WALK_CHUNK):
        part = apply_rounds(part, key, sides, is_inverse)
        outside = (part >= n).nonzero().view(-1)
        while len(outside):
            part[outside] = apply_rounds(part[outside], key, sides, is_inverse)
            outside = outside[part[outside] >= n]
        parts.append(part)
    return torch.cat(parts).view(x.shape)


@permute.register_fake
def _(x: Tensor, words: Tensor, n: int, sides: list[int], is_inverse: bool):
    return torch.empty_like(x)


def apply_rounds(
    x: Tensor, words: Sequence[Any], sides: Sequence[int], is_inverse: bool = False
) -> Tensor:
    """Apply the network once, or undo it, without walking: see `permute`."""
    num_left, num_right = sides
    left, right = x // num_right, x % num_right
    sign = -1 if is_inverse else 1
    for r in range(NUM_ROUNDS)[::sign]:
        if r % 2 == 0:
            left = (left + sign * _shift(r, right, num_left, words)) % num_left
        else:
            right = (right + sign * _shift(r, left, num_right, words)) % num_right
    return left * num_right + right


def _shift(r: int, half: Tensor, size: int, words: Sequence[Any]) -> Tensor:
    """Return F: floor(64-bit word · size / 2^64); `half` and `size` are below 2^32."""
    zero = torch.zeros_like(half)
    counter = (half & MASK32, zero + r, zero + words[2], zero + words[3])
    upper, lower, *_ = philox(counter, words[:2])
    return (upper * size + ((lower * size) >> 32)) >> 32
