import dataclasses
import math
import random
from typing import Any

import mpmath
import pytest
import torch

from bench.make_normal_table import tail_quantile
from unison.errors import BadInput
from unison.kernels import random as kernels
from unison.kernels.random import Distribution, Recipe, fill_rows, secure_floats
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
from unison.rng.streams import MAX_MAGNITUDE

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
    words = torch.zeros(3, 1, dtype=torch.int64)
    largest = float(exact_steps(words, 2.0**20))
    assert largest == round(2.0**20 * float(tail_quantile(2.0**-80)))
    assert largest <= MAX_MAGNITUDE * 2.0**20 < 2.0**24


def test_finer_grids_need_float64():
    fine = secure_normal(STREAM, (1000,), 1.0, spacing=2.0**-30, dtype=torch.float64)
    assert torch.equal(fine * 2.0**30, (fine * 2.0**30).round())
    with pytest.raises(BadInput, match="wider spacing"):
        secure_normal(STREAM, (10,), 1.0, spacing=2.0**-30)
    with pytest.raises(BadInput, match=r"at least 4\.66e-10"):
        secure_normal(STREAM, (10,), 1.0, spacing=2.0**-32, dtype=torch.float64)


# ---- values that are decided exactly ---------------------------------------------------------


def exact_steps(words: torch.Tensor, scale: float) -> torch.Tensor:
    """Decide each of 3 words [3, ...]: 40 bits, and twice 32."""
    return kernels.exact_steps(words[0], words[1:], scale)


def words_of(p: Any) -> tuple[int, ...]:
    """Return the words whose p is the nearest to a given one."""
    bits = int(mpmath.floor(p * 2**105))
    return bits >> 64, bits >> 32 & 0xFFFFFFFF, bits & 0xFFFFFFFF


def p_of(words: tuple[int, ...]) -> Any:
    bits = (words[0] << 64) | (words[1] << 32) | words[2]
    return (bits + mpmath.mpf("0.5")) / mpmath.mpf(2) ** 105


def rounded(p: Any, scale: float) -> int:
    """Return what the definition says: scale · Q(p), rounded."""
    return int(mpmath.floor(tail_quantile(p) * scale + mpmath.mpf("0.5")))


def test_the_upper_tail_is_known_to_102_bits():
    generator = random.Random(0)
    z = [generator.uniform(0, 10.22) for _ in range(300)]
    z += [max(0.0, j / 8 + nudge) for j in range(82) for nudge in (-(2.0**-49), 0, 2.0**-49)]
    tail, rest, slope = kernels.upper_tail(torch.tensor(z, dtype=torch.float64))
    with mpmath.workdps(60):
        for at, *found in zip(z, tail.tolist(), rest.tolist(), slope.tolist(), strict=True):
            value, remainder, derivative = map(mpmath.mpf, found)
            exact = mpmath.erfc(mpmath.mpf(at) / mpmath.sqrt(2)) / 2
            assert abs(value + remainder - exact) < exact * 2.0**-102
            assert abs(derivative / mpmath.npdf(mpmath.mpf(at)) + 1) < 2.0**-50


@pytest.mark.parametrize("scale", [2.0**20, 0.7 * 2.0**20, 3.0, 2.0**30])
def test_boundaries_between_cells_are_where_they_should_be(scale):
    """A hair to either side of them, which 40 bits cannot tell apart: from 0 to 10 σ.

    To 9 σ on a fine grid, of which 104 bits do not have every cell beyond.
    """
    generator, farthest = random.Random(1), 10.1 if scale < 2.0**30 else 9.0
    with mpmath.workdps(60):
        cells = {math.floor(generator.uniform(0, farthest) * scale) for _ in range(60)} | {0}
        drawn, expected = [], []
        for cell in cells:
            boundary = mpmath.erfc((cell + mpmath.mpf("0.5")) / scale / mpmath.sqrt(2)) / 2
            hair = boundary * mpmath.mpf(2) ** -92 + mpmath.mpf(2) ** -104
            for side, steps in ((hair, cell), (-hair, cell + 1)):
                drawn.append(words_of(boundary + side))
                assert rounded(p_of(drawn[-1]), scale) == steps
                expected.append(steps)
    assert exact_steps(torch.tensor(drawn).T, scale).tolist() == expected


def test_any_words_are_decided_as_defined():
    generator, scale = random.Random(2), 0.7 * 2.0**20
    drawn = [tuple(generator.getrandbits(each) for each in (40, 32, 32)) for _ in range(60)]
    for zeros in range(1, 50):  # into the tail, where the first bits say little or nothing
        bits = generator.getrandbits(104 - zeros)
        if bits >> 25:
            drawn.append(words_of(mpmath.ldexp(bits, -105)))
    drawn += [((1 << 40) - 1, 0xFFFFFFFF, 0xFFFFFFFF), (1 << 39, 0, 0)]
    with mpmath.workdps(60):
        expected = [rounded(p_of(each), scale) for each in drawn]
    assert exact_steps(torch.tensor(drawn).T, scale).tolist() == expected


