"""What is chosen on the way, from what came out: counted by an odometer, beside exact figures.

The toy is the Gaussian mechanism on all records. Its outputs come in through the privacy loss ℓ
alone, so policies that look at ℓ are the worst, and whole interactions can be integrated exactly.
"""

import json
import math
import random
import warnings
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from scipy.special import ndtr

from tests.privacy.accounts import ALL, DELTA, make, releases
from unison.errors import BadInput
from unison.privacy.accounting import Event, Spending, epsilon_of, epsilon_of_events, spending_of
from unison.privacy.calibration import Budget, BudgetGuard, BudgetSpent
from unison.privacy.ledger import Ledger
from unison.privacy.ledger_file import read_ledger
from unison.privacy.mechanism import Mechanism
from unison.privacy.sampling import Poisson

# ---- random policies -------------------------------------------------------------------------


@dataclass
class Policy:
    """Steps of one σ; what follows depends on which interval the loss of them all is in."""

    sigma: float
    steps: int
    bounds: list[float] = field(default_factory=list)  # between what follows; none: it ends
    follow: list["Policy | None"] = field(default_factory=list)

    @property
    def mu(self) -> float:
        return math.sqrt(self.steps) / self.sigma


def random_policy(draw: random.Random, depth: int = 0) -> Policy:
    policy = Policy(math.exp(draw.uniform(0.0, 2.5)), draw.randint(1, 6))
    if depth < 2:
        around, width = policy.mu**2 / 2, policy.mu
        policy.bounds = sorted(
            around + width * draw.uniform(-1, 4) for _ in range(1 + (depth == 0))
        )
        policy.follow = [
            random_policy(draw, depth + 1) if draw.random() < 0.7 else None
            for _ in range(len(policy.bounds) + 1)
        ]
    return policy


def reports(policy: Policy, delta: float, mechanism: Mechanism | None = None, before=()):
    """The policy as a tree with the ε that is reported after each of its parts."""
    mechanism = mechanism or make(ALL, policy.sigma, is_chosen=True)
    spending = spending_of(before)
    if mechanism.release(0).is_chosen:
        mechanism.noise_multiplier = policy.sigma  # set between steps, as a user would
    taken = [*before, *releases(mechanism, policy.steps)]
    for release in taken[len(before) :]:
        spending.add(release)
    follow = [each and reports(each, delta, mechanism, taken) for each in policy.follow]
    return policy, follow, epsilon_of(spending, delta)


def failure(tree, loss: np.ndarray, epsilon: float | None = None) -> np.ndarray:
    """δ of what follows on each loss: at a given ε, or at the one reported where it ends.

    It is E[(1 − e^(ε − ℓ))₊] under the first of two neighbours, where a part's loss is normal with
    mean μ²/2 and variance μ².
    """
    policy, follow, reported = tree
    mu, end = policy.mu, reported if epsilon is None else epsilon
    if not follow:
        left = end - loss
        return ndtr(mu / 2 - left / mu) - np.exp(left) * ndtr(-mu / 2 - left / mu)
    z = np.linspace(-8, 8, 321)
    part = mu * mu / 2 + mu * z
    after = loss[..., None] + part
    result = np.zeros_like(after)
    edges = np.searchsorted(part, [-math.inf, *policy.bounds, math.inf])
    for low, high, each in zip(edges, edges[1:], follow, strict=False):
        here = after[..., low:high]
        if each is None:
            result[..., low:high] = np.maximum(-np.expm1(end - here), 0)
        elif high > low:
            result[..., low:high] = failure(each, here, epsilon)
    density = np.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    return (result * density).sum(-1) * (z[1] - z[0])


def largest_report(tree) -> float:
    _, follow, reported = tree
    ends = [reported if each is None else largest_report(each) for each in follow]
    return max(ends, default=reported)


def test_two_hundred_random_policies_keep_what_is_reported():
    delta, start = 1e-5, np.zeros(())
    for seed in range(200):
        tree = reports(random_policy(random.Random(seed)), delta)
        # ε of the whole interaction is no more than the largest that may be reported; and with the
        # ε of the end that is reached in its place, δ still holds.
        assert failure(tree, start, largest_report(tree)) <= delta
        assert failure(tree, start) <= delta


def test_ending_on_what_came_out_needs_the_odometer():
    # Ends as soon as the loss exceeds the ε reported by then; else goes on to the plan's end.
    delta, start = 1e-5, np.zeros(())
    policy = Policy(2.0, 1, [epsilon_of(releases(make(ALL, 2.0), 1), delta)], [])
    policy.follow = [Policy(2.0, 24), None]
    by_pld = reports(policy, delta, make(ALL, 2.0))
    assert failure(by_pld, start) > 1.9 * delta  # ε of the steps taken is no bound here
    assert failure(by_pld, start, largest_report(by_pld)) <= delta  # that of the planned ones is
    assert failure(reports(policy, delta), start) <= delta


# ---- sampled: the counterexample -------------------------------------------------------------

RATE, BEGUN = Poisson(rate=0.01), 20
ENDS = ((0.45, 1), (1.0, 5671))  # σ and steps, either of which is chosen after 20 steps at 0.6


