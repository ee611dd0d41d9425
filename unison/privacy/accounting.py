"""What releases cost: the events they come to, and their (ε, δ), composed by dp-accounting.

What a ledger says was applied is all that enters. docs/privacy.md says what ε covers, and proves
what is not dp-accounting's own: the odometer, and the pair that truncated sampling comes to.
"""

import copy
import logging
import math
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from unison import check
from unison.errors import BadInput, UnsupportedOperation
from unison.privacy import sampling as samplings
from unison.privacy.mechanism import Release
from unison.privacy.sampling import Poisson, Shuffled, TruncatedPoisson
from unison.rng.streams import DRAW_DISTANCE, drawn_probability

if TYPE_CHECKING:
    import dp_accounting
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

ACCOUNTANTS = ("pld", "rdp", "odometer")

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

# The Rényi orders of the odometer, fixed before anything is seen. δ is shared out among them, so
# more of them cost more; dense where sampled steps have their best one.
ODOMETER_ORDERS = (1.2, 1.5, 2, 3, 4, 5, 6, 8, 11, 16, 24, 40, 80, 160)
# The part of δ that the odometer sets aside for the noise's distance, however many steps follow.
_ODOMETER_RESERVE = 2.0**-7


# ---- what releases come to -----------------------------------------------------------------------

ADJACENCY = "zero-out: one record replaced by an empty one in the same place"
"""Between which data sets every ε of unison holds, in words; docs/privacy.md says why."""
# Of a session's settings, those that decide what its steps cost.
_COSTS = ("sampling", "noise_multiplier", "adaptive")


@dataclass(frozen=True, slots=True)
class Event:
    """A Gaussian release with noise multiplier z on a Poisson sample, or on all records.

    `sampling` is None for one pass over shuffled data, in which each record takes part once.
    """

    sampling: Poisson | TruncatedPoisson | None
    noise_multiplier: float


