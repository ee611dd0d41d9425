"""`PrivateTrainer`: transformers' `Trainer`, whose steps are private.

One step of the Trainer is one logical batch. What the Trainer takes for its data loader only counts
steps; `get_batch_samples`, by which the Trainer asks for the batches of a step, draws a logical
batch, whose passes go through `training_step` one by one. All else (schedules, logging, evaluation,
checkpoints) is the Trainer's own, and counts steps as it always does.

What is written to files is covered by ε: the loss of training rows, counts of their tokens and the
size of a draw are not, and are left out.
"""

import copy
import inspect
import json
import logging
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, IterableDataset, RandomSampler
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import TrainOutput

from unison.config import Privacy
from unison.errors import BadInput, UnsupportedOperation
from unison.hf.token_loss import IGNORED, logits_of, recognised_shift, token_losses
from unison.privacy import (
    LEDGER_FILE,
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
from unison.run_files import read_state, write_state
from unison.schema import cut, read_json
from unison.shard import (
    ShardedTensor,
    full_optimizer_state_dict,
    full_state_dict,
    load_full_optimizer_state_dict,
    units_of,
)

STATE_FILE = "privacy.json"  # of the engine, in a checkpoint
TRAINING_FILE = "training_state.safetensors"  # of the optimizer and the schedule
_WEIGHTS = {  # what a checkpoint may hold a model as: a pickle -> what is read in its place
    "pytorch_model.bin": "model.safetensors",
    "pytorch_model.bin.index.json": "model.safetensors.index.json",
    "adapter_model.bin": "adapter_model.safetensors",
}
_NUM_TRIED = 8  # records among which the loss of a model is recognised
_UNCOVERED = ("loss", "train_loss", "total_flos")  # what the Trainer logs of training rows

MAX_EPSILONS = 20  # of a run, while it goes on: one by PLD takes a second

logger = logging.getLogger(__name__)


class PrivateTrainer(Trainer):
    """transformers' `Trainer` with private steps.

    `per_device_train_batch_size` rows go through the model in one pass; so many times
    `gradient_accumulation_steps` and the number of processes is the logical batch, of which every
    step draws about as many. Steps, epochs, schedules, logging, evaluation and checkpoints count
    logical batches. `max_grad_norm` of the arguments clips the noisy gradient, as it does any.

    A class that derives from it and then from another Trainer, such as TRL's, has that one's steps
    made private. A `compute_loss` or `training_step` of your own is called for every pass.

    Guarantees:
        One step of the optimizer is one logical batch, one intent and one commit in the ledger. A
        row's gradient depends on that row alone: records are collated one by one and brought to
        one public length, and the loss is the mean over rows of each row's own mean. Nothing of the
        training rows is logged or saved but what ε covers.

    Args:
        args: The Trainer's own arguments, by position.
        privacy: What the run applies. `privacy.epsilon` decides the noise for all of the run's
            steps, and is a budget: training ends before a step that would pass it.
        max_length: Tokens that every row is cut or padded to; without it rows must come at one
            length. It must be public: not the length of the longest record.
        make_private: Other arguments of `PrivacyEngine.make_private`, such as `loss_reduction`.
        settings: The Trainer's own arguments, by name.

    Raises:
        BadInput: Arguments that cannot be used together.
        UnsupportedOperation: Arguments with which nothing would be private.
    """

    model: Any
    args: Any
    optimizer: Any
    lr_scheduler: Any
    train_dataset: Any

    # Losses that `compute_loss` here stands in for.
    _usual_losses: tuple[Callable[..., Any], ...] = (Trainer.compute_loss,)

    def __init__(
        self,
        *args: Any,
        privacy: Privacy,
        max_length: int | None = None,
        make_private: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        if not isinstance(privacy, Privacy):
            raise BadInput(f"privacy must be a unison.Privacy(...), found {privacy!r}")
        if not hasattr(Trainer, "_prepare_for_training"):
            raise BadInput(
                f"transformers {transformers.__version__} has another Trainer than the one that "
                "this extends: pip install 'unison[hf]'"
            )
        # Before TRL makes other data sets of them.
        given = inspect.signature(super().__init__).bind_partial(*args, **settings).arguments
        if type(given.get("model")).__name__ == "OptimizedModule":
            raise UnsupportedOperation(
                "the model is what torch.compile(model) returned, of which the Trainer cannot tell "
                "which columns it takes: give it the model itself, and "
                "TrainingArguments(torch_compile=True), or call model.compile()"
            )
        refuse_training_rows(given.get("eval_dataset"), given.get("train_dataset"))
        super().__init__(*args, **settings)
        self.privacy = privacy
        self._max_length = max_length or getattr(self.args, "max_length", None)  # TRL's have one
        self._make_private = dict(make_private or {})
        self._batch_size = 0  # of a logical batch, while a run goes on
        self._is_shifted: bool | None = None  # whether a token predicts the next; None: no tokens
        self._is_in_step = self._has_told = False  # that figures of training rows are not logged
        self._epsilon, self._epsilon_step = 0.0, 0  # as computed last, and after which step
        self._engine: PrivacyEngine | None = None
        self._loader: PrivateLoader | None = None
        self._batches: Iterator[Any] = iter(())  # of all epochs
        self._whole: dict[str, Tensor] | None = None  # a sharded model's values, while it is saved
        _refuse(self)

    # --- a run -----------------------------------------------------------------------------------

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train as the Trainer does, privately; the ledger is in `output_dir`.

        Returns:
            The Trainer's output, whose `training_loss` is NaN: no ε covers the loss of training
            rows.
        """
        if trial is not None:
            raise UnsupportedOperation(
                "a search over hyperparameters shows results of many runs on the same rows, and "
                "the ledger of each counts only its own: run them one by one, and add them up with "
                "`unison account RUN RUN ...`"
            )
        users, self._epsilon, self._epsilon_step = self.args, 0.0, 0
        self._batch_size = self.get_total_train_batch_size(users)
        # The passes of a logical batch are the accumulation; the Trainer sees one batch a step.
        self.args = copy.copy(users)
        self.args.gradient_accumulation_steps = 1
        kept = vars(self).get("training_step")
        # What a class of the user's overrides is a step of one pass, here as in the Trainer.
        self.training_step = partial(self._train_on_passes, self.training_step)  # type: ignore[assignment]
        try:
            return super().train(resume_from_checkpoint, ignore_keys_for_eval=ignore_keys_for_eval)
        finally:
            self.args = users
            del self.training_step
            if kept is not None:
                self.training_step = kept
            if self._engine is not None and self._loader is not None:
                self._loader.abandon()
                self._engine.detach()
            self._engine = self._loader = None
            self._batches, self._batch_size = iter(()), 0

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return a loader that counts steps: one number for every logical batch of an epoch.

        While no run goes on it is the Trainer's own: the rows, as they would be without privacy.
        """
        theirs = super().get_train_dataloader()
        if not self._batch_size:
            return theirs
        tokenizer, config = self.processing_class, getattr(self.model, "config", None)
        padding = getattr(tokenizer, "pad_token_id", None)
        padding = getattr(config, "pad_token_id", None) if padding is None else padding
        is_shuffled = self.privacy.sampling == "shuffled"
        self._data = resized(
            theirs,
            self._batch_size,
            RandomSampler(theirs.dataset),  # type: ignore[arg-type]
            drop_last=is_shuffled or self.args.dataloader_drop_last,
            collate_fn=RowCollator(
                theirs.collate_fn,
                self._max_length,
                padding or 0,
                takes_mask="attention_mask" in inspect.signature(self._base.forward).parameters,
            ),
        )
        sampling = sampling_for(self.privacy, self._batch_size, len(theirs.dataset))  # type: ignore[arg-type]
        return DataLoader(range(steps_per_epoch(sampling)))  # type: ignore[arg-type]

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """As the Trainer's; rows that are trained on are refused."""
        is_named = eval_dataset is None or isinstance(eval_dataset, str)  # given, and looked at
        refuse_training_rows(None if is_named else eval_dataset, self.train_dataset)
        return super().get_eval_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader[Any]:
        """As the Trainer's; rows that are trained on are refused."""
        refuse_training_rows(test_dataset, self.train_dataset)
        return super().get_test_dataloader(test_dataset)

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> tuple[nn.Module, Any]:
        """Attach the engine to what the Trainer has prepared, and go on from a checkpoint."""
        # The Trainer's word for a model that sees to its own gradients: it is not put into DDP.
        self.is_distributed_loading_by_transformers = _are_sharded(self.model)
        try:
            prepared = super()._prepare_for_training(
                max_steps, train_dataloader, resume_from_checkpoint
            )
        finally:
            self.is_distributed_loading_by_transformers = False
        self._is_shifted = self._recognised_loss()
        settings = {"max_physical_batch_size": self.args.per_device_train_batch_size}
        self._engine, self._loader = attach(
            self.privacy,
            module=prepared[0],
            optimizer=self.optimizer,
            data_loader=self._data,
            steps=max_steps,
            seed=self.args.seed,
            ledger=Path(self.args.output_dir) / LEDGER_FILE,
            **settings | self._make_private,
        )
        self._batches = chain.from_iterable(repeat(self._loader))
        if resume_from_checkpoint is not None:
            path = _require_file(Path(resume_from_checkpoint) / STATE_FILE)
            self._engine.load_state_dict(read_json(path))
        return prepared

    def _sync_replicated_trainable_parameters(self, model: nn.Module) -> None:
        """Nothing: the engine adds the ranks' gradients up."""

    # --- what is saved ---------------------------------------------------------------------------

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Move a model, unless it is sharded: that is where it belongs."""
        if not _are_sharded(model):
            return super()._move_model_to_device(model, device)
        found = next(model.parameters()).device.type
        if found != device.type:
            raise BadInput(
                f"the model is sharded on {found} and would train on {device.type}: move it there "
                "before it is sharded"
            )
        return None

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the whole model, as the Trainer does; with a sharded one every process must call."""
        if _are_sharded(self.model):
            each_node = self.args.save_on_each_node
            self._whole = full_state_dict(self.model, rank0_only=not each_node)
        try:
            super().save_model(output_dir, _internal_call)
        finally:
            self._whole = None

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        super()._save(output_dir, state_dict if self._whole is None else self._whole)

    # What torch would write as pickles, and read as such, is safetensors and JSON here.

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if _are_sharded(self.model):
            each_node = self.args.save_on_each_node
            optimizer = getattr(self.optimizer, "optimizer", self.optimizer)  # accelerate's has one
            state = full_optimizer_state_dict(self.model, optimizer, rank0_only=not each_node)
        else:
            state = self.optimizer.state_dict()
        if not self.args.should_save:
            return
        states = {"optimizer": state, "scheduler": self.lr_scheduler.state_dict()}
        try:
            save_states(Path(output_dir) / TRAINING_FILE, states)
        except BadInput as error:  # what was trained is not lost for it
            warnings.warn(f"{output_dir} cannot be gone on from: {error}", stacklevel=2)
        if self._engine is not None:
            engines = json.dumps(self._engine.state_dict())
            (Path(output_dir) / STATE_FILE).write_text(engines + "\n")

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        path = Path(checkpoint) / TRAINING_FILE
        if not path.is_file():
            raise BadInput(
                f"{path} is not there: an older unison wrote the checkpoint, or only a pickle "
                "could hold the optimizer's state, and pickles are never loaded; begin a run with "
                "the checkpoint's model, and add its ledger to the new one's: `unison account RUN "
                "RUN`"
            )
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)

        def use(states: dict[str, Any]) -> None:
            if _are_sharded(self.model):
                load_full_optimizer_state_dict(self.model, optimizer, states["optimizer"])
            else:
                self.optimizer.load_state_dict(states["optimizer"])
            self.lr_scheduler.load_state_dict(states["scheduler"])

        load_states(path, use)

    def _save_rng_state(self, output_dir: str) -> None:
        folder = Path(output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        save_states(folder / random_file(self.args), random_state())

    def _load_rng_state(self, checkpoint: str | None) -> None:
        path = Path(checkpoint or "") / random_file(self.args)
        if checkpoint is not None and path.is_file():  # other numbers of processes have others
            load_states(path, set_random_state)

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Nothing: scaled gradients are refused."""

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        _require_file(Path(resume_from_checkpoint) / STATE_FILE)
        refuse_pickled_model(Path(resume_from_checkpoint))
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        refuse_pickled_model(Path(str(self.state.best_model_checkpoint)))
        super()._load_best_model()

    # --- a step ----------------------------------------------------------------------------------

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Iterator[Any]], None]:
        """Draw the logical batch of the next step; none, and the run ends, at the budget."""
        try:
            next(epoch_iterator)
            first = next(self._batches)
        except StopIteration:
            return [], None
        except BudgetSpent as error:
            logger.warning("training ends here: %s", error)
            self.control.should_training_stop = True
            return [], None
        return [self._passes(first)], None

    def _passes(self, first: Any) -> Iterator[Any]:
        assert self._loader is not None
        yield first
        while self._loader.is_open:
            yield next(self._batches)

    def _train_on_passes(
        self,
        training_step: Callable[..., Tensor],
        model: nn.Module,
        passes: Iterator[Any],
        num_items_in_batch: None = None,
    ) -> Tensor:
        """Run the passes of a logical batch; the gradients are there, with noise, after the last.

        Returns:
            Zero: no ε covers the loss of training rows, and the Trainer would write it to files.
        """
        self._is_in_step = True
        try:
            for batch in passes:
                training_step(model, batch, num_items_in_batch)
        finally:
            self._is_in_step = False
        assert self._loader is not None
        self._loader.leave()  # what comes until the next step is not followed
        return torch.zeros((), device=self.args.device)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Return the mean over rows of each row's own mean; in evaluation, the Trainer's own loss.

        Models of transformers divide by the number of labels in the batch, which other rows change.
        A loss that is not the mean over a row's tokens is the model's own, and `compute_loss_func`,
        or the `compute_loss` of another class, is the user's: the engine looks at each of them, and
        refuses one in which rows mix.
        """
        theirs: Any = super().compute_loss
        if not model.training or theirs.__func__ not in self._usual_losses:
            return theirs(model, inputs, return_outputs)
        labels: Any = inputs.get("labels")
        is_of_tokens = torch.is_tensor(labels) and labels.ndim == 2 and self._is_shifted is not None
        if self.compute_loss_func is not None or not is_of_tokens:
            try:
                # The Trainer's own: TRL's would run the model twice, and log what it finds.
                return Trainer.compute_loss(self, model, inputs, return_outputs)  # type: ignore[arg-type]
            except TypeError as error:
                if self.compute_loss_func is None or "NoneType" not in str(error):
                    raise
                raise BadInput(
                    "compute_loss_func cannot compute with num_items_in_batch, which is None in "
                    "private training: divided by a count over all rows of a step, a row's "
                    f"gradient would depend on the others ({error}). Return the mean over rows of "
                    "each row's own mean: unison.per_sample_loss(logits, labels).mean()"
                ) from error
        logits, outputs = logits_of(model, inputs, makes_inputs=self._makes_decoder_inputs)
        losses = token_losses(logits, labels, is_shifted=bool(self._is_shifted))
        return (losses.mean(), outputs) if return_outputs else losses.mean()

    @property
    def _base(self) -> nn.Module:
        """The model, without what PEFT puts around it."""
        return self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model

    @property
    def _makes_decoder_inputs(self) -> bool:
        """Whether the model makes its decoder's inputs of labels, which it then needs."""
        return getattr(getattr(self._base, "config", None), "is_encoder_decoder", False)

    def _recognised_loss(self) -> bool | None:
        """Whether the model's loss is its tokens' mean, of the next or not; None if it is neither.

        It is tried on records before anything is spent.
        """
        data, collate = self._data.dataset, self._data.collate_fn
        assert isinstance(collate, RowCollator)
        pairs = (
            self._prepare_inputs(collate([data[index], data[index]]))  # type: ignore[misc]
            for index in range(min(_NUM_TRIED, len(data)))  # type: ignore[arg-type]
        )
        with self.compute_loss_context_manager():
            makes_inputs, padding = self._makes_decoder_inputs, collate.padding
            return recognised_shift(self.model, pairs, makes_inputs=makes_inputs, padding=padding)

    # --- what is told ----------------------------------------------------------------------------

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log what ε covers, and with it σ, and now and then ε and what the budget has left."""
        if self._is_in_step:
            if not self._has_told and not all(map(is_public, logs.values())):
                self._has_told = True
                warnings.warn(
                    f"{', '.join(logs)}, and what else is logged in training steps, is not "
                    "written, since no ε covers figures of training rows. Log figures of held-out "
                    "rows in evaluation, or self.log({name: unison.public(value)}) what is public",
                    stacklevel=2,
                )
            logs = {name: float(each) for name, each in logs.items() if is_public(each)}
            return super().log(logs, *args, **kwargs) if logs else None
        is_of_training = any(name in logs for name in _UNCOVERED)
        logs = {name: each for name, each in logs.items() if name not in _UNCOVERED}
        every = -(-self.state.max_steps // MAX_EPSILONS)
        is_due = self.state.global_step >= self._epsilon_step + every or "train_runtime" in logs
        if is_of_training and is_due:
            logs |= self._spent()
        return super().log(logs, *args, **kwargs)

    def _spent(self) -> dict[str, float]:
        """ε so far, σ, and what is left of the budget."""
        assert self._engine is not None
        assert self._loader is not None
        privacy, step = self.privacy, self.state.global_step
        if step != self._epsilon_step or not self._epsilon:
            self._epsilon = self._engine.ledger.epsilon_if_secret(privacy.delta)
            self._epsilon_step = step
        # Of a seeded run ε is infinite: this is what it would be under a secret key.
        spent = {"epsilon" if privacy.secure_noise else "epsilon_if_secret": self._epsilon}
        release = self._engine.mechanism.release(max(0, self._loader.next_step - 1))
        spent |= {"delta": privacy.delta, "noise_multiplier": release.noise_multiplier}
        if privacy.epsilon is not None:
            spent["epsilon_left"] = privacy.epsilon - self._epsilon
        return spent

    def _finalize_training(self, *args: Any, **kwargs: Any) -> TrainOutput:
        done = super()._finalize_training(*args, **kwargs)
        metrics = {name: each for name, each in done.metrics.items() if name not in _UNCOVERED}
        return TrainOutput(done.global_step, float("nan"), metrics | self._spent())

    def floating_point_ops(self, inputs: Any) -> int:
        """Return 0: a count of what was computed would tell how many rows were drawn."""
        return 0

    def num_examples(self, dataloader: Any) -> int:
        """Return the number of training rows, where the loader counts steps."""
        is_ours = isinstance(dataloader.dataset, range)
        return len(self._data.dataset) if is_ours else super().num_examples(dataloader)  # type: ignore[arg-type]

    def get_total_train_batch_size(self, args: Any) -> int:
        """Return the rows that a step draws, as expected, on all ranks together."""
        return self._batch_size or super().get_total_train_batch_size(args)


@dataclass
class RowCollator:
    """Collates records one by one, at one public length, so that no row depends on another.

    Attributes:
        collate: The user's collator.
        max_length: Tokens that rows are cut or padded to; None if they come at one length.
        padding: The token to pad `input_ids` with.
        takes_mask: Whether the model takes an `attention_mask`, which padding needs.
        shapes: Of a row, by name, as met first; or what is none of rows, and must stay the same.
    """

    collate: Callable[[list[Any]], Any]
    max_length: int | None
    padding: int
    takes_mask: bool = False
    shapes: dict[str, Any] = field(default_factory=dict)

    def __call__(self, records: Sequence[Any]) -> dict[str, Any]:
        """Return one row for every record."""
        rows = [self._row(self.collate([record])) for record in records]
        return {name: self._joined(name, [row[name] for row in rows]) for name in rows[0]}

    def _row(self, row: Any) -> dict[str, Any]:
        if not isinstance(row, Mapping):
            raise BadInput(
                f"data_collator returned {type(row).__name__}, and a model takes its columns by "
                "name: return a dict, with one row for each record"
            )
        if self.max_length is None:
            return dict(row)
        ids = row.get("input_ids")
        ids = ids if isinstance(ids, Tensor) and ids.ndim > 1 else None
        if self.takes_mask and ids is not None and "attention_mask" not in row:
            row = {**row, "attention_mask": torch.ones_like(ids)}
        return {name: self._fitted(name, each, ids) for name, each in row.items()}

    def _fitted(self, name: str, value: Any, ids: Tensor | None) -> Any:
        """Cut or pad what has one entry per token [1, ..., tokens, ...]; the rest stays."""
        if not isinstance(value, Tensor) or value.ndim < 2:
            return value
        has_prefix = ids is not None and value.shape[: ids.ndim] == ids.shape
        is_of_tokens = has_prefix
        if value.is_floating_point():  # neither images nor scores of classes
            is_of_tokens = has_prefix and value.ndim == 2 and name != "labels"
        elif value.ndim == 2 and not has_prefix:  # has a length of its own
            is_of_tokens = name == "labels" or name.startswith("decoder_")
        if not is_of_tokens:
            return value
        dim = ids.ndim - 1 if ids is not None and has_prefix else 1
        assert self.max_length is not None
        value = value.narrow(dim, 0, min(value.shape[dim], self.max_length))
        missing = [0, 0] * (value.ndim - 1 - dim) + [0, self.max_length - value.shape[dim]]
        fill = {"input_ids": self.padding, "decoder_input_ids": self.padding, "labels": IGNORED}
        return F.pad(value, missing, value=fill.get(name, 0))

    def _joined(self, name: str, parts: list[Any]) -> Any:
        first = parts[0]
        if isinstance(first, Mapping):
            return {
                key: self._joined(f"{name}.{key}", [part[key] for part in parts]) for key in first
            }
        if isinstance(first, list | tuple | np.ndarray):
            return [each for part in parts for each in part]
        shapes = [tuple(each.shape[1:]) if isinstance(each, Tensor) else each for each in parts]
        known = self.shapes.setdefault(name, shapes[0])
        for shape in shapes:
            if shape != known and not isinstance(first, Tensor):
                raise BadInput(
                    f"data_collator makes {name!r} of the records, {known!r} and {shape!r}, and "
                    "not one row for each: return tensors or lists with a row for each record"
                )
            if shape != known:
                remedy = (
                    "Give the trainer a public max_length=, which rows are cut or padded to"
                    if self.max_length is None
                    else "max_length= is for what has one entry per token: cut or pad it to one "
                    "public shape in the data set or the data_collator"
                )
                raise BadInput(
                    f"rows of {name!r} have shapes {list(known)} and {list(shape)}: the longest "
                    f"row of a batch would show in how the others are computed. {remedy}"
                )
        return torch.cat(parts) if isinstance(first, Tensor) else first


def _require_file(path: Path) -> Path:
    """Refuse a checkpoint that cannot be gone on from, since this file of it is missing."""
    if not path.is_file():
        raise BadInput(
            f"{path} is not there: the checkpoint is not that of a private run, or was "
            "saved with save_only_model=True, and cannot be gone on from"
        )
    return path


def _are_sharded(model: nn.Module) -> bool:
    # On one rank parameters are whole, and units are there all the same.
    return bool(units_of(model)) or any(isinstance(p, ShardedTensor) for p in model.parameters())


_REFUSED = {
    "fp16": "scaled gradients cannot be clipped; use bf16=True",
    "deepspeed": "its engine owns the gradients; leave it out",
    "fsdp": "accelerate's sharding owns the gradients; leave it out, and give the trainer a model "
    "that unison.auto_shard has sharded",
    "auto_find_batch_size": "steps that are tried again are spent again; lower "
    "per_device_train_batch_size and raise gradient_accumulation_steps, which leaves the logical "
    "batch as it is",
    "enable_jit_checkpoint": "it saves in the midst of a step, whose rows are drawn already; leave "
    "it out, and set save_steps, from which a run goes on",
    "label_smoothing_factor": "its loss divides by a count over all rows; give compute_loss_func a "
    "mean of rows",
    "parallelism_config": "what splits a row or a layer over processes is not known to clipping; "
    "leave it out",
    "include_num_input_tokens_seen": "the tokens of drawn rows are private; leave it out",
    "train_sampling_strategy": "privacy rests on how rows are drawn; leave it at 'random'",
}
_USUAL = {
    "include_num_input_tokens_seen": "no",
    "train_sampling_strategy": "random",
    "loss_type": "nll",
}


def refuse_settings(settings: Any, remedies: Mapping[str, str]) -> None:
    """Refuse settings that are not as usual and under which nothing would be private.

    Args:
        settings: Arguments of a trainer.
        remedies: Their names, and what to do about each.
    """
    for name, remedy in remedies.items():
        found = getattr(settings, name, None)
        if found and found != _USUAL.get(name):
            raise UnsupportedOperation(
                f"{name}={found!r} cannot be used in private training: {remedy}"
            )


def _refuse(trainer: Any) -> None:
    """Refuse arguments of a Trainer under which nothing would be private, or nothing would run."""
    args = trainer.args
    refuse_settings(args, _REFUSED)
    if isinstance(trainer.train_dataset, IterableDataset):
        raise UnsupportedOperation(
            f"train_dataset is an IterableDataset ({type(trainer.train_dataset).__name__}): its "
            "records have no number, so they cannot be drawn independently; give one with "
            "__getitem__ and __len__"
        )
    if any(isinstance(each, DTensor) for each in trainer.model.parameters()):
        raise UnsupportedOperation(
            "the model is sharded by torch's own fully_shard or parallelize_module, whose "
            "checkpoints the Trainer cannot load; shard it with unison.auto_shard"
        )
    for unit in units_of(trainer.model)[:1]:
        if unit.ranks.size != args.world_size:
            raise BadInput(
                f"the model is sharded over {unit.ranks.size} of {args.world_size} processes: "
                "make the TrainingArguments first, which join them, and shard the model then"
            )
    if getattr(getattr(trainer.model, "config", None), "output_router_logits", False):
        raise UnsupportedOperation(
            "the model's config has output_router_logits=True: the router's loss balances experts "
            "over all rows of a batch, so that rows mix; set it to False, or SFTConfig's "
            "router_aux_loss_coef to 0.0"
        )


# --- checkpoints ----------------------------------------------------------------------------------
# The Trainer's own are `optimizer.pt`, `scheduler.pt` and `rng_state.pth`, which torch reads as
# pickles. Here the same states are safetensors and JSON: tensors, plain values, and marks for what
# JSON would not give back as it was.


def random_file(args: TrainingArguments) -> str:
    """The file with the state of a process's generators."""
    rank = f"_{args.process_index}" if args.world_size > 1 else ""
    return f"rng_state{rank}.safetensors"


def random_state() -> dict[str, Any]:
    """The state of every generator that a user's model or collator may draw from."""
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),  # noqa: NPY002 - the one that users share
        "cpu": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Give generators back what `random_state` returned."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])  # noqa: NPY002
    torch.set_rng_state(state["cpu"])
    if torch.cuda.is_available() and len(state.get("cuda", ())) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])


