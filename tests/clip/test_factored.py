"""Layers whose factors wait for each other: measured and added up at once, and right."""

import copy
import gc
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from tests.clip.common import explicit_gradients, explicit_mass
from tests.clip.passes import BATCH, WIDTH, Model, Passes, assert_same_bits, batch, run
from tests.clip.test_calibration_costs import alone, linear, table, vector
from tests.harness import assert_close, per_sample_gradients
from tests.harness import assert_same_bits as assert_same_tensors
from tests.kernels.interpreted import as_on_cuda, interpreted
from unison.capture import Capture, learn_axes
from unison.clip import MODES, Clipping, LayerShape, Plan, costs, plan_clipping
from unison.clip.plan import LayerPlan
from unison.ops import Product, Record

MIXED = "mixed"  # no mode: matrices as in ghost_bk, and all others as in grad_materialize
PLENTY = 1 << 40  # bytes: a bound, but none that changes the plan

full = pytest.mark.full


def plan_of(
    layers: Sequence[LayerShape], mode: str = MIXED, memory_budget: int | None = None
) -> Plan:
    if mode != MIXED:
        return plan_clipping(layers, mode=mode, memory_budget=memory_budget)
    plan = plan_clipping(layers, memory_budget=memory_budget)
    return replace(plan, layers=tuple(map(_mixed, plan.layers)))


def _mixed(planned: LayerPlan) -> LayerPlan:
    is_product = all(use.kind == "product" for use in planned.layer.uses)
    wanted = MODES["ghost_bk" if is_product else "grad_materialize"]
    return replace(
        planned, chosen=next(each for each in planned.alternatives if each.choice == wanted)
    )


class Waiting(Passes):
    """Passes in which the factors of some layers wait."""

    def __init__(self, model: nn.Module, mode: str = MIXED) -> None:
        super().__init__(model.bfloat16(), batch(0))
        self.plan = plan_of([each.layer for each in self.plan.layers], mode)

    def bounded(self) -> "Waiting":
        """The same within a memory budget."""
        made = copy.copy(self)
        made.plan = replace(self.plan, memory_budget=PLENTY)
        return made

    def records(self, ids: Tensor) -> dict[str, list[Record]]:
        """Run one pass, and return its records as they are."""
        found: dict[str, list[Record]] = {}
        capture = Capture(
            self.model,
            len(ids),
            axes=self.axes,
            on_record=lambda name, record: found.setdefault(name, []).append(record),
        )
        with capture.installed():
            run(self.model, ids).sum().backward()
        return dict(sorted(found.items()))


def coefficients_of(names: Sequence[str]) -> dict[str, Tensor]:
    """Others for every parameter [BATCH]."""
    return {
        name: torch.linspace(0.3, 0.9, BATCH, dtype=torch.float64) / (1 + i)
        for i, name in enumerate(names)
    }


