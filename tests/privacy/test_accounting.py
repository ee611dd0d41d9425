"""ε is dp-accounting's: of the events that were applied, all of them, and of nothing else."""

import itertools
import math
from collections import Counter, defaultdict
from dataclasses import replace

import dp_accounting
import numpy as np
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
from unison.privacy import accounting
from unison.privacy.accounting import (
    ADJACENCY,
    Event,
    Spending,
    epsilon_of,
    epsilon_of_events,
    last_place,
    spending_of,
)
from unison.privacy.calibration import (
    Budget,
    BudgetGuard,
    epsilon_for,
)
from unison.privacy.ledger import Ledger
from unison.privacy.mechanism import AdaptiveClipping, Cosine, Exponential, Stairs
from unison.privacy.sampling import Poisson, Shuffled, TruncatedPoisson
from unison.rng.streams import DRAW_DISTANCE, drawn_probability

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
    assert epsilon_of(ledger, DELTA, "rdp") == pytest.approx(expected["rdp"], rel=1e-9)


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
    event = times(accounting._dp_event(Event(sampling, 3.0)), 20)
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


# ---- truncated samples -----------------------------------------------------------------------


def kept_sets(sampling: TruncatedPoisson) -> dict[tuple[int, ...], float]:
    """The probability of every set of records that a step may keep, by enumeration."""
    probabilities: dict[tuple[int, ...], float] = defaultdict(float)
    size, rate = sampling.num_records, sampling.rate
    for drawn in itertools.product([0, 1], repeat=size):
        members = [record for record in range(size) if drawn[record]]
        chance = rate ** len(members) * (1 - rate) ** (size - len(members))
        kept = list(itertools.combinations(members, min(len(members), sampling.capacity)))
        for each in kept:
            probabilities[each] += chance / len(kept)
    return probabilities


def exact_epsilon(sampling: TruncatedPoisson, z: float, others: float, delta: float) -> float:
    """ε of one step by integration: record 0 adds 1 or nothing, each of the others `others`."""
    reach = sampling.num_records + 12 * z
    y = np.linspace(-reach, reach, 4001)
    sums: list[Counter] = [Counter(), Counter()]
    for kept, chance in kept_sets(sampling).items():
        rest = others * sum(record > 0 for record in kept)
        sums[0][rest + (0 in kept)] += chance
        sums[1][rest] += chance
    one, two = [sum(p * norm.pdf(y, mean, z) for mean, p in each.items()) for each in sums]

    def delta_at(epsilon: float) -> float:
        both = (one - math.exp(epsilon) * two, two - math.exp(epsilon) * one)
        return max(float(np.maximum(each, 0).sum()) * (y[1] - y[0]) for each in both)

    if delta_at(0) <= delta:
        return 0.0
    return float(brentq(lambda epsilon: delta_at(epsilon) - delta, 0, 40))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("size", "rate", "capacity", "z"),
    [
        (4, 0.3, 2, 1.5),
        (5, 0.7, 3, 1.5),
        (5, 1.0, 2, 1.0),
        (6, 0.1, 2, 4.0),
        (6, 0.5, 4, 1.0),
        (8, 0.2, 2, 2.0),
    ],
)
def test_truncated_sampling_beside_the_exact_mixture(size, rate, capacity, z):
    sampling = TruncatedPoisson(rate=rate, capacity=capacity, num_records=size)
    for delta in (1e-3, 1e-5):
        exact = max(exact_epsilon(sampling, z, others, delta) for others in (-1, -0.5, 0, 0.5, 1))
        found = epsilon_of_events({Event(sampling, z): 1}, delta, "pld")
        assert exact - 1e-4 <= found <= 1.2 * exact
        assert found <= epsilon_of_events({Event(sampling, z): 1}, delta, "rdp")


