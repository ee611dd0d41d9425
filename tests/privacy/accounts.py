"""Mechanisms, and ε by hand."""

import dp_accounting
from dp_accounting import pld, rdp

from unison.privacy.mechanism import Mechanism, Release
from unison.privacy.sampling import Poisson

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