def save_states(path: Path, state: Mapping[str, Any]) -> None:
    """Write a state of tensors, arrays, and what is made of plain values.

    Raises:
        BadInput: Naming what only a pickle could hold.
    """
    write_state(path, _marked(state, ""))


def load_states(path: Path, use: Callable[[dict[str, Any]], None]) -> None:
    """Read what `save_states` wrote, and use it.

    Raises:
        BadInput: If it is no such file, or does not fit.
    """
    state = _unmarked(read_state(path))
    try:
        use(state)
    except BadInput:
        raise
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise BadInput(
            f"{path} does not fit this run: {cut(repr(error))}; go on with the model, the "
            "optimizer and the schedule that it was begun with"
        ) from error


def refuse_pickled_model(folder: Path) -> None:
    """Refuse a checkpoint whose model, or whose adapter, would be read from a pickle.

    Raises:
        BadInput: Naming the file.
    """
    for root in (folder, *(each for each in folder.glob("*") if each.is_dir())):  # an adapter each
        for pickled, read in _WEIGHTS.items():
            if (root / pickled).is_file() and not (root / read).is_file():
                raise BadInput(
                    f"{root / pickled} is a pickle, which could run code of others and is never "
                    "loaded: load the model yourself where you trust it, and save it again with "
                    "save_pretrained, which writes safetensors"
                )


