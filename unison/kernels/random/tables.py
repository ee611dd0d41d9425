"""The shipped tables of the inverse normal distribution function.

`normal_table.txt` holds the coefficients as hexadecimal floats, one segment to a line, written by
`python -m bench.make_normal_table`. They are constants: nothing is fitted when unison runs, so
every machine reads the same bits.

The map, for an odd integer v below 2^(bits - 1) with tail probability p = v / 2^bits:

* `x = float64(v)`; its exponent is the octave, the next `SUB_BITS` bits the part of the octave;
* `u` = the mantissa of x with those bits cleared, minus the middle of the part, exactly;
* `|z| = ((c_n · u + c_{n-1}) · u + ...) + c_0`, each product and each sum rounded on its own.
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
SEGMENT_OFFSET = 1023 << SUB_BITS


@dataclass(frozen=True)
class TableShape:
    """Which integers a table maps, and how many segments and coefficients it has."""

    name: str
    bits: int  # p = v / 2^bits
    num_octaves: int
    num_coefficients: int

    @property
    def num_segments(self) -> int:
        """Number of polynomials."""
        return self.num_octaves << SUB_BITS


# One 32-bit word: a sign and 31 bits of v. Largest error of |z| about 1e-10.
ORDINARY = TableShape(name="ordinary", bits=33, num_octaves=32, num_coefficients=6)
# Two words: a sign and 62 bits of v. Largest error of |z| about 2e-15. The last octave holds the
# single value 2^63, to which float64(v) can round up.
SECURE = TableShape(name="secure", bits=64, num_octaves=64, num_coefficients=9)


@cache
def _tables() -> dict[str, torch.Tensor]:
    lines = TABLE_FILE.read_text(encoding="ascii").splitlines()
    tables = {}
    at = 0
    for shape in (ORDINARY, SECURE):
        header = f"{shape.name} {shape.num_segments} {shape.num_coefficients}"
        assert lines[at] == header, f"{TABLE_FILE.name}: expected {header!r}, found {lines[at]!r}"
        rows = lines[at + 1 : at + 1 + shape.num_segments]
        values = [[float.fromhex(word) for word in row.split()] for row in rows]
        # Coefficient-major, so that one gather of a warp touches few cache lines.
        tables[shape.name] = torch.tensor(values, dtype=torch.float64).t().contiguous()
        at += 1 + shape.num_segments
    assert at == len(lines), f"{TABLE_FILE.name} has {len(lines) - at} lines too many"
    return tables


@cache
def table(shape: TableShape, device: torch.device) -> torch.Tensor:
    """Return the coefficients on `device`: float64 [num_coefficients, num_segments]."""
    coefficients = _tables()[shape.name].to(device)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()  # later uses may be on other streams
    return coefficients
