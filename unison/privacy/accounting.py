"""What releases cost: their (ε, δ), computed by dp-accounting and by nothing else.

What a ledger says was applied is all that enters. docs/privacy.md says what ε covers.
"""

import logging
import math
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from unison import check
from unison.errors import BadInput, UnsupportedOperation
from unison.privacy.mechanism import Release
from unison.privacy.sampling import Poisson, TruncatedPoisson
from unison.privacy.spending import Event, Source, has_passes, spending_of

if TYPE_CHECKING:
    import dp_accounting

ACCOUNTANTS = ("pld", "rdp")

# Above this many different noise multipliers, each is counted as the next lower one of a lattice
# with so many levels to an octave: dp-accounting takes a tenth of a second for each, and less noise
# never costs less. ε comes out 1 % too high by that.
MAX_DISTINCT = 64
LEVELS_PER_OCTAVE = 32

# Less noise than this counts as none: ε of one step would be in the thousands.
LEAST_NOISE_MULTIPLIER = 2.0**-7

# dp-accounting's own default: privacy losses are rounded up to multiples of it.
_INTERVAL = 1e-4
# Widths of one event's losses and of their sum from which a coarser interval takes over; a finer
# one would need minutes and gigabytes for an ε that says nothing.
_EVENT_WIDTH = 22.0
_TOTAL_WIDTH = 100.0
_COARSEST_INTERVAL = 0.1  # taken for an ε of 10^5; beyond that PLD is not asked any more


def event_of(release: Release) -> "dp_accounting.DpEvent":
    """The dp-accounting event of one release by itself."""
    return dp_event_of(spending_of([release]).events)


def dp_event_of(events: Mapping[Event, int]) -> "dp_accounting.DpEvent":
    """All events, composed, in dp-accounting's words."""
    import dp_accounting

    # In one order, so that equal events give equal bits whatever order they took place in.
    ordered = sorted(events.items(), key=lambda item: (item[0].noise_multiplier, repr(item[0])))
    parts: list[dp_accounting.DpEvent] = [
        dp_accounting.SelfComposedDpEvent(_dp_event(event), count) for event, count in ordered
    ]
    return parts[0] if len(parts) == 1 else dp_accounting.ComposedDpEvent(parts)


def _dp_event(event: Event) -> "dp_accounting.DpEvent":
    import dp_accounting

    z = event.noise_multiplier
    if z == 0:
        return dp_accounting.NonPrivateDpEvent()
    match event.sampling:
        case None | Poisson(rate=1):
            return dp_accounting.GaussianDpEvent(z)
        case Poisson(rate=rate):
            return dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(z))
        case TruncatedPoisson(rate=rate, capacity=capacity, num_records=num_records):
            return dp_accounting.TruncatedSubsampledGaussianDpEvent(
                dataset_size=num_records,
                sampling_probability=rate,
                truncated_batch_size=capacity,
                noise_multiplier=z,
            )
        case _:
            raise AssertionError(event)


def epsilon_of(source: Source, delta: float, accountant: str = "pld") -> float:
    """ε at δ of what a ledger or a sequence of releases holds.

    Guarantees:
        An upper bound: dp-accounting's, with every intent counted whether it was committed or not.
        Infinite if the noise of a release came from a seed: whoever knows it can draw it again.

    Args:
        source: A ledger, a `Spending`, or releases in the order of their steps.
        delta: δ, above 0 and below 1. A warning says if it is 1/N or more.
        accountant: "pld" or "rdp".

    Raises:
        UnsupportedOperation: If that accountant has no bound for the sampling.
    """
    spending = spending_of(source)
    if spending.num_seeded:
        check_accountant(accountant)
        check_delta(delta, spending.num_records)
        return math.inf
    return epsilon_if_secret(spending, delta, accountant)


def epsilon_if_secret(source: Source, delta: float, accountant: str = "pld") -> float:
    """ε at δ as it would be had every key been secret: what budgets and tests of seeded runs use.

    The same as `epsilon_of` where every key was; arguments and errors are its own.
    """
    spending = spending_of(source)
    check_delta(delta, spending.num_records)
    return epsilon_of_events(spending.events, delta, accountant)


def epsilon_of_events(
    events: Mapping[Event, int],
    delta: float,
    accountant: str,
    *,
    max_distinct: int = MAX_DISTINCT,
) -> float:
    """ε at δ of events, without a look at the size of the data set.

    Args:
        events: How often each took place.
        delta: δ.
        accountant: "pld" or "rdp".
        max_distinct: Number of different events above which they are rounded; see `MAX_DISTINCT`.
    """
    check_accountant(accountant)
    events = {event: count for event, count in events.items() if count}
    if not events:
        return 0.0
    if any(event.noise_multiplier < LEAST_NOISE_MULTIPLIER for event in events):
        return math.inf
    events = _with_fewer_levels(events, max_distinct)
    if accountant == "rdp":
        return _epsilon(events, delta, _fresh_rdp(events), accountant)
    interval = _interval(events, delta)
    if interval > _COARSEST_INTERVAL:
        is_bounded = _fresh_rdp(events).supports(dp_event_of(events))
        return epsilon_of_events(events, delta, "rdp") if is_bounded else math.inf
    return _epsilon(events, delta, _fresh_pld(events, interval), accountant)


