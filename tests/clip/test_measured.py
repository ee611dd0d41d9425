"""Clipping by compiled kernels, in Triton's interpreter: accurate, and no sample adds too much."""

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.clip.common import (
    Make,
    cancelling,
    cast,
    dense,
    explicit_gradients,
    explicit_mass,
    lookup,
    product,
)
from tests.clip.hard import HARD
from tests.harness import assert_close, assert_same_bits
from tests.kernels.interpreted import as_on_cuda, interpreted
from unison.clip import MODES, SampleNorms, bounds, clipped_gradients, flat, measured
from unison.clip.bounds import SMALLEST_MAX_NORM
from unison.kernels import multi_tensor
from unison.kernels.cross_entropy import ChunkedHead
from unison.ops import Dense, Lookup, Product, Record, Streamed
from unison.ops.records import shape_of

ROWS, COLUMNS, BATCH, TOKENS = 12, 20, 3, 5
SIZES = {"batch": BATCH, "tokens": TOKENS}


def _product(gen: torch.Generator, **options) -> Product:
    return product(gen, **{**SIZES, "d_in": COLUMNS, "d_out": ROWS, **options})


def _lookup(gen: torch.Generator, **options) -> Lookup:
    return lookup(gen, **{**SIZES, "rows": ROWS, "features": COLUMNS, **options})


def _dense(gen: torch.Generator, *shape: int) -> Dense:
    return dense(gen, *(shape or (ROWS, COLUMNS)), batch=BATCH)


def _not_contiguous(gen: torch.Generator) -> list[Record]:
    a = torch.randn(COLUMNS, BATCH, TOKENS, generator=gen).permute(1, 2, 0)
    g = torch.randn(TOKENS, BATCH, 2 * ROWS, generator=gen).transpose(0, 1)[..., ::2]
    ids = torch.randint(0, ROWS, (TOKENS, BATCH), generator=gen).T
    rows = torch.randn(BATCH, 1, COLUMNS, generator=gen).expand(BATCH, TOKENS, COLUMNS)
    value = torch.randn(COLUMNS, ROWS, BATCH, generator=gen).permute(2, 1, 0)
    shape = (ROWS, COLUMNS)
    return [Product(a, g, False, shape), Lookup(ids, rows, shape), Dense(value)]


def _turned(gen: torch.Generator) -> Product:
    return _product(gen, d_in=ROWS, d_out=COLUMNS, is_transposed=True)


RECORDS: dict[str, Make] = {
    "product": lambda gen: [_product(gen)],
    "transposed": lambda gen: [_turned(gen)],
    "one token": lambda gen: [_product(gen, tokens=1)],
    "aligned": lambda gen: [_product(gen, d_in=16, d_out=8)],
    "convolution": lambda gen: [_product(gen, shape=(ROWS, 5, 4))],
    "lookup": lambda gen: [_lookup(gen)],
    "time-major lookup": lambda gen: _not_contiguous(gen)[1:2],
    "dense": lambda gen: [_dense(gen)],
    "vector": lambda gen: [_dense(gen, 13)],
    "scalar": lambda gen: [dense(gen, batch=BATCH)],
    "two vectors": lambda gen: [_dense(gen, 13), _dense(gen, 13)],
    "two products": lambda gen: [_product(gen), _product(gen, tokens=4)],
    "opposite products": lambda gen: [_product(gen), _turned(gen)],
    "two lookups": lambda gen: [_lookup(gen), _lookup(gen, tokens=2)],
    "tied": lambda gen: [_lookup(gen), _product(gen, tokens=4)],
    "tied, transposed": lambda gen: [_lookup(gen), _turned(gen)],
    "product and dense": lambda gen: [_product(gen), _dense(gen)],
    "lookup and dense": lambda gen: [_lookup(gen), _dense(gen)],
    "all kinds": lambda gen: [_product(gen), _lookup(gen), _dense(gen), _product(gen)],
    "not contiguous": _not_contiguous,
    "no tokens": lambda gen: [_product(gen, tokens=0)],
}
METHODS = ["tile", "gram", "materialize"]
DTYPES = [
    torch.float32,
    torch.bfloat16,
    pytest.param(torch.float16, marks=pytest.mark.full),
]


