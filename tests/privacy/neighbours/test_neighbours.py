"""Every loop is covered by ε, or refused before its step is counted; and none that is right is."""

import zlib
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

from tests.privacy.neighbours import loops, losses, models
from tests.privacy.neighbours.harness import Case, judge, oracle_sum, run
from unison.clip import AUTO, MODES
from unison.privacy.mechanism import CLIP_RULES

quiet = pytest.mark.filterwarnings(
    "ignore:no rule for",
    "ignore:There is a performance drop",
    "ignore:`torch.jit.script` is deprecated",
    "ignore:The .grad attribute of a Tensor that is not a leaf",  # torch.compile looks at it
)
pytestmark = quiet

ADVERSARIAL: dict[str, Case] = {
    f"{group}: {name}": case
    for group, cases in {
        "loss": losses.LOSSES,
        "labels": losses.LABELS,
        "model": models.STATISTICS,
        "dropout": models.DROPOUT,
        "place": models.PLACES,
        "buffers": models.BUFFERS,
        "routing": models.ROUTING,
        "cache": models.CACHES,
        "state": loops.STATE,
        "late": loops.LATE,
        "gradients": loops.GRADIENTS,
        "outside": loops.OUTSIDE,
        "pairs": loops.COUPLED_PAIRS,
    }.items()
    for name, case in cases.items()
}
LEGITIMATE: dict[str, Case] = {
    **losses.LEGITIMATE,
    **models.LEGITIMATE_MODELS,
    **loops.LEGITIMATE_LOOPS,
    **{f"term: {name}": loops.with_term(term) for name, term in loops.TERMS.items()},
    **loops.PAIR_CASES,
}
# A record decides whether these are refused: what couples rows shows with some of them only.
REFUSED_BY_DATA = frozenset(
    {
        "loss: loss inside the module, padded",
        "labels: gpt2 with labels, padded",
        "labels: labels by tolist",
        "late: a branch from the third step on",
        "labels: flat mean, first batch even",
        "labels: sum over tokens, first batch even",
        "model: branch on the inputs",
    }
)
MANY = 75  # fewer, and a group has been lost


def in_modes(cases: Mapping[str, Case]) -> pytest.MarkDecorator:
    """Every case in "auto" or another mode by turns; in all of them where tests may be long."""

    def marks(name: str, mode: str) -> list[pytest.MarkDecorator]:
        chosen = [AUTO, *MODES, AUTO, AUTO, AUTO][zlib.crc32(name.encode()) % (len(MODES) + 4)]
        return [] if mode == chosen else [pytest.mark.full]

    return pytest.mark.parametrize(
        ("name", "mode"),
        [
            pytest.param(name, mode, marks=marks(name, mode), id=f"{name}, {mode}")
            for name in cases
            for mode in (AUTO, *MODES)
        ],
    )


def is_refused_by_mode(refusal: str | None, mode: str) -> bool:
    """Whether a mode does not take a loop that others take."""
    return mode != AUTO and f"clipping {mode!r}" in (refusal or "")


def test_there_are_many_cases():
    assert len(ADVERSARIAL) >= MANY
    assert len(LEGITIMATE) >= 40


@in_modes(ADVERSARIAL)
def test_covered_or_refused(name, mode):
    verdict = judge(ADVERSARIAL[name], mode)
    assert verdict.is_covered, verdict
    assert not verdict.is_split or name in REFUSED_BY_DATA, verdict


@in_modes(LEGITIMATE)
def test_legitimate_loops_are_trained(name, mode):
    case = LEGITIMATE[name]
    verdict = judge(case, mode)
    assert verdict.is_covered, verdict
    if verdict.refusal is not None:
        assert case.may_be_refused or is_refused_by_mode(verdict.refusal, mode), verdict.refusal
        return
    if case.has_oracle and mode == AUTO:
        expected = oracle_sum(case)
        found = run(case, mode).sums[0]
        assert (found - expected).norm() <= 1e-5 * expected.norm()


def as_it_is(case: Case) -> Case:
    return case


def compiled(case: Case) -> Case:
    torch._dynamo.reset()
    return replace(case, settings={**case.settings, "compile": {"backend": "aot_eager"}})


