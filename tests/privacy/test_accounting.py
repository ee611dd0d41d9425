"""ε is dp-accounting's: of the events that were applied, all of them, and of nothing else."""

import math
import random
import warnings
from collections import Counter
from dataclasses import replace

import dp_accounting
import pytest
from dp_accounting import pld, rdp
from scipy.optimize import brentq
from scipy.stats import norm

from unison.errors import BadInput, UnsupportedOperation
from unison.privacy.accounting import epsilon_of, epsilon_of_events, event_of
from unison.privacy.adaptive import AdaptiveClipping
from unison.privacy.budget import Budget, BudgetGuard, BudgetSpent
from unison.privacy.calibration import (
    _search,
    calibrate,
    epsilon_for,
    noise_multiplier_for,
    steps_for,
)
from unison.privacy.ledger import Ledger
from unison.privacy.mechanism import Mechanism, Release
from unison.privacy.sampling import Poisson, Shuffled, TruncatedPoisson
from unison.privacy.schedules import Cosine, Exponential, Stairs
from unison.privacy.spending import Event, Spending, spending_of

DELTA = 1e-6
ADD_REMOVE = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
ZERO_OUT = dp_accounting.NeighboringRelation.REPLACE_SPECIAL


RATE = Poisson(rate=0.01)
ALL = Poisson(rate=1.0)  # for which dp-accounting is fast


def make(sampling=RATE, sigma=2.0, **settings) -> Mechanism:
    given = {"max_grad_norm": 1.0, "expected_batch_size": 100}
    return Mechanism(sampling=sampling, noise_multiplier=sigma, **given | settings)


def releases(mechanism: Mechanism, steps: int) -> list[Release]:
    return [mechanism.release(step) for step in range(steps)]


def by_hand(event, relation=ADD_REMOVE, delta=DELTA) -> dict[str, float]:
    accountants = {"pld": pld.PLDAccountant(relation), "rdp": rdp.RdpAccountant(None, relation)}
    return {
        name: accountant.compose(event).get_epsilon(delta)
        for name, accountant in accountants.items()
        if accountant.supports(event)
    }


def times(event, count: int):
    return dp_accounting.SelfComposedDpEvent(event, count)


def sampled(rate: float, z: float):
    return dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(z))


# ---- the ledger's ε is dp-accounting's -------------------------------------------------------


def stairs():
    return make(sigma=Stairs(start=8.0, factor=0.5, every=10))


def adaptive():
    clipping = AdaptiveClipping(count_noise_multiplier=5.0)
    return make(sigma=2.0, adaptive=clipping, rounded_elements=10**6)


def z_of_adaptive() -> float:
    factor = 1 + 2.0**-19 * 2.0 * 1e3
    return ((factor / 2.0) ** 2 + (2 * 5.0) ** -2) ** -0.5


