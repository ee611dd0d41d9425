"""Per-sample gradients of many parameters at once: against the reference, most of it to the bit."""

import math
from unittest import mock

import pytest
import torch

from tests.harness import assert_close, assert_same_bits
from tests.kernels.interpreted import as_on_cuda, interpreted
from tests.kernels.tensors import (
    HALF,
    SHAPES,
    SINGLE,
    assert_all_same_bits,
    draw,
    outs_like,
    recipes_of,
    weights_of,
)
from unison.kernels.random import Recipe, fill_rows
from unison.rng import noise_spacing

# ---- moments -------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_held", [0.0, 1.0, None])
@interpreted
def test_moments_are_adams_and_squares_those_of_its_steps(is_held):
    from unison.kernels import multi_tensor

    gen = torch.Generator().manual_seed(0)
    shapes = [*SHAPES, (2 * 4096 + 5,)]
    whole = [torch.randn(3, 1 + math.prod(shape), generator=gen) for shape in shapes]
    # The last one begins at no 16 bytes.
    g, m, v = (
        [each[i, :-1].view(s) for each, s in zip(whole, shapes, strict=True)] for i in range(3)
    )
    g, m, v = ([*each[:-1], each[-1].new_tensor([0.0, *each[-1]])[1:]] for each in (g, m, v))
    v = [each.abs_() for each in v]
    params = [torch.zeros_like(each) for each in g]
    adam = torch.optim.Adam(params, lr=1.0, betas=(0.8, 0.9), eps=1e-3)
    for each, gradient, mean, variance in zip(params, g, m, v, strict=True):
        each.grad = gradient.clone()
        state = {"step": torch.tensor(4.0), "exp_avg": mean.clone(), "exp_avg_sq": variance.clone()}
        adam.state[each] = state
    adam.step()
    before = [each.clone() for each in (*m, *v)]
    flag = None if is_held is None else torch.tensor(is_held)
    with as_on_cuda():
        found = multi_tensor.moments(g, m, v, 5, (0.8, 0.9), 1e-3, flag)
    expected = torch.stack([each.double().square().sum() for each in params])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0.0)
    after = [adam.state[each][key] for key in ("exp_avg", "exp_avg_sq") for each in params]
    for each, wanted in zip((*m, *v), before if is_held else after, strict=True):
        torch.testing.assert_close(each, wanted, rtol=1e-6, atol=1e-7)


# ---- squares -------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 3, 0])
@interpreted
def test_squares(batch):
    from unison.kernels import multi_tensor

    values = draw(batch)
    with as_on_cuda():
        assert multi_tensor.is_fast(values)
        found = multi_tensor.squares(values)
        again = multi_tensor.squares(values)
    assert found.dtype == torch.float64
    assert found.shape == (len(values), batch)
    torch.testing.assert_close(found, multi_tensor.squares(values), rtol=2e-6, atol=0.0)
    assert_same_bits(found, again)


@interpreted
def test_squares_of_a_tensor_do_not_depend_on_the_others():
    from unison.kernels import multi_tensor

    values = draw(2)
    with as_on_cuda():
        found = multi_tensor.squares(values)
        for i in (0, 3, 4):
            assert_same_bits(multi_tensor.squares([values[i]])[0], found[i])


@interpreted
def test_squares_of_more_than_one_tile_and_of_spaced_samples():
    from unison.kernels import multi_tensor

    gen = torch.Generator().manual_seed(0)
    long = torch.randn(2, 2 * 8192 + 5, generator=gen)
    spaced = torch.randn(2, 3, 24, generator=gen)[:, 1]  # as a part of the sums of a norm
    shifted = torch.randn(2 * 24 + 1, generator=gen)[1:].view(2, 24)  # not at 16 bytes
    values = [long, spaced, shifted]
    assert not spaced.is_contiguous()
    assert shifted.data_ptr() % 16
    with as_on_cuda():
        found = multi_tensor.squares(values)
    torch.testing.assert_close(found, multi_tensor.squares(values), rtol=2e-6, atol=0.0)


