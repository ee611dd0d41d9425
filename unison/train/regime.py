"""How rows become steps: which ones a step takes, the loss that is sent back, and what is told.

`Regime` is an ordinary run: the rows of a step are a function of (seed, step) alone, and ranks cut
that one global list, so that adding ranks never changes what a step is made of. `PrivateRegime`
draws rows at random, clips each one's gradient, adds noise and keeps a ledger; the record that it
protects is one row. `unison.PrivacyEngine` does the work; here is which of its settings a run has,
and what may be told of it.
"""

import math
import warnings
from collections.abc import Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rich.markup import escape
from torch import Tensor
from torch.utils.data import DataLoader

import unison
from unison import check, rng
from unison import privacy as dp
from unison.data import IGNORE_INDEX
from unison.errors import BadInput
from unison.run_files import PrivacyResult, read_config
from unison.schema import short
from unison.train.step import Batch, mean_over_targets

if TYPE_CHECKING:
    from unison.train.loop import Run

MAX_EPSILONS = 10  # of a private run, while it goes on: one by PLD takes a second


def rows_of_step(step: int, *, num_rows: int, batch_size: int, seed: int) -> np.ndarray:
    """The global batch of a step in its canonical order: int64 [batch_size].

    The order of rows is endless: epoch after epoch, each in a new permutation. A batch larger than
    what is left of an epoch continues in the next one; every row comes once per epoch.

    Args:
        step: From 0 on.
        num_rows: Rows in the data set.
        batch_size: Rows per step, over all ranks.
        seed: Seed of the permutations.
    """
    positions = np.arange(step * batch_size, (step + 1) * batch_size, dtype=np.int64)
    epochs, offsets = np.divmod(positions, num_rows)
    rows = np.empty_like(positions)
    for epoch in np.unique(epochs):
        chosen = epochs == epoch
        stream = rng.Stream(rng.Key.from_seed(seed), "rows", int(epoch), purpose="shuffle")
        permutation = rng.Permutation(stream, num_rows)
        rows[chosen] = permutation(torch.from_numpy(offsets[chosen])).numpy()
    return rows


class Regime:
    """Rows in a new order every epoch; the mean over all targets of the global batch."""

    def __init__(self, run: "Run") -> None:
        self._run, self._config, self._rows = run, run.config, run.train_rows

    def prepare(self, state: Mapping[str, Any] | None) -> None:
        """Settle what the steps apply, before anything is written; `state` is a checkpoint's."""

    def describe(self) -> list[str]:
        """What a person should know of privacy before the first step, in sentences."""
        return []

    def attached(self) -> AbstractContextManager[object]:
        """Around the steps: hold on to model and optimizer, and to what is written of privacy."""
        return nullcontext()

    def passes(self, steps: range) -> Generator[Batch, None, None]:
        """This rank's passes of some steps, all after one another."""
        mechanism, data = self._config.mechanism, self._rows
        sizes = {"num_rows": data.num_rows, "batch_size": mechanism.batch_size}
        drawn = (rows_of_step(step, seed=mechanism.seed, **sizes) for step in steps)
        batches = (
            {
                **data.rows(rows),
                "sample_ids": torch.from_numpy(rows),
                "num_targets": int(data.num_targets(rows).sum()),
            }
            for rows in drawn
        )
        yield from unison.deal(
            batches,
            granule=mechanism.granule if mechanism.reducer == "ordered" else None,
            micro_batch=self._config.execution.micro_batch_size,
        )

    def is_step_complete(self) -> bool:
        """Whether the pass that was handed out last closes its step."""
        plan = unison.current_plan()
        return plan is None or plan.closes_logical_batch

    def objective(self, logits: Tensor, batch: Batch) -> tuple[Tensor, bool]:
        """Make the rows' losses, of which the mean is sent back; see `step.Objective`."""
        return mean_over_targets(logits, batch)

    def facts(self, step: int) -> tuple[dict[str, float], str]:
        """What is known of privacy after step `step`: metrics by name, and ε in words."""
        return {}, ""

    def recorded(self, step: int, rows: str, loss: float) -> dict[str, Any]:
        """Fields of `StepRecord`, of a step that was just taken."""
        return {"rows": rows, "loss": loss}

    def result(self, budget_sentence: str | None) -> PrivacyResult | None:
        """What was applied and spent; every rank must call it."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs to go on, as values that JSON can hold."""
        return {}

    def witnessed(self, state: dict[str, Any]) -> dict[str, Any]:
        """The same state as the rank that has the ledger would give it; no collective."""
        return state


