"""Squared norms from inner products of tokens: against float64, where tokens cancel too."""

import pytest
import torch
from torch import Tensor

from tests.harness import assert_same_bits
from tests.kernels.interpreted import interpreted

# samples, tokens, rows, columns: odd, one token, one element, several tiles, several runs
SHAPES = [(3, 17, 9, 20), (2, 1, 5, 3), (1, 1, 1, 1), (2, 65, 33, 5), (1, 66, 130, 7), (2, 7, 1, 1)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def draw(shape: tuple[int, int, int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    batch, tokens, rows, columns = shape
    gen = torch.Generator().manual_seed(sum(shape))
    left = torch.randn(batch, tokens, rows, generator=gen)
    return left.to(dtype), torch.randn(batch, tokens, columns, generator=gen).to(dtype)


def explicit(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Squared norms and masses in float64."""
    x, y = left.double(), right.double()
    squared = torch.zeros(len(x), dtype=torch.float64)
    for b in range(len(x)):
        squared[b] = (x[b].T @ y[b]).square().sum()
    return squared, (x.norm(dim=2) * y.norm(dim=2)).sum(1)


def check(left: Tensor, right: Tensor, tolerance: float = 2e-6) -> None:
    from unison.kernels import products_triton as kernels

    squares, masses = kernels.squared_norms(left, right, "ieee")
    assert squares.dtype == torch.float64
    assert masses.dtype == torch.float64
    assert squares.shape == masses.shape
    squared, mass = explicit(left, right)
    # Where tokens cancel, no float32 inner product can be better than a part of the mass.
    error = (squares.sum(1) - squared).abs()
    assert (error <= tolerance * mass.square()).all(), error / mass.square()
    torch.testing.assert_close(masses.double().sum(1), mass, rtol=2e-6, atol=0.0)
    again = kernels.squared_norms(left, right, "ieee")
    assert_same_bits(again[0], squares)
    assert_same_bits(again[1], masses)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@interpreted
def test_against_float64(shape, dtype):
    check(*draw(shape, dtype))


@interpreted
def test_several_tiles_of_halves():
    check(*draw((2, 130, 9, 20), torch.bfloat16))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@interpreted
def test_tokens_that_cancel(dtype):
    left, right = draw((3, 40, 33, 20), dtype)
    right = torch.cat([right, -right + (0.01 * torch.randn(right.shape)).to(dtype)], 1)
    left = left.repeat(1, 2, 1)
    squared, mass = explicit(left, right)
    assert (squared < 1e-3 * mass.square()).all()
    check(left, right)


@interpreted
def test_tokens_that_cancel_to_nothing():
    left, right = draw((2, 40, 33, 20), torch.float32)
    check(left.repeat(1, 2, 1), torch.cat([right, -right], 1))


@interpreted
def test_tokens_that_are_all_one():
    left, right = draw((2, 1, 33, 20), torch.float32)
    left, right = left.expand(2, 70, 33), right.expand(2, 70, 20)
    check(left, right)
    squared, mass = explicit(left, right)
    torch.testing.assert_close(squared, mass.square())


@interpreted
def test_any_strides():
    left, right = draw((2, 19, 33, 20), torch.float32)
    for x, y in [
        (left.mT.contiguous().mT, right),
        (left.transpose(0, 1).contiguous().transpose(0, 1), right[..., ::2]),
        (left[:, ::2], right[:, ::2]),
    ]:
        assert not (x.is_contiguous() and y.is_contiguous())
        check(x, y)


@interpreted
def test_none():
    from unison.kernels import products_triton as kernels

    for shape in ((0, 7, 5, 3), (2, 0, 5, 3)):
        squares, masses = kernels.squared_norms(*draw(shape, torch.float32), "ieee")
        assert squares.sum(1).tolist() == masses.sum(1).tolist() == [0.0] * shape[0]


@interpreted
def test_a_sample_that_is_not_finite_is_not_finite():
    from unison.kernels import products_triton as kernels

    left, right = draw((3, 9, 5, 3), torch.float32)
    left[1, 3, 2] = torch.nan
    right[2, 8, 1] = torch.inf
    squares, _ = kernels.squared_norms(left, right, "ieee")
    assert squares.sum(1).isfinite().tolist() == [True, False, False]


@interpreted
def test_every_tile_has_its_place():
    """Of many tokens: a root in float32 says where a tile lies."""
    from unison.kernels import products_triton as kernels

    left, right = torch.ones(1, 64 * 7 + 1, 1), torch.ones(1, 64 * 7 + 1, 1)
    left[0, 1::2] = -1
    squares, masses = kernels.squared_norms(left, right, "ieee")
    assert squares.shape == (1, 8 * 9 // 2)
    assert float(squares.sum()) == 1.0
    assert float(masses.sum()) == 64 * 7 + 1
