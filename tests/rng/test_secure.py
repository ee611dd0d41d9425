import math

import pytest
import torch

from unison.errors import BadInput
from unison.rng import (
    Cipher,
    Key,
    Stream,
    add_noise_,
    grid_sensitivity,
    noise_spacing,
    round_to_grid,
    secure_normal,
)

STREAM = Stream(Key.from_seed(5), "w", purpose="noise", cipher=Cipher.CHACHA20)


@pytest.mark.parametrize("std", [1e-6, 0.37, 1.0, 1.0000001, 1.9999, 2.0, 513.0])
def test_noise_is_on_the_grid_in_both_dtypes(std):
    spacing = noise_spacing(std)
    assert std * 2.0**-20 <= spacing < std * 2.0**-19
    assert math.frexp(spacing)[0] == 0.5
    narrow = secure_normal(STREAM, (50_000,), std)
    wide = secure_normal(STREAM, (50_000,), std, dtype=torch.float64)
    assert torch.equal(narrow.double(), wide)
    integers = wide / spacing
    assert torch.equal(integers, integers.round())
    assert 0.98 < float(wide.std()) / std < 1.02


def test_largest_noise_fits_float32():
    from unison.kernels.random.reference import inverse_tail
    from unison.kernels.random.tables import SECURE

    largest = float(inverse_tail(torch.tensor([1]), SECURE))
    assert largest < 9.1
    assert largest * 2.0**20 < 2.0**24


def test_finer_grids_need_float64():
    fine = secure_normal(STREAM, (1000,), 1.0, spacing=2.0**-30, dtype=torch.float64)
    assert torch.equal(fine * 2.0**30, (fine * 2.0**30).round())
    with pytest.raises(BadInput, match="wider spacing"):
        secure_normal(STREAM, (10,), 1.0, spacing=2.0**-30)


def test_round_to_grid_is_nearest_and_exact():
    x = torch.randn(10_000, generator=torch.Generator().manual_seed(0)) * 3
    spacing = 2.0**-20
    rounded = round_to_grid(x, spacing)
    assert torch.equal(rounded / spacing, (x.double() / spacing).round())
    assert float((rounded - x.double()).abs().max()) <= spacing / 2
    assert torch.equal(round_to_grid(rounded, spacing), rounded)


@pytest.mark.parametrize("bad", [math.inf, math.nan, 1e30])
def test_sums_that_cannot_be_rounded_raise(bad):
    with pytest.raises(BadInput, match="too large or not finite"):
        round_to_grid(torch.tensor([0.0, bad]), 2.0**-20)


def test_addition_is_exact_and_shift_invariant():
    # The low bits of the result carry no trace of the sum: total + noise, both on the grid.
    spacing = noise_spacing(1.0)
    noise = secure_normal(STREAM, (4096,), 1.0)
    total = torch.linspace(-3, 3, 4096, dtype=torch.float64)
    result = add_noise_(total.clone(), noise, spacing)
    integers = result / spacing
    assert torch.equal(integers, integers.round())
    assert torch.equal(result - noise.double(), round_to_grid(total, spacing))


def test_addition_handles_strides_and_half_precision():
    noise = secure_normal(STREAM, (6, 8), 1.0)
    total = torch.zeros(8, 6).t()
    assert torch.equal(add_noise_(total, noise, noise_spacing(1.0)), noise)
    half = torch.zeros(6, 8, dtype=torch.bfloat16)
    assert torch.equal(add_noise_(half, noise, noise_spacing(1.0)), noise.bfloat16())


def test_sensitivity_bound_holds_for_random_neighbours():
    generator = torch.Generator().manual_seed(1)
    spacing, dim, clip = 2.0**-4, 500, 1.0
    bound = grid_sensitivity(clip, spacing, dim)
    for _ in range(50):
        total = torch.randn(dim, generator=generator, dtype=torch.float64)
        change = torch.randn(dim, generator=generator, dtype=torch.float64)
        change *= clip / change.norm()
        moved = round_to_grid(total + change, spacing) - round_to_grid(total, spacing)
        assert float(moved.norm()) <= bound


@pytest.mark.parametrize("bad", [
    lambda: secure_normal(Stream(Key.from_seed(0), "w"), (3,), 1.0),
    lambda: secure_normal(STREAM, (3,), 0.0),
    lambda: secure_normal(STREAM, (3,), 1.0, dtype=torch.bfloat16),
    lambda: secure_normal(STREAM, (3,), 1.0, spacing=0.3),
    lambda: round_to_grid(torch.zeros(2), 0.3),
    lambda: add_noise_(torch.zeros(2), torch.zeros(3), 0.5),
    lambda: add_noise_(torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16), 0.5),
])  # fmt: skip
def test_bad_arguments_raise(bad):
    with pytest.raises(BadInput):
        bad()
