"""Planning: ε of equal steps, the noise or the steps that an ε allows, and a bound that is kept.

A budget is a privacy filter: the step that would exceed it is refused, and not taken. Under PLD and
RDP the plan does not depend on what comes out, so how many steps fit is fixed before the first.
Where σ is chosen on the way, the odometer counts.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from unison import check
from unison.errors import BadInput, UnisonError
from unison.privacy.accounting import (
    LEAST_NOISE_MULTIPLIER,
    MAX_DISTINCT,
    Event,
    Spending,
    check_accountant,
    check_delta,
    epsilon_of_events,
    epsilon_of_spending,
    spending_of,
    without_truncation,
)
from unison.privacy.mechanism import Mechanism, Release, sensitivity_factor
from unison.privacy.sampling import Sampling, Shuffled
from unison.rng.streams import DRAW_DISTANCE

MAX_STEPS = 10_000_000  # of which PLD's ε takes seconds; of ten times as many it takes minutes
_MAX_AHEAD = 1 << 17
_MOST_NOISE_MULTIPLIER = 2.0**20
_SHORTFALL = 0.01  # what a calibration may leave of its target


def epsilon_for(
    *,
    noise_multiplier: float,
    delta: float,
    sampling: Sampling,
    steps: int,
    accountant: str = "pld",
    rounded_elements: int = 0,
    num_records: int | None = None,
) -> float:
    """ε at δ of equal steps.

    Args:
        noise_multiplier: σ; for adaptive clipping the effective one.
        delta: δ.
        sampling: How each step chooses its records.
        steps: Number of logical steps.
        accountant: "pld", "rdp" or "odometer".
        rounded_elements: As for `Mechanism`.
        num_records: Size of the data set, where the sampling does not know it: a δ that is too
            large for it is warned of.
    """
    check.not_negative(noise_multiplier=noise_multiplier, steps=steps)
    _check_countable(steps)
    check_delta(delta, getattr(sampling, "num_records", num_records))
    z = noise_multiplier / sensitivity_factor(noise_multiplier, rounded_elements)
    events, num_draws = _equal_steps(sampling, z, steps), steps * rounded_elements
    return epsilon_of_events(events, delta, accountant, num_draws=num_draws)


def noise_multiplier_for(
    *,
    target_epsilon: float,
    target_delta: float,
    sampling: Sampling,
    steps: int,
    accountant: str = "pld",
    count_noise_multiplier: float | None = None,
    rounded_elements: int = 0,
    num_records: int | None = None,
) -> float:
    """σ with which equal steps spend at most `target_epsilon`, and at least 99 % of it.

    Args:
        target_epsilon: ε to land on, from below.
        target_delta: δ.
        sampling: How each step chooses its records.
        steps: Number of logical steps.
        accountant: "pld", "rdp" or "odometer".
        count_noise_multiplier: Noise on the statistic of adaptive clipping, if there is one.
        rounded_elements: As for `Mechanism`.
        num_records: As for `epsilon_for`.

    Raises:
        BadInput: If no σ reaches the target.
    """
    check.positive(steps=steps)
    _check_countable(steps)
    check_delta(target_delta, getattr(sampling, "num_records", num_records))
    num_draws = steps * (rounded_elements + (count_noise_multiplier is not None))
    if num_draws * DRAW_DISTANCE >= target_delta:
        raise BadInput(
            f"{num_draws:,} values of noise may be {num_draws * DRAW_DISTANCE:.2g} away from ideal "
            f"ones, which is no less than {target_delta=:g}; choose a larger one, or fewer steps"
        )
    z = _least_noise(
        lambda z: (_equal_steps(sampling, z, steps), num_draws),
        target_epsilon,
        target_delta,
        accountant,
    )
    if count_noise_multiplier is None and not rounded_elements:
        return z
    shift = 1 / z
    if count_noise_multiplier is not None:
        if 2 * count_noise_multiplier <= z:
            raise BadInput(
                f"the noise on the count alone spends more than ε = {target_epsilon}: "
                f"count_noise_multiplier must exceed {z / 2:.4g}, found {count_noise_multiplier}"
            )
        shift = math.sqrt(shift**2 - (0.5 / count_noise_multiplier) ** 2)
    # The sensitivity factor is affine in σ.
    least = sensitivity_factor(0.0, rounded_elements)
    shift -= sensitivity_factor(1.0, rounded_elements) - least
    if shift <= 0:
        raise BadInput(
            f"rounding {rounded_elements:,} elements to the noise's grid alone spends more than "
            f"ε = {target_epsilon}; raise the target"
        )
    return (1 + 1e-9) * least / shift  # the way back to z rounds; the little more keeps ε below


def calibrate(
    make_mechanism: Callable[[float], Mechanism],
    *,
    target_epsilon: float,
    target_delta: float,
    steps: int,
    accountant: str = "pld",
) -> float:
    """The parameter of a mechanism, such as the start of a schedule, that spends ε in all steps.

    >>> from unison.privacy import Poisson, Stairs
    >>> def make(start: float) -> Mechanism:
    ...     return Mechanism(
    ...         sampling=Poisson(rate=0.01),
    ...         noise_multiplier=Stairs(start=start, factor=0.9, every=50),
    ...         max_grad_norm=1.0,
    ...         expected_batch_size=100,
    ...     )
    >>> start = calibrate(make, target_epsilon=2.0, target_delta=1e-5, steps=100, accountant="rdp")
    >>> round(start, 2)
    0.9

    Args:
        make_mechanism: More noise for a larger parameter.
        target_epsilon: ε to land on, from below and within 1 %.
        target_delta: δ.
        steps: Number of logical steps, from step 0.
        accountant: "pld", "rdp" or "odometer".

    Raises:
        BadInput: If no parameter reaches the target.
    """
    check.positive(steps=steps)
    _check_countable(steps)

    def spent(parameter: float) -> tuple[Mapping[Event, int], int]:
        mechanism = make_mechanism(parameter)
        spending = spending_of(mechanism.release(step) for step in range(steps))
        return spending.events, spending.num_draws

    return _least_noise(spent, target_epsilon, target_delta, accountant)


def steps_for(
    *,
    target_epsilon: float,
    target_delta: float,
    sampling: Sampling,
    noise_multiplier: float,
    accountant: str = "pld",
    rounded_elements: int = 0,
    num_records: int | None = None,
) -> int:
    """The largest number of equal steps that spend at most ε: from 0, if one is too many, to 10^7.

    Args:
        target_epsilon: ε that may be spent.
        target_delta: δ.
        sampling: How each step chooses its records.
        noise_multiplier: σ; for adaptive clipping the effective one.
        accountant: "pld", "rdp" or "odometer".
        rounded_elements: As for `Mechanism`.
        num_records: As for `epsilon_for`.
    """
    check.positive(target_epsilon=target_epsilon, noise_multiplier=noise_multiplier)
    check_delta(target_delta, getattr(sampling, "num_records", num_records))
    z = noise_multiplier / sensitivity_factor(noise_multiplier, rounded_elements)

    def fits(steps: int) -> bool:
        events, num_draws = _equal_steps(sampling, z, steps), steps * rounded_elements
        spent = epsilon_of_events(events, target_delta, accountant, num_draws=num_draws)
        return spent <= target_epsilon

    return largest_that_fits(fits, limit=MAX_STEPS)


def _check_countable(steps: int) -> None:
    if steps > MAX_STEPS:
        is_short = steps < 10**15
        found = f"{steps:,}" if is_short else f"a number of {int(math.log10(steps)) + 1} digits"
        raise BadInput(
            f"steps must be at most {MAX_STEPS:,}, found {found}: beyond that an ε would take "
            "minutes"
        )


def largest_that_fits(fits: Callable[[int], bool], *, limit: int) -> int:
    """The largest number up to `limit` that fits, if all below it do and none above it.

    >>> largest_that_fits(lambda n: n * n <= 50, limit=1000)
    7
    """
    low, high = 0, min(64, limit)
    while high > low and fits(high):
        low, high = high, min(4 * high, limit)
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


def _equal_steps(sampling: Sampling, z: float, steps: int) -> dict[Event, int]:
    """What equal steps from step 0 come to."""
    if isinstance(sampling, Shuffled):
        return {Event(None, z): math.ceil(steps / sampling.steps_per_epoch)}
    return {Event(sampling, z): steps}


# ---- the search ----------------------------------------------------------------------------------
#
# dp-accounting's own search ends when it knows the *parameter* well enough. What is promised here
# is a distance in ε, which a cheaper search can end on.


def _least_noise(
    spent_by: Callable[[float], tuple[Mapping[Event, int], int]],
    target_epsilon: float,
    target_delta: float,
    accountant: str,
) -> float:
    """A parameter whose events, and draws of noise, spend between 99 % and 100 % of the target."""
    check.positive(target_epsilon=target_epsilon)
    check_delta(target_delta)
    check_accountant(accountant)

    def epsilon(parameter: float) -> float:
        events, num_draws = spent_by(parameter)
        return epsilon_of_events(events, target_delta, accountant, num_draws=num_draws)

    def crude_epsilon(parameter: float) -> float:
        events, num_draws = spent_by(parameter)
        plain = without_truncation(events)
        return epsilon_of_events(plain, target_delta, "rdp", num_draws=num_draws)

    start = 2.0
    if accountant == "pld":
        # RDP is twenty times faster and not far off: a place to begin, nothing more.
        with suppress(BadInput):
            start = _search(crude_epsilon, target_epsilon, start)
    return _search(epsilon, target_epsilon, start)


def _search(epsilon: Callable[[float], float], target: float, start: float) -> float:
    """A root of a falling function, by false position in logarithms that never stands still."""
    aim = math.log(target * (1 - _SHORTFALL / 2))
    low: tuple[float, float] | None = None  # log of a parameter that spends too much, and its miss
    high: tuple[float, float] | None = None  # of one that spends little enough
    here, stride, was_high = math.log(start), 0.7, None
    for _ in range(100):
        spent = epsilon(math.exp(here))
        if target * (1 - _SHORTFALL) <= spent <= target:
            return math.exp(here)
        miss = math.log(min(max(spent, 1e-300), 1e300)) - aim
        # An end that stays twice counts half, or it might stay for ever (the Illinois rule).
        if spent > target:
            weight = 0.5 if was_high is False else 1.0
            low, high, was_high = (here, miss), high and (high[0], high[1] * weight), False
        else:
            weight = 0.5 if was_high is True else 1.0
            low, high, was_high = low and (low[0], low[1] * weight), (here, miss), True
        if low is None or high is None:
            # ε falls about as the square of the noise, and faster where there is little of it.
            here += min(max(abs(miss) / 2, 0.02), stride) * (1 if high is None else -1)
            stride = min(2 * stride, 4.0)
            if math.exp(here) > _MOST_NOISE_MULTIPLIER:
                raise BadInput(
                    f"no noise multiplier up to {_MOST_NOISE_MULTIPLIER:.0f} keeps ε at or below "
                    f"{target}; raise the target, take fewer steps or a larger delta"
                )
            if math.exp(here) < LEAST_NOISE_MULTIPLIER:
                raise BadInput(
                    f"hardly any noise spends less than ε = {target} already, since so few records "
                    "are drawn; lower the target"
                )
            continue
        part = low[1] / (low[1] - high[1])
        here = low[0] + (high[0] - low[0]) * min(max(part, 0.05), 0.95)
        if high[0] - low[0] < 1e-12:
            break
    raise BadInput(
        f"no noise spends between 99 % and 100 % of ε = {target}: near {math.exp(here):.6g} it "
        "jumps past; choose another target, or another accountant"
    )


# ---- a budget ------------------------------------------------------------------------------------


class BudgetSpent(UnisonError):
    """The next step would spend more than the budget; nothing of it was applied.

    Attributes:
        step: The step that was refused.
        spent: ε of what the ledger holds.
        would_spend: ε with that step.
    """

    def __init__(self, message: str, *, step: int, spent: float, would_spend: float) -> None:
        super().__init__(message)
        self.step, self.spent, self.would_spend = step, spent, would_spend


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The most that a run may spend.

    Attributes:
        epsilon: ε, at most.
        delta: The δ that ε is taken at.
        steps: Steps that are planned, if known: then one computation serves them all.
    """

    epsilon: float
    delta: float
    steps: int | None = None

    def __post_init__(self) -> None:
        check.positive(epsilon=self.epsilon)
        check_delta(self.delta)


