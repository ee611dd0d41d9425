"""Build the tables of the inverse normal distribution function.

    python -m bench.make_normal_table            # writes unison/kernels/random/normal_table.txt
    python -m bench.make_normal_table --check    # only compares with the file

A table maps an integer v with tail probability p = v / 2^bits to |z| with P(Z > |z|) = p. The
exponent of v and its next `SUB_BITS` bits pick a segment; the rest of the mantissa, measured from
the middle of the segment, is the variable of a polynomial. Coefficients come from interpolation at
Chebyshev nodes in 40 decimal digits and are written as hexadecimal floats, so they are exact.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from unison.kernels.random.tables import ORDINARY, SECURE, SUB_BITS, TABLE_FILE, TableShape


def tail_quantile(p: Any) -> Any:
    """Return z > 0 with P(Z > z) = p, to about 35 digits."""
    import mpmath as mp
    from scipy.special import ndtri

    z = -mp.mpf(float(ndtri(float(p))))
    for _ in range(4):  # Newton doubles the digits, from 16
        density = mp.exp(-z * z / 2) / mp.sqrt(2 * mp.pi)
        z += (mp.erfc(z / mp.sqrt(2)) / 2 - p) / density
    return z


def segment_coefficients(shape: TableShape, octave: int, part: int) -> list[float]:
    """Return the polynomial of one segment, constant term first, each coefficient a float64."""
    import mpmath as mp

    if octave >= shape.bits - 1:  # v = 2^(bits-1) exactly, reached by rounding only: p = 1/2
        return [0.0] * shape.num_coefficients
    n = shape.num_coefficients
    half = mp.mpf(2) ** -(SUB_BITS + 1)
    middle = 1 + (2 * part + 1) * half
    nodes = [half * mp.cos((2 * i + 1) * mp.pi / (2 * n)) for i in range(n)]
    values = [tail_quantile((middle + u) * mp.mpf(2) ** (octave - shape.bits)) for u in nodes]
    vandermonde = mp.matrix([[u**j for j in range(n)] for u in nodes])
    return [float(c) for c in mp.lu_solve(vandermonde, mp.matrix(values))]


def table_lines(shape: TableShape) -> list[str]:
    """Return one line of hexadecimal floats per segment."""
    import mpmath as mp

    with mp.workdps(40):
        return [
            " ".join(c.hex() for c in segment_coefficients(shape, octave, part))
            for octave in range(shape.num_octaves)
            for part in range(1 << SUB_BITS)
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare with the file, write nothing")
    arguments = parser.parse_args()
    text = "".join(
        f"{shape.name} {shape.num_segments} {shape.num_coefficients}\n"
        + "".join(line + "\n" for line in table_lines(shape))
        for shape in (ORDINARY, SECURE)
    )
    path = Path(TABLE_FILE)
    if not arguments.check:
        path.write_text(text, encoding="ascii")
        print(f"wrote {path.name}: {len(text)} bytes")
    elif path.read_text(encoding="ascii") != text:
        sys.exit(f"{path.name} differs from what this script computes")
    else:
        print(f"{path.name} is as computed")


if __name__ == "__main__":
    main()
