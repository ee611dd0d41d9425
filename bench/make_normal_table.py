"""Build the tables of the normal distribution: its inverse, and its upper tail.

    python -m bench.make_normal_table            # writes unison/kernels/normal_table.txt
    python -m bench.make_normal_table --check    # only compares with the file
    python -m bench.make_normal_table --bounds   # what docs/rng.md proves, from the file's numbers

A table of the inverse maps x with tail probability p = x / 2^bits to |z| with P(Z > |z|) = p. The
exponent of x and its next `sub_bits` bits pick a segment; the rest of the mantissa, measured from
the middle of the segment, is the variable of a polynomial. Coefficients come from interpolation at
Chebyshev nodes in 40 decimal digits and are written as hexadecimal floats, so they are exact. A
segment of the coarse table, of which docs/rng.md speaks, is two numbers: see `packed`.

The table of the tail holds Taylor coefficients of T(z) = P(Z > z), each as the float64 nearest to
it and the float64 nearest to what is left.
"""

import argparse
import struct
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch

from unison.kernels.random import (
    COARSE,
    COARSE_ROWS,
    NUM_TAIL_COEFFICIENTS,
    NUM_TAILS,
    ORDINARY,
    SECURE,
    TABLE_FILE,
    TAIL_STEPS,
    TableShape,
    coarse_polynomials,
    inverse_table,
)

UNIT = 2.0**-53  # what rounding to float64 changes, at most, relative to the number


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
    # x = 2^(bits-1) exactly, which is reached by rounding only, is p = 1/2.
    if octave + shape.first_octave >= shape.bits - 1:
        return [0.0] * shape.num_coefficients
    return [float(c) for c in interpolated_coefficients(shape, octave, part)]


def interpolated_coefficients(shape: TableShape, octave: int, part: int) -> list[Any]:
    """Return the polynomial of one segment, constant term first, to 35 digits."""
    import mpmath as mp

    n = shape.num_coefficients
    half = mp.mpf(2) ** -(shape.sub_bits + 1)
    middle = 1 + (2 * part + 1) * half
    nodes = [half * mp.cos((2 * i + 1) * mp.pi / (2 * n)) for i in range(n)]
    to_p = mp.mpf(2) ** (octave + shape.first_octave - shape.bits)
    values = [tail_quantile((middle + u) * to_p) for u in nodes]
    vandermonde = mp.matrix([[u**j for j in range(n)] for u in nodes])
    return list(mp.lu_solve(vandermonde, mp.matrix(values)))


def packed(segment: int) -> tuple[float, float]:
    """Return the two numbers of a segment of the coarse table: see `random.coarse_polynomials`."""
    exact = interpolated_coefficients(COARSE, *divmod(segment, 1 << COARSE.sub_bits))
    # c2 is the upper 24 bits of a float64, behind which c1 is the nearest that ends with them.
    code2 = (_bits(float(exact[2])) + (1 << 39)) >> 40
    bits1 = ((_bits(float(exact[1])) - code2 + (1 << 23)) >> 24 << 24) + code2
    # The bound is rounded up, and has room for what its own place in c0, which is below 4, changes.
    bound = reach(segment, (float(exact[0]), _float(bits1))) + 2.0**-36
    code0 = (_bits(bound) >> 48) + 1
    bits0 = ((_bits(float(exact[0])) - code0 + (1 << 15)) >> 16 << 16) + code0
    return _float(bits0), _float(bits1)


def _bits(x: float) -> int:
    return int.from_bytes(struct.pack("<d", x), "little")


def _float(bits: int) -> float:
    return struct.unpack("<d", (bits & (1 << 64) - 1).to_bytes(8, "little"))[0]