class BudgetGuard:
    """Says before every step whether it may be taken.

    Accounting takes a second, so it is not done at every step. The guard looks ahead: it asks the
    mechanism for the coming releases, finds how many of them fit, and lets steps pass that cost no
    more than what it found to fit. If a release is not what was announced, it computes anew.

    Guarantees:
        A step that passes leaves `epsilon_if_secret(ledger, budget.delta)`, which is ε unless the
        run is seeded, at or below `budget.epsilon`. So the run keeps (ε, δ) of the budget whenever
        it ends, also if it ends because of what came out: what was released is a part of what the
        budget allows.

    Args:
        budget: What may be spent.
        accountant: "pld", "rdp" or "odometer".
        horizon: Number of steps that are planned, if known; one computation then serves them all.
    """

    def __init__(
        self, budget: Budget, *, accountant: str = "pld", horizon: int | None = None
    ) -> None:
        check_accountant(accountant)
        if horizon is not None:
            check.positive(horizon=horizon)
        self.budget, self.accountant, self._horizon = budget, accountant, horizon
        self._approved = Spending()
        self._num_ahead = 0
        self._has_warned = False

    def check(self, spending: Spending, upcoming: Callable[[int], Release], step: int) -> None:
        """Refuse a step that would exceed the budget.

        Args:
            spending: What the ledger holds.
            upcoming: The release of any step from this one on (`mechanism.release`).
            step: The step that comes next.

        Raises:
            BudgetSpent: If it would. Nothing has been written or drawn.
        """
        trial = spending.copy()
        trial.add(upcoming(step))
        if _covers(self._approved, trial):
            return
        if not self._has_warned:
            check_delta(self.budget.delta, trial.num_records)
            self._has_warned = True
        if not self._fits(trial):
            delta, accountant = self.budget.delta, self.accountant
            spent = epsilon_of_spending(spending, delta, accountant)
            would_spend = epsilon_of_spending(trial, delta, accountant)
            accountant = "odometer" if trial.is_chosen else accountant
            raise BudgetSpent(
                f"step {step} would spend ε = {would_spend:.8g} at δ = {delta:g} by {accountant}, "
                f"more than the budget of {self.budget.epsilon:g}; the steps before it spent "
                f"{spent:.8g}. End the run here, or plan it with more noise or fewer steps",
                step=step,
                spent=spent,
                would_spend=would_spend,
            )
        self._look_ahead(spending, upcoming, step)

    def _look_ahead(
        self, spending: Spending, upcoming: Callable[[int], Release], step: int
    ) -> None:
        """Approve as many of the coming steps as is worth the time; the next one fits."""
        wanted = max(64, min(3 * self._num_ahead, _MAX_AHEAD))
        if self._horizon is not None and step < self._horizon:
            wanted = self._horizon - step
        releases = [upcoming(step)]
        with suppress(BadInput):  # a schedule may end before it is looked at that far
            while len(releases) < wanted:
                releases.append(upcoming(step + len(releases)))

        def after(num_steps: int) -> Spending:
            trial = spending.copy()
            for release in releases[:num_steps]:
                trial.add(release)
            return trial

        # From few steps to many: what lies far ahead may be next to no noise, which takes long.
        found = largest_that_fits(lambda n: self._fits(after(n)), limit=len(releases))
        self._num_ahead, self._approved = found, after(found)

    def _fits(self, spending: Spending) -> bool:
        parts = [spending]
        if len(spending.events) > 8:
            # The event with the least noise often says no by itself, and sooner.
            strongest = min(spending.events, key=lambda event: event.noise_multiplier)
            alone = spending.copy()
            alone.events = Counter({strongest: spending.events[strongest]})
            parts = [alone, spending]
        # Rounded sooner than what is reported: a part of what is approved may have more levels of
        # noise than the whole (a pass over shuffled data ends on its least), and must not be the
        # one that is rounded.
        return all(
            epsilon_of_spending(
                part, self.budget.delta, self.accountant, max_distinct=MAX_DISTINCT // 2
            )
            <= self.budget.epsilon
            for part in parts
        )


def _covers(approved: Spending, spending: Spending) -> bool:
    """Whether every event has one of its own among the approved, with no more noise than itself."""
    if spending.is_chosen != approved.is_chosen or spending.num_draws > approved.num_draws:
        return False
    by_sampling: dict[object, list[tuple[float, int, int]]] = {}
    for event, count in approved.events.items():
        by_sampling.setdefault(event.sampling, []).append((event.noise_multiplier, 0, count))
    for event, count in spending.events.items():
        by_sampling.setdefault(event.sampling, []).append((event.noise_multiplier, 1, count))
    for levels in by_sampling.values():
        free = 0
        for _, is_taken, count in sorted(levels):
            free += -count if is_taken else count
            if free < 0:
                return False
    return True
