"""Private training while it runs: from clipped sums to noisy gradients, step by step.

loader hands out ── (clipped sums)… ── last physical batch: intent in the ledger ── noise ──
division ── `.grad` ── the user's optimizer.step() ── commit in the ledger
"""

import inspect
import sys
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, SparseAdam

from unison.clip import NormTable, SampleNorms
from unison.clip.bounds import Grid
from unison.errors import BadInput, UnsupportedOperation
from unison.kernels.available import takes
from unison.parallel import (
    MakeSums,
    ParallelAdapter,
    ShardedParam,
    curvatures,
    find_shared,
    private_trainings,
)
from unison.privacy.arguments import listed
from unison.privacy.attachment import Attachment, RunningPass, Summands
from unison.privacy.calibration import BudgetGuard
from unison.privacy.graph import GraphedPass, LossOf
from unison.privacy.learning import ClippingSettings
from unison.privacy.ledger import Ledger
from unison.privacy.loader import PrivateLoader
from unison.privacy.loss_check import LossCheck
from unison.privacy.loss_tape import LossRecorder, memory_of, refuse_unseen
from unison.privacy.mechanism import (
    CLIP_RULES,
    Mechanism,
    Release,
    grid_of,
    grid_of_pass,
    noisy_fraction,
)
from unison.privacy.noise import (
    Given,
    ReleaseTerms,
    give,
    noisy_count,
    private_gradients,
    require_given,
)
from unison.privacy.sampling import (
    Dealing,
    Part,
    PhysicalBatch,
    current_plan,
    gather_objects,
    meet,
    present,
    publish_plan,
)
from unison.rng import Key, NoiseClock
from unison.torch_internals import is_recording, saved_buffers


def refuse_second_trainer(trainable: Mapping[str, nn.Parameter]) -> None:
    """Make sure that neither another engine nor a `KFAC` trains any of these parameters.

    Two engines would clip and noise the gradients of each other, and neither ledger would hold it.
    Curvature of batches gets no noise, and would shape a gradient that has some.

    Raises:
        BadInput: Naming a parameter that another engine trains.
        UnsupportedOperation: Naming one that a `KFAC` preconditions.
    """
    if (name := find_shared(trainable, private_trainings)) is not None:
        raise BadInput(
            f"{name} is trained privately already, by another engine: one parameter, one "
            "engine. detach() the other one first, or make a copy of the module"
        )
    if (name := find_shared(trainable, curvatures)) is not None:
        raise UnsupportedOperation(
            f"{name} is preconditioned by a KFAC, whose curvature of batches gets no noise: a "
            "private gradient that it shapes is no longer private. detach() the KFAC first, and "
            "train without it"
        )


def check_optimizer(optimizer: Optimizer, trainable: Mapping[str, nn.Parameter]) -> None:
    """Require the optimizer to hold the module's trainable parameters and no others."""
    if not isinstance(optimizer, Optimizer):
        raise BadInput(
            f"optimizer= expects a torch.optim.Optimizer, found {type(optimizer).__name__}, whose "
            "steps nobody is told of. If it wraps one, give make_private that one, and wrap the "
            "optimizer that make_private returns"
        )
    if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        raise BadInput(
            f"{type(optimizer).__name__} has not called super().__init__(params, defaults), and so "
            "tells nobody of its steps. Call it there; or, if it wraps an optimizer, give "
            "make_private that one, and wrap the optimizer that make_private returns"
        )
    if isinstance(optimizer, SparseAdam):
        raise UnsupportedOperation(
            f"{type(optimizer).__name__} takes sparse gradients, and private ones are dense, since "
            "every row gets noise: use Adam or AdamW, also for nn.Embedding(sparse=True)"
        )
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise UnsupportedOperation(
            f"{type(optimizer).__name__}.step needs a closure, and calls it as often as it likes: "
            "every call would release the batch again, and be spent again. Use an optimizer of "
            "first order that steps without one, such as SGD or AdamW"
        )
    missing, others = _held_otherwise(optimizer, trainable)
    if missing:
        raise BadInput(
            f"the optimizer does not have {listed(missing)}: they would take part in clipping and "
            "never be trained. Give them to it, or freeze them with requires_grad_(False). If "
            "another optimizer trains them, give make_private "
            "torch.optim.SGD(module.parameters(), lr=0.0), and in each step call its step() first, "
            "then those of the others, which find the noisy gradients"
        )
    if others:
        raise BadInput(
            f"the optimizer has {len(others)} parameters that are not the module's (shapes "
            f"{others[:3]}): they would be trained without privacy. Build it from "
            "module.parameters()"
        )


