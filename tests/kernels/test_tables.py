import numpy as np
import pytest
import torch
from scipy.special import ndtri

from bench.make_normal_table import segment_coefficients, table_lines
from unison.kernels.random.reference import inverse_tail
from unison.kernels.random.tables import ORDINARY, SECURE, SUB_BITS, TABLE_FILE, table

CPU = torch.device("cpu")


@pytest.mark.parametrize("shape", [ORDINARY, SECURE], ids=lambda shape: shape.name)
def test_file_is_what_the_script_computes(shape):
    import mpmath

    stored = table(shape, CPU)
    with mpmath.workdps(40):
        for octave in (0, shape.num_octaves // 2, shape.num_octaves - 2, shape.num_octaves - 1):
            for part in (0, 5):
                fresh = segment_coefficients(shape, octave, part)
                assert stored[:, (octave << SUB_BITS) + part].tolist() == fresh


@pytest.mark.full
def test_whole_file_is_what_the_script_computes():
    lines = TABLE_FILE.read_text(encoding="ascii").splitlines()
    assert lines[1 : 1 + ORDINARY.num_segments] == table_lines(ORDINARY)
    assert lines[2 + ORDINARY.num_segments :] == table_lines(SECURE)


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
