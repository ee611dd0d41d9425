"""No sample adds more than C: not C(1 + rounding), C. And hardly less than it may."""

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from tests.clip.common import (
    RECORDS,
    cancelling,
    cast,
    explicit_norms,
    lookup,
    product,
)
from tests.harness import assert_same_bits
from unison.clip import (
    DOUBLE,
    NORM_METHODS,
    RULES,
    Arithmetic,
    NormTable,
    SampleNorms,
    automatic,
    bounded,
    flat,
    from_records,
    measure,
    per_group,
    per_layer,
)
from unison.clip.bounds import gamma, total_sensitivity
from unison.clip.norms import refusal
from unison.errors import BadInput
from unison.ops import Dense, Lookup, Product, Record
from unison.ops.records import shape_of, take


def constant(gen: torch.Generator) -> list[Record]:
    """All tokens equal, and every sample's gradient of the same norm."""
    a = torch.randn(77, generator=gen).expand(5, 123, 77)
    g = torch.randn(13, generator=gen).expand(5, 123, 13)
    return [Product(a, g, False, (13, 77))]


def ones(gen: torch.Generator) -> list[Record]:
    return [Product(torch.ones(2, 300, 64), torch.full((2, 300, 48), 0.1), False, (48, 64))]


def scaled(records: list[Record], factor: float) -> list[Record]:
    done = []
    for record in records:
        match record:
            case Product(a=a, g=g):
                done.append(Product(a * factor, g * factor, record.is_transposed, record.shape))
            case Lookup(ids=ids, g=g):
                done.append(Lookup(ids, g * factor, record.shape))
            case Dense(value=value):
                done.append(Dense(value * factor))
    return done


HARD = {
    "cancelling": cancelling,
    "cancelling lookups": lambda gen: cancelling(gen, kind="lookup"),
    "constant": constant,
    "ones": ones,
    "huge": lambda gen: scaled([product(gen), lookup(gen)], 1e4),
    "tiny": lambda gen: scaled([product(gen), lookup(gen)], 1e-4),
    "hugest": lambda gen: scaled([product(gen), lookup(gen)], 1e15),
    "tiniest": lambda gen: scaled([product(gen)], 1e-18),
    "one large token": lambda gen: [_one_large_token(gen)],
}


def _one_large_token(gen: torch.Generator) -> Product:
    record = product(gen)
    record.a[:, 17] *= 1000
    return record


CASES = {**RECORDS, **HARD}


def norm_of(gradient: Tensor) -> float:
    return float(gradient.double().norm())


ALL_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
RULES_IN_TURN = [
    rule if rule == "flat" else pytest.param(rule, marks=pytest.mark.full) for rule in RULES
]


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("rule", RULES_IN_TURN)
def test_no_sample_adds_more_than_the_bound(rule, case, dtype, gen):
    records = cast(CASES[case](gen), dtype)
    for method in NORM_METHODS:
        if refusal(method, records):
            continue
        norms, used = measure(records, method)
        typical = float(norms.squared.clamp(min=0).sqrt().nan_to_num(posinf=0).sum()) or 1.0
        for max_norm in (1.0, 0.7 * typical / max(1, len(norms.squared)), 1e-3):
            max_norm = max(max_norm, 1e-20)
            found = RULES[rule](norms, max_norm)
            for i, c in enumerate(found.values):
                one = [take(record, slice(i, i + 1)) for record in used]
                added = norm_of(from_records(one, c.view(1), shape_of(one[0])))
                assert added <= max_norm, (method, i, added / max_norm - 1)


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
@pytest.mark.parametrize("case", ["product", "several tiles", "tied", "all kinds", "constant"])
@pytest.mark.parametrize("method", NORM_METHODS)
def test_the_bound_is_tight(method, case, dtype, gen):
    records = cast(CASES[case](gen), dtype)
    if refusal(method, records):
        return
    exact = explicit_norms(records)
    max_norm = 0.3 * float(exact.min())
    found = flat(measure(records, method)[0], max_norm).values
    deviation = found * exact / max_norm - 1  # below 0: clipped more than needed
    assert float(deviation.abs().max()) <= 1e-6