def table_lines(shape: TableShape) -> list[str]:
    """Return one line of hexadecimal floats per segment."""
    import mpmath as mp

    def line(segment: int) -> str:
        if shape is COARSE:
            numbers = packed(segment)
        else:
            numbers = segment_coefficients(shape, *divmod(segment, 1 << shape.sub_bits))
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
    """Return a bound of the error of |z| that a segment's polynomial makes in float64."""
    import mpmath as mp

    if (segment >> shape.sub_bits) + shape.first_octave >= shape.bits - 1:
        return mp.mpf(0)  # the one value there has |z| = 0 exactly
    half = mp.mpf(2) ** -(shape.sub_bits + 1)
    # Horner's scheme rounds a coefficient when it is stored, when it is added, and twice for each
    # power of u; less where products and sums are fused.
    rounded = sum((2 * i + 2) * abs(mp.mpf(c)) * half**i for i, c in enumerate(row))
    return interpolation_error(shape, segment) + rounded * UNIT * (1 + mp.mpf(2) ** -40)


def interpolation_error(shape: TableShape, segment: int) -> Any:
    """Return a bound of what a segment's polynomial through Chebyshev nodes is off by.

    The n-th derivative of the quantile is P_n(z) / density^n but for its sign, with P_1 = 1 and
    P_{n+1} = P_n' + n z P_n: coefficients are positive, so P_n grows with z, while the Mills ratio
    p / density falls.
    """
    import mpmath as mp

    n, half = shape.num_coefficients, mp.mpf(2) ** -(shape.sub_bits + 1)
    octave, part = divmod(segment, 1 << shape.sub_bits)
    low = 1 + 2 * part * half
    to_p = mp.mpf(2) ** (octave + shape.first_octave - shape.bits)
    least, most = (tail_quantile((low + u) * to_p) for u in (2 * half, 0))
    polynomial = [mp.mpf(1)]  # P_1, constant term first
    for k in range(1, n):
        slope = [i * c for i, c in enumerate(polynomial)][1:] + [mp.mpf(0)] * 2
        polynomial = [a + k * b for a, b in zip(slope, [mp.mpf(0), *polynomial], strict=False)]
    mills = _tail(least) / _density(least)
    derivative = mp.polyval(polynomial[::-1], most) * (mills / low) ** n
    return 2 * (half / 2) ** n * derivative / mp.factorial(n)


def reach(segment: int, row: tuple[float, float]) -> float:
    """Return a bound of |scaled - scale · Q(p)| / scale, for a segment of the coarse table.

    That is what interpolation is off by, and what packing changed; half a unit of 2^-32 for the
    bits that are not looked at, where Q is steepest; and roundings, of which Horner's scheme and
    the product make less than 2^-48 together.

    Args:
        segment: Which.
        row: Its two numbers.
    """
    import mpmath as mp

    octave, part = divmod(segment, 1 << COARSE.sub_bits)
    exact = interpolated_coefficients(COARSE, octave, part)
    used = row[0], row[1], _float(_bits(row[1]) << 40)
    half = mp.mpf(2) ** -(COARSE.sub_bits + 1)
    changed = sum(
        abs(mp.mpf(a) - b) * half**i for i, (a, b) in enumerate(zip(used, exact, strict=True))
    )
    begin = 1 + mp.mpf(part) / (1 << COARSE.sub_bits)
    farthest = tail_quantile(begin * mp.mpf(2) ** (octave + COARSE.first_octave - COARSE.bits))
    unit = mp.mpf(2) ** -(COARSE.bits + 1) / _density(farthest)
    return float(interpolation_error(COARSE, segment) + changed + unit + mp.mpf(2) ** -48)


def open_share(scale: float) -> float:
    """Return a bound of how many secure normals are open: a share of all."""
    first = COARSE_ROWS - COARSE.num_segments
    rows = torch.arange(first, COARSE_ROWS)
    *_, reaches = coarse_polynomials(rows)
    octaves = (rows - first) // (1 << COARSE.sub_bits) + COARSE.first_octave
    mass = 2.0 ** (octaves - COARSE.sub_bits - COARSE.bits + 1).double()
    far = 2.0 ** (COARSE.first_octave - COARSE.bits + 1)
    return far + float((mass * (2 * scale * reaches).clamp(max=1.0)).sum())


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
        num_columns = 2 if shape is COARSE else shape.num_coefficients
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
