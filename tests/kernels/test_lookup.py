"""Rows of tables that samples look up: against a loop, and the same bits however they are used."""

import math

import pytest
import torch
from torch import Tensor

from tests.harness import assert_close, assert_same_bits
from tests.kernels.interpreted import interpreted

ROWS = 9
# samples, tokens, features: odd, one token, one feature, a power of two, none
SHAPES = [(3, 12, 20), (2, 1, 5), (1, 6, 1), (2, 5, 64), (0, 4, 3), (2, 0, 3)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def draw(shape: tuple[int, int, int], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Ids of few rows, so that most are repeated, with padding of two kinds among them."""
    gen = torch.Generator().manual_seed(sum(shape))
    ids = torch.randint(-1, ROWS, shape[:2], generator=gen)
    ids[:, 2::5] = -100
    return ids, torch.randn(shape, generator=gen).to(dtype)


def tables(ids: Tensor, g: Tensor) -> Tensor:
    """Each sample's table in float64, one token after the other: [samples, rows, features]."""
    out = torch.zeros(len(g), ROWS, g.shape[2], dtype=torch.float64)
    for b in range(len(g)):
        for t, row in enumerate(ids[b].tolist()):
            if row >= 0:
                out[b, row] += g[b, t].double()
    return out


def check(ids: Tensor, g: Tensor) -> None:
    """Hold all three kernels against float64 and against one another."""
    from unison.kernels import lookup_triton as kernels

    expected = tables(ids, g)
    squares = kernels.squared_rows(ids, g)
    assert squares.shape == ids.shape
    torch.testing.assert_close(
        squares.double().sum(1), expected.square().sum((1, 2)), rtol=2e-6, atol=1e-30
    )
    stored = torch.zeros(expected.shape, dtype=torch.float32)
    kernels.add_rows(ids, g, stored)
    assert_close(stored, expected)
    more = torch.full(expected.shape, 2.0)
    kernels.add_rows(ids, g, more)
    assert_same_bits(more, 2 + stored)
    weights = torch.linspace(0.3, 1.7, len(g))
    total = torch.ones(ROWS, g.shape[2])
    kernels.weighted_rows(ids, g, weights, total)
    assert_close(total, 1 + torch.einsum("b,bij->ij", weights.double(), expected))
    for b in range(len(g)):  # what is added up is what was measured
        one = torch.zeros(len(g))
        one[b] = 1
        found = torch.zeros(ROWS, g.shape[2])
        kernels.weighted_rows(ids, g, one, found)
        assert_same_bits(found, stored[b])
        first = {row: t for t, row in reversed(list(enumerate(ids[b].tolist()))) if row >= 0}
        of_rows = torch.zeros(ids.shape[1])
        order = sorted(range(ids.shape[1]), key=lambda t: (int(ids[b, t]), t))
        for row, t in first.items():
            of_rows[order.index(t)] = torch.linalg.vector_norm(found[row].double()).square()
        torch.testing.assert_close(squares[b], of_rows, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@interpreted
def test_against_a_loop(shape, dtype):
    check(*draw(shape, dtype))


@pytest.mark.parametrize("row", [0, ROWS - 1, -1])
@interpreted
def test_all_ids_are_one(row):
    ids, g = draw((3, 11, 5))
    check(torch.full_like(ids, row), g)


@interpreted
def test_each_sample_its_own_row():
    _, g = draw((4, 6, 5))
    check(torch.arange(4)[:, None].expand(4, 6), g)


@interpreted
def test_any_strides():
    """Time-major ids are sorted with their strides: the kernels must not take them for rows."""
    ids, g = draw((2, 7, 5))
    check(ids.T.contiguous().T, g)
    check(ids, g.transpose(0, 1).contiguous().transpose(0, 1))
    check(ids, torch.randn(2, 1, 5).expand(2, 7, 5))  # as of a position's gradient
    check(ids, torch.randn(2, 7, 8)[..., :5])
    check(ids[:, ::2], g[:, ::2])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@interpreted
def test_a_sample_of_weight_0_is_left_out_whatever_it_holds(bad):
    from unison.kernels import lookup_triton as kernels

    ids, g = draw((3, 11, 5))
    weights = torch.tensor([0.5, 0.0, 2.0])
    expected, found = torch.zeros(ROWS, 5), torch.zeros(ROWS, 5)
    kernels.weighted_rows(ids, g, weights, expected)
    g[1] = bad
    kernels.weighted_rows(ids, g, weights, found)
    assert_same_bits(found, expected)
    assert kernels.squared_rows(ids, g).sum(1).isfinite().tolist() == [True, False, True]


@interpreted
def test_padding_may_hold_anything():
    from unison.kernels import lookup_triton as kernels

    ids, g = draw((3, 11, 5))
    g[ids < 0] = torch.nan
    assert kernels.squared_rows(ids, g).isfinite().all()
    out = torch.zeros(ROWS, 5)
    kernels.weighted_rows(ids, g, torch.ones(3), out)
    assert_close(out, tables(ids, g).sum(0))


@interpreted
def test_narrow_tables_are_added_to_in_float32():
    from unison.kernels import lookup_triton as kernels

    ids, g = draw((2, 17, 20), torch.bfloat16)
    first = torch.randn(2, ROWS, 20).bfloat16()
    table = first.clone()
    kernels.add_rows(ids, g, table)
    # Triton's interpreter truncates to bfloat16; hardware rounds.
    torch.testing.assert_close(table.double(), first + tables(ids, g), rtol=2**-7, atol=1e-6)


@interpreted
def test_rows_that_are_long_take_more_threads():
    """A thread squares 128 numbers of a row at most: SQUARE_ROUNDINGS."""
    from unison.kernels import lookup_triton as kernels

    for features in (1, 100, 1280, 16384, 16385, 50257, 131072):
        sizes = kernels._sizes(torch.empty(1, 1, features, device="meta"))
        assert sizes["FEATURES"] >= features
        assert sizes["FEATURES"] <= 128 * 32 * sizes["num_warps"]