def test_dividing_by_the_estimate_itself_exceeds_the_bound(gen):
    """The bound pays for something: without it the same test fails."""
    excess = []
    for _ in range(20):
        records = [product(gen)]
        norms = measure(records, "gram")[0].squared.sqrt()
        for i, norm in enumerate(norms):
            one = [take(record, slice(i, i + 1)) for record in records]
            max_norm = 0.3 * float(norm)
            added = norm_of(from_records(one, (max_norm / norm).view(1), shape_of(one[0])))
            excess.append(added / max_norm - 1)
    assert max(excess) > 0


NARROW = {
    "scale in bfloat16": Arithmetic(
        norm=torch.float64, scale=torch.bfloat16, accumulate=torch.float32, result=torch.float32
    ),
    "all in float32": Arithmetic(
        norm=torch.float64, scale=torch.float32, accumulate=torch.float32, result=torch.float32
    ),
    "result in bfloat16": Arithmetic(
        norm=torch.float64, scale=torch.float32, accumulate=torch.float32, result=torch.bfloat16
    ),
}


@pytest.mark.parametrize("case", ["product", "cancelling", "constant", "ones", "one large token"])
@pytest.mark.parametrize("name", NARROW)
def test_narrower_arithmetic_is_covered_once_it_is_named(name, case, gen):
    arithmetic = NARROW[name]
    records = cast(CASES[case](gen), torch.bfloat16)
    (record,) = records
    squared = measure(records, "gram")[0].squared
    max_norm = 0.3 * float(squared.sqrt().min())
    excess = {}
    for which in (arithmetic, DOUBLE):
        values = flat(bounded(records, squared, which), max_norm).values
        excess[which] = []
        for i, c in enumerate(values):
            scale = c.to(arithmetic.scale)
            g = (record.g[i].to(arithmetic.scale) * scale).to(arithmetic.accumulate)
            gradient = (g.T @ record.a[i].to(arithmetic.accumulate)).to(arithmetic.result)
            excess[which].append(norm_of(gradient) / max_norm - 1)
    assert max(excess[arithmetic]) <= 0
    if name == "scale in bfloat16" and case in ("constant", "ones"):
        assert max(excess[DOUBLE]) > 1e-4  # the check can fail


def test_flat_follows_its_table(gen):
    squared = torch.tensor([0.0, 0.25, 4.0, torch.nan, torch.inf], dtype=torch.float64)
    found = flat(SampleNorms(squared, squared * (1 + 1e-7)), 1.0)
    torch.testing.assert_close(
        found.values, torch.tensor([1, 1, 0.5, 0, 0], dtype=torch.float64), rtol=1e-6, atol=0
    )
    assert found.values[:2].tolist() == [1.0, 1.0]
    assert found.num_dropped.item() == 2


def test_a_sample_counts_if_norm_and_bound_are_finite():
    bad = [torch.nan, torch.inf, -torch.inf]
    some = torch.tensor([0.0, -0.0, 1.0, 1.7e308, 5e-324, -1.0, *bad], dtype=torch.float64)
    squared, upper = (each.flatten() for each in torch.meshgrid(some, some, indexing="ij"))
    norms = SampleNorms(squared, upper)
    expected = squared.isfinite() & upper.isfinite()
    of_group = per_group({"a": norms}, {"a": 1.0})["a"]
    for found in (flat(norms, 1.0), automatic(norms, 1.0), of_group):
        assert torch.equal(found.is_finite, expected)
        assert found.num_dropped.item() == 45
        assert not found.values[~expected].any()


def test_a_table_of_norms():
    squared = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], dtype=torch.float64)
    table = NormTable(["b", "c", "a"], squared, 2 * squared)
    assert (list(table), len(table), "c" in table, "d" in table) == (
        ["b", "c", "a"],
        3,
        True,
        False,
    )
    assert table["c"].squared.tolist() == [3, 4]
    assert table.scaled(1.0) is table
    scaled = table.scaled(3.0)
    assert list(scaled) == list(table)
    assert scaled["a"].upper.tolist() == [90, 108]
    assert_same_bits(scaled.total().squared, (9 * squared).sum(0))
    with pytest.raises(KeyError):
        table["d"]


def test_automatic_scales_everything_up_to_the_bound():
    squared = torch.tensor([0.0, 1e-4, 4.0, torch.nan], dtype=torch.float64)
    found = automatic(SampleNorms(squared, squared), 2.0)
    expected = torch.tensor([200.0, 100.0, 2 / 2.01, 0.0], dtype=torch.float64)
    torch.testing.assert_close(found.values, expected, rtol=1e-6, atol=0)
    assert found.num_dropped.item() == 1