CASES = {
    "poisson": (make, 30, lambda: times(sampled(0.01, 2.0), 30), ADD_REMOVE),
    "all records": (
        lambda: make(Poisson(rate=1.0), 9.0),
        5,
        lambda: times(dp_accounting.GaussianDpEvent(9.0), 5),
        ADD_REMOVE,
    ),
    "truncated": (
        lambda: make(TruncatedPoisson(rate=0.01, capacity=12, num_records=1000), 6.0),
        20,
        lambda: times(
            dp_accounting.TruncatedSubsampledGaussianDpEvent(
                dataset_size=1000,
                sampling_probability=0.01,
                truncated_batch_size=12,
                noise_multiplier=6.0,
            ),
            20,
        ),
        ADD_REMOVE,
    ),
    "shuffled": (
        lambda: make(Shuffled(batch_size=10, num_records=105), 5.0),
        21,
        lambda: times(dp_accounting.GaussianDpEvent(5.0), 3),  # 10 steps an epoch; the third began
        ZERO_OUT,
    ),
    "schedule": (
        stairs,
        25,
        lambda: dp_accounting.ComposedDpEvent(
            [times(sampled(0.01, z), count) for z, count in ((8.0, 10), (4.0, 10), (2.0, 5))]
        ),
        ADD_REMOVE,
    ),
    "adaptive": (
        adaptive,
        30,
        lambda: times(sampled(0.01, z_of_adaptive()), 30),
        ADD_REMOVE,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_ledger_epsilon_is_that_of_dp_accounting(case):
    make_mechanism, steps, event, relation = CASES[case]
    mechanism = make_mechanism()
    ledger = Ledger.open(None, mechanism=mechanism)
    for step in range(steps):
        ledger.intend(mechanism.begin(step))
        ledger.commit(step)
        mechanism.finish(step, noisy_fraction=0.7 if mechanism.adaptive else None)
    expected = by_hand(event(), relation)
    assert ledger.epsilon(DELTA) == pytest.approx(expected["pld"], rel=1e-9)
    assert epsilon_of(ledger, DELTA, "pld") == ledger.epsilon(DELTA)
    assert 0 < expected["pld"] < 8
    if "rdp" in expected:
        assert epsilon_of(ledger, DELTA, "rdp") == pytest.approx(expected["rdp"], rel=1e-9)
    else:
        with pytest.raises(UnsupportedOperation, match=r"rdp.*TruncatedPoisson.*'pld'"):
            epsilon_of(ledger, DELTA, "rdp")


def test_an_event_in_dp_accounting_words():
    assert event_of(make().release(7)) == times(sampled(0.01, 2.0), 1)
    assert event_of(make(sigma=0.0).release(0)) == times(dp_accounting.NonPrivateDpEvent(), 1)


def test_no_noise_is_no_privacy():
    for accountant in ("pld", "rdp"):
        assert epsilon_of(releases(make(sigma=0.0), 2), DELTA, accountant) == math.inf
        assert epsilon_of([], DELTA, accountant) == 0
    assert epsilon_for(noise_multiplier=0, delta=DELTA, sampling=Poisson(rate=0.1), steps=1) == (
        math.inf
    )


def test_a_hundred_thousand_steps_are_one_event():
    mechanism = make(Poisson(rate=1e-3), 4.0)
    spending = spending_of(releases(mechanism, 100_000))
    assert spending.events == {Event(Poisson(rate=1e-3), 4.0): 100_000}
    assert epsilon_of(spending, DELTA) == by_hand(times(sampled(1e-3, 4.0), 100_000))["pld"]


# ---- shuffled data ---------------------------------------------------------------------------

SHUFFLED = Shuffled(batch_size=10, num_records=50)  # 5 steps an epoch


def passes(*steps: int, sigma=3.0, sessions=()) -> Counter:
    mechanism, spending = make(SHUFFLED, sigma), Spending()
    for index, step in enumerate(steps):
        if index in sessions:
            spending.begin_session()
        spending.add(mechanism.release(step))
    return spending.events


def test_an_epoch_that_began_counts_whole():
    assert passes(0) == passes(0, 1, 2, 3, 4) == {Event(None, 3.0): 1}
    assert passes(*range(6)) == passes(*range(10)) == {Event(None, 3.0): 2}


def test_an_epoch_counts_with_its_least_noise():
    sigma = Exponential(start=8.0, factor=0.5)
    assert passes(0, 1, 2, sigma=sigma) == {Event(None, 2.0): 1}
    rising = Exponential(start=1.0, factor=2.0)
    assert passes(0, 1, 2, 5, sigma=rising) == {Event(None, 1.0): 1, Event(None, 32.0): 1}


def test_an_epoch_counts_again_after_a_resume_or_a_repeated_step():
    assert passes(0, 1, 2, 3, sessions=(2,)) == {Event(None, 3.0): 2}
    assert passes(0, 1, 1, 2) == {Event(None, 3.0): 2}
    assert passes(0, 1, 2, 1, 2, sessions=(3,)) == {Event(None, 3.0): 2}


def test_the_pass_that_began_is_copied():
    spending = spending_of([make(SHUFFLED, 3.0).release(0)])
    copied = spending.copy()
    copied.add(make(SHUFFLED, 2.0).release(1))
    assert copied.events == {Event(None, 2.0): 1}
    assert spending.events == {Event(None, 3.0): 1}
    assert spending.adjacency.startswith("zero-out")
    assert spending_of(releases(make(), 1)).adjacency == "add or remove one record"


def test_state_of_spending():
    spending = spending_of(releases(stairs(), 25) + releases(make(SHUFFLED), 3))
    loaded = Spending()
    loaded.load_state_dict(spending.state_dict())
    assert loaded.events == spending.events
    loaded.add(make(SHUFFLED).release(4))  # the same epoch, but nobody knows its order any more
    assert loaded.events[Event(None, 2.0)] == 2


# ---- schedules with many levels --------------------------------------------------------------


def test_many_levels_of_noise_are_rounded_to_less_of_it():
    sigma = Cosine(start=60.0, end=30.0, steps=70)
    spending = spending_of(releases(make(ALL, sigma), 70))
    assert len(spending.events) == 70
    exact = epsilon_of_events(spending.events, DELTA, "pld", max_distinct=10**6)
    assert exact < epsilon_of(spending, DELTA) < 1.03 * exact


def test_hopeless_settings_end_soon():
    # At dp-accounting's own interval these would take minutes and gigabytes.
    for sigma, rate, steps in (
        (0.02, 1e-3, 1),
        (1.0, 1.0, 10**9),
        (1e-9, 0.1, 1),
    ):
        found = epsilon_for(
            noise_multiplier=sigma, delta=DELTA, sampling=Poisson(rate=rate), steps=steps
        )
        assert found > 100


# ---- what is refused -------------------------------------------------------------------------


def test_a_central_limit_estimate_is_no_accountant():
    # Gaussian-DP reads 0.663 here; 2.4995 is what can be proved.
    sigma, rate, steps, delta = 0.6, 1e-4, 100_000, 1e-9
    mu = rate * math.sqrt(steps) * math.sqrt(math.expm1(sigma**-2))

    def excess(eps: float) -> float:
        below, above = -eps / mu + mu / 2, -eps / mu - mu / 2
        return float(norm.cdf(below) - math.exp(eps) * norm.cdf(above) - delta)

    assert brentq(excess, 0, 10) == pytest.approx(0.663, abs=0.002)
    plan = {"noise_multiplier": sigma, "sampling": Poisson(rate=rate), "steps": steps}
    assert epsilon_for(delta=delta, **plan) == pytest.approx(2.4995, abs=0.002)
    assert epsilon_for(delta=delta, accountant="rdp", **plan) == pytest.approx(3.596, abs=0.002)
    for name in ("gdp", "clt"):
        with pytest.raises(UnsupportedOperation, match=r"0\.66 where PLD proves 2\.50"):
            epsilon_for(delta=delta, accountant=name, **plan)
        with pytest.raises(UnsupportedOperation, match="no upper bound"):
            Ledger.open(None, mechanism=make(), accountant=name)
    with pytest.raises(BadInput, match="did you mean 'pld'"):
        epsilon_of(releases(make(), 1), delta, "pdl")


@pytest.mark.parametrize("delta", [0, 1, -1e-5, math.nan])
def test_delta_must_be_one(delta):
    with pytest.raises(BadInput, match="delta must lie"):
        epsilon_of(releases(make(), 1), delta, "rdp")
    with pytest.raises(BadInput, match="delta must lie"):
        Budget(epsilon=1.0, delta=delta)


@pytest.mark.parametrize(
    "sampling",
    [
        Poisson(rate=0.1),
        Shuffled(batch_size=100, num_records=1000),
        TruncatedPoisson(rate=0.1, capacity=1000, num_records=1000),
    ],
)
def test_a_delta_of_one_record_is_warned_of(sampling):
    # A hundred expected of a rate of a tenth: about a thousand records.
    held = releases(make(sampling, 50.0), 1)
    with pytest.warns(UserWarning, match=r"not below 1/N with about N = 1,000 records"):
        epsilon_of(held, 1e-3)
    epsilon_of(held, 0.9e-3)
    guard = BudgetGuard(Budget(epsilon=9.0, delta=1e-3))
    with pytest.warns(UserWarning, match="not below 1/N"):
        guard.check(Spending(), make(sampling, 50.0).release, 0)


# ---- calibration -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("epsilon", "delta", "sampling", "steps", "accountant"),
    [
        (0.3, 1e-5, Poisson(rate=0.01), 1000, "pld"),
        (2.0, 1e-6, Poisson(rate=0.1), 500, "pld"),
        (1.0, 1e-6, Poisson(rate=1.0), 100, "pld"),
        (3.0, 1e-6, Shuffled(batch_size=10, num_records=1000), 450, "pld"),
        (0.5, 1e-6, TruncatedPoisson(rate=0.1, capacity=1100, num_records=10_000), 40, "pld"),
        (0.9, 1e-5, Poisson(rate=0.005), 5000, "rdp"),
        (3.0, 1e-7, Poisson(rate=0.05), 10_000, "rdp"),
        (30.0, 1e-5, Shuffled(batch_size=7, num_records=100), 1000, "rdp"),
    ],
)
def test_calibration_lands_within_a_percent_below(epsilon, delta, sampling, steps, accountant):
    sigma = noise_multiplier_for(
        target_epsilon=epsilon,
        target_delta=delta,
        sampling=sampling,
        steps=steps,
        accountant=accountant,
    )
    spent = epsilon_of(releases(make(sampling, sigma), steps), delta, accountant)
    assert 0.99 * epsilon <= spent <= epsilon


def test_calibration_with_a_noisy_count_and_a_grid():
    given = {"target_epsilon": 2.0, "target_delta": DELTA, "steps": 200, "accountant": "rdp"}
    sampling, clipping = Poisson(rate=0.02), AdaptiveClipping(count_noise_multiplier=2.0)
    sigma = noise_multiplier_for(
        sampling=sampling, count_noise_multiplier=2.0, rounded_elements=10**9, **given
    )
    mechanism = make(sampling, sigma, adaptive=clipping, rounded_elements=10**9)
    assert 1.98 <= epsilon_of(releases(mechanism, 200), DELTA, "rdp") <= 2.0
    assert sigma > noise_multiplier_for(sampling=sampling, **given)
    with pytest.raises(BadInput, match="count_noise_multiplier must exceed"):
        noise_multiplier_for(sampling=sampling, count_noise_multiplier=0.1, **given)
    with pytest.raises(BadInput, match="grid alone"):
        noise_multiplier_for(sampling=sampling, rounded_elements=10**12, **given)


def test_calibration_of_a_schedule():
    def make_mechanism(start: float) -> Mechanism:
        return make(sigma=Stairs(start=start, factor=0.8, every=40))

    start = calibrate(
        make_mechanism, target_epsilon=1.5, target_delta=DELTA, steps=100, accountant="rdp"
    )
    assert 1.485 <= epsilon_of(releases(make_mechanism(start), 100), DELTA, "rdp") <= 1.5


def test_targets_that_cannot_be_met_are_refused():
    with pytest.raises(BadInput, match="target_epsilon must be above 0"):
        noise_multiplier_for(target_epsilon=0, target_delta=DELTA, sampling=RATE, steps=1)
    for epsilon, message in (
        (lambda sigma: 10.0, "raise the target"),
        (lambda sigma: 1e-9, "lower the target"),
        (lambda sigma: 10.0 if sigma < 3 else 0.0, "near 3 it jumps past"),
    ):
        with pytest.raises(BadInput, match=message):
            _search(epsilon, 1.0, 2.0)


@pytest.mark.parametrize("power", [0.5, 1, 2, 6])
@pytest.mark.parametrize("start", [0.01, 2.0, 1000.0])
def test_the_search_asks_seldom(power, start):
    asked = []

    def epsilon(sigma: float) -> float:
        asked.append(sigma)
        return 5 * math.expm1(min(sigma**-power, 700.0))

    found = _search(epsilon, 1.0, start)
    assert 0.99 <= epsilon(found) <= 1
    assert len(asked) < 25


def test_the_number_of_steps_that_fit():
    given = {"sampling": Poisson(rate=0.01), "noise_multiplier": 3.0}
    for target, accountant in ((0.1, "pld"), (0.7, "rdp")):
        steps = steps_for(target_epsilon=target, target_delta=DELTA, accountant=accountant, **given)
        spent = [
            epsilon_for(steps=n, delta=DELTA, accountant=accountant, **given)
            for n in (steps, steps + 1)
        ]
        assert spent[0] <= target < spent[1]
    assert steps_for(target_epsilon=0.01, target_delta=DELTA, accountant="rdp", **given) == 0


# ---- a budget --------------------------------------------------------------------------------


def run_to_the_end(mechanism: Mechanism, guard: BudgetGuard, most: int = 10_000) -> Ledger:
    """Take steps until the budget is spent."""
    ledger = Ledger.open(None, mechanism=mechanism)
    for step in range(most):
        try:
            guard.check(ledger.spending, mechanism.release, step)
        except BudgetSpent as refused:
            _check_refusal(refused, guard.budget, step)
            return ledger
        ledger.intend(mechanism.begin(step))
        ledger.commit(step)
        mechanism.finish(step, noisy_fraction=0.5 if mechanism.adaptive else None)
    raise AssertionError("the budget was never spent")


def _check_refusal(refused: BudgetSpent, budget: Budget, step: int) -> None:
    assert refused.step == step
    assert refused.spent <= budget.epsilon < refused.would_spend


def random_mechanism(draw: random.Random) -> Mechanism:
    sampling, scale = draw.choice(
        [
            (Poisson(rate=0.05), 1.0),
            (ALL, 20.0),
            (Shuffled(batch_size=draw.randint(20, 400), num_records=1000), 1.0),
        ]
    )
    sigma = scale * draw.uniform(2.5, 4.0)
    falling = Stairs(start=sigma, factor=draw.uniform(0.6, 0.95), every=draw.randint(40, 150))
    clipping = AdaptiveClipping(count_noise_multiplier=scale * draw.uniform(2, 9))
    return make(
        sampling,
        draw.choice([sigma, sigma, falling]),
        adaptive=draw.choice([None, clipping]),
    )


@pytest.mark.parametrize("case", range(20))
def test_a_budget_is_never_exceeded(case):
    draw = random.Random(case)
    mechanism = random_mechanism(draw)
    accountant = "pld" if case % 10 == 0 else "rdp"
    budget = Budget(epsilon=draw.uniform(0.8, 2.0), delta=10 ** draw.uniform(-7, -5))
    horizon = draw.choice([None, 40, 4000])
    ledger = run_to_the_end(mechanism, BudgetGuard(budget, accountant=accountant, horizon=horizon))
    assert epsilon_of(ledger, budget.delta, accountant) <= budget.epsilon
    ledger.spending.add(mechanism.release(ledger.num_intents))
    assert epsilon_of(ledger, budget.delta, accountant) > budget.epsilon


def test_a_budget_asks_dp_accounting_seldom(monkeypatch):
    asked = Counter()

    def count(*args, **kwargs):
        asked["times"] += 1
        return epsilon_of_events(*args, **kwargs)

    monkeypatch.setattr("unison.privacy.budget.epsilon_of_events", count)
    guard = BudgetGuard(Budget(epsilon=1.2, delta=DELTA), accountant="rdp")
    ledger = run_to_the_end(make(ALL, 150.0), guard)
    assert ledger.num_intents > 1000
    assert asked["times"] < 40
    asked.clear()
    mechanism = make(ALL, Cosine(start=300.0, end=150.0, steps=500))
    guard = BudgetGuard(Budget(epsilon=1.2, delta=DELTA), accountant="rdp", horizon=500)
    spending = Spending()
    for step in range(500):
        guard.check(spending, mechanism.release, step)
        spending.add(mechanism.release(step))
    assert asked["times"] < 10


def test_a_release_that_was_not_announced_is_computed_anew():
    mechanism = make(Poisson(rate=0.05), 4.0)
    guard = BudgetGuard(Budget(epsilon=1.0, delta=DELTA), accountant="rdp")
    spending = Spending()
    guard.check(spending, mechanism.release, 0)
    spending.add(mechanism.release(0))
    mechanism.noise_multiplier = 0.7  # one such step is too much
    with pytest.raises(BudgetSpent, match=r"step 1 would spend ε = .* budget of 1;"):
        guard.check(spending, mechanism.release, 1)
    mechanism.noise_multiplier = 5.0
    guard.check(spending, mechanism.release, 1)


def test_a_budget_looks_no_further_than_a_schedule_reaches():
    mechanism = make(sigma=lambda step: 4.0 if step < 40 else -1.0)
    guard = BudgetGuard(Budget(epsilon=5.0, delta=DELTA), accountant="rdp")
    spending = Spending()
    for step in range(30):
        guard.check(spending, mechanism.release, step)
        spending.add(mechanism.release(step))
    with pytest.raises(BadInput, match="step 40"):
        guard.check(spending, mechanism.release, 40)


def test_a_budget_counts_what_a_ledger_held_before():
    mechanism = make(Poisson(rate=0.05), 2.0)
    held = spending_of(releases(mechanism, 200))
    spent = epsilon_of(held, DELTA, "rdp")
    guard = BudgetGuard(Budget(epsilon=spent, delta=DELTA), accountant="rdp")
    with pytest.raises(BudgetSpent, match=f"the steps before it spent {spent:.8g}"):
        guard.check(held, mechanism.release, 200)


def test_a_budget_without_noise_is_spent_at_once():
    guard = BudgetGuard(Budget(epsilon=100.0, delta=DELTA))
    with pytest.raises(BudgetSpent, match="inf"):
        guard.check(Spending(), make(sigma=0.0).release, 0)
    with pytest.raises(BadInput, match="epsilon"):
        Budget(epsilon=0.0, delta=DELTA)


def test_nothing_is_warned_of_without_reason():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        epsilon_of([replace(make().release(0), expected_batch_size=1)], 1e-3, "rdp")