@interpreted
def test_squares_are_not_finite_where_a_sample_is_not():
    from unison.kernels import multi_tensor

    values = draw(3)
    values[0][1, 7, 15] = torch.nan
    values[1][2, 0] = torch.inf
    with as_on_cuda():
        found = multi_tensor.squares(values)
    assert found.isfinite().all(0).tolist() == [True, False, False]


# ---- combine -------------------------------------------------------------------------------------


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("batch", [1, 3, 0])
@interpreted
def test_combine(batch, add):
    from unison.kernels import multi_tensor

    values, weights = draw(batch), weights_of(len(SHAPES), batch)
    found, expected = outs_like(values), outs_like(values)
    with as_on_cuda():
        multi_tensor.combine(values, weights, found, add=add)
    multi_tensor.combine(values, weights, expected, add=add)
    assert_all_same_bits(found, expected)
    for value, row, out in zip(values, weights, found, strict=True):
        exact = torch.einsum("b,b...->...", row.double(), value.double())
        assert_close(out, exact + 3 if add else exact)


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@interpreted
def test_sums_on_a_grid(dtype, add):
    from unison.kernels import multi_tensor

    values, weights, spacing = draw(3), weights_of(len(SHAPES), 3), 2.0**-20
    found, expected = (outs_like(values, dtype=dtype) for _ in range(2))
    with as_on_cuda():
        multi_tensor.combine(values, weights, found, add=add, spacing=spacing)
    multi_tensor.combine(values, weights, expected, add=add, spacing=spacing)
    for value, row, out, other in zip(values, weights, found, expected, strict=True):
        assert torch.equal(out, other)
        exact = torch.einsum("b,b...->...", row.double(), value.double()) / spacing
        assert ((out - 3 * add) - exact).abs().le(0.5 + 1e-6).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@interpreted
def test_a_sample_of_weight_0_is_left_out_whatever_it_holds(bad):
    from unison.kernels import multi_tensor

    values, weights = draw(3), weights_of(len(SHAPES), 3)
    weights[:, 1] = 0
    expected = outs_like(values)
    with as_on_cuda():
        multi_tensor.combine(values, weights, expected)
        for value in values:
            value[1] = bad
        for is_fast in (True, False):
            found = outs_like(values)
            with mock.patch.object(multi_tensor, "is_fast", return_value=is_fast):
                multi_tensor.combine(values, weights, found, add=False)
            assert_all_same_bits(found, expected)


@pytest.mark.parametrize("is_sum_first", [True, False])
@interpreted
def test_sums_and_per_sample_gradients_together(is_sum_first):
    """One sample of weight 1 beside many: rows of weights are as long as the longest."""
    from unison.kernels import multi_tensor

    some, one = draw(4, [(24,), (7,)]), draw(1, [(40,), (9,)])
    values = [*one, *some] if is_sum_first else [*some, *one]
    weights = weights_of(4, 4)
    for row, value in zip(weights, values, strict=True):
        if len(value) == 1:
            row[:] = torch.tensor([1.0, 0, 0, 0])
    found, expected = outs_like(values), outs_like(values)
    with as_on_cuda():
        multi_tensor.release(values, weights, None, 2.0, found)
    multi_tensor.release(values, weights, None, 2.0, expected)
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
    from unison.kernels import multi_tensor

    values, weights = draw(2, shapes), weights_of(3, 2)
    found, expected = outs_like(values), outs_like(values)
    with as_on_cuda():
        noise = (recipes_of(3, distance=0.498), starts)  # some values are open
        multi_tensor.release(values, weights, noise, 8.0, found)
    noise = (recipes_of(3), starts)
    multi_tensor.release(values, weights, noise, 8.0, expected)
    assert_all_same_bits(found, expected)


@interpreted
def test_a_part_has_the_noise_of_its_elements():
    """Whatever ranks hold which part: as if one had released the whole."""
    from unison.kernels import multi_tensor

    value, recipes, one = torch.randn(1, 1200), recipes_of(1), torch.ones(1, 1)
    whole, parts = torch.empty(1200), torch.empty(1200)
    with as_on_cuda():
        multi_tensor.release([value], one, (recipes, [0]), 1.0, [whole])
        for begin, end in [(0, 1001), (1001, 1200)]:
            noise = (recipes, [begin])
            multi_tensor.release([value[:, begin:end]], one, noise, 1.0, [parts[begin:end]])
    assert_same_bits(parts, whole)