def test_groups_have_their_own_bounds(gen):
    norms = {name: measure([product(gen)], "gram")[0] for name in ("attention", "mlp")}
    bounds = {"attention": 3.0, "mlp": 4.0}
    found = per_group(norms, bounds)
    assert 5.0 <= total_sensitivity(bounds) < 5.000001
    for name in norms:
        assert_same_bits(found[name].values, flat(norms[name], bounds[name]).values)


def test_a_sample_that_is_bad_in_one_group_is_left_out_of_all(gen):
    good, bad = product(gen), product(gen)
    bad.g[2] = torch.nan
    norms = {"good": measure([good], "gram")[0], "bad": measure([bad], "tile")[0]}
    found = per_group(norms, {"good": 1.0, "bad": 1.0}, RULES["automatic"])
    for each in found.values():
        assert each.num_dropped.item() == 1
        assert (each.values == 0).tolist() == [False, False, True, False, False]


@pytest.mark.parametrize("num_layers", [1, 2, 3, 7, 48, 1000])
@pytest.mark.parametrize("max_norm", [0.1, 1.0, 1 / 3])
def test_layers_share_the_bound(num_layers, max_norm):
    one = torch.ones(1, dtype=torch.float64)
    norms = {str(i): SampleNorms(one, one) for i in range(num_layers)}
    found = per_layer(norms, max_norm)
    added = math.sqrt(math.fsum(float(each.values) ** 2 for each in found.values()))
    assert max_norm * (1 - 1e-11) <= added <= max_norm


def test_norms_add_over_parameters_and_so_do_bounds(gen):
    """Two parameters clipped together: their joint contribution is within C."""
    first, second = [product(gen)], [product(gen, d_in=5), product(gen, d_in=5, tokens=9)]
    norms = measure(first, "tile")[0] + measure(second, "gram")[0]
    max_norm = 0.5 * float(norms.squared.sqrt().min())
    for i, c in enumerate(flat(norms, max_norm).values):
        parts = []
        for records in (first, second):
            one = [take(record, slice(i, i + 1)) for record in records]
            parts.append(norm_of(from_records(one, c.view(1), shape_of(one[0]))))
        assert math.hypot(*parts) <= max_norm
        assert math.hypot(*parts) >= max_norm * (1 - 1e-6)


@pytest.mark.parametrize("method", NORM_METHODS)
@pytest.mark.parametrize("where", ["a", "g"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_sample_that_is_not_finite_is_counted_and_adds_nothing(method, where, bad, gen):
    records = [product(gen, tokens=1)]
    getattr(records[0], where)[3, 0, 2] = bad
    if where == "a":
        records[0].g[3] = 0.0  # 0 · inf must not pass for 0
    norms, used = measure(records, method)
    found = flat(norms, 1.0)
    assert (found.values == 0).tolist() == [False, False, False, True, False]
    assert found.num_dropped.item() == 1
    assert from_records(used, found.values, (13, 77)).isfinite().all()


def test_bad_bounds_are_refused():
    one = torch.ones(1, dtype=torch.float64)
    norms = SampleNorms(one, one)
    for max_norm in (0.0, -1.0, torch.inf, torch.nan, 1e-30):
        for rule in RULES.values():
            with pytest.raises(BadInput, match="max_norm must be"):
                rule(norms, max_norm)
    with pytest.raises(BadInput, match="gamma must be above 0"):
        automatic(norms, 1.0, gamma=0.0)
    with pytest.raises(BadInput, match=r"groups \['a'\] and bounds for \['b'\]"):
        per_group({"a": norms}, {"b": 1.0})
    with pytest.raises(BadInput, match="one bound per group"):
        per_group({}, {})
    with pytest.raises(BadInput, match="wider dtype"):
        gamma(10**8, 2.0**-24)


def test_sensitivity_is_never_rounded_down(gen):
    for _ in range(50):
        bounds = torch.rand(7, dtype=torch.float64, generator=gen).tolist()
        found = total_sensitivity({str(i): b for i, b in enumerate(bounds)})
        assert Fraction(found) ** 2 >= sum(Fraction(b) ** 2 for b in bounds)
