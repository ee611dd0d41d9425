"""The noise that a target takes: found from below, and with few questions."""

import math

import pytest

from tests.privacy.accounts import (
    DELTA,
    RATE,
    make,
    releases,
)
from unison.errors import BadInput
from unison.privacy.accounting import epsilon_of
from unison.privacy.calibration import (
    _search,
    calibrate,
    epsilon_for,
    noise_multiplier_for,
    steps_for,
)
from unison.privacy.mechanism import AdaptiveClipping, Mechanism, Stairs
from unison.privacy.sampling import Poisson, Shuffled, TruncatedPoisson


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
    with pytest.raises(BadInput, match=r"200,000,000,000,000 values of noise may be 5.3e-09 away"):
        noise_multiplier_for(
            sampling=sampling, rounded_elements=10**12, **given | {"target_delta": 5e-9}
        )
    with pytest.raises(BadInput, match="grid alone"):
        noise_multiplier_for(sampling=sampling, rounded_elements=10**12, **given)


def test_calibration_sets_the_distance_of_the_noise_aside():
    given = {"sampling": Poisson(rate=0.01), "accountant": "rdp", "rounded_elements": 10**9}
    target = {"target_epsilon": 2.0, "target_delta": 5e-11, **given}  # half of it: 10¹² draws
    sigma = noise_multiplier_for(steps=1000, **target)
    mechanism = make(Poisson(rate=0.01), sigma, rounded_elements=10**9)
    spent = epsilon_of(releases(mechanism, 1000), 5e-11, "rdp")
    assert 1.98 <= spent <= 2.0
    planned = epsilon_for(noise_multiplier=sigma, delta=5e-11, steps=1000, **given)
    assert planned == pytest.approx(spent, rel=1e-9)
    assert 1000 <= steps_for(noise_multiplier=sigma, **target) <= 1020


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
