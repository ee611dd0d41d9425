"""What to draw, as data: cipher, stream key, distribution and its numbers.

A recipe travels through the `unison::random_fill` operation as one small int64 tensor on the CPU.
It is a tensor and not a list of integers because profilers record scalar arguments, and the key of
a secure stream must not end up in a trace.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum

import torch

from unison.errors import BadInput


class Cipher(IntEnum):
    """Which function turns (key, counter) into words."""

    PHILOX = 0  # Philox4x32-10: fast, public
    CHACHA20 = 1  # ChaCha20: cryptographic, for what privacy rests on

    @property
    def words_per_block(self) -> int:
        """32-bit words that one counter value yields."""
        return 4 if self is Cipher.PHILOX else 16

    @property
    def num_key_words(self) -> int:
        """32-bit words that identify a stream: the key, then the fixed part of the counter."""
        return 4 if self is Cipher.PHILOX else 10


class Distribution(IntEnum):
    """How the words of an element become its value."""

    WORDS = 0
    UNIFORM24 = 1
    UNIFORM53 = 2
    NORMAL = 3
    TRUNCATED = 4
    SECURE_NORMAL = 5
    BERNOULLI = 6
    INTEGERS = 7


WORDS_PER_ELEMENT = {
    Distribution.WORDS: 1,
    Distribution.UNIFORM24: 1,
    Distribution.UNIFORM53: 2,
    Distribution.NORMAL: 1,
    Distribution.TRUNCATED: 1,
    Distribution.SECURE_NORMAL: 2,
    Distribution.BERNOULLI: 2,
    Distribution.INTEGERS: 4,
}

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

# Secure normals that are this near to the middle of two grid points, in standard deviations, or so
# far in the tail that their first 63 bits are too coarse, are decided by more bits and exactly:
# 2^-20 of them at the usual spacing (docs/rng.md, "How a value is decided").
NEAR = 2.0**-42
FAR_UPPER = 1 << 10  # the upper 31 of the 63 bits are less: P(|Z| > |z|) < 2^-21
MORE_BLOCKS = 1 << 62  # their further bits lie in blocks from here on; no element's own is there

NUM_KEY, NUM_FLOATS, NUM_INTS = 10, 4, 2
KEY_AT = 2
FLOATS_AT = KEY_AT + NUM_KEY
INTS_AT = FLOATS_AT + NUM_FLOATS
RECIPE_LENGTH = INTS_AT + NUM_INTS


def float_bits(value: float) -> int:
    """Return the bit pattern of a float64 as a signed 64-bit integer."""
    return struct.unpack("<q", struct.pack("<d", value))[0]


def bits_float(bits: int) -> float:
    """Undo `float_bits`."""
    return struct.unpack("<d", struct.pack("<q", bits))[0]


def secure_floats(std: float, spacing: float) -> tuple[float, float, float]:
    """Return the floats of a SECURE_NORMAL recipe.

    The third says how near to the middle of two multiples a value must be, in spacings, to be
    decided exactly. More than NEAR changes no value; tests use it to have many decided so.
    """
    return std / spacing, spacing, std / spacing * NEAR


@dataclass(frozen=True, repr=False)
class Recipe:
    """A cipher, the words that identify a stream, a distribution and its numbers.

    The floats and integers mean, by distribution:

    | distribution | floats | integers |
    |---|---|---|
    | UNIFORM24, UNIFORM53 | low, high - low, least and greatest allowed result | |
    | NORMAL | mean, standard deviation | |
    | TRUNCATED | mean, standard deviation, least and greatest result | first rank, count of ranks |
    | SECURE_NORMAL | standard deviation / spacing, spacing, nearness (see `secure_floats`) | |
    | BERNOULLI | | greatest 63-bit draw that counts as success, -1 for none |
    | INTEGERS | | low, high - low |
    """

    cipher: Cipher
    key: tuple[int, ...]
    distribution: Distribution
    floats: tuple[float, ...] = ()
    ints: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.distribution is Distribution.SECURE_NORMAL:  # without nearness it would not be
            assert any(self.floats[2:]), "floats come from secure_floats"

    @property
    def words_per_element(self) -> int:
        """32-bit words that one element consumes."""
        return WORDS_PER_ELEMENT[self.distribution]

    @property
    def elements_per_block(self) -> int:
        """Elements that one counter value yields; no element straddles two blocks."""
        return self.cipher.words_per_block // self.words_per_element

    def numbers(self) -> list[int]:
        """Return the recipe as RECIPE_LENGTH integers."""
        assert len(self.key) == self.cipher.num_key_words
        key = [*self.key, *[0] * (NUM_KEY - len(self.key))]
        floats = [*self.floats, *[0.0] * (NUM_FLOATS - len(self.floats))]
        ints = [*self.ints, *[0] * (NUM_INTS - len(self.ints))]
        return [int(self.cipher), int(self.distribution), *key, *map(float_bits, floats), *ints]

    def pack(self) -> torch.Tensor:  # int64 [RECIPE_LENGTH], CPU
        """Return the recipe as a tensor."""
        return torch.tensor(self.numbers(), dtype=torch.int64)

    @classmethod
    def unpack(cls, packed: torch.Tensor) -> "Recipe":
        """Read a recipe back from `pack`'s tensor."""
        numbers = packed.tolist()
        cipher = Cipher(numbers[0])
        return cls(
            cipher=cipher,
            key=tuple(numbers[2 : 2 + cipher.num_key_words]),
            distribution=Distribution(numbers[1]),
            floats=tuple(bits_float(bits) for bits in numbers[FLOATS_AT:INTS_AT]),
            ints=tuple(numbers[INTS_AT:]),
        )

    def check_output(self, out: torch.Tensor) -> None:
        """Require a contiguous output of a dtype that the distribution can fill."""
        allowed = OUTPUT_DTYPES[self.distribution]
        if out.dtype not in allowed:
            listed = ", ".join(str(dtype) for dtype in allowed)
            raise BadInput(
                f"{self.distribution.name.lower()} draws fill {listed}, found {out.dtype=}"
            )
        if not out.is_contiguous():
            raise BadInput(f"expected a contiguous output, found strides {out.stride()}")

    def __repr__(self) -> str:
        return f"Recipe({self.cipher.name}, {self.distribution.name}, key withheld)"