class PrivateRegime(Regime):
    """Trains with `PrivacyEngine`, one row being one record; every rank has one.

    All parameters of the run's model get noisy gradients.
    """

    def __init__(self, run: "Run") -> None:
        super().__init__(run)
        config, rows = run.config, run.train_rows
        assert config.mechanism.privacy is not None
        self._privacy = config.mechanism.privacy
        self._sampling = dp.sampling_for(self._privacy, config.mechanism.batch_size, rows.num_rows)
        self._ledger_path = Path(config.output.folder) / dp.LEDGER_FILE
        self._engine = dp.PrivacyEngine(
            accountant=self._privacy.accountant,
            secure_noise=self._privacy.secure_noise,
            ledger=None if run.is_replay else self._ledger_path,
        )
        self._record_key: rng.Key | None = None
        self._state: Mapping[str, Any] | None = None
        self._loader: dp.PrivateLoader | None = None
        self._noise_multiplier = self._privacy.noise_multiplier
        self._epsilon, self._epsilon_step = math.inf, 0

    def prepare(self, state: Mapping[str, Any] | None) -> None:
        """Choose the noise for the run's steps, or take that of a checkpoint."""
        self._state = state
        if self._config.output.resume:
            is_known = self._run.world.on_main(self._check_rows)
            if not is_known and self._config.output.seal_key is None:
                self._run.notes.append(
                    "of its rows only the number was compared: a private run keeps no hash of "
                    "them, unless --data-salt names a secret for it"
                )
        if state is not None:
            with self._reading():
                self._noise_multiplier = state["mechanism"]["noise_multiplier"]
                check.positive(noise_multiplier=self._noise_multiplier)
                if state["loader"]["next_step"] != self._run.progress.step:
                    raise BadInput(f"its loader is at step {short(state['loader']['next_step'])}")
        elif self._privacy.epsilon is not None:
            # One rank computes for all: it takes seconds of a core.
            of_budget = partial(
                dp.noise_multiplier_for,
                target_epsilon=self._privacy.epsilon,
                target_delta=self._privacy.delta,
                sampling=self._sampling,
                steps=self._config.mechanism.steps,
                accountant=self._privacy.accountant,
                rounded_elements=self._run.num_parameters,
            )
            self._noise_multiplier = self._run.world.on_main(of_budget)

    def _check_rows(self) -> bool:
        """Refuse rows that the ledger commits to others of; returns whether it commits to any.

        Raises:
            BadInput: If they, or the salt, are not those of before.
        """
        path, salt = self._ledger_path, self._config.output.data_salt
        sessions = dp.read_ledger(path).sessions if path.is_file() else []
        known = {each.commitment for each in sessions} - {None}
        if salt is None or not known:
            return False
        found = None
        if Path(salt).exists():  # none is made now
            session = dp.Session(num_records=self._rows.num_rows)
            found = dp.commit_to_data(session, salt=salt, data_id=self._rows.digest(), ledger=path)
        if found is None or found.commitment not in known:
            raise BadInput(
                f"the rows of this run, or the salt {salt}, have changed: {path} commits to "
                "others; put the old ones back, or start a new run"
            )
        return True

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Name the file of a state that is none."""
        try:
            yield
        except (BadInput, KeyError, TypeError, AttributeError, ValueError) as error:
            raise BadInput(
                f"{self._run.source}: extra.regime cannot be used: "
                f"{'' if isinstance(error, BadInput) else type(error).__name__ + ' '}{error}"
            ) from error

    def describe(self) -> list[str]:
        """Say what is protected, and how."""
        mechanism, privacy = self._config.mechanism, self._privacy
        goal = f"for ε ≤ {privacy.epsilon:g}" if privacy.epsilon else "as given"
        lines = [
            f"private, one row is one record: {in_words(self._sampling)}; clip norm C = "
            f"{privacy.max_grad_norm:g}, noise multiplier σ = {self._noise_multiplier:.4g} {goal} "
            f"at δ = {privacy.delta:g}"
        ]
        if self._rows.layout == "packed":
            lines.append(
                "a packed row is a stretch of text, and a document may lie in several: --layout "
                "documents protects documents"
            )
        if self._config.output.seal_key is not None:
            lines.append(
                f"the key is kept in {escape(self._config.output.seal_key)}, sealed: whoever opens "
                "it can replay the run, and take its noise off"
            )
        if not privacy.secure_noise:
            lines.append(
                f"[bold]noise and sampling come from seed {mechanism.seed}: whoever knows it can "
                "remove them, and nothing that this run gives is private[/]"
            )
        return lines

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Make the model private, with the run's ledger, and give it back at the end."""
        mechanism, privacy = self._config.mechanism, self._privacy
        is_ordered = mechanism.reducer == "ordered"
        assert self._noise_multiplier is not None  # of `prepare`
        is_shuffled, salt = isinstance(self._sampling, dp.Shuffled), self._config.output.data_salt
        budget = None
        if privacy.epsilon is not None and not self._run.is_replay:  # which spends nothing
            budget = dp.Budget(epsilon=privacy.epsilon, delta=privacy.delta, steps=mechanism.steps)
        key, commitment = self._kept_key()
        if not privacy.secure_noise:
            self._record_key = rng.Key.from_seed(mechanism.seed).child("record")
        with warnings.catch_warnings():
            # `describe` says it, as one sentence.
            warnings.filterwarnings("ignore", message="noise and sampling come from a seed")
            _, _, self._loader = self._engine.make_private(
                module=self._run.parallel.module,
                optimizer=self._run.optimizer,
                data_loader=DataLoader(
                    self._rows.numbered(),  # dropout's masks hang on the numbers
                    mechanism.batch_size,
                    shuffle=True,
                    drop_last=is_shuffled,
                ),
                noise_multiplier=self._noise_multiplier,
                max_grad_norm=privacy.max_grad_norm,
                clipping=self._config.execution.clipping,
                clip_rule=privacy.clip_rule,
                sampling=self._sampling,
                expected_batch_size=mechanism.batch_size,
                max_physical_batch_size=self._config.execution.micro_batch_size,
                budget=budget,
                granule=mechanism.granule if is_ordered else None,
                compile=mechanism.compile,
                # A replay releases nothing: if samples mixed later, its digests would say so.
                recheck=not self._run.is_replay,
                seed=None if privacy.secure_noise else mechanism.seed,
                key=key,
                key_commitment=commitment,
                data_salt=salt,
                # The rank that writes the ledger reads the rows for it.
                data_id=self._rows.digest() if salt and self._run.world.is_main else None,
            )
        try:
            if self._state is not None:
                # The rank that has the ledger may refuse; then all do.
                self._run.world.agree(partial(self._load, self._state))
            if key is not None and self._engine.ledger.session.key_commitment is not None:
                self._record_key = key.child("record")
            # Whether the model can be clipped, before any budget is spent: here rather than in the
            # first step, where dropout expects the rows of that step. Each rank takes a row of its
            # own, as in training: ranks that are fed the same one are warned of.
            row = self._rows.rows([self._run.world.rank % self._rows.num_rows])["input_ids"]
            with self._run.cast():
                self._engine.check(row.to(self._run.world.device))
            yield
        finally:
            self._loader.abandon()
            self._engine.detach()

    def _kept_key(self) -> tuple[rng.Key | None, str | None]:
        """The key that its owner keeps, if any does, and the commitment to it; a collective."""
        output, run = self._config.output, self._run
        if output.seal_key is None:
            return None, None
        path, folder, found = Path(output.seal_key), Path(output.folder), list[rng.Key]()

        def find() -> str:
            passphrase, data = rng.read_passphrase(output.passphrase_file), self._rows.digest()
            if not (run.is_replay or output.resume):
                if folder.resolve() in path.resolve().parents:
                    raise BadInput(
                        f"the sealed key {path} would lie in the run's folder, where whoever gets "
                        "the run finds it: name another place"
                    )
                found.append(rng.Key.from_entropy())
                return rng.seal_key(found[0], path, passphrase, data)
            key, commitment = rng.open_sealed_key(
                path, passphrase, data, is_reproducible=run.is_replay
            )
            sessions = dp.read_ledger(self._ledger_path).sessions
            if commitment not in {each.key_commitment for each in sessions}:
                raise BadInput(
                    f"{path} holds the key of another run: {self._ledger_path} commits to none "
                    "like it"
                )
            changed = run.changed_conditions()
            if self._config.execution.clipping != read_config(folder).execution.clipping:
                changed.append("clipping")
            if changed and not run.is_replay:
                raise BadInput(
                    "the same noise on other bits would give the data away, and here these differ "
                    f"from where the run began: {', '.join(changed)}; leave --seal-key out to go "
                    "on under a fresh key"
                )
            found.append(key)
            return commitment

        commitment = self._run.world.on_main(find)
        # What the other ranks bring to it is replaced by the main one's.
        others = rng.Key.from_seed(0) if run.is_replay else rng.Key.from_entropy()
        return (found[0] if found else others).agree(), commitment

    def _load(self, state: Mapping[str, Any]) -> None:
        with self._reading():
            self._engine.load_state_dict(state)

    def state_dict(self) -> dict[str, Any]:
        """Return the engine's state; never a key."""
        return self._engine.state_dict()

    def witnessed(self, state: dict[str, Any]) -> dict[str, Any]:
        """The state with the position of the ledger's file, which another rank may write.

        Raises:
            BadInput: If the file does not count the step before.
        """
        found, last = dp.read_ledger(self._ledger_path), state["loader"]["next_step"] - 1
        if all(each.step != last for each in found.releases):
            raise BadInput(f"{found.path} does not count step {last}, which was taken")
        head = asdict(found.whole_head)
        return state | {"ledger": state["ledger"] | {"is_in_memory": False, "head": head}}

    def passes(self, steps: range) -> Generator[Batch, None, None]:
        """Draw this rank's passes; what they hold is drawn anew after a resumption."""
        loader = self._loader
        assert loader is not None
        assert loader.next_step == steps.start
        # The targets of a draw are private; of so many rows, padding counted, they are not.
        num_targets = self._config.mechanism.batch_size * self._rows.row_length
        while True:
            for batch in loader:
                yield {**batch, "num_targets": num_targets}

    def is_step_complete(self) -> bool:
        """Whether the loader has handed out all of a draw."""
        assert self._loader is not None
        return self._loader.current is None or self._loader.current.is_last

    def objective(self, logits: Tensor, batch: Batch) -> tuple[Tensor, bool]:
        """Make the rows' losses; the engine undoes the mean over the logical batch.

        A row's loss is the mean over its own targets. One over all targets of the batch would
        couple rows through its denominator.
        """
        losses = unison.per_sample_loss(logits, batch["labels"], IGNORE_INDEX)  # [rows]
        return losses, self.is_step_complete()

    def facts(self, step: int) -> tuple[dict[str, float], str]:
        """Return what no ε covers, and ε: it is computed now and then, for the steps ahead."""
        found = self._engine.diagnostics()  # a collective
        if self._run.world.is_main and step > self._epsilon_step:  # the others show nothing
            self._look_ahead(step)
        metrics: dict[str, float] = {
            "privacy/median_norm": found.median_norm,
            "privacy/clipped_fraction": found.clipped_fraction,
            "privacy/num_dropped": found.num_dropped,
        }
        # Of a seeded run ε is infinite: this is what it would be under a secret key.
        is_secure, is_exact = self._privacy.secure_noise, step == self._epsilon_step
        if is_exact:
            name = "privacy/epsilon" if is_secure else "privacy/epsilon_if_secret"
            metrics[name] = self._epsilon
        what = "ε" if is_secure else "seeded: ε if secret"
        return metrics, f"{what} {'=' if is_exact else '≤'} {self._epsilon:.3f}"

    def _look_ahead(self, step: int) -> None:
        """Compute ε as it will be after the steps until the next time."""
        num_steps = self._config.mechanism.steps
        every = max(self._config.output.eval_every or num_steps, -(-num_steps // MAX_EPSILONS))
        self._epsilon_step = min(-(-step // every) * every, num_steps)
        spending = self._engine.ledger.spending.copy()
        for ahead in range(step, self._epsilon_step):  # the engine counts steps from 0
            spending.add(self._engine.mechanism.release(ahead))
        epsilon = dp.epsilon_if_secret(spending, self._privacy.delta, self._privacy.accountant)
        self._epsilon = min(epsilon, self._privacy.epsilon or math.inf)  # the budget's guard

    def recorded(self, step: int, rows: str, loss: float) -> dict[str, Any]:
        """What was applied; what no ε covers, as outputs of a hash under the key, or not at all."""
        release, session = self._engine.last_release, self._engine.ledger.session
        found: dict[str, Any] = {
            "noise_multiplier": release.noise_multiplier,
            "max_grad_norm": release.max_grad_norm,
            "key": session.key_commitment or ("seed" if session.is_seeded else "lost"),
        }
        if self._record_key is not None:
            for name, value in {"rows": rows, "loss": loss.hex()}.items():
                found[name] = self._record_key.derive(name, step, value, size=16).hex()
        return found

    def result(self, budget_sentence: str | None) -> PrivacyResult:
        """Return what was applied and spent."""
        privacy, ledger = self._privacy, self._engine.ledger
        assert self._noise_multiplier is not None
        if_secret = self._run.world.on_main(partial(ledger.epsilon_if_secret, privacy.delta))
        return PrivacyResult(
            epsilon=math.inf if ledger.spending.num_seeded else if_secret,
            epsilon_if_secret=if_secret,
            delta=privacy.delta,
            accountant=privacy.accountant,
            target_epsilon=privacy.epsilon,
            noise_multiplier=self._noise_multiplier,
            max_grad_norm=privacy.max_grad_norm,
            clip_rule=privacy.clip_rule,
            sampling=in_words(self._sampling),
            batch_size=self._config.mechanism.batch_size,
            num_rows=self._rows.num_rows,
            num_counted=ledger.num_intents,
            is_secure=privacy.secure_noise,
            budget_sentence=budget_sentence,
            ledger=str(ledger.path),
        )


def in_words(sampling: dp.Sampling) -> str:
    """A sampling as a person reads it.

    >>> in_words(dp.Poisson(rate=0.0125))
    'Poisson, q = 0.0125'
    """
    match sampling:
        case dp.Poisson(rate=rate):
            return f"Poisson, q = {rate:.4g}"
        case dp.TruncatedPoisson(rate=rate, capacity=capacity):
            return f"Poisson, q = {rate:.4g}, at most {capacity:,} rows"
    return "shuffled, no amplification"
