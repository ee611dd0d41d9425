"""A budget is never exceeded, and seldom asks dp-accounting."""

import random
import warnings
from collections import Counter
from dataclasses import replace

import pytest

from tests.privacy.accounts import ALL, DELTA, make, releases
from unison.errors import BadInput
from unison.privacy.accounting import Spending, epsilon_of, epsilon_of_spending, spending_of
from unison.privacy.calibration import Budget, BudgetGuard, BudgetSpent
from unison.privacy.ledger import Ledger
from unison.privacy.mechanism import AdaptiveClipping, Cosine, Mechanism, Stairs
from unison.privacy.sampling import Poisson, Shuffled


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
        return epsilon_of_spending(*args, **kwargs)

    monkeypatch.setattr("unison.privacy.calibration.epsilon_of_spending", count)
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
    mechanism = make(Poisson(rate=0.05), 6.0, is_chosen=True)
    guard = BudgetGuard(Budget(epsilon=1.0, delta=DELTA), accountant="rdp")
    spending = Spending()
    guard.check(spending, mechanism.release, 0)
    spending.add(mechanism.release(0))
    mechanism.noise_multiplier = 0.7  # one such step is too much
    with pytest.raises(BudgetSpent, match=r"step 1 would spend ε = .* by odometer.* budget of 1;"):
        guard.check(spending, mechanism.release, 1)
    mechanism.noise_multiplier = 8.0
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