# A line for each of the second one's steps takes seconds.
@pytest.mark.parametrize(
    ("sigma", "steps"), [ENDS[0], pytest.param(*ENDS[1], marks=pytest.mark.full)]
)
def test_a_sigma_chosen_from_outputs_is_not_composed_as_if_it_were_fixed(sigma, steps):
    # At δ = 10⁻⁶ whoever chooses well between the two loses 5.886.
    events = {Event(RATE, 0.6): BEGUN, Event(RATE, sigma): steps}
    assert epsilon_of_events(events, DELTA, "pld") == pytest.approx(5.600, abs=0.003)
    fixed = make(RATE, 0.6)
    with pytest.raises(BadInput, match="fixed: PLD and RDP hold for plans"):
        fixed.noise_multiplier = sigma
    mechanism = make(RATE, 0.6, is_chosen=True)
    ledger = Ledger.open(None, mechanism=mechanism)
    for step in range(BEGUN):
        ledger.intend(mechanism.release(step))
    mechanism.noise_multiplier = sigma
    for step in range(BEGUN, BEGUN + steps):
        ledger.intend(mechanism.release(step))
    assert ledger.epsilon(DELTA) == ledger.epsilon(DELTA, "rdp") > 5.886


def test_a_sigma_chosen_by_opening_the_ledger_again_is_no_plan_either(tmp_path):
    path = tmp_path / "ledger.jsonl"
    mechanism = make(RATE, 0.6)
    with Ledger.open(path, mechanism=mechanism) as ledger:
        for step in range(BEGUN):
            ledger.intend(mechanism.release(step))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Ledger.open(path, mechanism=make(RATE, 0.6, max_grad_norm=3.0)).close()
    assert not read_ledger(path).spending.is_chosen  # the same plan, resumed
    other = make(RATE, 0.45)
    with pytest.warns(UserWarning, match="another noise multiplier.*odometer's now"):
        ledger = Ledger.open(path, mechanism=other, step=BEGUN)
    ledger.intend(other.release(BEGUN))
    live = ledger.epsilon(DELTA)
    ledger.close()
    found = read_ledger(path)
    assert epsilon_of(found, DELTA) == live > 5.886
    assert any("odometer" in note for note in found.notes)


def test_ledgers_of_versions_that_let_sigma_be_set_are_counted_so(tmp_path):
    path = tmp_path / "ledger.jsonl"
    mechanism = make(RATE, 0.6, rounded_elements=5)
    with Ledger.open(path, mechanism=mechanism) as ledger:
        for step in range(3):
            ledger.intend(mechanism.release(step))
        ledger.intend(replace(mechanism.release(3), noise_multiplier=0.45))
    assert read_ledger(path).spending.is_chosen
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        for fields in (line, line.get("next", {}), line.get("mechanism", {})):
            fields.pop("is_chosen", None)
            if "mechanism" not in line or fields is line.get("next"):
                fields.pop("rounded_elements", None)
    old = tmp_path / "old.jsonl"
    old.write_text("".join(json.dumps(line) + "\n" for line in lines))
    spending = read_ledger(old).spending  # its chain is broken; what it holds is counted
    assert (spending.is_chosen, spending.num_draws) == (True, 20)


def test_chosen_releases_survive_a_file_and_a_checkpoint(tmp_path):
    mechanism = make(RATE, 2.0, is_chosen=True, rounded_elements=7)
    with Ledger.open(tmp_path / "ledger.jsonl", mechanism=mechanism) as ledger:
        ledger.intend(mechanism.release(0))
        state = json.loads(json.dumps(ledger.spending.state_dict()))
    loaded = Spending()
    loaded.load_state_dict(state)
    for spending in (loaded, read_ledger(tmp_path / "ledger.jsonl").spending):
        assert (spending.is_chosen, spending.num_draws) == (True, 7)
        assert epsilon_of(spending, DELTA) == ledger.epsilon(DELTA) > 0


# ---- budgets ---------------------------------------------------------------------------------


def test_a_budget_stops_whoever_chooses():
    mechanism, spending = make(RATE, 1.0, is_chosen=True), Spending()
    guard = BudgetGuard(Budget(epsilon=5.6, delta=DELTA))
    draw = random.Random(0)
    refused = None
    while refused is None:
        step = sum(spending.events.values())
        try:
            guard.check(spending, mechanism.release, step)
        except BudgetSpent as found:
            refused = found
            break
        spending.add(mechanism.release(step))
        if step % 10 == 0:
            mechanism.noise_multiplier = draw.choice([0.6, 1.0, 2.0])
    assert "by odometer" in str(refused)
    assert refused.spent == epsilon_of(spending, DELTA) <= 5.6 < refused.would_spend
    assert epsilon_of_events(spending.events, DELTA, "rdp") < refused.spent


def test_an_odometer_costs_more_than_a_plan_and_never_less():
    for rate, z, steps in ((1.0, 5.0, 10), (0.01, 1.0, 1000), (0.05, 2.0, 2000)):
        events = {Event(Poisson(rate=rate), z): steps}
        plan = epsilon_of_events(events, DELTA, "rdp")
        assert plan < epsilon_of_events(events, DELTA, "odometer") < 1.2 * plan
