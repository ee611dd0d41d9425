"""The shipped tables of the normal distribution: its inverse, and its upper tail.

`normal_table.txt` holds the coefficients as hexadecimal floats, one segment to a line, written by
`python -m bench.make_normal_table`. They are constants: nothing is fitted when unison runs, so
every machine reads the same bits.

The inverse, for a float64 x with tail probability p = x / 2^bits:

* the exponent of x is the octave, the next `SUB_BITS` bits the part of the octave;
* `u` = the mantissa of x with those bits cleared, minus the middle of the part, exactly;
* `|z| = ((c_n · u + c_{n-1}) · u + ...) + c_0`, each product and each sum rounded on its own.

The tail, T(z) = P(Z > z), for what secure draws decide exactly: Taylor coefficients around each
multiple of 1 / `TAIL_STEPS`, as pairs of float64 whose sum is the coefficient to 2^-106.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

SUB_BITS = 3
TABLE_FILE = Path(__file__).with_name("normal_table.txt")

# [Note: u, the place within a segment]
# x = 2^e · (1 + s/8 + f) with f in [0, 1/8). Clearing the exponent and the three bits of s and
# setting the exponent of 1.0 gives 1 + f; subtracting 1 + 1/16 leaves u in [-1/16, 1/16). Both
# numbers are multiples of 2^-52 below 2, so the difference is exact.
SEGMENT_SHIFT = 52 - SUB_BITS
FRACTION_MASK = (1 << SEGMENT_SHIFT) - 1
ONE_BITS = 1023 << 52
MIDDLE = 1.0 + 2.0 ** -(SUB_BITS + 1)


@dataclass(frozen=True)
class TableShape:
    """Which numbers a table of the inverse maps, and its number of segments and coefficients."""

    name: str
    bits: int  # p = x / 2^bits
    num_octaves: int
    num_coefficients: int
    first_octave: int = 0  # x is at least 2^first_octave

    @property
    def num_segments(self) -> int:
        """Number of polynomials."""
        return self.num_octaves << SUB_BITS

    @property
    def segment_offset(self) -> int:
        """Number of segments below x = 2^first_octave, counted from the exponent's bits."""
        return (1023 + self.first_octave) << SUB_BITS


# One 32-bit word: a sign and 31 bits of v. Largest error of |z| about 1e-10.
ORDINARY = TableShape(name="ordinary", bits=33, num_octaves=32, num_coefficients=6)
# Two words: a sign and 63 bits, and what decides exactly (docs/rng.md) has more. Largest error of
# |z| about 4e-15. The last octave holds the single value 2^63, to which x can round up.
SECURE = TableShape(name="secure", bits=64, num_octaves=80, num_coefficients=9, first_octave=-16)

TAIL_STEPS = 4
NUM_TAILS, NUM_TAIL_COEFFICIENTS = 42, 32  # |z| <= 10.25, one step past the quantile of 2^-80
SECURE_LENGTH = SECURE.num_segments * SECURE.num_coefficients


@cache
def _tables() -> dict[str, torch.Tensor]:
    lines = TABLE_FILE.read_text(encoding="ascii").splitlines()
    sizes = [(each.name, each.num_segments, each.num_coefficients) for each in (ORDINARY, SECURE)]
    tables = {}
    at = 0
    for name, num_rows, num_columns in [*sizes, ("tail", NUM_TAILS, 2 * NUM_TAIL_COEFFICIENTS)]:
        header = f"{name} {num_rows} {num_columns}"
        assert lines[at] == header, f"{TABLE_FILE.name}: expected {header!r}, found {lines[at]!r}"
        rows = lines[at + 1 : at + 1 + num_rows]
        values = [[float.fromhex(word) for word in row.split()] for row in rows]
        # Coefficient-major, so that one gather of a warp touches few cache lines.
        tables[name] = torch.tensor(values, dtype=torch.float64).t().contiguous()
        at += 1 + num_rows
    assert at == len(lines), f"{TABLE_FILE.name} has {len(lines) - at} lines too many"
    # Side by side: kernels that draw secure normals get one address.
    both = torch.cat((tables["secure"].view(-1), tables.pop("tail").view(-1)))
    return {**tables, "secure": both}


@cache
def table(shape: TableShape, device: torch.device) -> torch.Tensor:
    """Return the coefficients on `device`: float64 [num_coefficients, num_segments]."""
    numel = shape.num_coefficients * shape.num_segments
    return kernel_table(shape, device)[:numel].view(shape.num_coefficients, shape.num_segments)


def tail_table(device: torch.device) -> torch.Tensor:
    """Return the tail's coefficients: float64 [NUM_TAIL_COEFFICIENTS, 2, NUM_TAILS]."""
    tail = kernel_table(SECURE, device)[SECURE_LENGTH:]
    return tail.view(NUM_TAIL_COEFFICIENTS, 2, NUM_TAILS)


@cache
def kernel_table(shape: TableShape, device: torch.device) -> torch.Tensor:
    """Return all that draws by a shape look up, one after the other: `table`, then `tail_table`."""
    coefficients = _tables()[shape.name].view(-1).to(device)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()  # later uses may be on other streams
    return coefficients
