"""Build the tables of the normal distribution: its inverse, and its upper tail.

    python -m bench.make_normal_table            # writes unison/kernels/normal_table.txt
    python -m bench.make_normal_table --check    # only compares with the file
    python -m bench.make_normal_table --bounds   # what docs/rng.md proves, from the file's numbers

A table of the inverse maps x with tail probability p = x / 2^bits to |z| with P(Z > |z|) = p. The
exponent of x and its next `sub_bits` bits pick a segment; the rest of the mantissa, measured from
the middle of the segment, is the variable of a polynomial. Coefficients come from interpolation at
Chebyshev nodes in 40 decimal digits and are written as hexadecimal floats, so they are exact. A
segment of the coarse table ends with how far off it may be, of which docs/rng.md speaks.

The table of the tail holds Taylor coefficients of T(z) = P(Z > z), each as the float64 nearest to
it and the float64 nearest to what is left.
"""

import argparse
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch

from unison.kernels.random import (
    COARSE,
    NUM_TAIL_COEFFICIENTS,
    NUM_TAILS,
    ORDINARY,
    SECURE,
    TABLE_FILE,
    TAIL_STEPS,
    TableShape,
    inverse_table,
)

UNIT = 2.0**-53  # what rounding to float64 changes, at most, relative to the number
FAR = 12  # octave below which 40 bits say nothing worth a bound


def tail_quantile(p: Any) -> Any:
    """Return z > 0 with P(Z > z) = p, to about 35 digits."""
    import mpmath as mp
    from scipy.special import ndtri

    z = -mp.mpf(float(ndtri(float(p))))
    for _ in range(4):  # Newton doubles the digits, from 16
        z += (_tail(z) - p) / _density(z)
    return z


def segment_coefficients(shape: TableShape, octave: int, part: int) -> list[float]:
    """Return the polynomial of one segment, constant term first, each coefficient a float64."""
    import mpmath as mp

    octave += shape.first_octave
    # x = 2^(bits-1) exactly, which is reached by rounding only, is p = 1/2.
    if octave >= shape.bits - 1 or (shape is COARSE and octave < FAR):
        return [0.0] * shape.num_coefficients
    n = shape.num_coefficients
    half = mp.mpf(2) ** -(shape.sub_bits + 1)
    middle = 1 + (2 * part + 1) * half
    nodes = [half * mp.cos((2 * i + 1) * mp.pi / (2 * n)) for i in range(n)]
    values = [tail_quantile((middle + u) * mp.mpf(2) ** (octave - shape.bits)) for u in nodes]
    vandermonde = mp.matrix([[u**j for j in range(n)] for u in nodes])
    return [float(c) for c in mp.lu_solve(vandermonde, mp.matrix(values))]


def table_lines(shape: TableShape) -> list[str]:
    """Return one line of hexadecimal floats per segment."""
    import mpmath as mp

    def line(segment: int) -> str:
        numbers = segment_coefficients(shape, *divmod(segment, 1 << shape.sub_bits))
        if shape is COARSE:
            numbers += [reach(segment, numbers)]
        return " ".join(each.hex() for each in numbers)

    with mp.workdps(40):
        return [line(segment) for segment in range(shape.num_segments)]


def tail_coefficients(t: Any, count: int) -> list[Any]:
    """Return the Taylor coefficients of T around t, to 50 digits or more.

    The n-th derivative of the density is (-1)^n He_n(t) times the density, He_n Hermite's
    polynomials.
    """
    import mpmath as mp

    hermite = [mp.mpf(1), t]
    while len(hermite) < count:
        hermite.append(t * hermite[-1] - (len(hermite) - 1) * hermite[-2])
    density = _density(t)
    return [_tail(t)] + [
        (-1) ** n * density * hermite[n - 1] / mp.factorial(n) for n in range(1, count)
    ]


def tail_lines() -> list[str]:
    """Return one line for each multiple of 1 / TAIL_STEPS: every coefficient and what it lacks."""
    import mpmath as mp

    def pair(c: Any) -> str:
        return f"{float(c).hex()} {float(c - float(c)).hex()}"

    with mp.workdps(60):
        rows = (
            tail_coefficients(mp.mpf(j) / TAIL_STEPS, NUM_TAIL_COEFFICIENTS)
            for j in range(NUM_TAILS)
        )
        return [" ".join(map(pair, row)) for row in rows]


@cache
def inverse_error(shape: TableShape, segment: int) -> Any:
    """Return a bound of the error of |z| in one segment, as the table and float64 compute it."""
    row = inverse_table(shape, torch.device("cpu"))[:, segment].tolist()
    return polynomial_error(shape, segment, row)


