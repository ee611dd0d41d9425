"""Factors that wait, given to clipping without a model: their order, memory and bound."""

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.clip.common import cast, dense, explicit_gradients, product
from tests.clip.passes import BATCH
from tests.clip.test_factored import MIXED, PLENTY, assert_right, coefficients_of, plan_of
from tests.harness import assert_close, assert_same_bits
from tests.kernels.interpreted import as_on_cuda, interpreted
from unison.clip import Clipping, SampleNorms, describe, flat
from unison.clip.measured import (
    Factors,
    bound_grams,
    factor_sums,
    groups_of,
    measure_factors,
    stacked,
    sums_of,
)
from unison.errors import UnsupportedOperation
from unison.kernels import factored
from unison.ops import Product, Record


def use(rows: int = 8, columns: int = 16, tokens: int = 4, **options) -> Product:
    """One use of a matrix [rows, columns], bfloat16; options are those of `product`."""
    gen = torch.Generator().manual_seed(100 * rows + 10 * columns + tokens)
    d_in, d_out = (rows, columns) if options.get("is_transposed") else (columns, rows)
    made = product(gen, BATCH, tokens, d_in, d_out, **options)
    return Product(made.a.bfloat16(), made.g.bfloat16(), made.is_transposed, made.shape)


def clipping_of(
    records: Mapping[str, Record], mode: str = "ghost_bk", memory_budget: int | None = None
) -> Clipping:
    """Clipping that was planned for these records, and has got them."""
    layers = [describe(name, [record]) for name, record in records.items()]
    clipping = Clipping(plan_of(layers, mode, memory_budget), BATCH)
    for name, record in records.items():
        clipping.take(name, record)
    return clipping


def waiting_in(clipping: Clipping) -> set[str]:
    return {name for name, each in clipping._parameters.items() if each.factors}


def as_lists(records: Mapping[str, Record]) -> dict[str, list[Record]]:
    return {name: [record] for name, record in sorted(records.items())}


def factors_of(records: Mapping[str, Product]) -> dict[str, Factors]:
    return {name: Factors.of(record) for name, record in records.items()}


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# ---- what is measured together -------------------------------------------------------------------


@pytest.mark.parametrize("others", ["none", "gradients", "odd"])
@interpreted
def test_the_norm_table_is_in_order_of_names(others):
    records: dict[str, Record] = {"e": use(), "b": use(24, 8), "c": use(8, 40, tokens=7)}
    records |= {"d": use(16, 16, is_transposed=True), "a": use(8, 8, tokens=7)}
    waiting = set(records)
    if others == "gradients":
        records["bc"] = dense(torch.Generator().manual_seed(0), 5, 3, batch=BATCH)
    if others == "odd":
        records |= {"cd": use(3, 16), "a first": use(5, 7, tokens=2)}
    with as_on_cuda():
        clipping = clipping_of(records, MIXED)
        assert waiting_in(clipping) == waiting
        assert_right(as_lists(records), clipping, by="sums" if others == "odd" else "shares")


def test_what_is_alike_is_a_group():
    records = {"e": use(), "b": use(tokens=6), "d": use(24, 8, is_transposed=True)}
    records |= {"a": use(8, 8), "f": use(40, 8, tokens=6)}
    x = use()
    records["c"] = Product(x.a.half(), x.g.half(), False, x.shape)
    records["g"] = Product(x.a[:2], x.g[:2], False, x.shape)  # of fewer samples
    expected = [["a", "d", "e"], ["b", "f"], ["c"], ["g"]]
    for names in (list(records), sorted(records), sorted(records, reverse=True)):
        found = factors_of({name: records[name] for name in names})
        assert groups_of(found) == expected
    assert groups_of({}) == []