def _marked(value: Any, path: str) -> Any:
    """The value with marks for what JSON would change; tensors are on the CPU."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case np.generic():
            return value.item()
        case Tensor():
            return value.detach().cpu()
        case np.ndarray():
            return {"__array__": torch.from_numpy(value)}
        case list():
            return [_marked(each, f"{path}[{index}]") for index, each in enumerate(value)]
        case tuple():
            return {"__tuple__": _marked(list(value), path)}
        case Mapping() if all(isinstance(key, str) for key in value):
            return {key: _marked(each, f"{path}[{key!r}]") for key, each in value.items()}
        case Mapping():
            return {"__pairs__": _marked([list(pair) for pair in value.items()], path)}
        case _:
            raise BadInput(f"{path} is of type {type(value).__name__}, which only a pickle holds")


def _unmarked(value: Any) -> Any:
    match value:
        case list():
            return [_unmarked(each) for each in value]
        case {"__tuple__": list(each)} if len(value) == 1:
            return tuple(map(_unmarked, each))
        case {"__array__": Tensor() as tensor} if len(value) == 1:
            return tensor.numpy()
        case {"__pairs__": list(pairs)} if len(value) == 1:
            return {_unmarked(key): _unmarked(each) for key, each in pairs}
        case dict():
            return {key: _unmarked(each) for key, each in value.items()}
        case _:
            return value
