"""What differs between an ordinary and a private run, behind one face for the loop.

Both draw rows, send a loss back and tell what came of it. `Ordinary` is here, `Private` in
`unison.train.private`.
"""

from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import unison
from unison.config import TrainConfig
from unison.data import RowDataset
from unison.train.batches import RowOrder, global_batches
from unison.train.step import Batch, Objective, mean_over_targets


@dataclass(frozen=True, kw_only=True)
class PrivacyFacts:
    """What is known of privacy after a step.

    Attributes:
        epsilon: ε so far, at most, if the key is secret. It is computed now and then, and then for
            the steps ahead.
        is_secure: Whether it is; if noise and sampling come from a seed, ε is infinite.
        is_exact: Whether `epsilon` is that of the steps up to this one.
        median_norm: Median of the rows' gradient norms before clipping; no ε covers it.
        clipped_fraction: Part of the rows whose gradient was clipped; no ε covers it.
        num_dropped: Rows whose gradient was not finite and was left out; no ε covers it.
    """

    epsilon: float
    is_exact: bool
    median_norm: float
    clipped_fraction: float
    num_dropped: int
    is_secure: bool = True

    def metrics(self) -> dict[str, float]:
        """The same by the names of metrics; ε where it is that of the step."""
        found = {
            "privacy/median_norm": self.median_norm,
            "privacy/clipped_fraction": self.clipped_fraction,
            "privacy/num_dropped": self.num_dropped,
        }
        name = "privacy/epsilon" if self.is_secure else "privacy/epsilon_if_secret"
        return found | ({name: self.epsilon} if self.is_exact else {})


@dataclass(frozen=True, kw_only=True)
class PrivacyResult:
    """What a private run applied and spent. All of it is public.

    Attributes:
        epsilon: ε of everything that the ledger counts; infinite if the key came from a seed.
        epsilon_if_secret: What it would be under a secret key, which is what a budget bounds.
        delta: The δ it is taken at.
        accountant: Whose bound it is.
        target_epsilon: ε that the noise was chosen for; None if the noise was given.
        noise_multiplier: σ.
        max_grad_norm: C.
        clip_rule: How gradients were brought below C.
        sampling: How rows were drawn, in words.
        batch_size: Rows that a step draws, as expected.
        num_rows: Rows to draw from; each is one record.
        num_counted: Steps that the ledger counts, repeated ones included.
        is_secure: Whether noise and sampling came from a secret key.
        budget_sentence: Why the run ended before its last step, if the budget did that.
        ledger: The file.
    """

    epsilon: float
    epsilon_if_secret: float
    delta: float
    accountant: str
    target_epsilon: float | None
    noise_multiplier: float
    max_grad_norm: float
    clip_rule: str
    sampling: str
    batch_size: int
    num_rows: int
    num_counted: int
    is_secure: bool
    budget_sentence: str | None
    ledger: str


class Regime(Protocol):
    """How rows become steps."""

    objective: Objective

    def prepare(self, state: Mapping[str, Any] | None) -> None:
        """Settle what the steps apply, before anything is written; `state` is a checkpoint's."""
        ...

    def describe(self) -> list[str]:
        """What a person should know of privacy before the first step, in sentences."""
        ...

    def attached(self) -> AbstractContextManager[object]:
        """Around the steps: hold on to model and optimizer, and to what is written of privacy."""
        ...

    def passes(self, steps: range) -> Generator[Batch, None, None]:
        """This rank's passes of some steps, all after one another."""
        ...

    def is_step_complete(self) -> bool:
        """Whether the pass that was handed out last closes its step."""
        ...

    def facts(self, step: int) -> PrivacyFacts | None:
        """What is known of privacy after a step, counted from 1."""
        ...

    def result(self, budget_sentence: str | None) -> PrivacyResult | None:
        """What was applied and spent; every rank must call it."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs to go on, as values that JSON can hold."""
        ...


class Ordinary:
    """Rows in a new order every epoch; the mean over all targets of the global batch."""

    def __init__(self, config: TrainConfig, rows: RowDataset) -> None:
        self.objective = mean_over_targets
        self._config, self._rows = config, rows

    def prepare(self, state: Mapping[str, Any] | None) -> None:
        """Nothing: which rows a step takes is a function of the step."""

    def describe(self) -> list[str]:
        """Nothing is private."""
        return []

    def attached(self) -> AbstractContextManager[object]:
        """Nothing to hold on to."""
        return nullcontext()

    def passes(self, steps: range) -> Generator[Batch, None, None]:
        """See `Regime.passes`."""
        mechanism = self._config.mechanism
        order = RowOrder(
            num_rows=self._rows.num_rows, batch_size=mechanism.batch_size, seed=mechanism.seed
        )
        yield from unison.deal(
            global_batches(self._rows, order, steps),
            granule=mechanism.granule if mechanism.reducer == "ordered" else None,
            micro_batch=self._config.execution.micro_batch_size,
        )

    def is_step_complete(self) -> bool:
        """See `Regime.is_step_complete`."""
        plan = unison.current_plan()
        return plan is None or plan.closes_logical_batch

    def facts(self, step: int) -> None:
        """Nothing is private."""

    def result(self, budget_sentence: str | None) -> None:
        """Nothing is private."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing: see `prepare`."""
        return {}