@interpreted
def test_sides_that_are_alike_may_be_of_other_shapes():
    """Sums have the shape of the parameter."""
    for shape in [(8, 4, 4), (8, 16), (8, 4, 4), (2, 4, 16)]:
        record = use(8, 16, shape=shape)
        with as_on_cuda():
            for by in ("sums", "shares"):
                _, found = assert_right({"conv": [record]}, clipping_of({"conv": record}), by=by)
                assert found["conv"].shape == shape


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64], ids=str)
@interpreted
def test_dtypes_of_sums_whatever_the_default(default):
    records = {"a": use(8, 16), "b": use(24, 8)}
    found, c = factors_of(records), coefficients_of(["a", "b"])
    with as_on_cuda(), default_dtype(default):
        (names,) = groups_of(found)
        norms = measure_factors(names, found)
        sums = factor_sums(names, found, stacked(list(c.values())))
        _, combined = assert_right(as_lists(records), clipping_of(records, "grad_materialize"))
    assert norms.squared.dtype == norms.upper.dtype == torch.float64
    for i, (name, record) in enumerate(records.items()):
        gradients = explicit_gradients([record])
        squared = gradients.reshape(BATCH, -1).square().sum(1)
        torch.testing.assert_close(norms.squared[i], squared, rtol=1e-4, atol=0.0)
        total = torch.einsum("b,b...->...", c[name], gradients)
        assert (sums[i].dtype, combined[name].dtype) == (torch.float32, torch.float64)
        assert_close(sums[i], total, dtype=torch.float32)


# ---- the record ----------------------------------------------------------------------------------


@pytest.mark.parametrize("is_transposed", [False, True])
def test_factors_are_the_record(is_transposed):
    record = use(8, 32, is_transposed=is_transposed, shape=(8, 4, 8))
    made = Factors.of(record)
    assert (made.left.shape[2], made.right.shape[2]) == (8, 32)
    sides = (record.a, record.g) if is_transposed else (record.g, record.a)
    assert (made.left, made.right, made.held) == (*sides, record.g)  # the very tensors
    assert made.shape == (8, 4, 8)


@pytest.mark.parametrize("side", ["left", "right"])
@interpreted
def test_what_changed_while_it_waited(side):
    records = {"a": use(), "b": use(16, 8), "c": use(tokens=6)}
    with as_on_cuda():
        for name in records:
            clipping = clipping_of(records)
            changed = records[name].g if side == "left" else records[name].a
            changed.add_(1)
            with pytest.raises(UnsupportedOperation, match="changed in place"):
                clipping.norms()
        clipping_of(records).norms()  # what changed before is what the record is


@pytest.mark.parametrize("by", ["clipped_sums", "shares"])
@interpreted
def test_what_changed_after_it_was_measured(by):
    records = {"a": use(), "b": use(16, 8)}
    with as_on_cuda():
        clipping = clipping_of(records)
        coefficients = coefficients_of(list(clipping.norms()))
        records["a"].a.mul_(8)  # it would add eight times what was measured
        with pytest.raises(UnsupportedOperation, match="changed in place"):
            dict(getattr(clipping, by)(coefficients))


@interpreted
def test_what_changed_before_a_second_record_came():
    records = {"a": use(), "b": use(16, 8)}
    with as_on_cuda():
        clipping = clipping_of(records)
        records["a"].g.add_(1)
        with pytest.raises(UnsupportedOperation, match="changed in place"):
            clipping.take("a", use(tokens=6))


@pytest.mark.parametrize("by", ["sums", "shares"])
@interpreted
def test_records_that_come_after_factors_were_kept(by):
    records = {"a": use(), "b": use(16, 8), "c": use(8, 8)}
    second = {"a": use(tokens=6), "c": use(8, 8, tokens=3, is_transposed=True)}
    with as_on_cuda():
        clipping = clipping_of(records)
        assert waiting_in(clipping) == {"a", "b", "c"}
        both = {name: [each] for name, each in records.items()}
        for name, record in second.items():
            clipping.take(name, record)
            both[name].append(record)
        assert waiting_in(clipping) == {"b"}
        assert_right(both, clipping, by=by)


# ---- memory --------------------------------------------------------------------------------------