@interpreted
def test_a_batch_of_none_is_released_as_noise():
    from unison.kernels import multi_tensor

    values, recipes = draw(0, NOISED), recipes_of(3)
    found, expected = outs_like(values), outs_like(values)
    with as_on_cuda():
        noise = (recipes, STARTS["whole"])
        multi_tensor.release(values, torch.empty(3, 0), noise, 1.0, found)
    for out, recipe in zip(expected, recipes, strict=True):
        fill_rows(out, Recipe.unpack(recipe), torch.tensor([0]), out.numel())
    assert_all_same_bits(found, expected)


@interpreted
def test_outputs_of_several_dtypes():
    from unison.kernels import multi_tensor

    values, weights = draw(2), weights_of(len(SHAPES), 2)
    singles = outs_like(values)
    dtypes = [SINGLE, HALF, torch.float16, torch.float64, HALF, SINGLE, HALF]
    mixed = [out.to(dtype) for out, dtype in zip(singles, dtypes, strict=True)]
    with as_on_cuda():
        multi_tensor.release(values, weights, None, 8.0, singles)
        multi_tensor.release(values, weights, None, 8.0, mixed)
    for single, out in zip(singles, mixed, strict=True):
        if out.dtype == HALF:  # Triton's interpreter truncates; hardware rounds
            torch.testing.assert_close(out.float(), single, rtol=2**-7, atol=0.0)
        elif out.dtype == torch.float64:  # sums are made in it
            torch.testing.assert_close(out.float(), single, rtol=2**-23, atol=0.0)
        else:
            assert_same_bits(out, single.to(out.dtype))


@interpreted
def test_without_noise_a_release_is_a_mean():
    from unison.kernels import multi_tensor

    values, weights = draw(3), weights_of(len(SHAPES), 3)
    sums, means = outs_like(values), outs_like(values)
    with as_on_cuda():
        multi_tensor.combine(values, weights, sums)
        multi_tensor.release(values, weights, None, 5.0, means)
    for mean, total in zip(means, sums, strict=True):
        assert_close(mean, total.double() / 5)


@interpreted
def test_noise_is_added_on_its_grid():
    from unison.kernels import multi_tensor

    std = 1e-3
    values, recipes = [torch.randn(1, 200)], recipes_of(1, std)
    found, alone = torch.empty(200), torch.empty(200)
    with as_on_cuda():
        one = torch.ones(1, 1)
        multi_tensor.release(values, one, (recipes, [0]), 1.0, [found])
        multi_tensor.release([torch.zeros(1, 200)], one, (recipes, [0]), 1.0, [alone])
    spacing = noise_spacing(std)
    on_grid = (values[0][0].double() / spacing).round() * spacing
    assert_same_bits(found, (on_grid + alone.double()).float())
    steps = alone.double() / spacing
    assert torch.equal(steps, steps.round())


def test_what_the_kernels_take():
    from unison.kernels import multi_tensor

    assert not multi_tensor.is_fast([])
    assert not multi_tensor.is_fast(draw(2))  # on the CPU


def test_plain_torch_serves_the_cpu():
    from unison.kernels import multi_tensor

    values, weights, recipes = draw(2), weights_of(len(SHAPES), 2), recipes_of(len(SHAPES))
    found, expected = outs_like(values), outs_like(values)
    for row, value in zip(multi_tensor.squares(values), values, strict=True):
        for b in range(2):
            assert float(row[b]) == pytest.approx(float(value[b].double().square().sum()))
    multi_tensor.combine(values, weights, found)
    multi_tensor.release(values, weights, None, 1.0, expected)
    assert_all_same_bits(found, expected)
    multi_tensor.release(values, weights, (recipes, [0] * len(SHAPES)), 1.0, found)
    assert all(not torch.equal(a, b) for a, b in zip(found, expected, strict=True) if a.numel())


