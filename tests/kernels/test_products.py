"""Per-sample products: against float64, and the same bits whether stored, squared or added up."""

import math

import pytest
import torch
from torch import Tensor

from tests.harness import assert_close, assert_same_bits
from tests.kernels.interpreted import interpreted

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# batch, tokens, rows, columns: odd, one token, one element, none, more than one tile and run
SHAPES = [
    (2, 37, 33, 20),
    (3, 1, 5, 77),
    (1, 1, 1, 1),
    (2, 70, 66, 70),
    (0, 7, 5, 3),
    (2, 0, 5, 3),
    (1, 64, 128, 64),
]
LAYOUTS = ["contiguous", "transposed", "padded", "time major", "every other"]


def laid_out(shape: tuple[int, int, int], layout: str, dtype: torch.dtype, seed: int) -> Tensor:
    """Return [batch, tokens, features] of random numbers, laid out in one of the ways there are."""
    gen = torch.Generator().manual_seed(seed)
    batch, tokens, features = shape
    draw = lambda *size: torch.randn(size, generator=gen).to(dtype)  # noqa: E731
    match layout:
        case "contiguous":
            return draw(batch, tokens, features)
        case "transposed":
            return draw(batch, features, tokens).mT
        case "padded":  # as logits are: rows begin at multiples, and what is between is not ours
            return draw(batch, tokens, features + 5)[..., :features]
        case "time major":
            return draw(tokens, batch, features).transpose(0, 1)
        case "every other":
            return draw(batch, tokens, 2 * features)[..., ::2]
    raise AssertionError(layout)


def both(
    shape: tuple[int, int, int, int], dtype: torch.dtype, layout: str = "contiguous"
) -> tuple[Tensor, Tensor]:
    batch, tokens, rows, columns = shape
    left = laid_out((batch, tokens, rows), layout, dtype, 1)
    return left, laid_out((batch, tokens, columns), layout, dtype, 2)


def products(left: Tensor, right: Tensor) -> Tensor:
    """X in float64, one token after the other: [batch, rows, columns]."""
    out = torch.zeros(len(left), left.shape[2], right.shape[2], dtype=torch.float64)
    for t in range(left.shape[1]):
        out += left[:, t, :, None].double() * right[:, t, None, :].double()
    return out


def scale(left: Tensor, right: Tensor) -> float:
    """Σ_t ‖left_t‖‖right_t‖ of the largest sample: rounding errors are a part of it."""
    mass = (left.double().norm(dim=2) * right.double().norm(dim=2)).sum(1)
    return float(mass.max()) if mass.numel() else 0.0


def check(left: Tensor, right: Tensor) -> None:
    """Hold all three kernels against float64 and against one another."""
    from unison.kernels import products_triton as kernels

    expected, unit = products(left, right), 2e-6 * scale(left, right)
    stored = torch.full(expected.shape, torch.nan, dtype=torch.float32)
    parts = kernels.per_sample(left, right, stored, "ieee")
    assert float((stored - expected).abs().max()) <= unit if stored.numel() else True
    only = kernels.per_sample(left, right, None, "ieee")
    assert_same_bits(only, parts)  # what is squared is what is stored
    squares = expected.square().sum((1, 2))
    assert parts.dtype == torch.float32
    torch.testing.assert_close(parts.double().sum(1), squares, rtol=2e-6, atol=unit**2)
    weights = torch.linspace(0.3, 1.7, len(left))
    total = torch.ones(expected.shape[1:])
    kernels.weighted(left, right, weights, total, "ieee", add=False)
    error = (total - torch.einsum("b,bij->ij", weights.double(), expected)).abs()
    assert float(error.max()) <= 2 * len(left) * unit
    again = torch.ones(expected.shape[1:])
    kernels.weighted(left, right, weights, again, "ieee", add=True)
    assert_same_bits(again, total + 1)
    for b in range(len(left)):  # what is added up is what is stored
        one = torch.zeros(len(left))
        one[b] = 1
        kernels.weighted(left, right, one, total, "ieee", add=False)
        assert_same_bits(total, stored[b])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@interpreted
def test_against_float64(shape, dtype):
    check(*both(shape, dtype))


@pytest.mark.parametrize("layout", LAYOUTS)
@interpreted
def test_any_strides(layout):
    left, right = both((2, 9, 33, 20), torch.float32, layout)
    assert left.is_contiguous() == (layout == "contiguous")
    check(left, right)


@interpreted
def test_a_padded_row_ends_before_its_padding():
    """What lies between rows is NaN: nothing may read it, in tiles that are cut off too."""
    whole = torch.full((2, 35, 40), torch.nan)
    whole[..., :33] = torch.randn(2, 35, 33)
    check(whole[..., :33], torch.randn(2, 35, 20))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@interpreted
