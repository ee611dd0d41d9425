"""ε is dp-accounting's: of the events that were applied, all of them, and of nothing else."""

import math
from collections import Counter

import dp_accounting
import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from tests.privacy.accounts import (
    ADD_REMOVE,
    ALL,
    DELTA,
    ZERO_OUT,
    by_hand,
    make,
    releases,
    sampled,
    times,
)
from unison.errors import BadInput, UnsupportedOperation
from unison.privacy.accounting import epsilon_of, epsilon_of_events, event_of
from unison.privacy.adaptive import AdaptiveClipping
from unison.privacy.budget import Budget, BudgetGuard
from unison.privacy.calibration import (
    epsilon_for,
)
from unison.privacy.ledger import Ledger
from unison.privacy.sampling import Poisson, Shuffled, TruncatedPoisson
from unison.privacy.schedules import Cosine, Exponential, Stairs
from unison.privacy.spending import ADJACENCY, Event, Spending, spending_of

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


@pytest.mark.parametrize("sampling", [Poisson(rate=0.02), Poisson(rate=1.0)])
def test_an_emptied_record_costs_what_a_missing_one_does(sampling):
    # docs/privacy.md, "Between which data sets": the same pair of distributions a step.
    event = times(event_of(make(sampling, 3.0).release(0)), 20)
    assert by_hand(event, ZERO_OUT) == by_hand(event, ADD_REMOVE)


def test_the_pass_that_began_is_copied():
    spending = spending_of([make(SHUFFLED, 3.0).release(0)])
    copied = spending.copy()
    copied.add(make(SHUFFLED, 2.0).release(1))
    assert copied.events == {Event(None, 2.0): 1}
    assert spending.events == {Event(None, 3.0): 1}
    for each in (spending, spending_of(releases(make(), 1)), Spending()):
        assert each.adjacency == ADJACENCY  # one answer, whatever was sampled


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