@interpreted
def test_kernels_read_tables_that_were_filled_later():
    """As a graph does: what is launched while recording reads the tables when it is replayed."""
    from unison.kernels import multi_tensor
    from unison.kernels import multi_tensor_triton as kernels

    values, tables = draw(2, [(24,), (7,)]), multi_tensor.Tables(torch.device("cpu"))
    weights, found, expected = weights_of(2, 2), outs_like(values), outs_like(values)
    recorded = []
    release = kernels.release_kernel

    class Recorder:
        def __getitem__(self, grid):
            return lambda *args, **options: recorded.append((grid, args, options))

    with as_on_cuda():
        kernels.release(values, weights, None, 1.0, expected)
        with (
            mock.patch.object(kernels, "release_kernel", Recorder()),
            multi_tensor.tables_kept(tables),
        ):
            # Weights of the two launches are looked up by tables, which are empty as yet.
            kernels.release(values, weights.expand(2, 2), None, 1.0, found)
        tables.fill()
        for (grid, args, options), row in zip(recorded, weights, strict=True):
            given = [*args[:3], row.unsqueeze(0), *args[4:]]
            release[grid](*given, **options)
    assert_all_same_bits(found, expected)


# ---- AdamW with the release ------------------------------------------------------------------


@pytest.mark.parametrize("distance", [0.49, 0.2])  # of the latter more are open than lists hold
@interpreted
def test_a_step_of_adamw_is_taken_with_the_released_gradients(distance):
    """Of aligned and other tensors, whose elements may be open: by the formula of Adam."""
    from unison.kernels import multi_tensor

    gen = torch.Generator().manual_seed(5)
    values = [torch.randn(2, *shape, generator=gen) for shape in ((8, 16), (7,), (33,))]
    params, means = ([torch.randn(x.shape[1:], generator=gen) for x in values] for _ in range(2))
    squares = [torch.rand(x.shape[1:], generator=gen) for x in values]
    squares[1][0] = 0.0
    numbers = torch.tensor([[1e-2, 0.9, 0.999, 1e-8, 0.1]]).repeat(3, 1)
    numbers[1, 0] = 3e-2
    given = [[x.clone() for x in each] for each in (params, means, squares)]
    weights, steps = weights_of(3, 2), torch.tensor([3.0, 3.0, 4.0])
    alone, found = outs_like(values), outs_like(values)
    noise = (recipes_of(3, distance=distance), [0, 3, 500])
    multi_tensor.release(values, weights, noise, 4.0, alone)  # the reference
    with as_on_cuda():
        rates = multi_tensor.adamw_rates(numbers, steps)
        step = multi_tensor.AdamWStep(given[0], given[1], given[2], rates)
        noise = (recipes_of(3, distance=distance), [0, 3, 500])
        multi_tensor.release(values, weights, noise, 4.0, found, step)
    assert_all_same_bits(found, alone)
    for i, gradient in enumerate(x.double() for x in found):
        lr, beta1, beta2, eps, decay = numbers[i].double().tolist()
        mean = beta1 * means[i].double() + (1 - beta1) * gradient
        square = beta2 * squares[i].double() + (1 - beta2) * gradient.square()
        t = float(steps[i])
        change = mean / (1 - beta1**t) / ((square / (1 - beta2**t)).sqrt() + eps)
        expected = params[i].double() * (1 - lr * decay) - lr * change, mean, square
        for new, exact in zip((each[i] for each in given), expected, strict=True):
            torch.testing.assert_close(new.double(), exact, rtol=3e-5, atol=1e-7)


@interpreted
def test_kernels_that_draw_other_noise_are_refused():
    """As if a compiler had lost what the second kernel does."""
    from unison.errors import UnsupportedOperation
    from unison.kernels import multi_tensor_triton as kernels

    class Nothing:
        def __getitem__(self, grid):
            return lambda *args, **options: None

    check = kernels.require_reference_noise.__wrapped__
    with mock.patch.object(kernels, "_NUM_CHECKED", 1 << 11):
        check(torch.device("cpu"))
        with (
            mock.patch.object(kernels, "open_kernel", Nothing()),
            pytest.raises(UnsupportedOperation, match="of 2048 values differ"),
        ):
            check(torch.device("cpu"))
