"""Clipped sums as integers: what one sample adds to them does not depend on the others."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from tests.clip.common import dense, explicit_gradients, lookup
from tests.clip.passes import BATCH
from tests.clip.test_factored import MIXED
from tests.clip.test_factors_alone import clipping_of, use
from tests.kernels.interpreted import as_on_cuda, interpreted
from unison.clip.bounds import Grid
from unison.ops import Lookup, Record

SPACING = 2.0**-14
NOT_HELD = Grid(SPACING, torch.int64)


def records_of() -> dict[str, Record]:
    gen = torch.Generator().manual_seed(7)
    table = lookup(gen, BATCH, 5, 11, 24)
    return {
        "matrix": use(24, 40, tokens=7),
        "other": use(8, 16, is_transposed=True),
        "odd": use(3, 5, tokens=2),
        "table": Lookup(table.ids, table.g.bfloat16(), table.shape),
        "bias": dense(gen, 5, batch=BATCH),
    }


def added(
    records: Mapping[str, Record],
    weights: Tensor,
    mode: str,
    grid: Grid,
    totals: dict[str, Tensor | None],
    dtype: torch.dtype = torch.int32,
) -> dict[str, Tensor | None]:
    with as_on_cuda():
        clipping = clipping_of(records, mode)
        clipping.norms()
        clipping.grid = grid
        coefficients = dict.fromkeys(records, weights)
        clipping.add_on_grid(coefficients, totals, Grid(SPACING, dtype))
    return totals


@pytest.mark.parametrize("grid", [Grid(SPACING), NOT_HELD, Grid(4 * SPACING)], ids=str)
@pytest.mark.parametrize("mode", ["ghost_bk", "grad_materialize", MIXED], ids=str)
@interpreted
def test_two_passes_against_float64(mode, grid):
    records = records_of()
    totals: dict[str, Tensor | None] = dict.fromkeys([*records, "unused"])
    passes = [torch.tensor([0.7, 0.0, 0.3]), torch.tensor([0.25, 1.0, 0.5])]
    assert len(passes[0]) == BATCH
    for weights in passes:
        added(records, weights.double(), mode, grid, totals)
    assert totals.pop("unused") is None
    for name, total in totals.items():
        assert total is not None
        exact = torch.einsum(
            "b,b...->...", sum(passes).double(), explicit_gradients([records[name]])
        )
        off = (total.double() * SPACING - exact.flatten()).abs().max()
        assert total.dtype == torch.int32
        # Half a spacing of every sample of two passes; and of gradients that are kept in bfloat16.
        is_kept = mode == "grad_materialize" or (mode == MIXED and name == "table")
        of_dtype = 2e-2 if is_kept else 1e-5
        assert off <= 2 * BATCH * float(grid.spacing) / 2 + of_dtype * exact.abs().max(), name


@pytest.mark.parametrize("mode", ["ghost_bk", MIXED], ids=str)
@interpreted
def test_a_sample_adds_what_it_adds_alone(mode):
    records, weights = records_of(), torch.tensor([0.7, 0.9, 0.3], dtype=torch.float64)
    names = ["matrix", "other", "odd"]
    everybody = added(records, weights, mode, Grid(SPACING), dict.fromkeys(names))
    for b in range(BATCH):
        alone, others = torch.zeros_like(weights), weights.clone()
        alone[b], others[b] = weights[b], 0.0
        of_b = added(records, alone, mode, Grid(SPACING), dict.fromkeys(names))
        rest = added(records, others, mode, Grid(SPACING), dict.fromkeys(names))
        for name in names:
            found, one, two = everybody[name], of_b[name], rest[name]
            assert found is not None
            assert one is not None
            assert two is not None
            assert torch.equal(found, one + two), (b, name)


@interpreted
def test_wide_integers():
    records, weights = records_of(), torch.tensor([0.7, 0.9, 0.3], dtype=torch.float64)
    grid = Grid(8 * SPACING)
    wide = added(records, weights, "ghost_bk", grid, dict.fromkeys(records), torch.int64)
    for name, total in wide.items():
        assert total is not None
        assert total.dtype == torch.int64
        if name in ("matrix", "other", "odd"):  # whole multiples of the coarser grid
            assert (total % 8 == 0).all()


@pytest.mark.parametrize("grid", [Grid(SPACING), NOT_HELD], ids=["held", "not held"])
@interpreted
def test_shares_are_integers_of_a_spacing(grid):
    records, weights = records_of(), torch.tensor([0.7, 0.9, 0.3], dtype=torch.float64)
    with as_on_cuda():
        clipping = clipping_of(records, "ghost_bk")
        clipping.norms()
        clipping.grid = grid
        shares = clipping.shares(dict.fromkeys(records, weights))
    assert (shares["matrix"][0].dtype == torch.int32) == (grid.dtype == torch.int32)
    for name, (values, row) in shares.items():
        exact = torch.einsum("b,b...->...", weights, explicit_gradients([records[name]]))
        found = torch.einsum("b,b...->...", row, values.double())
        assert (found - exact).abs().max() <= 2 * SPACING + 1e-4 * exact.abs().max(), name
