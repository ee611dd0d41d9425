"""Per-sample gradients of many parameters at once: against the reference, most of it to the bit."""

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.harness import assert_close, assert_same_bits
from tests.kernels.interpreted import as_on_cuda, interpreted
from unison.kernels.many import table
from unison.kernels.random import Cipher, Distribution, Recipe
from unison.rng import Key, Stream, noise_spacing

# Aligned and not, of less and more than a tile, a scalar, none at all.
SHAPES = [(8, 16), (40,), (7,), (33, 4), (1100,), (), (0, 3)]
HALF, SINGLE = torch.bfloat16, torch.float32


def draw(batch: int, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[Tensor]:
    """Per-sample gradients, bfloat16 and float32 in turn."""
    gen = torch.Generator().manual_seed(batch)
    return [
        torch.randn(batch, *shape, generator=gen).to(HALF if i % 2 else SINGLE)
        for i, shape in enumerate(shapes)
    ]


def weights_of(num_tensors: int, batch: int) -> Tensor:
    gen = torch.Generator().manual_seed(7)
    return torch.rand(num_tensors, batch, generator=gen) + 0.1


def recipes_of(num_tensors: int, std: float = 0.7) -> Tensor:
    spacing, key = noise_spacing(std), Key.from_seed(3)
    return torch.stack(
        [
            Recipe(
                Cipher.CHACHA20,
                Stream(key, str(i), purpose="noise", cipher=Cipher.CHACHA20).words,
                Distribution.SECURE_NORMAL,
                (std / spacing, spacing),
            ).pack()
            for i in range(num_tensors)
        ]
    )


def outs_like(values: Sequence[Tensor], dtype: torch.dtype = SINGLE) -> list[Tensor]:
    return [torch.full(each.shape[1:], 3.0, dtype=dtype) for each in values]


def assert_all_same_bits(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    assert_same_bits(*({str(i): x for i, x in enumerate(each)} for each in (found, expected)))


# ---- squares -------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 3, 0])
@interpreted
def test_squares(batch):
    from unison.kernels import many
    from unison.kernels.many import reference

    values = draw(batch)
    with as_on_cuda():
        assert many.is_fast(values)
        found = many.squares(values)
        again = many.squares(values)
    assert found.dtype == torch.float64
    assert found.shape == (len(values), batch)
    torch.testing.assert_close(found, reference.squares(values), rtol=2e-6, atol=0.0)
    assert_same_bits(found, again)


@interpreted
def test_squares_of_a_tensor_do_not_depend_on_the_others():
    from unison.kernels import many

    values = draw(2)
    with as_on_cuda():
        found = many.squares(values)
        for i in (0, 3, 4):
            assert_same_bits(many.squares([values[i]])[0], found[i])


@interpreted
def test_squares_of_more_than_one_tile_and_of_spaced_samples():
    from unison.kernels import many
    from unison.kernels.many import reference

    gen = torch.Generator().manual_seed(0)
    long = torch.randn(2, 2 * 8192 + 5, generator=gen)
    spaced = torch.randn(2, 3, 24, generator=gen)[:, 1]  # as a part of the sums of a norm
    shifted = torch.randn(2 * 24 + 1, generator=gen)[1:].view(2, 24)  # not at 16 bytes
    values = [long, spaced, shifted]
    assert not spaced.is_contiguous()
    assert shifted.data_ptr() % 16
    with as_on_cuda():
        found = many.squares(values)
    torch.testing.assert_close(found, reference.squares(values), rtol=2e-6, atol=0.0)


@interpreted
def test_squares_are_not_finite_where_a_sample_is_not():
    from unison.kernels import many

    values = draw(3)
    values[0][1, 7, 15] = torch.nan
    values[1][2, 0] = torch.inf
    with as_on_cuda():
        found = many.squares(values)
    assert found.isfinite().all(0).tolist() == [True, False, False]


# ---- combine -------------------------------------------------------------------------------------


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("batch", [1, 3, 0])
@interpreted
def test_combine(batch, add):
    from unison.kernels import many
    from unison.kernels.many import reference

    values, weights = draw(batch), weights_of(len(SHAPES), batch)
    found, expected = outs_like(values), outs_like(values)
    with as_on_cuda():
        many.combine(values, weights, found, add=add)
    reference.combine(values, weights, expected, add=add)
    assert_all_same_bits(found, expected)
    for value, row, out in zip(values, weights, found, strict=True):
        exact = torch.einsum("b,b...->...", row.double(), value.double())
        assert_close(out, exact + 3 if add else exact)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@interpreted
def test_a_sample_of_weight_0_is_left_out_whatever_it_holds(bad):
    from unison.kernels import many
    from unison.kernels.many import reference

    values, weights = draw(3), weights_of(len(SHAPES), 3)
    weights[:, 1] = 0
    expected = outs_like(values)
    with as_on_cuda():
        many.combine(values, weights, expected)
        for value in values:
            value[1] = bad
        for combine in (many.combine, reference.combine):
            found = outs_like(values)
            combine(values, weights, found, add=False)
            assert_all_same_bits(found, expected)


@pytest.mark.parametrize("is_sum_first", [True, False])
@interpreted
def test_sums_and_per_sample_gradients_together(is_sum_first):
    """One sample of weight 1 beside many: rows of weights are as long as the longest."""
    from unison.kernels import many
    from unison.kernels.many import reference

    some, one = draw(4, [(24,), (7,)]), draw(1, [(40,), (9,)])
    values = [*one, *some] if is_sum_first else [*some, *one]
    weights = weights_of(4, 4)
    for row, value in zip(weights, values, strict=True):
        if len(value) == 1:
            row[:] = torch.tensor([1.0, 0, 0, 0])
    found, expected = outs_like(values), outs_like(values)
    with as_on_cuda():
        many.release(values, weights, None, 2.0, found)
    reference.release(values, weights, None, [0] * 4, 2.0, expected)
    assert_all_same_bits(found, expected)


# ---- release -------------------------------------------------------------------------------------

# Few and small: the interpreter takes a second for a thousand secure normals.
NOISED = [(8, 16), (7,), (300,)]
ALIGNED = [(8, 16), (8,), (304,)]
STARTS = {"whole": [0, 0, 0], "parts": [0, 1031, 250]}


@pytest.mark.parametrize(
    ("shapes", "starts"),
    [
        (ALIGNED, STARTS["whole"]),
        pytest.param(NOISED, STARTS["whole"], marks=pytest.mark.full),
        (NOISED, STARTS["parts"]),
    ],
    ids=["aligned", "whole", "parts"],
)
@interpreted
def test_release_equals_the_reference(shapes, starts):
    """To the bit, as float32."""
    from unison.kernels import many
    from unison.kernels.many import reference

    values, weights, recipes = draw(2, shapes), weights_of(3, 2), recipes_of(3)
    found, expected = outs_like(values), outs_like(values)
    with as_on_cuda():
        many.release(values, weights, many.NoiseDraw(recipes, starts), 8.0, found)
    reference.release(values, weights, recipes, starts, 8.0, expected)
    assert_all_same_bits(found, expected)


@interpreted
def test_a_part_has_the_noise_of_its_elements():
    """Whatever ranks hold which part: as if one had released the whole."""
    from unison.kernels import many

    value, recipes, one = torch.randn(1, 1200), recipes_of(1), torch.ones(1, 1)
    whole, parts = torch.empty(1200), torch.empty(1200)
    with as_on_cuda():
        many.release([value], one, many.NoiseDraw(recipes, [0]), 1.0, [whole])
        for begin, end in [(0, 1001), (1001, 1200)]:
            noise = many.NoiseDraw(recipes, [begin])
            many.release([value[:, begin:end]], one, noise, 1.0, [parts[begin:end]])
    assert_same_bits(parts, whole)


@interpreted
def test_a_batch_of_none_is_released_as_noise():
    from unison.kernels import many
    from unison.kernels.many import reference

    values, recipes = draw(0, NOISED), recipes_of(3)
    found, expected = outs_like(values), outs_like(values)
    with as_on_cuda():
        noise = many.NoiseDraw(recipes, STARTS["whole"])
        many.release(values, torch.empty(3, 0), noise, 1.0, found)
    reference.noise(recipes, STARTS["whole"], expected)
    assert_all_same_bits(found, expected)


@interpreted
def test_outputs_of_several_dtypes():
    from unison.kernels import many

    values, weights = draw(2), weights_of(len(SHAPES), 2)
    singles = outs_like(values)
    dtypes = [SINGLE, HALF, torch.float16, torch.float64, HALF, SINGLE, HALF]
    mixed = [out.to(dtype) for out, dtype in zip(singles, dtypes, strict=True)]
    with as_on_cuda():
        many.release(values, weights, None, 8.0, singles)
        many.release(values, weights, None, 8.0, mixed)
    for single, out in zip(singles, mixed, strict=True):
        if out.dtype == HALF:  # Triton's interpreter truncates; hardware rounds
            torch.testing.assert_close(out.float(), single, rtol=2**-7, atol=0.0)
        else:
            assert_same_bits(out, single.to(out.dtype))


@interpreted
def test_without_noise_a_release_is_a_mean():
    from unison.kernels import many

    values, weights = draw(3), weights_of(len(SHAPES), 3)
    sums, means = outs_like(values), outs_like(values)
    with as_on_cuda():
        many.combine(values, weights, sums)
        many.release(values, weights, None, 5.0, means)
    for mean, total in zip(means, sums, strict=True):
        assert_close(mean, total.double() / 5)


@interpreted
def test_noise_is_added_on_its_grid():
    from unison.kernels import many

    std = 1e-3
    values, recipes = [torch.randn(1, 200)], recipes_of(1, std)
    found, alone = torch.empty(200), torch.empty(200)
    with as_on_cuda():
        one = torch.ones(1, 1)
        many.release(values, one, many.NoiseDraw(recipes, [0]), 1.0, [found])
        many.release([torch.zeros(1, 200)], one, many.NoiseDraw(recipes, [0]), 1.0, [alone])
    spacing = noise_spacing(std)
    on_grid = (values[0][0].double() / spacing).round() * spacing
    assert_same_bits(found, (on_grid + alone.double()).float())
    steps = alone.double() / spacing
    assert torch.equal(steps, steps.round())


# ---- tables --------------------------------------------------------------------------------------


@interpreted
def test_kernels_read_tables_that_were_filled_later():
    """As a graph does: what is launched while recording reads the tables when it is replayed."""
    from unison.kernels.many import launch

    values, tables = draw(2, [(24,), (7,)]), table.Tables(torch.device("cpu"))
    weights, found, expected = weights_of(2, 2), outs_like(values), outs_like(values)
    recorded = []
    release = launch._launch_release._kernel

    class Recorder:
        def __getitem__(self, grid):
            return lambda *args, **options: recorded.append((grid, args, options))

    with as_on_cuda():
        launch.release(values, weights, None, 1.0, expected)
        launch._launch_release._kernel = Recorder()
        try:
            with table.tables_kept(tables):
                # Weights of the two launches are looked up by tables, which are empty as yet.
                launch.release(values, weights.expand(2, 2), None, 1.0, found)
        finally:
            launch._launch_release._kernel = release
        tables.fill()
        for (grid, args, options), row in zip(recorded, weights, strict=True):
            given = [*args[:4], row.unsqueeze(0), *args[5:]]
            release[grid](*given, **options)
    assert_all_same_bits(found, expected)


@interpreted
def test_tensors_that_were_asked_about_are_not_asked_again():
    from unison.kernels import many

    values, others = draw(3), draw(3)
    with as_on_cuda():
        facts = many.Facts(values)
        asked = many.Asked(others, facts, many.is_fast(values))
        assert facts == many.Facts(others)
        assert hash(facts) == hash(many.Facts(others))
        assert facts != many.Facts(draw(2))
        assert_same_bits(many.squares(asked), many.squares(others))
        weights, found, expected = weights_of(len(values), 3), outs_like(others), outs_like(others)
        many.combine(asked, weights, found)
        many.combine(others, weights, expected)
        assert_all_same_bits(found, expected)


@interpreted
def test_tables_are_made_again_only_where_tensors_lie_elsewhere():
    from unison.kernels import many
    from unison.kernels.many import launch, reference

    values, weights = draw(2, [(8, 16), (7,), (40,)]), weights_of(3, 2)
    others, found = [each + 1 for each in values], outs_like(values)
    made, filled = [], launch._Group._filled

    def num_made_for(values: list[Tensor]) -> int:
        expected = outs_like(values)
        many.release(values, weights, None, 1.0, found)
        reference.release(values, weights, None, [0] * 3, 1.0, expected)
        assert_all_same_bits(found, expected)
        squares = reference.squares(values)
        torch.testing.assert_close(many.squares(values), squares, rtol=1e-6, atol=0.0)
        return len(made)

    launch._Group._filled = lambda self, *args: made.append(args) or filled(self, *args)
    try:
        with as_on_cuda():
            assert num_made_for(values) == 4  # of two launches each
            values[0].mul_(2)
            assert num_made_for(values) == 4
            assert num_made_for(others) == 8
            values[1].add_(1)
            assert num_made_for(values) == 8
    finally:
        launch._Group._filled = filled


@interpreted
def test_outputs_that_were_asked_about():
    from unison.kernels import many
    from unison.kernels.many import launch
    from unison.kernels.many.asked import addresses_of

    values, weights = draw(3), weights_of(len(SHAPES), 3)
    expected = outs_like(values)
    with as_on_cuda():
        many.combine(values, weights, expected)
        for addresses in (None, "theirs"):
            outs = outs_like(values)
            known = None if addresses is None else addresses_of(outs)
            found = many.Asked(outs, many.Facts(outs), False, known)
            many.combine(values, weights, found)
            assert_all_same_bits(found, expected)
            assert found.addresses == addresses_of(outs)
        assert launch._alignments(b"") == b""
        offsets = [0, 256, 4, 1 << 40 | 15]
        addresses = b"".join(each.to_bytes(8, "little") for each in offsets)
        assert launch._alignments(addresses[:16]) == b""
        assert list(launch._alignments(addresses)) == [0, 0, 4, 15]


def test_equal_facts_are_compared_once():
    from unison.kernels.many import Facts

    one, other = Facts(draw(2)), Facts(draw(2))
    assert one._facts is not other._facts
    assert one == other
    assert one._facts is other._facts
    assert hash(one) == hash(other)
    assert one != Facts(draw(1))
    assert one != "facts"


# ---- without kernels -----------------------------------------------------------------------------


def test_what_the_kernels_take():
    from unison.kernels import many

    assert not many.is_fast([])
    assert not many.is_fast(draw(2))  # on the CPU


def test_plain_torch_serves_the_cpu():
    from unison.kernels import many

    values, weights, recipes = draw(2), weights_of(len(SHAPES), 2), recipes_of(len(SHAPES))
    found, expected = outs_like(values), outs_like(values)
    for row, value in zip(many.squares(values), values, strict=True):
        for b in range(2):
            assert float(row[b]) == pytest.approx(float(value[b].double().square().sum()))
    many.combine(values, weights, found)
    many.release(values, weights, None, 1.0, expected)
    assert_all_same_bits(found, expected)
    many.release(values, weights, many.NoiseDraw(recipes, [0] * len(SHAPES)), 1.0, found)
    assert all(not torch.equal(a, b) for a, b in zip(found, expected, strict=True) if a.numel())