# Sums that are larger than what is given back with them, and the other way round; in bytes
# 4 · rows · columns, and 2 · BATCH · tokens · rows.
LARGE_SUMS = {f"l{i:02}": (8, 64, 4) for i in range(15)}
LARGE_FACTORS = {f"f{i:02}": (8, 8, 64) for i in range(9)}
MIXTURE = {f"m{i:02}": (8 * (1 + i % 3), 8 * (1 + i * 5 % 7), 4 + 4 * (i % 4)) for i in range(24)}
BOTH = LARGE_SUMS | LARGE_FACTORS
SETS = {"sums": LARGE_SUMS, "factors": LARGE_FACTORS, "both": BOTH, "mixture": MIXTURE}


def factors_like(sizes: Mapping[str, tuple[int, int, int]]) -> dict[str, Factors]:
    return factors_of({name: use(*each) for name, each in sizes.items()})


@contextlib.contextmanager
def launches(*, is_run: bool = False) -> Iterator[list[list[int]]]:
    """Yield a list to which each launch adds the sizes of its sums, in bytes."""
    sizes: list[list[int]] = []
    real: Callable = factored.weighted_sums

    def launch(lefts: Sequence[Tensor], rights: Sequence[Tensor], weights: Tensor, outs) -> None:
        assert len(lefts) == len(rights) == len(weights) == len(outs)
        sizes.append([each.nbytes for each in outs])
        if is_run:
            real(lefts, rights, weights, outs)

    with mock.patch.object(factored, "weighted_sums", launch):
        yield sizes


def launched(found: dict[str, Factors], *, is_bounded: bool) -> list[list[int]]:
    """Sizes of the sums of every launch, none of which runs."""
    with launches() as sizes:
        list(sums_of(found, coefficients_of(list(found)), is_bounded=is_bounded))
    assert not found
    return sizes


@pytest.mark.parametrize("name", SETS)
def test_without_a_bound_a_group_is_added_up_at_once(name):
    found = factors_like(SETS[name])
    expected = [len(names) for names in groups_of(found)]
    assert [len(each) for each in launched(found, is_bounded=False)] == expected


@pytest.mark.parametrize("name", SETS)
def test_a_bound_holds_for_what_is_made_at_a_time(name):
    found = factors_like(SETS[name])
    order = [each for names in groups_of(found) for each in names]
    given = [found[each].held.nbytes for each in order]
    sizes = launched(found, is_bounded=True)
    largest = max(size for launch in sizes for size in launch)
    made = back = count = 0
    for launch in sizes:
        assert sum(launch) <= max(largest, largest + back - made)
        made += sum(launch)
        back += sum(given[count : count + len(launch)])
        count += len(launch)
    assert count == len(order)
    if name == "factors":  # what was given back is used
        assert len(sizes) < count / 2


def test_what_was_given_back_is_spent():
    """Once: sums that are larger than their factors take from it."""
    found = factors_like({"a": (64, 8, 64), **LARGE_SUMS})
    (size,) = {4 * math.prod(each.shape) for each in found.values()}
    assert found["a"].held.nbytes == 12 * size
    assert [len(each) for each in launched(found, is_bounded=True)] == [1, 12, 1, 1, 1]


def test_a_bound_lets_factors_go_as_they_are_added_up():
    found = factors_like(LARGE_SUMS)
    held = {name: [weakref.ref(each.left), weakref.ref(each.right)] for name, each in found.items()}
    with launches() as sizes:
        for name, _ in sums_of(found, coefficients_of(list(found)), is_bounded=True):
            alive = {each for each, refs in held.items() for ref in refs if ref() is not None}
            assert alive == set(found) == {each for each in held if each > name}
    assert len(sizes) == len(held)