def polynomial_error(shape: TableShape, segment: int, row: list[float]) -> Any:
    """Return a bound of the error of |z| that a segment's polynomial makes in float64.

    The n-th derivative of the quantile is P_n(z) / density^n but for its sign, with P_1 = 1 and
    P_{n+1} = P_n' + n z P_n: coefficients are positive, so P_n grows with z, while the Mills ratio
    p / density falls.
    """
    import mpmath as mp

    n, half = shape.num_coefficients, mp.mpf(2) ** -(shape.sub_bits + 1)
    octave, part = divmod(segment, 1 << shape.sub_bits)
    if octave + shape.first_octave >= shape.bits - 1:
        return mp.mpf(0)  # the one value there has |z| = 0 exactly
    low = 1 + 2 * part * half
    to_p = mp.mpf(2) ** (octave + shape.first_octave - shape.bits)
    least, most = (tail_quantile((low + u) * to_p) for u in (2 * half, 0))
    polynomial = [mp.mpf(1)]  # P_1, constant term first
    for k in range(1, n):
        slope = [i * c for i, c in enumerate(polynomial)][1:] + [mp.mpf(0)] * 2
        polynomial = [a + k * b for a, b in zip(slope, [mp.mpf(0), *polynomial], strict=False)]
    mills = _tail(least) / _density(least)
    derivative = mp.polyval(polynomial[::-1], most) * (mills / low) ** n
    interpolated = 2 * (half / 2) ** n * derivative / mp.factorial(n)
    # Horner's scheme rounds a coefficient when it is stored, when it is added, and twice for each
    # power of u; less where products and sums are fused.
    rounded = sum((2 * i + 2) * abs(mp.mpf(c)) * half**i for i, c in enumerate(row))
    return interpolated + rounded * UNIT * (1 + mp.mpf(2) ** -40)


def reach(segment: int, row: list[float]) -> float:
    """Return a bound of |scaled - scale · Q(p)| / scale, where 40 bits of p are looked at.

    That is the polynomial's error, a unit of 2^-41 for the bits that are not looked at, where Q is
    steepest, and a rounded product; infinity far in the tail.
    """
    import mpmath as mp

    octave, part = divmod(segment, 1 << COARSE.sub_bits)
    if octave + COARSE.first_octave < FAR:
        return float("inf")
    begin = 1 + mp.mpf(part) / (1 << COARSE.sub_bits)
    farthest = tail_quantile(begin * mp.mpf(2) ** (octave + COARSE.first_octave - COARSE.bits))
    unit = mp.mpf(2) ** -COARSE.bits / _density(farthest)
    total = polynomial_error(COARSE, segment, row) + unit + 2 * farthest * UNIT
    return float(total * (1 + mp.mpf(2) ** -20))


def open_share(scale: float) -> float:
    """Return a bound of how many secure normals are open: a share of all."""
    table = inverse_table(COARSE, torch.device("cpu"))
    total = 0.0
    for segment in range(COARSE.num_segments):
        octave = (segment >> COARSE.sub_bits) + COARSE.first_octave
        mass = 2.0 ** (octave - COARSE.sub_bits - COARSE.bits + 1)
        total += mass * min(1.0, 2 * scale * reach(segment, table[:, segment].tolist()))
    return total


def draw_distance(scale: float) -> Any:
    """Return a bound of the total variation between a secure draw and a rounded normal one.

    An exact decision goes wrong only if T at a boundary between two cells is nearer to p than what
    the decision's own error comes to. The density of p is 2; the errors are those of docs/rng.md.
    """
    import mpmath as mp

    change = max(inverse_error(SECURE, each) for each in range(SECURE.num_segments)) + 2 * UNIT
    half = mp.mpf(1) / (2 * TAIL_STEPS)
    total = mp.mpf(0)
    for j in range(NUM_TAILS):
        t = mp.mpf(j) / TAIL_STEPS
        begin, end = max(t - half, mp.mpf(0)), t + half
        terms = tail_coefficients(t, 2 * NUM_TAIL_COEFFICIENTS)
        sizes = [abs(c) * half**m for m, c in enumerate(terms)]
        steep = [m * size / half for m, size in enumerate(sizes)]
        n = NUM_TAIL_COEFFICIENTS  # of what is cut off, all but the first n terms is far less
        tail = sum((m + 1) * size for m, size in enumerate(sizes[:n]))
        tail = 21 * UNIT**2 * tail + 2 * sum(sizes[n:])
        slope = UNIT * sum((m + 1) * size for m, size in enumerate(steep[:n])) + 2 * sum(steep[n:])
        newton = change * (slope / _density(end) + 5 * UNIT) + 12 * UNIT**2
        bits = mp.mpf(2) ** -106 + 4 * UNIT**2 * _tail(begin)
        total += tail + _density(begin) * newton + bits
    boundaries = mp.mpf(scale) / TAIL_STEPS + 2  # in each of the segments, at most
    return 4 * boundaries * total + mp.mpf(2) ** (SECURE.first_octave - 63)


def _tail(z: Any) -> Any:
    import mpmath as mp

    return mp.erfc(z / mp.sqrt(2)) / 2


def _density(z: Any) -> Any:
    import mpmath as mp

    return mp.exp(-z * z / 2) / mp.sqrt(2 * mp.pi)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare with the file, write nothing")
    parser.add_argument("--bounds", action="store_true", help="print them, write nothing")
    arguments = parser.parse_args()
    if arguments.bounds:
        import mpmath as mp

        with mp.workdps(40):
            for bits in (20, 31):
                distance, share = draw_distance(2.0**bits), open_share(2.0**bits)
                print(f"distance of a draw, scale 2^{bits}: 2^{float(mp.log(distance, 2)):.2f}")
                print(f"share of open values, scale 2^{bits}: 2^{float(mp.log(share, 2)):.2f}")
        return
    lines = []
    for shape in (ORDINARY, COARSE, SECURE):
        num_columns = shape.num_coefficients + (shape is COARSE)
        lines += [f"{shape.name} {shape.num_segments} {num_columns}"]
        lines += table_lines(shape)
    lines += [f"tail {NUM_TAILS} {2 * NUM_TAIL_COEFFICIENTS}", *tail_lines()]
    text = "".join(line + "\n" for line in lines)
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
