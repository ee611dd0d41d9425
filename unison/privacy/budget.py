"""A bound on what one ledger counts: the step that would exceed it is refused, and not taken.

It is a privacy filter. Under PLD and RDP the plan does not depend on what comes out, so how many
steps fit is fixed before the first. Where σ is chosen on the way, the odometer counts.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from unison import check
from unison.errors import BadInput, UnisonError
from unison.privacy.accounting import (
    MAX_DISTINCT,
    check_accountant,
    check_delta,
    epsilon_of_spending,
)
from unison.privacy.calibration import largest_that_fits
from unison.privacy.mechanism import Release
from unison.privacy.spending import Spending

_MAX_AHEAD = 1 << 17


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
        self._answers: dict[object, bool] = {}
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
            self._refuse(spending, trial, step)
        self._look_ahead(spending, upcoming, step)

    def _look_ahead(
        self, spending: Spending, upcoming: Callable[[int], Release], step: int
    ) -> None:
        """Approve as many of the coming steps as is worth the time; the next one fits."""
        coming = _Coming(spending, upcoming, step)
        wanted = max(64, min(3 * self._num_ahead, _MAX_AHEAD))
        if self._horizon is not None and step < self._horizon:
            wanted = self._horizon - step
        wanted = coming.up_to(wanted)
        # From few steps to many: what lies far ahead may be next to no noise, which takes long.
        found = largest_that_fits(lambda n: self._fits(coming.after(n)), limit=wanted)
        self._num_ahead, self._approved = found, coming.after(found)

    def _fits(self, spending: Spending) -> bool:
        events = frozenset(spending.events.items())
        known = events, spending.is_chosen, spending.num_draws
        if known not in self._answers:
            self._answers[known] = self._compute_fits(spending)
        return self._answers[known]

    def _compute_fits(self, spending: Spending) -> bool:
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

    def _refuse(self, spending: Spending, trial: Spending, step: int) -> NoReturn:
        delta, accountant = self.budget.delta, self.accountant
        spent = epsilon_of_spending(spending, delta, accountant)
        would_spend = epsilon_of_spending(trial, delta, accountant)
        accountant = "odometer" if trial.is_chosen else accountant
        raise BudgetSpent(
            f"step {step} would spend ε = {would_spend:.8g} at δ = {delta:g} by {accountant}, more "
            f"than the budget of {self.budget.epsilon:g}; the steps before it spent {spent:.8g}. "
            "End the run here, or plan it with more noise or fewer steps",
            step=step,
            spent=spent,
            would_spend=would_spend,
        )


class _Coming:
    """What the ledger would hold after each number of coming steps."""

    def __init__(self, spending: Spending, upcoming: Callable[[int], Release], first: int) -> None:
        self._spending, self._upcoming, self._first = spending, upcoming, first
        self._releases: list[Release] = []

    def up_to(self, wanted: int) -> int:
        """How many steps can be foreseen; a schedule may end before it is looked at that far."""
        while len(self._releases) < wanted:
            try:
                self._releases.append(self._upcoming(self._first + len(self._releases)))
            except BadInput:
                if not self._releases:
                    raise
                break
        return min(wanted, len(self._releases))

    def after(self, num_steps: int) -> Spending:
        """What the ledger and so many steps more come to, as far as they can be foreseen."""
        trial = self._spending.copy()
        for release in self._releases[: self.up_to(num_steps)]:
            trial.add(release)
        return trial


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