quiet_compiler = pytest.mark.filterwarnings("ignore")  # and of what runs uncompiled
eager_and_compiled = pytest.mark.parametrize(
    "how", [as_it_is, pytest.param(compiled, marks=[pytest.mark.full, quiet_compiler])]
)


@pytest.mark.full
@quiet_compiler
@pytest.mark.parametrize("name", ADVERSARIAL)
def test_covered_or_refused_compiled(name):
    """What is refused is refused by the sentence of an eager run."""
    case = ADVERSARIAL[name]
    verdict = judge(compiled(case), AUTO)
    assert verdict.is_covered, verdict
    assert not verdict.is_split or name in REFUSED_BY_DATA, verdict
    assert verdict.refusal == judge(case, AUTO).refusal


@pytest.mark.full
@quiet_compiler
@pytest.mark.parametrize("name", LEGITIMATE)
def test_legitimate_loops_are_trained_compiled(name):
    case = compiled(LEGITIMATE[name])
    verdict = judge(case, AUTO)
    assert verdict.is_covered, verdict
    assert verdict.refusal == judge(LEGITIMATE[name], AUTO).refusal
    assert verdict.refusal is None or case.may_be_refused, verdict.refusal
    if case.has_oracle and verdict.refusal is None:
        expected = oracle_sum(case)
        found = run(case, AUTO).sums[0]
        assert (found - expected).norm() <= 1e-5 * expected.norm()


@eager_and_compiled
@pytest.mark.parametrize("name", loops.TERMS)
def test_a_term_on_parameters_is_added_after_the_noise(name, how):
    """Neither clipped nor multiplied: the gradient differs by the term's own."""
    term = loops.TERMS[name]
    plain = run(how(loops.with_term(None, noise_multiplier=1.0)), AUTO)
    found = run(how(loops.with_term(term, noise_multiplier=1.0)), AUTO)
    assert found.refusal is None, found.refusal
    torch.manual_seed(7)
    module = loops.with_term(term).model().double()
    parts = torch.autograd.grad(term(module), list(module.parameters()), allow_unused=True)
    own = torch.cat(
        [
            (torch.zeros_like(each) if part is None else part).flatten()
            for each, part in zip(module.parameters(), parts, strict=True)
        ]
    )
    size = len(loops.with_term(term).records)
    for with_term, without in zip(found.sums, plain.sums, strict=True):
        torch.testing.assert_close((with_term - without) / size, own, rtol=1e-5, atol=1e-6)


@eager_and_compiled
def test_a_grad_scaler_trains_or_is_refused(how):
    """Not "no training at all, silently": its scale is undone, or one sentence names it."""
    verdict = judge(how(loops.GRAD_SCALER), AUTO)
    assert verdict.is_covered, verdict
    if verdict.refusal is None:
        expected = oracle_sum(loops.GRAD_SCALER)
        found = run(how(loops.GRAD_SCALER), AUTO).sums[0]
        assert (found - expected).norm() <= 1e-5 * expected.norm()


@eager_and_compiled
@pytest.mark.parametrize("name", loops.DECLARED)
def test_what_is_declared_is_trained(name, how):
    taken = run(how(loops.DECLARED[name]), AUTO)
    assert taken.refusal is None, taken.refusal
    assert len(taken.sums) == loops.DECLARED[name].steps


# ---- the harness itself --------------------------------------------------------------------------


def test_an_emptied_row_has_no_share():
    case = LEGITIMATE["mse"]
    record = case.records.record
    emptied = run(case, AUTO, case.records.emptied(), empty_row=record).sums[0]
    removed = run(case, AUTO, case.records.removed()).sums[0]
    torch.testing.assert_close(emptied, removed, rtol=1e-5, atol=1e-6)
    assert (run(case, AUTO).sums[0] - removed).norm() > 0.9 * case.max_grad_norm


def test_coefficients_that_are_too_large_are_seen(monkeypatch):
    flat = CLIP_RULES["flat"]

    def larger(*args):
        return {name: 1.01 * values for name, values in flat(*args).items()}

    monkeypatch.setitem(CLIP_RULES, "flat", larger)
    verdict = judge(LEGITIMATE["mse"], AUTO)
    assert not verdict.is_covered
    assert verdict.moved["removed"] == pytest.approx(1.01, rel=1e-4)