class Spending:
    """The events that releases come to, one after the other.

    Guarantees:
        Nothing is counted less than once. A Poisson step is one event. A pass over shuffled data is
        one event, counted whole from its first step, with the smallest noise multiplier in it: a
        record takes part at one step of the pass, which may be that one. A new session, or a step
        that does not come after the last, begins a new pass, because the records may come in
        another order there.

    Attributes:
        events: How often each event took place.
        num_records: Size of the data set as far as the releases tell; for Poisson sampling the
            expected batch size divided by the rate.
        num_seeded: Releases whose noise came from a seed: with one of them, ε is infinite.
        adjacency: Between which data sets ε holds, in words.
        is_chosen: Whether what was applied may have been chosen from what came out before: σ could
            be set, was set (in ledgers of versions that allowed it), or is another one than in the
            session before.
        num_draws: Values of secure noise that were drawn.
    """

    adjacency = ADJACENCY

    def __init__(self) -> None:
        self.events: Counter[Event] = Counter()
        self.num_records: float | None = None
        self.num_seeded = 0
        self.is_chosen = False
        self.num_draws = 0
        self._is_seeded = False  # the session that releases are added to
        self._plan: Mapping[str, Any] = {}  # what it said that it would apply
        # A pass over shuffled data that has begun and is counted whole, at its least noise: its
        # sampling and epoch, its last step, and the event.
        self._pass: tuple[tuple[Shuffled, int], int, Event] | None = None

    def add(self, release: Release) -> None:
        """Count a release."""
        sigma = self._plan.get("noise_multiplier")
        self.is_chosen |= release.is_chosen
        self.is_chosen |= isinstance(sigma, int | float) and sigma != release.noise_multiplier
        # Ledgers of older versions have the number of elements in the session's first line alone.
        elements = release.rounded_elements or self._plan.get("rounded_elements", 0)
        self.num_draws += elements + (release.count_noise_multiplier is not None)
        z, sampling = release.effective_noise_multiplier, release.sampling
        self.num_seeded += self._is_seeded
        match sampling:
            case Shuffled():
                self.num_records = sampling.num_records
                self._add_shuffled(release.step, sampling, z)
            case TruncatedPoisson():
                self.num_records = sampling.num_records
                self.events[Event(sampling, z)] += 1
            case Poisson():
                if sampling.rate:
                    self.num_records = release.expected_batch_size / sampling.rate
                self.events[Event(sampling, z)] += 1
            case _:
                raise BadInput(f"expected a sampling of unison.privacy, found {sampling!r}")

    def begin_session(
        self, plan: Mapping[str, Any] | None = None, *, is_seeded: bool | None = None
    ) -> None:
        """Forget the pass over shuffled data that has begun; the next step begins another.

        Args:
            plan: What the session is going to apply (`Mechanism.describe`). One that costs
                something else than that of the session before was chosen after it.
            is_seeded: Whether the session's key comes from a seed; as before unless given.
        """
        self._pass = None
        if is_seeded is not None:
            self._is_seeded = is_seeded
        if plan is not None:
            self.is_chosen |= bool(self.events) and self._differs_from(plan)
            self._plan = plan

    def _differs_from(self, plan: Mapping[str, Any]) -> bool:
        return any(self._plan.get(name) != plan.get(name) for name in _COSTS)

    def join(self, other: "Spending") -> None:
        """Count what another run on the same data has spent as well.

        One that applies something else may have been chosen from what the other gave.
        """
        self.begin_session()
        self.is_chosen |= other.is_chosen or (bool(self.events) and self._differs_from(other._plan))
        self.events.update(other.events)
        self.num_seeded += other.num_seeded
        self.num_draws += other.num_draws
        self._plan = other._plan
        sizes = [size for size in (self.num_records, other.num_records) if size is not None]
        self.num_records = max(sizes, default=None)

    def copy(self) -> "Spending":
        """A copy that can be added to."""
        copied = copy.copy(self)
        copied.events = self.events.copy()
        return copied

    def state_dict(self) -> dict[str, Any]:
        """The events as values that JSON can hold; a pass that has begun is not continued."""
        return {
            "num_records": self.num_records,
            "num_seeded": self.num_seeded,
            "is_chosen": self.is_chosen,
            "num_draws": self.num_draws,
            "events": [
                {
                    "sampling": event.sampling and samplings.to_fields(event.sampling),
                    "noise_multiplier": event.noise_multiplier,
                    "count": count,
                }
                for event, count in self.events.items()
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the events by those of a state."""
        self._pass = None
        self.num_records = state["num_records"]
        self.num_seeded = state.get("num_seeded", 0)  # states of before did not say
        self.is_chosen, self.num_draws = state.get("is_chosen", False), state.get("num_draws", 0)
        self.events = Counter()
        for fields in state["events"]:
            sampling = fields["sampling"] and samplings.from_fields(fields["sampling"])
            assert not isinstance(sampling, Shuffled)  # its passes have no sampling
            self.events[Event(sampling, fields["noise_multiplier"])] += fields["count"]

    def _add_shuffled(self, step: int, sampling: Shuffled, z: float) -> None:
        epoch, event = (sampling, sampling.epoch_of(step)), Event(None, z)
        begun = self._pass
        if begun is not None and begun[0] == epoch and step > begun[1]:
            before = begun[2]
            if z >= before.noise_multiplier:
                self._pass = epoch, step, before
                return
            self.events[before] -= 1
            if not self.events[before]:
                del self.events[before]
        self._pass = epoch, step, event
        self.events[event] += 1


def spending_of(source: Any) -> Spending:
    """What a ledger (open, or read from its file), or a sequence of releases, comes to."""
    found = getattr(source, "spending", source)
    if isinstance(found, Spending):
        return found
    spending = Spending()
    for release in source:
        spending.add(release)
    return spending


# ---- ε -------------------------------------------------------------------------------------------


def epsilon_of(source: Any, delta: float, accountant: str = "pld") -> float:
    """ε at δ of what a ledger or a sequence of releases holds.

    Guarantees:
        An upper bound, with every intent counted whether it was committed or not, and the distance
        of the noise from an ideal one taken off δ. By PLD and RDP it holds for a plan (σ, sampling
        and number of steps) that was fixed before the first step; releases that say that they were
        chosen on the way are counted by the odometer whichever accountant is asked for. Infinite
        if the noise of a release came from a seed: whoever knows it can draw it again.

    Args:
        source: A ledger, a `Spending`, or releases in the order of their steps.
        delta: δ, above 0 and below 1. A warning says if it is 1/N or more.
        accountant: "pld", "rdp" or "odometer".
    """
    spending = spending_of(source)
    if spending.num_seeded:
        check_accountant(accountant)
        check_delta(delta, spending.num_records)
        return math.inf
    return epsilon_if_secret(spending, delta, accountant)


def epsilon_if_secret(source: Any, delta: float, accountant: str = "pld") -> float:
    """ε at δ as it would be had every key been secret: what budgets and tests of seeded runs use.

    The same as `epsilon_of` where every key was; arguments and errors are its own.
    """
    spending = spending_of(source)
    check_delta(delta, spending.num_records)
    distance = spending.num_draws * DRAW_DISTANCE
    if distance >= delta:
        warnings.warn(
            f"ε is infinite at delta = {delta:g}: {spending.num_draws:,} values of noise may be "
            f"{distance:.2g} away from ideal ones, which is no less; choose a larger delta",
            stacklevel=2,
        )
    return epsilon_of_spending(spending, delta, accountant)


def epsilon_of_spending(
    spending: Spending, delta: float, accountant: str, *, max_distinct: int = MAX_DISTINCT
) -> float:
    """See `epsilon_of`, without warnings; `max_distinct` as in `epsilon_of_events`."""
    check_accountant(accountant)
    return epsilon_of_events(
        spending.events,
        delta,
        "odometer" if spending.is_chosen else accountant,
        num_draws=spending.num_draws,
        max_distinct=max_distinct,
    )


def epsilon_of_events(
    events: Mapping[Event, int],
    delta: float,
    accountant: str,
    *,
    num_draws: int = 0,
    max_distinct: int = MAX_DISTINCT,
) -> float:
    """ε at δ of events, without a look at the size of the data set.

    Args:
        events: How often each took place.
        delta: δ.
        accountant: "pld", "rdp" or "odometer".
        num_draws: Values of secure noise, whose distance from ideal ones is taken off δ.
        max_distinct: Number of different events above which they are rounded; see `MAX_DISTINCT`.
    """
    check_accountant(accountant)
    events = {event: count for event, count in events.items() if count}
    if not events:
        return 0.0
    if any(event.noise_multiplier < LEAST_NOISE_MULTIPLIER for event in events):
        return math.inf
    distance = num_draws * DRAW_DISTANCE
    if accountant == "odometer":
        # How many steps follow is not known, so the same part of δ is set aside at every one.
        is_near, left = distance <= delta * _ODOMETER_RESERVE, delta * (1 - _ODOMETER_RESERVE)
    else:
        is_near, left = distance < delta, delta - distance
    if not is_near:
        return math.inf
    events = _with_fewer_levels(events, max_distinct)
    if accountant == "odometer":
        return _odometer(events, left)
    if accountant == "rdp":
        return _epsilon_by_rdp(events, left)
    interval = _interval(events, left)
    if interval > _COARSEST_INTERVAL:
        return _epsilon_by_rdp(events, left)
    return _epsilon_by_pld(events, left, interval)


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


def _dp_event(event: Event) -> "dp_accounting.DpEvent":
    """The event in dp-accounting's words; truncated samples are counted by our own means."""
    import dp_accounting

    gaussian = dp_accounting.GaussianDpEvent(event.noise_multiplier)
    if event.sampling is None or event.sampling.rate == 1:
        return gaussian
    return dp_accounting.PoissonSampledDpEvent(event.sampling.rate, gaussian)


def _ordered(events: Mapping[Event, int]) -> list[tuple[Event, int]]:
    """Events in one order, so that equal ones give equal bits whatever order they came in."""
    return sorted(events.items(), key=lambda item: (item[0].noise_multiplier, repr(item[0])))


def _epsilon_by_pld(events: Mapping[Event, int], delta: float, interval: float) -> float:
    from dp_accounting import pld

    relation = _relation(events)
    accountant = pld.PLDAccountant(relation, value_discretization_interval=interval)
    for event, count in _ordered(events):
        sampling, z = event.sampling, event.noise_multiplier
        if isinstance(sampling, TruncatedPoisson):
            one = _pld_of_truncated(sampling, z, interval)
        elif sampling is not None and 0 < sampling.rate < 1:
            one = _pld_of_poisson(sampling.rate, z, interval, relation)
        else:
            accountant.compose(_dp_event(event), count)
            continue
        accountant._pld = accountant._pld.compose(one.self_compose(count))
    return float(accountant.get_epsilon(delta))


@lru_cache(maxsize=64)  # a run asks for the ε of its one kind of step again and again
def _pld_of_poisson(
    rate: float, z: float, interval: float, relation: "dp_accounting.NeighboringRelation"
) -> "PrivacyLossDistribution":
    """The PLD of one step, as `PLDAccountant` makes it: seconds where there is little noise."""
    from dp_accounting.pld import privacy_loss_distribution

    return privacy_loss_distribution.from_gaussian_mechanism(
        z,
        value_discretization_interval=interval,
        sampling_prob=rate,
        neighboring_relation=relation,
    )


def _epsilon_by_rdp(events: Mapping[Event, int], delta: float) -> float:
    from dp_accounting import rdp

    orders = rdp.rdp_privacy_accountant.DEFAULT_RDP_ORDERS
    with _quiet():
        return float(rdp.compute_epsilon(orders, _rdp(events, orders).tolist(), delta)[0])


def _odometer(events: Mapping[Event, int], delta: float) -> float:
    """ε that holds at δ wherever a run ends, whoever chose its steps from whatever came out.

    For one order a, exp((a − 1)·(loss − Σ rdp)) is a supermartingale, and so no more than 1 on
    average wherever it is stopped. With δ' for one of the orders, which were fixed in advance,
    that is δ' for ε = Σ rdp + log(1 − 1/a) − log(a·δ')/(a − 1): see docs/privacy.md.
    """
    share = delta / len(ODOMETER_ORDERS)
    spent = zip(ODOMETER_ORDERS, _rdp(events, ODOMETER_ORDERS), strict=True)
    return max(
        0.0,
        min(float(rdp) + math.log1p(-1 / a) - math.log(a * share) / (a - 1) for a, rdp in spent),
    )


def _rdp(events: Mapping[Event, int], orders: Sequence[float]) -> np.ndarray:
    """Rényi divergences of all events, composed, at each order."""
    total = np.zeros(len(orders))
    for event, count in _ordered(events):
        total += count * _rdp_of(event, tuple(orders))
    return total


@lru_cache(maxsize=64)  # a third of a second each, of the few kinds of step that a run has
def _rdp_of(event: Event, orders: tuple[float, ...]) -> np.ndarray:
    from dp_accounting import rdp

    sampling, z = event.sampling, event.noise_multiplier
    if not isinstance(sampling, TruncatedPoisson):
        with _quiet():
            accountant = rdp.RdpAccountant(orders, _relation([event]))
            return accountant.compose(_dp_event(event))._rdp
    # As if it were told whether the others fill a batch, and of those whether the record is in.
    sampling = _as_drawn(sampling)
    plain = _rdp_of(Event(Poisson(rate=sampling.rate), z), orders)
    others, capacity = _other_members(sampling), sampling.capacity
    filled, kept = others.sf(capacity - 1), _kept_by_lot(sampling)
    if not filled:
        return plain
    power = np.asarray(orders) - 1
    with np.errstate(over="ignore", divide="ignore"):
        within = np.log(kept) + power * (power + 1) / (2 * z**2)
        mixed = np.logaddexp(np.log1p(-filled) + power * plain, np.log(filled - kept))
        return np.logaddexp(mixed, within) / power


def _as_drawn(sampling: TruncatedPoisson) -> TruncatedPoisson:
    """The sampling with the rate that is drawn: lower by less than 2^-63.

    A plain Poisson draw costs the less for it; whether one with a capacity does is not asked.
    """
    return replace(sampling, rate=drawn_probability(sampling.rate))


def _other_members(sampling: TruncatedPoisson) -> Any:
    """How many of the records beside one are drawn, before any are left out."""
    from scipy.stats import binom

    return binom(sampling.num_records - 1, sampling.rate)


def _kept_by_lot(sampling: TruncatedPoisson) -> float:
    """Probability that too many are drawn and that a given record is among those kept."""
    from scipy.stats import binom

    size = sampling.num_records
    return float(binom.sf(sampling.capacity, size, sampling.rate)) * sampling.capacity / size


def last_place(sampling: TruncatedPoisson) -> tuple[float, float, float]:
    """Probability that all places but one are taken, and then of the last one's fates.

    Returns:
        Probability that so many of the other records are drawn; given that, probability that the
        last place stays empty, and that the record is in it. Otherwise it is another's.

    >>> last_place(TruncatedPoisson(rate=1.0, capacity=3, num_records=4))
    (1.0, 0.0, 0.75)
    """
    others, rate = _other_members(sampling), sampling.rate
    taken, exact = float(others.sf(sampling.capacity - 2)), float(others.pmf(sampling.capacity - 1))
    if not taken:
        return 0.0, 1.0, 0.0
    record = (exact * rate + _kept_by_lot(sampling)) / taken
    return taken, exact * (1 - rate) / taken, min(record, 1.0)


def _pld_of_truncated(
    sampling: TruncatedPoisson, z: float, interval: float
) -> "PrivacyLossDistribution":
    """The PLD of one step: a mixture of steps with one place left or none, and of others.

    In a full batch a record has the place of another one, which may point the other way:
    docs/sampling.md finds the worst. dp-accounting's own event takes a looser pair there.
    """
    from dp_accounting.pld import pld_pmf, privacy_loss_distribution

    sampling = _as_drawn(sampling)
    plain = privacy_loss_distribution.from_gaussian_mechanism(
        z, value_discretization_interval=interval, sampling_prob=sampling.rate
    )
    taken, empty, record = last_place(sampling)
    if empty + record >= 1:
        return plain
    # A normal value at 10 loses so much; what is beyond has probability below e^-50.
    epsilons = np.arange(math.ceil((0.5 + 10 * z) / z**2 / interval) + 1) * interval
    deltas = last_place_deltas(empty, record, z, epsilons)
    ends = [min(int((each > math.exp(-50)).sum()), len(each) - 1) for each in deltas]

    def pmf(order: int) -> pld_pmf.PLDPmf:
        # δ(−ε) = 1 − e^−ε + e^−ε·δ'(ε), with δ' of the pair in the other order.
        below = -np.expm1(-epsilons) + np.exp(-epsilons) * deltas[1 - order]
        low, high = ends[1 - order], ends[order]
        values = np.concatenate([below[low:0:-1], deltas[order][: high + 1]])
        return pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(interval, -low, high, values)

    crowded = privacy_loss_distribution.PrivacyLossDistribution(pmf(0), pmf(1))
    return crowded.compute_mixture(plain, taken)


def last_place_deltas(
    empty: float, record: float, z: float, epsilons: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """δ at each ε ≥ 0 of a step in which one place is left for a record, in both orders.

    With probabilities e, r and w of nothing, the record and another one in it, and in units of the
    clip norm, the worst is e·N(0) + r·N(1) + w·N(−1) beside (e+r)·N(0) + w·N(−1), and in the other
    order (e+r)·N(0) + w·N(1) beside e·N(0) + (r+w)·N(1).

    Args:
        empty: e.
        record: r.
        z: Noise multiplier.
        epsilons: [n], at least 0.
    """
    from scipy.special import log_ndtr, ndtr

    other = 1 - empty - record
    past_one = -np.expm1(-epsilons)  # 1 − 1/α, where α = e^ε may be more than a float holds
    with np.errstate(divide="ignore"):
        # P > αQ beyond one threshold, which solves a quadratic equation in e^(−(y − ½)/z²).
        nothing = record + empty * past_one
        curve = past_one * np.exp(-epsilons - 1 / z**2) * other * record / nothing**2
        y = 0.5 + z**2 * (epsilons + np.log(nothing / record * (1 + np.sqrt(1 + 4 * curve)) / 2))
        present = record * ndtr((1 - y) / z) - np.exp(epsilons + log_ndtr(-y / z)) * nothing
        present -= np.exp(epsilons + log_ndtr((-1 - y) / z)) * past_one * other
        # Q > αP below one, if there is any.
        left = record - empty * np.expm1(np.minimum(epsilons, 700.0))
        something = record + other * past_one
        y = 0.5 + z**2 * (np.log(np.maximum(left, 0) / something) - epsilons)
        absent = left * ndtr(y / z) - np.exp(epsilons + log_ndtr((y - 1) / z)) * something
    return np.clip(present, 0, 1), np.where(left > 0, np.clip(absent, 0, 1), 0)


def _relation(events: Iterable[Event]) -> "dp_accounting.NeighboringRelation":
    """The adjacency for which all the events hold.

    Passes over shuffled data hold for zero-out only. A Poisson sample without a record and one in
    which it contributes nothing are the same, so its events hold for both.
    """
    import dp_accounting

    if any(event.sampling is None for event in events):
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
    total_width = _epsilon_by_rdp(without_truncation(events), delta)
    return max(interval, _INTERVAL * total_width / _TOTAL_WIDTH)


def without_truncation(events: Mapping[Event, int]) -> Mapping[Event, int]:
    """The events as if no batch were truncated: an order of magnitude, sooner."""
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