def _held_otherwise(
    optimizer: Optimizer, trainable: Mapping[str, nn.Parameter]
) -> tuple[list[str], list[list[int]]]:
    """Return names of parameters that an optimizer lacks, and shapes of others that it trains."""
    names = {id(each): name for name, each in trainable.items()}
    held = [each for group in optimizer.param_groups for each in group["params"]]
    others = [list(each.shape) for each in held if id(each) not in names and each.requires_grad]
    held_ids = set(map(id, held))
    return [name for key, name in names.items() if key not in held_ids], others


@dataclass(eq=False)
class LogicalBatch:
    """A logical batch, under way or complete.

    Attributes:
        release: What its step applies.
        num_samples: Samples of all ranks.
        rates: The optimizer's learning rates when it began.
        next_pass: Number of the pass that comes next.
        norms: Of this rank's samples before clipping [samples], by part of a pass.
        positions: Where they stand in the logical batch [samples].
        terms: On which it is released, once the ledger holds its intent; its noise's key is there.
    """

    release: Release
    rates: list[Any]
    num_samples: int = 0
    next_pass: int = 0
    norms: list[Tensor] = field(default_factory=list)
    positions: list[Tensor] = field(default_factory=list)
    terms: ReleaseTerms | None = None


class PrivateTraining:
    """Couples a module, its optimizer and its loader; see `PrivacyEngine.make_private`.

    Attributes:
        observer: Who looks at each step's quantities as they are made, by `see_pass`, `see_totals`
            and `see_noisy` (`Tracer` in verify/trace.py); None for nobody.
        recorder: Follows the user's loss.
        watched: Modules that must not hold values of records.
        attachment: The hooks on the module.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        loader: PrivateLoader,
        *,
        owner: ParallelAdapter,
        dealing: Dealing,
        key: Key,
        mechanism: Mechanism,
        ledger: Ledger,
        guard: BudgetGuard | None,
        settings: ClippingSettings,
        clip_rule: str,
        loss_reduction: str,
    ) -> None:
        self.module, self.optimizer, self.loader = module, optimizer, loader
        self.mechanism, self.ledger = mechanism, ledger
        self._key, self._clock = key, NoiseClock(key)
        self._guard, self.clip_rule, self.loss_reduction = guard, clip_rule, loss_reduction
        self.owner, self.owned, self._dealing = owner, owner.params, dealing
        self._parameters = {each.name: each.parameter for each in owner.params}
        self._batch: LogicalBatch | None = None
        self._last: LogicalBatch | None = None
        self._given: Given = {}
        self._uncommitted: int | None = None
        self._settings = mechanism.describe()
        self._is_taken = False  # the step of the last release, by a graph
        self._has_warned = False
        self.observer: Any = None
        self._loss_check = LossCheck(
            batch_dim=settings.batch_dim,
            rows_per_sample=settings.rows_per_sample,
            rechecks=settings.recheck,
            is_mean=loss_reduction == "mean",
        )
        # Of the recorder, which must not keep this object: what is detached is freed at once.
        before_write = weakref.WeakMethod(self._before_write)
        before_grad = weakref.WeakMethod(self._before_grad)
        self.recorder = LossRecorder(
            self._loss_check.judge,
            lambda target: (own := before_write()) and own(target),
            lambda inputs: (own := before_grad()) and own(inputs),
        )
        self.watched = [module]
        self.attachment = Attachment(self, settings, dealing)
        loader.training = self
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]
        private_trainings.add(self)

    @property
    def trained(self) -> list[nn.Parameter]:
        """All parameters that are trained, as the module and the optimizer hold them."""
        return [
            *self._parameters.values(),
            *(each for each in self.module.parameters() if each.requires_grad),
        ]

    @property
    def current(self) -> PhysicalBatch | None:
        """The physical batch in the user's hands."""
        return self.loader.current

    @property
    def is_aside(self) -> bool:
        """Whether the module runs for the engine's own sake, and not to be trained."""
        return self.attachment.is_aside

    def detach(self) -> None:
        """Give module and optimizer back as they were."""
        self.recorder.remove()
        private_trainings.discard(self)
        self.attachment.detach()
        for handle in self._handles:
            handle.remove()
        self.owner.detach()
        if self._dealing.plan is not None and current_plan() is self._dealing.plan:
            publish_plan(None)  # the last batch is no one's current one any more
        self.loader.training = None
        self.ledger.close()

    # --- a logical batch -------------------------------------------------------------------------

    def present(self, batch: Any, physical: PhysicalBatch) -> Any:
        """Hand a physical batch out; what the user's code does with it is followed from here on."""
        presented = present(self._dealing, batch, physical)
        self._loss_check.begin(sum(part.num_rows for part in self._dealing.parts))
        self.recorder.begin(presented)
        return presented

    def _before_write(self, target: Tensor) -> None:
        """Refuse to let the user's code write values of records to what is saved with the model.

        The module's own passes are looked at where they run.
        """
        memory = memory_of(target)
        if not memory:
            return
        for name, parameter in self._parameters.items():
            state = self.optimizer.state.get(parameter, {})
            held = {f"{name}.grad": parameter.grad}
            held |= {f"the optimizer's {key} of {name}": each for key, each in state.items()}
            for what, value in held.items():
                if isinstance(value, Tensor) and memory_of(value) == memory:
                    raise UnsupportedOperation(
                        f"values of training rows that were neither clipped nor noised are written "
                        f"to {what}, which the optimizer trains on. Let the private loss hold all "
                        "that is to be trained on, and give gradients of copies of the model to "
                        "nobody; a number that is public is declared with unison.public(value)"
                    )
        for watched in self.watched:
            values = chain(watched.named_parameters(), saved_buffers(watched))
            name = next((name for name, each in values if memory_of(each) == memory), None)
            if name is None or self.attachment.learning.is_public(name):
                continue
            raise UnsupportedOperation(
                f"values of training rows are written to {name!r}, which is saved with the model "
                "and gets no noise. Keep them elsewhere (register_buffer(..., persistent=False) "
                "is not saved), or say that it may be published: make_private("
                f"public_buffers=[{name!r}])"
            )

    def _before_grad(self, inputs: list[Any]) -> None:
        """Refuse to hand out gradients of private parameters that come from data."""
        asked = {id(each) for each in inputs}
        names = [name for name, each in self._parameters.items() if id(each) in asked]
        if names:
            raise UnsupportedOperation(
                f"torch.autograd.grad was asked for the gradient of {names[0]!r}, which would be "
                "neither clipped nor noised. Call loss.backward(), which leaves the noisy gradient "
                "at .grad; gradients of a copy of the module (copy.deepcopy) may be looked at, and "
                "not trained on"
            )

    def before_draw(self, step: int) -> None:
        """A logical batch is about to be handed out; nothing of it has been used."""
        if self._batch is not None:
            raise BadInput(
                f"the batch of step {self._batch.release.step} never went backward to its end: "
                "call loss.backward() for every batch that the loader hands out, or "
                "loader.abandon() to give a step up. To accumulate several batches, give the "
                "loader a larger batch_size and make_private max_physical_batch_size="
            )
        self._key.check_process()
        if self.owner.everyone.size > 1:
            settings = self.mechanism.describe()
            if settings != self._settings and self.mechanism.adaptive is None:
                changed = {k: v for k, v in settings.items() if v != self._settings[k]}
                meet(self.owner.everyone, f"a mechanism with {changed}", may_be_late=True)
            self._settings = settings
        if self._guard is not None:
            self._guard.check(self.ledger.spending, self.mechanism.release, step)
        # Nothing of the step is lost yet. All is looked at in the forward pass.
        self.attachment.learning.check_params()
        self._check_optimizer()
        rates = [group.get("lr") for group in self.optimizer.param_groups]
        self._batch = LogicalBatch(self.mechanism.begin(step), rates)

    def on_abandon(self) -> bool:
        """Give a logical batch up, unless it is over; return whether it may be drawn again."""
        running = self._batch
        if running is None:
            return False
        self.attachment.drop_pass()
        self.owner.drop()
        self.attachment.public_terms.clear()
        self.mechanism.abandon()
        self._batch = None
        return running.terms is None  # else the ledger has counted it: it is not drawn twice

    def running(self, batch: PhysicalBatch) -> LogicalBatch:
        """The logical batch that a pass belongs to, which must be the next one of it."""
        running = self._batch
        if running is None or running.release.step != batch.step:
            raise BadInput(f"step {batch.step} is over; use the batch that the loader gave last")
        if batch.index != running.next_pass:
            raise BadInput(
                f"physical batch {batch.index} of step {batch.step} went backward where batch "
                f"{running.next_pass} should have: every one must, once and in order. Something "
                "between the loader and the loop reads ahead, or a batch was skipped"
            )
        return running

    def coefficients(
        self, batch: PhysicalBatch, part: Part, norms: Mapping[str, SampleNorms]
    ) -> tuple[Mapping[str, Tensor], Grid]:
        """One coefficient per row: 0 for padding, and a mean over samples undone."""
        running = self.running(batch)
        grid = grid_of_pass(running.release, batch.logical_size, part.num_rows)
        clip_norm = running.release.max_grad_norm
        dealing, factor = self._dealing, 1.0  # what undoes the mean in the user's loss
        if self.loss_reduction == "mean":
            assert dealing.plan is not None
            is_of_batch = dealing.mean_was_used
            factor = float(max(1, dealing.plan.num_samples) if is_of_batch else part.num_rows)
        elif dealing.mean_was_used:
            raise BadInput(
                "the loss was made by unison.batch_mean, a mean, and loss_reduction is 'sum'"
            )
        whole = self.owner.whole_norms(norms)
        scaled = NormTable.of(whole, part.num_rows).scaled(factor)
        total = scaled.total()
        by_name = CLIP_RULES[self.clip_rule](scaled, total, clip_norm, list(self._parameters))
        norms_of_rows = total.squared.clamp(min=0).sqrt()
        # Parameters that are clipped together share one tensor: it is scaled once.
        own = dict(zip(map(id, by_name.values()), by_name.values(), strict=True))
        if factor != 1:
            own = {key: each * factor for key, each in own.items()}
        # Nothing here may wait for the device: what is padding is known without it.
        if len(part.positions) < part.num_rows:
            device = total.squared.device
            where = part.is_real.nonzero().flatten().to(device, non_blocking=True)
            norms_of_rows = norms_of_rows[where]
            is_real = part.is_real.to(device, non_blocking=True)
            own = {key: each.where(is_real, 0.0) for key, each in own.items()}
        running.norms.append(norms_of_rows)
        running.positions.append(part.positions)
        return {name: own[id(each)] for name, each in by_name.items()}, grid

    def begin_sums(self, sums: RunningPass) -> None:
        """Before a second backward pass over a sharded module: add sums as they are complete."""
        if self.owner.num_places > 1:
            self._open(sums)
            clippings = sums.clippings.values()
            self.owner.begin(
                *self._summands(sums),
                lambda names: all(each.is_complete(names) for each in clippings),
            )

    def _open(self, sums: RunningPass) -> LogicalBatch:
        """Let a pass be added; with the last one of a logical batch, that counts from here on.

        The intent is written before the sums of the last pass go over ranks: that exchange ends on
        no rank before every rank has come to it, the one that writes the ledger included.
        """
        running = self.running(sums.batch)
        self._loss_check.finish()
        if sums.batch.is_last and running.terms is None:
            self.open_release(running, sums.batch.logical_size)
        return running

    def _summands(self, sums: RunningPass) -> Summands:
        """What makes a pass's sums, by itself or with an observer around it; and what they are."""
        if sums.summands is None:
            grid = grid_of(self.running(sums.batch).release, sums.batch.logical_size)
            make_sums: MakeSums = partial(_make_sums, sums, grid)
            if self.observer is not None:
                make_sums = self.observer.see_pass(sums, make_sums, grid)
            assert self._dealing.plan is not None
            sums.summands = make_sums, self._dealing.plan, [*sums.clippings], grid.dtype
        return sums.summands

    def add_sums(self, sums: RunningPass) -> None:
        """Add a pass's sums; after the last one of a logical batch, release it."""
        batch, running = sums.batch, self._open(sums)
        # Where a pass is all there is of its logical batch, nothing is to be added.
        is_all = batch.is_last and running.next_pass == 0 and self.owner.is_alone
        own = sums.shares() if is_all and takes(*self._parameters.values()) else None
        if own is None:
            self.owner.add(*self._summands(sums))
        running.next_pass += 1
        if batch.is_last:
            assert running.terms is not None
            gradients = private_gradients(self.owner, own, running.terms, self.observer)
            if self.observer is not None:
                gradients = self.observer.see_noisy(gradients)
            self.release(running, gradients)
        elif not self._has_warned and running.rates != [
            group.get("lr") for group in self.optimizer.param_groups
        ]:
            self._has_warned = True
            warnings.warn(
                "the learning rate changed between two physical batches of one logical batch: a "
                "scheduler that steps once per loop runs too fast here. Step it only where "
                "`loader.current.is_last`",
                stacklevel=1,
            )

    def open_release(self, running: LogicalBatch, num_samples: int) -> None:
        """Count a logical batch of so many samples, before anything of its noise is drawn."""
        self._key.check_process()  # the ledger's file is the parent's, if this is a fork
        if self._last is None and self.owner.everyone.size > 1:
            self._compare_records()
        release = running.release
        self.ledger.intend(release)
        key = self._clock.advance(release.step)
        divisor = release.expected_batch_size if self.loss_reduction == "mean" else 1.0
        running.terms = ReleaseTerms(key, release, divisor, num_samples)

    def _compare_records(self) -> None:
        """Make sure that ranks draw from one data set; a collective, before anything is spent.

        Raises:
            BadInput: They hold other records.
        """
        found = gather_objects(self.owner.everyone, self.loader.digests)
        for name in {name: None for each in found for name in each}:
            if len({each[name] for each in found if name in each}) > 1:
                raise BadInput(
                    f"ranks hold different records (at {name}): every rank draws the "
                    "same records and loads its part of them. Give each rank the whole data set, "
                    "no share of it, and the loader the batch_size of all ranks together"
                )

    def record(self, loss_of: LossOf, example: Sequence[Tensor]) -> GraphedPass:
        """Record a pass; see `PrivacyEngine.capture_graph`."""
        if self.attachment.settings.rows_per_sample > 1:
            raise UnsupportedOperation(
                "capture_graph clips each row by itself, and records have "
                f"rows_per_sample={self.attachment.settings.rows_per_sample} rows: train without "
                "a graph"
            )
        if not (self.owner.is_alone and takes(*self._parameters.values())):
            raise UnsupportedOperation(
                "capture_graph needs all parameters on one CUDA device and no granules; sharded "
                "and ordered training run without a graph"
            )
        if self.mechanism.adaptive is not None:
            raise UnsupportedOperation(
                "capture_graph with adaptive clipping, whose C changes: train without a graph"
            )
        if self.attachment.settings.batch_dim != 0:
            raise UnsupportedOperation("capture_graph needs samples first: batch_first=True")
        limit = self._dealing.max_physical_batch_size
        self.loader.limit_rows(limit)  # a graph has as many, and pads what is smaller
        return GraphedPass(
            self,
            loss_of,
            example,
            num_rows=limit or len(example[0]),
        )

    @contextmanager
    def followed(self, batch: Sequence[Tensor]) -> Iterator[None]:
        """Follow the losses of a batch that is not the loader's, which a recorded pass adds up."""
        self._loss_check.begin(len(batch[0]), is_sum=True)
        self.recorder.begin(batch)
        try:
            yield
            self._loss_check.finish()
        finally:
            self.recorder.remove()
        if not self.recorder.is_judged:
            refuse_unseen()

    @contextmanager
    def unfollowed(self) -> Iterator[None]:
        """Run code of ours, which need not be followed, while a batch is in the user's hands."""
        self.recorder.suspend()
        try:
            yield
        finally:
            self.recorder.resume()

    def release(
        self, running: LogicalBatch, gradients: Iterable[tuple[ShardedParam, Tensor]]
    ) -> None:
        """Put private gradients where the optimizer finds them; the logical batch is over.

        Args:
            running: The logical batch.
            gradients: Of everything that this rank owns, with noise, divided.
        """
        terms, release, public = running.terms, running.release, self.attachment.public_terms
        self._batch, self._is_taken = None, False
        assert terms is not None
        give(gradients, self._given)
        for owned in self.owned if public else ():
            if owned.name in public:
                assert owned.parameter.grad is not None
                owned.parameter.grad.add_(public.pop(owned.name))
        self._last, running.num_samples = running, terms.num_samples
        self._uncommitted = release.step
        fraction = None
        if release.count_noise_multiplier is not None:
            below = torch.cat(running.norms) <= release.max_grad_norm
            # A multiple of one half, which float64 adds exactly over ranks.
            statistic = self.owner.ranks.sum_(below.double().sub(0.5).sum().view(1))
            noisy = noisy_count(float(statistic), key=terms.key, release=release)
            fraction = noisy_fraction(noisy, release.expected_batch_size)
        self.mechanism.finish(release.step, noisy_fraction=fraction)
        running.terms = None  # and with them the key

    # --- the optimizer ---------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Look at the gradients before a step; a closure is run here, once, and not by `step`."""
        if is_recording():
            return None
        closure = kwargs.get("closure") if len(args) < 2 else args[1]
        if closure is not None:
            with torch.enable_grad():
                closure()  # a second one would release the batch again
        if self._is_taken:
            raise BadInput(
                "capture_graph(..., with_optimizer=True) takes the optimizer's step: leave "
                "optimizer.step() out, or it would be taken twice"
            )
        self._check_optimizer()
        require_given(self._parameters, self._given)
        for group in optimizer.param_groups:
            for name, value in group.items():
                if self.recorder.slot_of(value) is not None:
                    raise BadInput(
                        f"the optimizer's {name} was made of numbers read from private batches, "
                        "which no noise covers; use a schedule, or unison.public(value) if it is "
                        "public"
                    )
        self.recorder.suspend()  # what an optimizer does with noisy gradients is public
        return None if closure is None else (args[:1], {})

    def _after_step(self, optimizer: Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
        if not is_recording():
            self.recorder.resume()
            self.commit()

    def commit(self, *, is_by_graph: bool = False) -> None:
        """Note in the ledger that the last release was trained on, and by whom."""
        self._is_taken = is_by_graph
        if self._uncommitted is not None:
            self.ledger.commit(self._uncommitted)
            self._uncommitted = None

    def check_trained(self) -> None:
        """Make sure that what is trained is what was made private, where no forward pass does."""
        self.attachment.learning.check_params()
        self._check_optimizer()

    def _check_optimizer(self) -> None:
        """Make sure that the optimizer has what is trained privately, and nothing else to train.

        `add_param_group` after `make_private` would train others on gradients of single records.

        Nor does accelerate accumulate the noisy gradients of several steps.

        Raises:
            BadInput: Naming a parameter of the module, or the shape of one that is not.
        """
        accelerate = sys.modules.get("accelerate.state")
        if accelerate is not None and accelerate.GradientState._shared_state:
            steps = accelerate.GradientState().num_steps
            if steps > 1:
                raise BadInput(
                    f"Accelerator(gradient_accumulation_steps={steps}) would add up the noise of "
                    f"{steps} steps; leave it out, give the loader a batch size {steps} times as "
                    "large, and make_private max_physical_batch_size="
                )
        missing, others = _held_otherwise(self.optimizer, self._parameters)
        if others:
            raise BadInput(
                f"the optimizer has a parameter of shape {others[0]} that make_private "
                "did not see: it would be trained on gradients that are neither clipped nor "
                "noised. Put it into the module and call make_private after that, or give it to "
                "another optimizer that never sees private records"
            )
        if missing:
            raise BadInput(
                f"the optimizer has lost {missing[0]} since make_private: it takes part in "
                "clipping and would never be trained. Leave it to the optimizer, or detach() the "
                "engine and call make_private again"
            )

    # --- asking, saving --------------------------------------------------------------------------

    def norms(self) -> Tensor:
        """See `PrivacyEngine.per_sample_norms`; in the order of the logical batch, a collective."""
        batch = self.last
        meet(self.owner.ranks, "per_sample_norms", may_be_late=True)
        slots = batch.norms[0].new_zeros(batch.num_samples)
        slots[torch.cat(batch.positions)] = torch.cat(batch.norms)
        # Each slot has one owner and all others add 0: exact. A NaN stays one.
        return self.owner.ranks.sum_(slots) if batch.num_samples else slots

    @property
    def last(self) -> LogicalBatch:
        """The last logical batch that is complete."""
        if self._last is None:
            raise BadInput("no logical batch is complete yet")
        return self._last

    def state_dict(self) -> dict[str, Any]:
        """See `PrivacyEngine.state_dict`."""
        if self._batch is not None:
            raise BadInput("a logical batch is under way; save where `loader.current.is_last`")
        return {
            "loader": self.loader.state_dict(),
            "mechanism": self.mechanism.state_dict(),
            "ledger": self.ledger.state_dict(),
            "tensor_degree": self._tensor_degree,
        }

    @property
    def _tensor_degree(self) -> int:
        """Ranks that share one copy of the module and one set of samples."""
        return self.owner.everyone.size // self.owner.ranks.size

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `PrivacyEngine.load_state_dict`."""
        degree = state.get("tensor_degree", 1)
        if self.owner.is_ordered and degree != self._tensor_degree:
            raise BadInput(
                f"the state is of a run that was cut into {degree} along the tensor axis, this one "
                f"is cut into {self._tensor_degree}: matrices of other shapes round differently, "
                "and a run in granules promises the same bits. Go on with the same tensor axis; "
                "the data axis may change"
            )
        if self._batch is not None:
            self.loader.abandon()
        self.mechanism.load_state_dict(state["mechanism"])
        self.ledger.load_state_dict(state["ledger"])
        self.loader.load_state_dict(state["loader"])
        last = self._clock.last_step
        if last is not None and self.loader.next_step <= last:
            # Steps come again in this process: other noise, and other samples, or two releases
            # could be subtracted.
            self._clock.renew(self.owner.everyone.group)
            self._key = Key.shared(self.owner.everyone.group)
            self.loader.renew(self._key)
            self.ledger.session = replace(self.ledger.session, key_commitment=None)
        self.ledger.renew(self.mechanism, step=self.loader.next_step, key_origin=self._key.origin)


def _make_sums(
    sums: RunningPass,
    grid: Grid,
    granule: int,
    names: Sequence[str],
    before: Sequence[Tensor | None] | None,
) -> list[Tensor | None]:
    """Return this rank's clipped sums of these parameters on a grid; see `MakeSums`.

    Sums are integers, which add without rounding: over granules, passes and ranks they are the same
    in any order, and emptying a record changes what it changes in that record's own rows.
    """
    totals = dict(zip(names, before or [None] * len(names), strict=True))
    sums.clippings[granule].add_on_grid(sums.coefficients[granule], totals, grid)
    return list(totals.values())