def test_every_cell_beyond_8_sigma_can_be_drawn():
    """40 bits alone have none of them."""
    scale, first = 2.0**20, round(8.3 * 2.0**20)
    with mpmath.workdps(40):
        middles = [mpmath.erfc(k / scale / mpmath.sqrt(2)) / 2 for k in range(first, first + 200)]
        drawn = [words_of(p) for p in middles]
    assert {each[0] for each in drawn} == {0}
    assert exact_steps(torch.tensor(drawn).T, scale).tolist() == [*range(first, first + 200)]


@pytest.mark.parametrize(("std", "spacing"), [(0.7, 2.0**-20), (1.0, 2.0**-30), (3.0, 1.0)])
def test_deciding_all_values_exactly_changes_none(std, spacing):
    recipe = Recipe(
        STREAM.cipher, STREAM.words, Distribution.SECURE_NORMAL, secure_floats(std, spacing)
    )
    all_open = dataclasses.replace(recipe, floats=(*recipe.floats[:2], -1.0))
    found = [torch.empty(20_000, dtype=torch.float64) for _ in range(2)]
    for each, out in zip((recipe, all_open), found, strict=True):
        kernels.fill_reference(out, each, torch.tensor([5]), out.numel())
    assert torch.equal(*found)


# Elements of a stream whose value is open by itself, as one in 400 is: near to the middle of two
# grid points, or in the tail, where 31 bits say nothing.
NEAR_ONES, FAR_ONES = (1255, 1509, 1885), (7803, 8341, 20655)


@pytest.mark.parametrize("element", [*NEAR_ONES, *FAR_ONES])
def test_values_that_are_open_by_themselves(element):
    key = tuple((i * 2654435761) % 2**32 for i in range(1, 11))
    floats = secure_floats(0.7, 2.0**-20)
    recipe = Recipe(Cipher.CHACHA20, key, Distribution.SECURE_NORMAL, floats)
    tile, place = divmod(element, 512)
    number = 32 * tile + place % 128 // 4
    own = kernels.chacha20_blocks(torch.tensor(number), key).tolist()[place // 128 * 4 + place % 4]
    more = kernels.chacha20_blocks(torch.tensor((1 << 62) + element), key).tolist()[:3]
    v = own & 0x7FFFFFFF
    _, is_open = kernels.coarse_steps(torch.tensor([v]), floats[0], floats[2])
    assert bool(is_open)
    assert (v < 1 << 18) == (element in FAR_ONES)
    bits = (v << 73) | (more[0] << 41) | (more[1] << 9) | (more[2] >> 23)
    words = bits >> 64, bits >> 32 & 0xFFFFFFFF, bits & 0xFFFFFFFF
    with mpmath.workdps(60):
        expected = rounded(p_of(words), floats[0]) * (-1 if own >> 31 else 1)
    out = torch.empty(1, dtype=torch.float64)
    fill_rows(out, recipe, torch.tensor([element]), 1)
    assert float(out) / floats[1] == expected


def test_a_hair_from_a_boundary_all_104_bits_decide():
    """Where float64 of p would not do, by the three words that follow an element's own."""
    generator, scale = random.Random(3), 0.7 * 2.0**20
    own, more, expected = [], [], []
    with mpmath.workdps(60):
        for _ in range(40):
            cell = math.floor(generator.uniform(0, 6) * scale)
            boundary = mpmath.erfc((cell + mpmath.mpf("0.5")) / scale / mpmath.sqrt(2)) / 2
            for side, steps in ((1, cell), (-1, cell + 1)):
                w, *rest = words_of(
                    boundary + side * (boundary * mpmath.mpf(2) ** -70 + mpmath.mpf(2) ** -104)
                )
                bits = ((w << 64) | (rest[0] << 32) | rest[1]) << 23
                own.append(bits >> 96)
                more.append([bits >> 64 & 0xFFFFFFFF, bits >> 32 & 0xFFFFFFFF, bits & 0xFFFFFFFF])
                expected.append(steps)
    found = kernels.decided_steps(torch.tensor(own), torch.tensor(more).T, scale)
    assert found.tolist() == expected


def test_every_element_has_a_word_of_its_own():
    """Of the words of 32 blocks each is one element's; all are used."""
    block, word = kernels.secure_places(torch.arange(3 * 512))
    assert torch.equal((16 * block + word).sort().values, torch.arange(3 * 512))
    assert block.view(3, 512).amax(1).tolist() == [31, 63, 95]


# ---- the grid ----------------------------------------------------------------------------------


def test_round_to_grid_is_nearest_and_exact():
    x = torch.randn(10_000, generator=torch.Generator().manual_seed(0)) * 3
    spacing = 2.0**-20
    rounded = round_to_grid(x, spacing)
    assert torch.equal(rounded / spacing, (x.double() / spacing).round())
    assert float((rounded - x.double()).abs().max()) <= spacing / 2
    assert torch.equal(round_to_grid(rounded, spacing), rounded)


@pytest.mark.parametrize("bad", [math.inf, math.nan, 1e30, 2.0**32])
def test_sums_that_cannot_be_rounded_raise(bad):
    with pytest.raises(BadInput, match="too large or not finite"):
        round_to_grid(torch.tensor([0.0, bad], dtype=torch.float64), 2.0**-20)


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
