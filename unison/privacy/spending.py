"""What releases come to: events, and how often each took place."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from unison.errors import BadInput
from unison.privacy import sampling as samplings
from unison.privacy.mechanism import Release
from unison.privacy.sampling import Poisson, Shuffled, TruncatedPoisson

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


@dataclass
class _Pass:
    """A pass over shuffled data that has begun and is counted whole."""

    sampling: Shuffled
    epoch: int
    last_step: int
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
        self._pass: _Pass | None = None

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
        copied = Spending()
        copied.events = self.events.copy()
        copied.num_records = self.num_records
        copied.num_seeded, copied._is_seeded = self.num_seeded, self._is_seeded
        copied.is_chosen, copied.num_draws = self.is_chosen, self.num_draws
        copied._plan = self._plan
        copied._pass = self._pass and _Pass(**vars(self._pass))
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
        begun, epoch = self._pass, sampling.epoch_of(step)
        is_same_pass = (
            begun is not None
            and (begun.sampling, begun.epoch) == (sampling, epoch)
            and step > begun.last_step
        )
        if begun is None or not is_same_pass:
            self._pass = _Pass(sampling, epoch, step, z)
            self.events[Event(None, z)] += 1
            return
        begun.last_step = step
        if z < begun.noise_multiplier:
            _move_one(self.events, Event(None, begun.noise_multiplier), Event(None, z))
            begun.noise_multiplier = z


def has_passes(events: Iterable[Event]) -> bool:
    """Whether passes over shuffled data are among the events, which have no add/remove bound."""
    return any(event.sampling is None for event in events)


def _move_one(events: Counter[Event], before: Event, after: Event) -> None:
    events[before] -= 1
    if not events[before]:
        del events[before]
    events[after] += 1


class HasSpending(Protocol):
    """A ledger, open or read."""

    @property
    def spending(self) -> Spending:
        """What it counts."""
        ...


Source = Spending | HasSpending | Iterable[Release]


def spending_of(source: Source) -> Spending:
    """What a ledger, or a sequence of releases, comes to."""
    if isinstance(source, Spending):
        return source
    found = getattr(source, "spending", None)
    if isinstance(found, Spending):
        return found
    spending = Spending()
    for release in source:  # pyright: ignore[reportGeneralTypeIssues]
        spending.add(release)
    return spending
