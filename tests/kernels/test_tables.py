import mpmath
import numpy as np
import pytest
import torch
from scipy.special import ndtri

from bench.make_normal_table import (
    draw_distance,
    inverse_error,
    open_share,
    packed,
    segment_coefficients,
    table_lines,
    tail_coefficients,
    tail_lines,
    tail_quantile,
)
from unison.kernels.random import (
    COARSE,
    COARSE_ROWS,
    NUM_TAIL_COEFFICIENTS,
    NUM_TAILS,
    ORDINARY,
    SECURE,
    SECURE_AT,
    TABLE_FILE,
    TAIL_STEPS,
    TAILS_AT,
    coarse_polynomials,
    coarse_steps,
    inverse_table,
    inverse_tail,
    kernel_table,
)
from unison.rng.streams import DRAW_DISTANCE

CPU = torch.device("cpu")


@pytest.mark.parametrize("shape", [ORDINARY, SECURE], ids=lambda shape: shape.name)
def test_file_is_what_the_script_computes(shape):
    stored = inverse_table(shape, CPU)
    with mpmath.workdps(40):
        for octave in (0, shape.num_octaves // 2, shape.num_octaves - 2, shape.num_octaves - 1):
            for part in (0, 5):
                fresh = segment_coefficients(shape, octave, part)
                assert stored[:, (octave << shape.sub_bits) + part].tolist() == fresh


def test_coarse_part_of_the_file_is_what_the_script_computes():
    stored = kernel_table(COARSE, CPU)[:SECURE_AT].view(-1, 2)[COARSE_ROWS - COARSE.num_segments :]
    with mpmath.workdps(40):
        for segment in (0, 5, 1700, 3327):
            assert tuple(stored[segment].tolist()) == packed(segment)


def test_pairs_of_the_tail_are_its_coefficients():
    tails = kernel_table(SECURE, CPU)[TAILS_AT:].view(NUM_TAIL_COEFFICIENTS, 2, NUM_TAILS)
    with mpmath.workdps(60):
        for j in (0, 1, 17, NUM_TAILS - 1):
            fresh = tail_coefficients(mpmath.mpf(j) / TAIL_STEPS, NUM_TAIL_COEFFICIENTS)
            for (c, rest), exact in zip(tails[:, :, j].tolist(), fresh, strict=True):
                assert c == float(exact)
                assert abs(mpmath.mpf(c) + mpmath.mpf(rest) - exact) <= abs(exact) * 2.0**-106


@pytest.mark.full
def test_whole_file_is_what_the_script_computes():
    lines = TABLE_FILE.read_text(encoding="ascii").splitlines()
    coarse_at = 2 + ORDINARY.num_segments
    secure_at = coarse_at + 1 + COARSE.num_segments
    assert lines[1 : coarse_at - 1] == table_lines(ORDINARY)
    assert lines[coarse_at : secure_at - 1] == table_lines(COARSE)
    assert lines[secure_at : secure_at + SECURE.num_segments] == table_lines(SECURE)
    assert lines[secure_at + SECURE.num_segments + 1 :] == tail_lines()


@pytest.mark.parametrize(("shape", "tolerance"), [(ORDINARY, 1e-10), (SECURE, 4e-15)])
def test_accuracy(shape, tolerance):
    generator = np.random.default_rng(1)
    exponents = generator.uniform(0, shape.bits - 1, 100_000)
    v = np.minimum((2.0**exponents).astype(np.uint64), (1 << (shape.bits - 1)) - 1) | np.uint64(1)
    v = v.astype(np.int64)
    z = inverse_tail(torch.from_numpy(v), shape).numpy()
    exact = -ndtri(v.astype(np.float64) * 2.0**-shape.bits)
    assert np.abs(z - exact).max() < tolerance  # scipy's own error is about 1e-15


@pytest.mark.parametrize("shape", [ORDINARY, SECURE], ids=lambda shape: shape.name)
def test_ends(shape):
    ends = torch.tensor([1, (1 << (shape.bits - 1)) - 1])
    smallest, largest = inverse_tail(ends, shape).tolist()
    assert smallest == pytest.approx(-ndtri(2.0**-shape.bits), abs=1e-9)
    assert abs(largest) < 1e-9


@pytest.mark.parametrize("step", [23, pytest.param(1, marks=pytest.mark.full)])
def test_errors_of_the_inverse_keep_to_their_bound(step):
    """At the ends of segments, where polynomials are worst, in the middle and elsewhere."""
    worst = 0.0
    with mpmath.workdps(40):
        for segment in range(0, SECURE.num_segments - 8, step):
            octave, part = divmod(segment, 1 << SECURE.sub_bits)
            places = [0.0, 2.0**-49, 0.0123, 1 / 16, 0.1, 1 / 8 - 2.0**-52]
            xs = [(1 + part / 8 + u) * 2.0 ** (octave + SECURE.first_octave) for u in places]
            found = inverse_tail(torch.tensor(xs, dtype=torch.float64), SECURE).tolist()
            bound = inverse_error(SECURE, segment)
            for x, z in zip(xs, found, strict=True):
                error = abs(z - tail_quantile(mpmath.mpf(x) / 2**SECURE.bits))
                assert error <= bound, (x, float(error), float(bound))
                worst = max(worst, float(error / bound))
    assert worst > 0.1  # not a bound of something else


@pytest.mark.parametrize("step", [149, pytest.param(1, marks=pytest.mark.full)])
def test_the_coarse_table_is_off_by_no_more_than_it_says(step):
    """The value of a cell against any p of it; the table says it of every segment."""
    first, worst = COARSE_ROWS - COARSE.num_segments, 0.0
    *_, reaches = coarse_polynomials(torch.arange(COARSE_ROWS))
    assert bool((reaches[:first] == np.inf).all())
    with mpmath.workdps(40):
        for segment in range(0, COARSE.num_segments, step):
            octave, part = divmod(segment, 1 << COARSE.sub_bits)
            begin, end = (round((256 + part + i) * 2.0 ** (octave + 10)) for i in (0, 1))
            for v in (begin, (begin + end) // 2, end - 1):
                # As a standard deviation of 2^45 spacings would have it: to all of its digits.
                found = float(coarse_steps(torch.tensor([v]), 2.0**45, 0.5)[0]) * 2.0**-45
                ends = [tail_quantile(mpmath.mpf(v + k) / 2**COARSE.bits) for k in (0, 1)]
                error = max(abs(found - end) for end in ends)
                assert error <= float(reaches[first + segment]), (v, float(error))
                worst = max(worst, float(error) / float(reaches[first + segment]))
    assert worst > 0.5  # not a bound of something else


def test_the_claimed_bounds_are_those_of_the_tables():
    with mpmath.workdps(40):
        assert max(inverse_error(SECURE, i) for i in range(SECURE.num_segments)) < 4.3e-15
        assert DRAW_DISTANCE / 4 < draw_distance(2.0**20) < DRAW_DISTANCE
        assert draw_distance(2.0**31) < DRAW_DISTANCE * 2**11
        assert open_share(2.0**20) < 1 / 400