def generator(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(len(name))


def measured_by(method: str, records: Sequence[Record]) -> tuple[SampleNorms, Sequence[Record]]:
    """Norms by a method, and what the clipped sum is made of then: as in `Clipping`."""
    if method != "materialize":
        return measured.squared_norms(records, method), records
    kept = measured.materialize(records)
    numel = math.prod(kept.shape[1:])
    norms = measured.bound(multi_tensor.squares([kept]), len(kept), numel)
    return SampleNorms(norms.squared[0], norms.upper[0]), [Dense(kept)]


def methods_of(records: Sequence[Record]) -> list[str]:
    """The methods that differ: only products have inner products of tokens."""
    has_gram = all(isinstance(each, Product) for each in records)
    return METHODS if has_gram else ["tile", "materialize"]


def is_stored_narrow(records: Sequence[Record], method: str) -> bool:
    """Whether what is measured was rounded to bfloat16 first."""
    is_formed = method == "materialize" or len({type(each) for each in records}) > 1
    is_formed = is_formed or (len(records) > 1 and not isinstance(records[0], Product))
    return is_formed and measured.kept_dtype(records) == torch.bfloat16


# ---- accuracy ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", RECORDS)
@interpreted
def test_against_float64(name, dtype):
    records = cast(RECORDS[name](generator(name)), dtype)
    shape, gradients = shape_of(records[0]), explicit_gradients(records)
    expected = gradients.reshape(BATCH, -1).square().sum(1)
    mass = explicit_mass(records).square()
    c = torch.linspace(0.2, 1.0, BATCH, dtype=torch.float64)
    total = torch.einsum("b,b...->...", c, gradients)
    with as_on_cuda():
        assert bounds.is_taken(records)
        for method in methods_of(records):
            # Triton's interpreter truncates to bfloat16: each of several uses once more.
            is_narrow = is_stored_narrow(records, method)
            tolerance = len(records) * 2.0**-6 if is_narrow else 1e-5
            norms, used = measured_by(method, records)
            assert norms.squared.dtype == norms.upper.dtype == torch.float64
            error = (norms.squared - expected).abs()
            assert (error <= tolerance * mass).all(), (method, error / mass)
            assert (norms.upper >= norms.squared).all()
            if method != "gram" and not is_narrow:
                assert (norms.upper <= norms.squared * 1.0001 + 1e-30).all()
            if method == "gram":  # its sums are those of "tile"
                continue
            found = measured.clipped_sum(used, c, shape)
            assert found.dtype == torch.float32
            assert found.shape == shape
            assert_close(found, total, dtype=torch.bfloat16 if is_narrow else torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", RECORDS)
@interpreted
def test_materialize(name, dtype):
    records = cast(RECORDS[name](generator(name)), dtype)
    with as_on_cuda():
        found = measured.materialize(records)
    assert found[:1].is_contiguous()
    if [type(each) for each in records] != [Dense]:
        assert found.dtype == measured.kept_dtype(records)
    assert found.dtype != torch.float16 or [type(each) for each in records] == [Dense]
    assert_close(found, explicit_gradients(records), dtype=found.dtype)


@pytest.mark.parametrize("name", ["product", "lookup", "dense", "tied", "all kinds"])
@interpreted
def test_an_empty_batch(name):
    records: list[Record] = [
        measured.take(each, slice(0, 0)) for each in RECORDS[name](generator(name))
    ]
    with as_on_cuda():
        for method in METHODS:
            norms, used = measured_by(method, records)
            assert norms.squared.shape == norms.upper.shape == (0,)
            found = measured.clipped_sum(used, norms.upper, shape_of(records[0]))
            assert found.shape == shape_of(records[0])
            assert not found.any()


@pytest.mark.parametrize("name", ["product", "lookup", "dense", "tied"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@interpreted
def test_a_sample_that_is_not_finite_adds_nothing(name, bad):
    records = RECORDS[name](generator(name))
    clean = measured.tensors_of(records[-1])[0]
    clean[1].view(-1)[0] = bad
    if name == "lookup":
        records[0].ids[:] = 3
    with as_on_cuda():
        for method in METHODS:
            norms, used = measured_by(method, records)
            coefficients = flat(norms, 1.0)
            assert coefficients.values.eq(0).tolist() == [False, True, False]
            assert int(coefficients.num_dropped) == 1
            found = measured.clipped_sum(used, coefficients.values, shape_of(records[0]))
            assert found.isfinite().all()


def test_dtypes_that_are_kept(gen):
    half = lambda *records: cast(records, torch.bfloat16)  # noqa: E731
    assert measured.kept_dtype(half(_product(gen))) == torch.bfloat16
    assert measured.kept_dtype(half(_lookup(gen), _product(gen))) == torch.bfloat16
    assert measured.kept_dtype(half(_dense(gen), _dense(gen))) == torch.float32  # sums already
    assert measured.kept_dtype([_product(gen)]) == torch.float32
    assert measured.kept_dtype(cast([_product(gen)], torch.float16)) == torch.float32
    assert measured.kept_dtype([*half(_product(gen)), _product(gen)]) == torch.float32


def test_what_the_kernels_take(gen):
    assert not bounds.is_taken([_product(gen)])  # on the CPU
    with as_on_cuda():
        assert bounds.is_taken([_product(gen), _lookup(gen), _dense(gen)])
        assert not bounds.is_taken(cast([_product(gen)], torch.float64))
        first = _product(gen, shape=(ROWS, 5, 4))
        other = _product(gen, d_in=4, d_out=ROWS * 5, shape=(ROWS, 5, 4))
        assert not bounds.is_taken([first, other])  # two matrices


@interpreted
def test_mixed_dtypes_are_measured_as_they_are_added():
    gen = generator("mixed")
    first = _product(gen)
    records: list[Record] = [Product(first.a, first.g.bfloat16(), False, first.shape)]
    with as_on_cuda():
        for method in ("tile", "materialize"):
            norms, used = measured_by(method, records)
            for b in range(BATCH):
                one = torch.zeros(BATCH)
                one[b] = 1
                share = measured.clipped_sum(used, one, shape_of(first)).double().square().sum()
                assert float(share) == pytest.approx(float(norms.squared[b]), rel=1e-6)


# ---- streamed records ----------------------------------------------------------------------------


def streamed(dtype: torch.dtype) -> Streamed:
    gen = torch.Generator().manual_seed(5)
    hidden = torch.randn(BATCH, TOKENS, 8, generator=gen).to(dtype)
    weight = torch.randn(37, 8, generator=gen).to(dtype)
    labels = torch.randint(0, 37, (BATCH, TOKENS), generator=gen)
    labels[1, 2] = -100
    head = ChunkedHead(
        hidden=hidden, weight=weight, bias=None, labels=labels, ignore_index=-100, chunk=TOKENS
    )
    return Streamed(head, head.losses()[1], torch.randn(BATCH, TOKENS, generator=gen).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@interpreted
def test_records_that_come_in_pieces(dtype):
    """Formed piece by piece they are what the whole record forms."""
    record = streamed(dtype)
    with as_on_cuda():
        formed = measured.form(record)
        assert len(list(record.chunks())) == BATCH
        whole = record.as_product()
        assert formed.dtype == dtype
        assert_same_bits(formed, measured.materialize([whole]))
        assert_close(formed, explicit_gradients([whole]), dtype=dtype)


@interpreted
def test_what_was_formed_is_added_to_in_place():
    record = streamed(torch.float32)
    gen = generator("tied")
    ids = torch.randint(0, 37, (BATCH, TOKENS), generator=gen)
    use = Lookup(ids, torch.randn(BATCH, TOKENS, 8, generator=gen), (37, 8))
    with as_on_cuda():
        expected = explicit_gradients([record.as_product(), use])
        formed = measured.form(record)
        found = measured.materialize([Dense(formed, is_ours=True), use])
        assert found.data_ptr() == formed.data_ptr()
        assert_close(found, expected)
        # Whoever else holds per-sample gradients keeps them.
        before = found.clone()
        other = measured.materialize([Dense(found), use])
        assert_same_bits(found, before)
        assert_close(other, expected + explicit_gradients([use]))


def test_doubles_are_formed_in_float64():
    record = streamed(torch.float64)
    formed = measured.form(record)
    assert formed.dtype == torch.float64
    assert_close(formed, explicit_gradients([record.as_product()]))


# ---- the bound -----------------------------------------------------------------------------------


def share_of(used: Sequence[Record], c: Tensor, b: int) -> float:
    """The norm of what one sample adds, among others that add nothing."""
    alone = torch.zeros_like(c)
    alone[b] = c[b]
    total = measured.clipped_sum(used, alone, shape_of(used[0]))
    return math.sqrt(math.fsum(total.double().square().flatten().tolist()))


def constant(kind: str) -> list[Record]:
    """All tokens are one: every rounding has the same sign."""
    a, g = torch.full((2, 64, 20), 1.1), torch.full((2, 64, 12), 0.1)
    if kind == "lookup":
        return [Lookup(torch.full((2, 16), 7), g[:, :16], (ROWS, 12))]
    return [Product(a, g, False, (12, 20))]


def tied(gen: torch.Generator) -> list[Record]:
    """Uses that cancel but for a part in a hundred."""
    first = _product(gen)
    g = -first.g + 1e-2 * torch.randn(first.g.shape, generator=gen)
    return [first, Product(first.a, g, False, first.shape), _lookup(gen)]


BOUNDED: dict[str, Make] = {
    "random": lambda gen: [_product(gen)],
    "cancelling": lambda gen: cancelling(gen, tokens=64),
    "cancelling lookups": lambda gen: cancelling(gen, tokens=12, kind="lookup"),
    "constant": lambda gen: constant("product"),
    "constant lookups": lambda gen: constant("lookup"),
    "time-major lookup": lambda gen: _not_contiguous(gen)[1:2],
    "tied": tied,
    "dense": lambda gen: [Dense(torch.full((2, 5, 77), 0.1))],
    "tiny": lambda gen: [Dense(torch.full((2, 5, 77), 1e-22))],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", BOUNDED)
@interpreted
def test_no_sample_adds_more_than_the_bound(name, dtype):
    records = cast(BOUNDED[name](generator(name)), dtype)
    with as_on_cuda():
        for method in methods_of(records):
            norms, used = measured_by(method, records)
            largest = float(norms.squared.clamp(min=0).max().sqrt()) or 1.0
            for max_norm in (1e-3 * largest, 0.999 * largest):
                max_norm = max(max_norm, SMALLEST_MAX_NORM)
                c = flat(norms, max_norm).values
                share = share_of(used, c, 1)
                assert share <= max_norm, (method, share / max_norm - 1)
            share = share_of(used, torch.ones_like(c), 1)
            assert share**2 <= float(norms.upper[1])


@pytest.mark.parametrize("method", ["tile", "materialize"])
@interpreted
def test_a_measured_tensor_is_bounded_tightly(method):
    """Where tokens cancel too: what was measured is what is added."""
    for name in ("cancelling", "constant", "random", "constant lookups"):
        records = BOUNDED[name](generator(name))
        with as_on_cuda():
            norms, used = measured_by(method, records)
            c = flat(norms, 1e-3).values
            assert share_of(used, c, 1) >= (1 - 2e-5) * 1e-3


# ---- from a model to its clipped sums ------------------------------------------------------------

QUICK = ["cancelling", "constant lookups"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "case", [case if case in QUICK else pytest.param(case, marks=pytest.mark.full) for case in HARD]
)
@pytest.mark.parametrize("mode", [*MODES, "auto"])
@interpreted
def test_no_sample_of_a_model_adds_more_than_the_bound(mode, case, dtype):
    model, batch = HARD[case].make().to(dtype), HARD[case].batch(1)
    batch = batch.to(dtype) if batch.is_floating_point() else batch
    with as_on_cuda():
        norm = float(
            clipped_gradients(model, HARD[case].loss, batch, max_norm=1.0, mode=mode).norms
        )
        max_norm = 0.3 * norm or 1.0
        found = clipped_gradients(model, HARD[case].loss, batch, max_norm=max_norm, mode=mode)
    squares = [float(each.double().square().sum()) for each in found.sums.values()]
    assert math.sqrt(math.fsum(squares)) <= max_norm