def test_what_is_stored_narrow_is_squared_as_it_is_stored(dtype):
    from unison.kernels import products_triton as kernels

    left, right = both((2, 37, 33, 40), torch.bfloat16)
    stored = torch.empty(2, 33, 40, dtype=dtype)
    parts = kernels.per_sample(left, right, stored, "ieee")
    squares = stored.double().square().sum((1, 2))
    torch.testing.assert_close(parts.double().sum(1), squares, rtol=2e-6, atol=0.0)
    expected = products(left, right)
    # Triton's interpreter truncates to bfloat16; hardware rounds.
    torch.testing.assert_close(stored.double(), expected, rtol=2**-7, atol=1e-5)


@interpreted
def test_only_its_own_part_of_the_output_is_written():
    from unison.kernels import products_triton as kernels

    left, right = both((2, 9, 33, 20), torch.float32)
    whole = torch.full((2, 40, 20), 7.0)
    kernels.per_sample(left, right, whole[:, :33], "ieee")
    assert whole[:, 33:].eq(7).all()
    assert_close(whole[:, :33], products(left, right))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@interpreted
def test_a_sample_of_weight_0_is_left_out_whatever_it_holds(bad):
    from unison.kernels import products_triton as kernels

    left, right = both((3, 9, 33, 20), torch.float32)
    weights = torch.tensor([0.5, 0.0, 2.0])
    expected, found = torch.zeros(33, 20), torch.zeros(33, 20)
    kernels.weighted(left, right, weights, expected, "ieee", add=False)
    left[1, 4] = bad
    right[1, 2, 3] = bad
    kernels.weighted(left, right, weights, found, "ieee", add=False)
    assert_same_bits(found, expected)
    assert not kernels.per_sample(left, right, None, "ieee")[1].isfinite().all()


@interpreted
def test_a_batch_of_none_adds_nothing():
    from unison.kernels import products_triton as kernels

    left, right = both((0, 9, 33, 20), torch.float32)
    out = torch.full((33, 20), 3.0)
    kernels.weighted(left, right, torch.zeros(0), out, "ieee", add=True)
    assert out.eq(3).all()
    kernels.weighted(left, right, torch.zeros(0), out, "ieee", add=False)
    assert out.eq(0).all()


@interpreted
def test_the_order_of_tokens_is_that_of_the_tile_alone():
    """A sample's bits depend neither on its neighbours nor on where it lies in memory."""
    from unison.kernels import products_triton as kernels

    left, right = both((4, 70, 65, 66), torch.float32)
    whole = torch.empty(4, 65, 66)
    kernels.per_sample(left, right, whole, "ieee")
    for layout in ("alone", "turned"):
        x, y = left[2:3], right[2:3]
        if layout == "turned":
            x, y = x.mT.contiguous().mT, y.mT.contiguous().mT
        alone = torch.empty(1, 65, 66)
        kernels.per_sample(x, y, alone, "ieee")
        assert_same_bits(alone[0], whole[2])


@interpreted
def test_every_tile_has_its_place():
    """With more than one group of rows, cut off in both directions."""
    from unison.kernels import products_triton as kernels

    tiles = {"BM": 16, "BN": 16, "BK": 16, "num_warps": 4, "num_stages": 2}
    left, right = both((2, 3, 16 * 9 + 5, 17), torch.float32)
    stored = torch.full((2, left.shape[2], right.shape[2]), torch.nan)
    parts = kernels.per_sample(left, right, stored, "ieee", tiles)
    assert parts.shape == (2, 10 * 2)
    assert_close(stored, products(left, right))


@interpreted
def test_tiles_are_a_function_of_shape_and_dtype():
    from unison.kernels import products_triton as kernels

    for dtype in DTYPES:
        for rows in (1, 16, 17, 64, 200, 256, 1280):
            for columns in (1, 33, 128, 255, 256, 5120):
                tiles = kernels.choose_tiles(rows, columns, dtype)
                assert tiles == kernels.choose_tiles(rows, columns, dtype)
                # A thread squares 128 numbers of a tile at most: SQUARE_ROUNDINGS.
                assert tiles["BM"] * tiles["BN"] <= 128 * 32 * tiles["num_warps"]
                assert min(tiles["BM"], tiles["BN"], tiles["BK"]) >= 16


@interpreted
def test_numbers_of_11_bits_and_the_rest_are_the_whole():
    from unison.kernels.products_triton import split

    gen = torch.Generator().manual_seed(0)
    whole = torch.randn(3, 40, 1100, generator=gen) * torch.logspace(-30, 30, 1100)
    for value in (whole, whole[:, 3:17, 5:1090], whole[1, ::2, :1], whole[:, :0]):
        high, low = split(value)
        assert torch.equal(high + low, value)
        assert not (high.view(torch.int32) & 0x1FFF).any()
        assert (low.abs() <= value.abs() * 2**-11).all()