def test_no_neighbour_of_a_crowded_batch_is_worse_than_the_pair_that_is_counted():
    # Given the others' draws, the last place is empty (e), the record's (r), or another's.
    from unison.privacy.accounting import last_place_deltas

    epsilons = np.array([0.0, 0.3, 1.0, 2.5])
    side = np.linspace(-14, 14, 561)
    plane = np.stack(np.meshgrid(side, side), -1)  # [561, 561, 2]
    draw = np.random.default_rng(0)
    for e, r, z in ((0.5, 0.1, 1.0), (0.0, 0.5, 0.8), (0.05, 0.9, 2.0)):

        def normal(mean, z=z):
            distance = ((plane - mean) ** 2).sum(-1)
            return np.exp(-distance / (2 * z**2)) / (2 * math.pi * z**2) * 0.05**2

        present, absent = last_place_deltas(e, r, z, epsilons)
        means = [*draw.normal(size=(6, 2, 2)), [[1, 0], [-1, 0]], [[1, 0], [1, 0]]]
        found = []
        for record, replaced in means:
            record = np.array(record) / max(1, np.hypot(*record))
            replaced = np.array(replaced) / max(1, np.hypot(*replaced))
            rest = e * normal(np.zeros(2)) + (1 - e - r) * normal(replaced)
            with_it, without = rest + r * normal(record), rest + r * normal(np.zeros(2))
            pairs = ((with_it, without), (without, with_it))
            found.append(
                [[np.maximum(p - math.exp(eps) * q, 0).sum() for eps in epsilons] for p, q in pairs]
            )
        # Both are attained, and nothing is beyond; the sums are right to half a percent.
        assert np.allclose(np.array(found).max(0), [present, absent], rtol=5e-3, atol=1e-9)


def test_a_capacity_that_is_never_reached_costs_nothing():
    plain = epsilon_of_events({Event(Poisson(rate=0.02), 2.0): 50}, DELTA, "pld")
    for capacity, most in ((1000, 1 + 1e-12), (50, 1.001), (30, 1.1)):
        sampling = TruncatedPoisson(rate=0.02, capacity=capacity, num_records=1000)
        found = epsilon_of_events({Event(sampling, 2.0): 50}, DELTA, "pld")
        assert plain * (1 - 1e-12) <= found <= plain * most


def test_truncated_draws_are_counted_at_the_rate_that_is_drawn(monkeypatch):
    """A rate below 2^-11 may be no multiple of 2^-63, which is what membership can have."""
    rates, rate = [], 1e-5 / 3
    assert 0 < rate - drawn_probability(rate) < 2.0**-63
    monkeypatch.setattr(accounting, "last_place", lambda s: rates.append(s.rate) or last_place(s))
    sampling = TruncatedPoisson(rate=rate, capacity=3, num_records=100_000)
    found = [
        epsilon_of_events({Event(each, 1.0): 10}, DELTA, accountant)
        for accountant in ("pld", "rdp")
        for each in (sampling, replace(sampling, rate=drawn_probability(rate)))
    ]
    assert rates == [drawn_probability(rate)] * 2
    assert found[0] == found[1]
    assert found[2] == found[3]


# ---- the noise's distance --------------------------------------------------------------------


def test_the_distance_of_the_noise_is_taken_off_delta():
    mechanism = make(ALL, 30.0, rounded_elements=10**9)
    held = spending_of(releases(mechanism, 100))
    distance = 100 * 10**9 * DRAW_DISTANCE
    assert held.num_draws == 10**11
    for accountant in ("pld", "rdp"):
        found = epsilon_of(held, 6e-12, accountant)
        assert found == epsilon_of_events(held.events, 6e-12 - distance, accountant)
        assert found > 1.01 * epsilon_of_events(held.events, 6e-12, accountant)
        with pytest.warns(UserWarning, match="100,000,000,000 values of noise may be 2.6e-12 away"):
            assert epsilon_of(held, 2e-12, accountant) == math.inf
    assert epsilon_of(held, 1e-9, "odometer") == epsilon_of_events(held.events, 1e-9, "odometer")
    assert epsilon_of(held, 1e-10, "odometer") == math.inf  # more than its part of δ
    counted = make(adaptive=AdaptiveClipping(count_noise_multiplier=5.0), rounded_elements=7)
    assert spending_of(releases(counted, 3)).num_draws == 3 * 8


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
        (1.0, 1.0, 10**7),
        (1e-9, 0.1, 1),
    ):
        found = epsilon_for(
            noise_multiplier=sigma, delta=DELTA, sampling=Poisson(rate=rate), steps=steps
        )
        assert found > 100
    with pytest.raises(BadInput, match="steps must be at most 10,000,000"):
        epsilon_for(noise_multiplier=1.0, delta=DELTA, sampling=Poisson(rate=1.0), steps=10**9)


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
