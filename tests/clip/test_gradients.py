"""Clipped sums against float64 loops over samples."""

import pytest
import torch

from tests.clip.common import DTYPES, RECORDS, cast, dense, explicit_gradients, lookup, product
from tests.harness import assert_close, assert_same_bits
from unison.clip import (
    GRADIENT_METHODS,
    add_clipped,
    from_records,
    measure,
)
from unison.clip.bounds import tensors_of
from unison.errors import BadInput
from unison.ops import Dense
from unison.ops.records import shape_of


def clipped_sum(records, coefficients):
    return torch.einsum("b,b...->...", coefficients.double(), explicit_gradients(records))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", RECORDS)
@pytest.mark.parametrize("method", GRADIENT_METHODS)
def test_clipped_sums_are_those_of_explicit_gradients(method, case, dtype, gen):
    records = cast(RECORDS[case](gen), dtype)
    used = measure(records, "materialize")[1] if method == "kept" else records
    before = [tensor.clone() for record in used for tensor in tensors_of(record)]
    coefficients = torch.rand(len(tensors_of(records[0])[0]), dtype=torch.float64, generator=gen)
    found = from_records(used, coefficients, shape_of(records[0]))
    assert found.dtype == torch.float64
    made_in = torch.promote_types(dtype, torch.float32)  # what was kept is rounded
    assert_close(found.to(made_in), clipped_sum(records, coefficients))
    for tensor, copy in zip((t for r in used for t in tensors_of(r)), before, strict=True):
        assert_same_bits(tensor, copy)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_samples_with_coefficient_0_may_be_anything(bad, gen):
    records = [product(gen), lookup(gen), dense(gen, 13, 77)]
    coefficients = torch.tensor([0.5, 0.0, 1.0, 0.0, 0.25], dtype=torch.float64)
    expected = from_records(records, coefficients, (13, 77))
    for record in records:
        for tensor in tensors_of(record):
            tensor[1] = bad
            tensor[3] = bad
    assert_same_bits(from_records(records, coefficients, (13, 77)), expected)
    kept = measure(records, "materialize")[1][0]
    assert isinstance(kept, Dense)
    assert_close(from_records([kept], coefficients, (13, 77)).float(), expected)


def test_padding_may_be_anything_too(gen):
    record = lookup(gen)
    record.ids[:, ::3] = -1
    ones = torch.ones(5, dtype=torch.float64)
    expected = from_records([record], ones, shape_of(record))
    record.g[record.ids < 0] = torch.nan
    assert_same_bits(from_records([record], ones, shape_of(record)), expected)
    for method in ("gram", "tile", "materialize"):
        assert measure([record], method)[0].squared.isfinite().all()
        assert measure([record], method)[0].upper.isfinite().all()


def test_long_batches_go_through_several_gemms(gen):
    records = [product(gen, batch=3, tokens=4500, d_in=3, d_out=1030)]
    coefficients = torch.rand(3, dtype=torch.float64, generator=gen)
    found = from_records(records, coefficients, shape_of(records[0]))
    assert_close(found, clipped_sum(records, coefficients))


def test_autocast_does_not_change_the_sum(gen):
    records = [product(gen)]
    ones = torch.ones(5, dtype=torch.float64)
    expected = from_records(records, ones, (13, 77))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same_bits(from_records(records, ones, (13, 77)), expected)


def test_what_does_not_fit_is_refused(gen):
    record = product(gen)
    with pytest.raises(BadInput, match=r"total of shape \[13, 77\], found .* \[77, 13\]"):
        from_records([record], torch.ones(5), (77, 13))
    with pytest.raises(BadInput, match=r"expected coefficients \[5\], found \[4\]"):
        from_records([record], torch.ones(4), (13, 77))
    with pytest.raises(BadInput, match="expected a float64 total"):
        add_clipped(torch.zeros(13, 77), record, torch.ones(5))


def test_uses_may_come_one_by_one(gen):
    records = [product(gen), lookup(gen), dense(gen, 13, 77)]
    coefficients = torch.rand(5, dtype=torch.float64, generator=gen)
    total = torch.zeros(13, 77, dtype=torch.float64)
    for record in records:
        add_clipped(total, record, coefficients)
    assert_same_bits(total, from_records(records, coefficients, (13, 77)))