def totals_of(shares: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """What shares add up to."""
    return {
        name: torch.einsum("b,b...->...", weights.double(), x.double())
        for name, (x, weights) in shares.items()
    }


def assert_right(
    records: Mapping[str, Sequence[Record]], clipping: Clipping, *, by: str = "sums"
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compare with a float64 loop over samples, on the very tensors that the pass multiplied.

    Returns:
        Squared norms of all parameters together [BATCH], and clipped sums by `coefficients_of`.
    """
    norms = clipping.norms()
    assert list(norms) == sorted(records)
    c = coefficients_of(list(norms))
    used = clipping._parameters.items()
    formed = {name for name, each in used if each.gradients is not None}
    found = dict(clipping.clipped_sums(c)) if by == "sums" else totals_of(clipping.shares(c))
    assert found.keys() == records.keys()
    for name, its in records.items():
        # Inner products and sums are float32; what is formed is kept as bfloat16.
        is_exact = name not in formed and all(isinstance(each, Product) for each in its)
        gradients = explicit_gradients(its)
        error = norms[name].squared - gradients.reshape(BATCH, -1).square().sum(1)
        mass = explicit_mass(its).square()
        assert (error.abs() <= (1e-5 if is_exact else 2.0**-6) * mass).all(), (name, error / mass)
        assert (norms[name].upper >= norms[name].squared).all()
        total = torch.einsum("b,b...->...", c[name], gradients)
        assert_close(found[name], total, dtype=torch.float32 if is_exact else torch.bfloat16)
    return norms.total().squared, found


# ---- from a model to its clipped sums ------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "by"),
    [
        (MIXED, "shares"),
        pytest.param("ghost_bk", "sums", marks=full),
        pytest.param("ghost_bk", "shares", marks=full),
        pytest.param(MIXED, "sums", marks=full),
    ],
)
@interpreted
def test_a_model_against_float64(mode, by):
    passes = Waiting(Model(), mode)
    records = passes.records(batch(1))
    gradients = per_sample_gradients(passes.model, run, batch(1))
    with as_on_cuda():
        clipping = passes.clipping(batch(1))
        waiting = {name for name, each in clipping._parameters.items() if each.factors}
        assert waiting == {"up.weight", "down.weight", "flat"}
        squared, sums = assert_right(records, clipping, by=by)
    # Of a model in float64 it is off by what forward and backward are rounded in bfloat16.
    expected = torch.stack([each.reshape(BATCH, -1).square().sum(1) for each in gradients.values()])
    torch.testing.assert_close(squared, expected.sum(0), rtol=0.1, atol=0.0)
    for name, c in coefficients_of(list(records)).items():
        total = torch.einsum("b,b...->...", c, gradients[name])
        assert float((sums[name] - total).norm()) <= 0.1 * float(total.norm()), name


class Shift(torch.autograd.Function):
    """Hands on a tensor, or its gradient, at an address that is no multiple of 16."""

    @staticmethod
    def forward(ctx, x: Tensor, of_input: bool, of_gradient: bool) -> Tensor:
        ctx.of_gradient = of_gradient
        return shifted(x) if of_input else x.clone()

    @staticmethod
    def backward(ctx, g: Tensor):  # type: ignore[override]
        return shifted(g) if ctx.of_gradient else g, None, None


def shifted(x: Tensor) -> Tensor:
    memory = x.new_empty(x.numel() + 1)
    made = memory[1:].view(x.shape).copy_(x)
    assert made.data_ptr() % 16
    return made


class Small(nn.Module):
    """Matrices whose factors wait, one that does not wait, and others.

    Attributes:
        num_repeats: How often the first two are used.
        shifts: Whether the input of `up` lies where kernels do not take it, and its gradient.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH, bias=False)
        self.flat = nn.Parameter(torch.randn(WIDTH, 16) / 4)
        self.odd = nn.Linear(16, 3)
        self.num_repeats, self.shifts = 1, (False, False)

    def forward(self, ids: Tensor) -> Tensor:
        of_input, of_gradient = self.shifts
        x = self.embedding(ids)
        for _ in range(self.num_repeats):
            y = self.up(Shift.apply(x, of_input, False))
            x = self.down(Shift.apply(y, False, of_gradient).tanh())
        return self.odd(x @ self.flat).square().mean((1, 2))


WAITING = {"up.weight", "down.weight", "flat"}


@cache
def small() -> Waiting:
    torch.manual_seed(0)
    return Waiting(Small())


def waiting_of(clipping: Clipping) -> set[str]:
    return {name for name, each in clipping._parameters.items() if each.factors is not None}


@interpreted
def test_a_small_model_against_float64():
    with as_on_cuda():
        found = small().clipping(batch(3))
        assert waiting_of(found) == WAITING
        assert_right(small().records(batch(3)), found)


@interpreted
def test_used_more_often_than_planned():
    """When the factors of the first uses are kept."""
    passes = copy.copy(small())
    with as_on_cuda(), mock.patch.object(passes.model, "num_repeats", 2):
        passes.axes = learn_axes(passes.model, run, batch(0))
        found = passes.clipping(batch(3))
        for name in WAITING - {"flat"}:
            assert len(found._parameters[name].records) == 2
            assert found._parameters[name].factors is None
        assert_right(passes.records(batch(3)), found)


@pytest.mark.parametrize(
    "shifts",
    [
        pytest.param((True, False), id="input", marks=full),
        pytest.param((False, True), id="gradient"),
    ],
)
@interpreted
def test_an_address_that_kernels_do_not_take(shifts):
    """A copy waits instead, and where memory lay changes no bit."""
    passes = small()
    with as_on_cuda():
        usual = passes.clipping(batch(3))
        with mock.patch.object(passes.model, "shifts", shifts):
            found, again = (passes.clipping(batch(3)) for _ in range(2))
            records = passes.records(batch(3))
        copied = found._parameters["up.weight"].factors
        assert copied is not None
        assert (copied.left.data_ptr() | copied.right.data_ptr()) % 16 == 0
        assert_same_bits(found, usual)
        assert_right(records, again)


# ---- some at a time ------------------------------------------------------------------------------


@interpreted
def test_some_parameters_and_then_the_others():
    with as_on_cuda():
        whole, parts = small().clipping(batch(3)), small().clipping(batch(3))
        c = coefficients_of(list(whole.norms()))
        parts.norms()
        first = dict(parts.clipped_sums(c, ["up.weight", "nobody", "up.bias", "flat"]))
        assert list(first) == ["up.weight", "up.bias", "flat"]
        rest = dict(parts.clipped_sums(c))
        assert not parts._parameters
        assert_same_tensors({**first, **rest}, dict(whole.clipped_sums(c)))


@interpreted
def test_a_memory_budget_changes_no_bit():
    with as_on_cuda():
        free, bounded = (passes.clipping(batch(3)) for passes in (small(), small().bounded()))
        assert_same_bits(bounded, free)


@pytest.mark.parametrize(
    ("by", "is_bounded"),
    [
        ("clipped_sums", True),
        ("shares", False),
        pytest.param("clipped_sums", False, marks=full),
        pytest.param("shares", True, marks=full),
    ],
)
@interpreted
def test_factors_are_let_go(by, is_bounded):
    passes = small().bounded() if is_bounded else small()
    with as_on_cuda():
        found = passes.clipping(batch(3))
        waiting = [each.factors for each in found._parameters.values() if each.factors]
        sides = [side for each in waiting for side in each[:2]]
        held = [weakref.ref(side) for side in sides]
        del sides, waiting
        c = coefficients_of(list(found.norms()))
        assert all(each() is not None for each in held)
        made = dict(getattr(found, by)(c))
        gc.collect()
        assert made.keys() >= WAITING
        assert [each() for each in held] == [None] * 6


# ---- which layers --------------------------------------------------------------------------------


def test_layers_that_wait():
    use = linear().uses[0]
    for layer in (
        linear(),
        linear(tokens=1),
        linear(rows=8),
        replace(linear(), is_float16=True),
        replace(linear(), is_checkpointed=True),
        replace(linear(), uses=(replace(use, is_transposed=True),)),
    ):
        assert costs.waits(layer)
    for layer in (
        alone(),
        linear(rows=1284),
        linear(rows=1),
        replace(linear(), uses=(replace(use, columns=1284),)),
        replace(linear(), uses=(use, use)),
        replace(linear(), uses=(use, *table().uses)),
        replace(linear(), uses=(replace(use, is_streamed=True),)),
        table(),
        vector(),
        replace(vector(), itemsize=2, uses=(replace(vector().uses[0], columns=8),)),
    ):
        assert not costs.waits(layer)