@interpreted
def test_clipping_within_a_budget_adds_up_a_few_at_a_time():
    sizes = {"a": (8, 32, 4), "b": (8, 32, 4), "c": (8, 32, 4), "d": (8, 8, 32)}
    records = {name: use(*each) for name, each in sizes.items()}
    c, sums, counts = coefficients_of(sorted(records)), [], []
    with as_on_cuda():
        for memory_budget in (None, PLENTY):
            clipping = clipping_of(records, memory_budget=memory_budget)
            clipping.norms()
            with launches(is_run=True) as made:
                sums.append(dict(clipping.clipped_sums(c)))
            counts.append(len(made))
    assert counts == [2, 4]
    assert_same_bits(*sums)


# ---- the bound -----------------------------------------------------------------------------------


def cancelling() -> Product:
    """Pairs of tokens that cancel but for a part in a hundred."""
    half = use(16, 24, tokens=48)
    g = torch.cat([half.g, -half.g + 1e-2 * torch.randn(half.g.shape)], 1).bfloat16()
    return Product(half.a.repeat(1, 2, 1), g, False, half.shape)


def constant() -> Product:
    """All tokens are one: every rounding has the same sign."""
    a, g = torch.full((BATCH, 80, 24), 1.1), torch.full((BATCH, 80, 16), 0.1)
    return Product(a.bfloat16(), g.bfloat16(), False, (16, 24))


BOUNDED = {"random": lambda: use(16, 72, 40), "constant": constant, "cancelling": cancelling}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", BOUNDED)
@interpreted
def test_no_sample_adds_more_than_its_bound(name, dtype):
    (record,) = cast([BOUNDED[name]()], dtype)
    found = factors_of({"w": record})
    exact = explicit_gradients([record]).reshape(BATCH, -1).square().sum(1)
    with as_on_cuda():
        measured = measure_factors(["w"], found)
        norms = SampleNorms(measured.squared[0], measured.upper[0])
        assert (exact <= norms.upper).all()
        clipped = flat(norms, 0.3 * float(norms.upper.max().sqrt())).values
        for c in (torch.ones_like(clipped), clipped, coefficients_of(["w"])["w"]):
            for b in range(BATCH):
                alone = torch.zeros_like(c)
                alone[b] = c[b]
                (total,) = factor_sums(["w"], found, stacked([alone]))
                share = math.sqrt(math.fsum(total.double().square().flatten().tolist()))
                assert share <= float(c[b] * norms.upper[b].sqrt()), b


@interpreted
def test_the_bound_is_tight_for_tokens_that_have_little_to_do_with_each_other():
    record = use(264, 136, tokens=256)
    exact = torch.bmm(record.g.double().mT, record.a.double()).square().sum((1, 2))
    with as_on_cuda():
        grams = factored.grams([record.g], [record.a])
    found, by_mass = (
        (bound_grams(each, BATCH, 256, 400, torch.bfloat16).upper[0] / exact).sqrt() - 1
        for each in (grams, [*grams[:2], grams[2] + math.inf, *grams[3:]])
    )
    assert ((found >= 0) & (found < 1e-3)).all(), found
    assert (found < by_mass / 2).all(), (found, by_mass)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("side", ["left", "right"])
@interpreted
def test_a_sample_that_is_not_finite_adds_nothing(side, bad):
    clean, dirty = {"a": use(), "b": use(16, 8)}, {"a": use(), "b": use(16, 8)}
    changed = dirty["b"].g if side == "left" else dirty["b"].a
    changed[1, 2, 3] = bad
    with as_on_cuda():
        usual, found = clipping_of(clean), clipping_of(dirty)
        expected, norms = usual.norms().total(), found.norms().total()
        assert norms.upper.isfinite().tolist() == [True, False, True]
        assert_same_bits(norms.upper[::2], expected.upper[::2])
        coefficients = flat(norms, 1.0)
        assert coefficients.values.eq(0).tolist() == [False, True, False]
        assert int(coefficients.num_dropped) == 1
        c = dict.fromkeys(clean, coefficients.values)
        sums, without = dict(found.clipped_sums(c)), dict(usual.clipped_sums(c))
    assert_same_bits(sums, without)
