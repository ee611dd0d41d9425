"""`PrivacyCallback`: private training with Lightning's automatic optimisation.

```python
private = unison.lightning.PrivacyCallback(
    unison.Privacy(epsilon=3, delta=1e-5), ledger="run/ledger.jsonl"
)
trainer = lightning.Trainer(max_epochs=3, callbacks=[private])
trainer.fit(model, train_dataloaders=loader)
```

Lightning is given a loader that draws a logical batch and hands out its first pass. The user's own
`training_step` runs for each of its passes, so that one step of Lightning's is one logical batch,
whatever it counts: schedules, `max_steps`, logging, checkpoints.

Whatever hooks of training log, in the LightningModule or in a callback, may be made of single
records, and nobody can tell: it is shown and not written, unless it is declared public.
"""

import os
import re
import warnings
from collections.abc import Iterator, Mapping
from functools import partial, update_wrapper
from itertools import chain, repeat
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from unison.config import Privacy
from unison.errors import BadInput, UnsupportedOperation
from unison.privacy import (
    BudgetSpent,
    PrivacyEngine,
    PrivateLoader,
    attach,
    is_public,
    refuse_training_rows,
    resized,
    sampling_for,
    steps_per_epoch,
)


class PrivacyCallback(Callback):
    """Makes the steps of a Lightning Trainer private.

    What is made private is the one child that holds all trainable parameters, or else the
    LightningModule itself, whose `training_step` must then call `self(...)`. What `training_step`
    logs is shown and not written, since no ε covers it. ε and σ are logged in its place.

    Args:
        privacy: What the run applies. `privacy.epsilon` decides the noise for all of the run's
            steps, and is a budget: training ends before a step that would pass it.
        ledger: File to write the ledger to. A run that goes on from a checkpoint must find it, so
            it lies beside checkpoints, not in a folder that Lightning numbers anew.
        max_physical_batch_size: Most rows in one pass of one process; the loader's batch size,
            times the number of processes, is that of a step.
        seed: Used where `privacy.secure_noise` is off.
        settings: Other arguments of `PrivacyEngine.make_private`, such as `row_shape`.

    Attributes:
        engine: The engine, while training runs.
    """

    def __init__(
        self,
        privacy: Privacy,
        *,
        ledger: str | os.PathLike[str],
        max_physical_batch_size: int | None = None,
        seed: int = 0,
        **settings: Any,
    ) -> None:
        if not isinstance(privacy, Privacy):
            raise BadInput(f"privacy must be a unison.Privacy(...), found {privacy!r}")
        self.privacy, self._ledger, self._seed = privacy, ledger, seed
        self._settings = {**settings, "max_physical_batch_size": max_physical_batch_size}
        self.engine: PrivacyEngine | None = None
        self._state: Mapping[str, Any] | None = None  # of a checkpoint
        self._last: Mapping[str, Any] = {}  # of the run that has ended
        self._loader: PrivateLoader | None = None
        self._batches: Iterator[Any] = iter(())  # of all epochs
        self._has_told = False  # that figures of training are not written

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Put a loader that counts steps in the place of the user's."""
        if stage != "fit":
            return
        refusals = {
            f"strategy {type(trainer.strategy).__name__}": (
                not isinstance(trainer.strategy, SingleDeviceStrategy | DDPStrategy),
                "use one device, or strategy='ddp'",
            ),
            "manual optimisation": (not pl_module.automatic_optimization, "use make_private"),
            "accumulate_grad_batches": (
                trainer.accumulate_grad_batches != 1
                or any(
                    each.going_to_accumulate_grad_batches()
                    for each in trainer.callbacks  # type: ignore[attr-defined]
                    if isinstance(each, GradientAccumulationScheduler)
                ),
                "give the loader a larger batch size, and the callback max_physical_batch_size",
            ),
            "precision 16-mixed": (trainer.precision == "16-mixed", "use bf16-mixed"),
        }
        for name, (is_set, remedy) in refusals.items():
            if is_set:
                raise UnsupportedOperation(f"PrivacyCallback cannot be used with {name}; {remedy}")
        source = trainer.fit_loop._data_source
        data: Any = source.dataloader()
        if not isinstance(data, DataLoader) or data.batch_size is None:
            raise BadInput(
                "PrivacyCallback takes one DataLoader with a batch_size, found "
                f"{type(data).__name__}: one data set has one ε"
            )
        size = data.batch_size * trainer.world_size  # a loader's is that of one process
        self._data = resized(data, size, drop_last=data.drop_last)
        sampling = sampling_for(self.privacy, size, len(data.dataset))  # type: ignore[arg-type]
        source.instance = _Steps(self, trainer, steps_per_epoch(sampling))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach the engine, and run the passes of a step where Lightning runs one batch."""
        if len(trainer.optimizers) != 1:
            raise UnsupportedOperation(
                f"PrivacyCallback takes one optimizer, found {len(trainer.optimizers)}: one "
                "optimizer must hold all trainable parameters"
            )
        # The one child that holds all trainable parameters, or else the module itself.
        wanted = {id(each) for each in pl_module.parameters() if each.requires_grad}
        holders = (
            child
            for child in pl_module.children()
            if wanted and wanted <= {id(each) for each in child.parameters()}
        )
        self.engine, self._loader = attach(
            self.privacy,
            module=next(holders, pl_module),
            optimizer=trainer.optimizers[0],
            data_loader=self._data,
            steps=int(trainer.estimated_stepping_batches),
            seed=self._seed,
            ledger=self._ledger,
            **self._settings,
        )
        self._batches = chain.from_iterable(repeat(self._loader))
        self.engine.watch(pl_module)  # checkpoints hold all of it
        if self._state is not None:
            self.engine.load_state_dict(self._state)
        # The engine adds the processes' gradients up: DDP would wait for some, and none come.
        trainer.strategy.model = pl_module
        step = partial(self._training_step, trainer, pl_module)
        # Lightning looks at the arguments of the user's.
        pl_module.training_step = update_wrapper(step, pl_module.training_step)  # type: ignore[method-assign]
        self._log, self._has_told = pl_module.log, False
        pl_module.log = partial(self._log_shown, trainer)  # type: ignore[method-assign]

    def draw(self, trainer: Trainer) -> Any:
        """Return the first pass of the next logical batch; None, and the run ends, at the budget.

        Raises:
            UnsupportedOperation: If somebody else trains, or adds several batches up.
        """
        if self._loader is None:
            raise UnsupportedOperation(
                "a loop that PrivacyCallback is no part of asks for training rows, and would train "
                "on them without noise or ledger (LearningRateFinder and BatchSizeFinder do): "
                "leave it out"
            )
        if trainer.accumulate_grad_batches != 1:
            raise UnsupportedOperation(
                f"accumulate_grad_batches has become {trainer.accumulate_grad_batches}, and would "
                "add up the noise of several steps; give the loader a larger batch size, and the "
                "callback max_physical_batch_size"
            )
        try:
            return next(self._batches)
        except BudgetSpent as error:
            trainer.should_stop = True
            trainer.lightning_module.print(f"training ends here: {error}")
            return None

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse to validate on rows that are trained on, as far as that can be seen."""
        if trainer.state.fn == "fit":
            for each in tree_leaves(trainer.val_dataloaders):
                refuse_training_rows(getattr(each, "dataset", None), self._data.dataset)

    def _training_step(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, *args: Any
    ) -> Any:
        """Run the user's step for all passes of a logical batch; return what the last one does."""
        assert self._loader is not None
        while True:
            output: Any = type(pl_module).training_step(pl_module, batch, *args)
            loss = output.get("loss") if isinstance(output, Mapping) else output
            if loss is None:
                raise UnsupportedOperation(
                    "training_step returned no loss, to skip a step: rows that are drawn are "
                    "counted; return a loss for every batch"
                )
            if not self._loader.is_open:
                return output
            trainer.strategy.backward(loss, None)
            # As Lightning does with the first.
            batch = trainer.precision_plugin.convert_input(next(self._batches))
            batch = pl_module._on_before_batch_transfer(batch, dataloader_idx=0)
            batch = trainer.strategy.batch_to_device(batch, dataloader_idx=0)
            trainer._logger_connector.on_batch_start(batch)

    def _log_shown(
        self,
        trainer: Trainer,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: Any = None,
        *args: Any,
        **more: Any,
    ) -> None:
        """`LightningModule.log`, in training without loggers."""
        if trainer.training and not is_public(value):
            _refuse_chosen_by(trainer, name)
            if logger is not False and trainer.loggers and not self._has_told:
                self._has_told = True
                warnings.warn(
                    f"{name!r}, and what else is logged in training, is shown and not written to "
                    "loggers, since no ε covers figures of training rows. Log figures of held-out "
                    "rows in validation, or self.log(name, unison.public(value)) what is public, "
                    "as the norm of private gradients is",
                    stacklevel=3,
                )
            logger = False
        self._log(name, value, prog_bar, logger, *args, **more)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log σ, and at the end of an epoch ε."""
        assert self.engine is not None
        assert self._loader is not None
        self._loader.leave()  # what comes until the next step is not followed
        release = self.engine.mechanism.release(max(0, self._loader.next_step - 1))
        self._log("noise_multiplier", release.noise_multiplier, batch_size=1)
        if trainer.is_last_batch:
            epsilon = self.engine.ledger.epsilon_if_secret(self.privacy.delta)
            # Of a seeded run ε is infinite: this is what it would be under a secret key.
            name = "epsilon" if self.privacy.secure_noise else "epsilon_if_secret"
            self._log(name, epsilon, batch_size=1)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds of privacy; never a key."""
        return dict(self._last) if self.engine is None else self.engine.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint, once training starts."""
        self._state = state_dict or None

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Give module and optimizer back as they were."""
        if self.engine is None or self._loader is None:
            return
        for name in ("training_step", "log"):
            vars(pl_module).pop(name, None)
        self._loader.abandon()
        self._last = self.engine.state_dict()  # for trainer.save_checkpoint, after fit
        self.engine.detach()
        self.engine = self._loader = self._state = None
        self._batches = iter(())

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Give module and optimizer back as they were."""
        self.teardown(trainer, pl_module, "fit")


class _Steps:
    """What Lightning takes for the loader of training rows: the first pass of every step.

    It has a length, so that Lightning does not read ahead.
    """

    def __init__(self, callback: PrivacyCallback, trainer: Trainer, num_steps: int) -> None:
        self._callback, self._trainer, self._num_steps = callback, trainer, num_steps

    def __len__(self) -> int:
        return self._num_steps

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self._num_steps):
            batch = self._callback.draw(self._trainer)
            if batch is None:
                return
            yield batch


def _refuse_chosen_by(trainer: Trainer, name: str) -> None:
    """Refuse to let a figure of training rows choose, or name, what is kept."""
    names = {name, f"{name}_step", f"{name}_epoch"}
    monitors = [*trainer.callbacks, *trainer.lr_scheduler_configs]  # type: ignore[attr-defined]
    if names & {getattr(each, "monitor", None) for each in monitors}:
        raise BadInput(
            f"a callback or schedule monitors {name!r}, which training_step logs: no ε "
            "covers what is chosen by it; monitor a figure of held-out rows"
        )
    for each in monitors:
        filename = getattr(each, "filename", None)
        if isinstance(filename, str) and names & set(re.findall(r"\{(.*?)[:\}]", filename)):
            raise BadInput(
                f"{type(each).__name__}(filename={filename!r}) would write {name!r} into the names "
                "of files: no ε covers a figure of training rows; name files by a figure of "
                "held-out rows"
            )