def check_accountant(accountant: str) -> None:
    """Refuse an accountant whose figures are no guarantee, or that is not known."""
    if accountant in ("gdp", "clt"):
        raise UnsupportedOperation(
            f"accountant={accountant!r} is not offered: a central-limit estimate is no upper bound "
            "(it reads ε = 0.66 where PLD proves 2.50, at σ = 0.6, q = 1e-4, 100,000 steps, "
            "δ = 1e-9); use 'pld' or 'rdp'"
        )
    if accountant == "prv":
        raise BadInput("accountant='prv' is Opacus's; 'pld' computes the same bound")
    check.one_of(ACCOUNTANTS, accountant=accountant)


def check_delta(delta: float, num_records: float | None = None) -> None:
    """Refuse a δ that is none, and warn of one that protects nobody.

    A mechanism that publishes one record at random is (0, 1/N)-private.
    """
    if not 0 < delta < 1:
        raise BadInput(f"delta must lie above 0 and below 1, found {delta!r}")
    if num_records and delta * num_records >= 1:
        warnings.warn(
            f"delta = {delta:g} is not below 1/N with about N = {num_records:,.0f} records: "
            "publishing a record at random would pass as private; choose a smaller delta",
            stacklevel=3,
        )


# ---- how dp-accounting is asked ------------------------------------------------------------------


def _epsilon(
    events: Mapping[Event, int],
    delta: float,
    fresh: "dp_accounting.PrivacyAccountant",
    accountant: str,
) -> float:
    composed = dp_event_of(events)
    if not fresh.supports(composed):
        kinds = {type(event.sampling).__name__ for event in events if event.sampling}
        raise UnsupportedOperation(
            f"dp-accounting's {accountant} accountant has no bound for {' and '.join(kinds)} "
            "sampling; use accountant='pld'"
        )
    with _quiet():
        return float(fresh.compose(composed).get_epsilon(delta))


def _fresh_pld(events: Mapping[Event, int], interval: float) -> "dp_accounting.PrivacyAccountant":
    from dp_accounting import pld

    return pld.PLDAccountant(_relation(events), value_discretization_interval=interval)


def _fresh_rdp(events: Mapping[Event, int]) -> "dp_accounting.PrivacyAccountant":
    from dp_accounting import rdp

    return rdp.RdpAccountant(neighboring_relation=_relation(events))


def _relation(events: Mapping[Event, int]) -> "dp_accounting.NeighboringRelation":
    """The adjacency for which all the events hold.

    Passes over shuffled data hold for zero-out only. A Poisson sample without a record and one in
    which it contributes nothing are the same, so its events hold for both.
    """
    import dp_accounting

    if has_passes(events):
        return dp_accounting.NeighboringRelation.REPLACE_SPECIAL
    return dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE


def _with_fewer_levels(
    events: Mapping[Event, int], max_distinct: int = MAX_DISTINCT
) -> Mapping[Event, int]:
    """The same events, where there are too many levels of noise with less of it.

    More noise is post-processing of less, sampled or not, so the result costs no less. The lattice
    is fixed, so that more events never seem to cost less.
    """
    if len(events) <= max_distinct:
        return events
    fewer: Counter[Event] = Counter()
    for event, count in events.items():
        level = math.floor(math.log2(event.noise_multiplier) * LEVELS_PER_OCTAVE)
        lower = min(2.0 ** (level / LEVELS_PER_OCTAVE), event.noise_multiplier)
        fewer[Event(event.sampling, lower)] += count
    return fewer


def _interval(events: Mapping[Event, int], delta: float) -> float:
    """The interval that PLD rounds privacy losses up to: dp-accounting's own unless ε is huge.

    It grows with the events and never shrinks, so that more events never seem to cost less.
    """
    least = min(event.noise_multiplier for event in events)
    interval = _INTERVAL * max(1.0, (0.5 / least**2 + 10 / least) / _EVENT_WIDTH)
    if sum(_crude_width(event, count) for event, count in events.items()) <= _TOTAL_WIDTH:
        return interval
    total_width = epsilon_of_events(without_truncation(events), delta, "rdp")
    return max(interval, _INTERVAL * total_width / _TOTAL_WIDTH)


def without_truncation(events: Mapping[Event, int]) -> Mapping[Event, int]:
    """The events as if no batch were truncated: an order of magnitude where RDP has no bound."""
    plain: Counter[Event] = Counter()
    for event, count in events.items():
        sampling = event.sampling and Poisson(rate=event.sampling.rate)
        plain[Event(sampling, event.noise_multiplier)] += count
    return plain


def _crude_width(event: Event, count: int) -> float:
    """Whether losses could add up to much; no ε, only a reason to look closer."""
    z, rate = event.noise_multiplier, 1.0 if event.sampling is None else event.sampling.rate
    spread = min(z**-2, rate**2 * math.expm1(min(z**-2, 700.0)))
    return count * spread / 2 + 10 * math.sqrt(count * spread)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence dp-accounting's notes on orders that it leaves out, which only make ε larger."""
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
