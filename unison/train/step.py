"""One optimizer step over the global batch, top to bottom, and what it is made of.

Optimizers and schedules are torch's own, by name. K-FAC, where a run has it, turns the gradient
into the step's direction.
"""

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

import unison
from unison.config import MechanismConfig, TrainConfig
from unison.data import IGNORE_INDEX
from unison.errors import Diverged
from unison.models import token_loss_sums
from unison.rng import Key, draws_by_sample
from unison.shard import PerGranule
from unison.train.world import Parallel, World

ADAM_BETAS = (0.9, 0.95)


def make_optimizer(model: nn.Module, mechanism: MechanismConfig) -> Optimizer:
    """Make the optimizer; norm gains and biases (one dimension) are not decayed."""
    groups = unison.param_groups(model, mechanism.weight_decay)
    if mechanism.optimizer == "adamw":
        return AdamW(groups, lr=mechanism.lr, betas=ADAM_BETAS)
    # SGD. Where K-FAC has Adam's length, its step is made of averaged gradients already.
    is_averaged = mechanism.kfac is not None and mechanism.kfac.graft == "adam"
    return SGD(groups, lr=mechanism.lr, momentum=0.0 if is_averaged else 0.9)


def make_schedule(optimizer: Optimizer, mechanism: MechanismConfig) -> LRScheduler:
    """Make the schedule: linear warm-up, then the named decay to zero at the last step."""
    return LambdaLR(optimizer, lambda step: lr_factor(step, mechanism))


def lr_factor(step: int, mechanism: MechanismConfig) -> float:
    """The learning rate at a step, as a part of its peak.

    >>> m = MechanismConfig(steps=100, warmup_steps=10, schedule="linear")
    >>> [round(lr_factor(s, m), 3) for s in (0, 9, 10, 55, 99)]
    [0.1, 1.0, 1.0, 0.5, 0.011]
    """
    warmup = min(mechanism.warmup_steps, mechanism.steps)
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, mechanism.steps - warmup)
    if mechanism.schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * progress))
    return 1 - progress if mechanism.schedule == "linear" else 1.0


def settings_of(config: TrainConfig) -> unison.KFACConfig:
    """The settings of `unison.KFAC` in a run.

    Labels come from the run's seed and the positions of rows in the global batch, so that they do
    not depend on the number of ranks.
    """
    assert config.mechanism.kfac is not None
    return unison.KFACConfig(
        **asdict(config.mechanism.kfac),
        betas=ADAM_BETAS,  # the grafted optimizer is that of a run without K-FAC
        owner_fraction=config.execution.owner_fraction,
        seed=config.mechanism.seed,
    )


# ---- the step ------------------------------------------------------------------------------------

Batch = dict[str, Any]
"""One pass of a logical batch.

input_ids, labels: [rows, tokens], plain or one value per granule. num_targets: int, the targets of
the whole logical batch. sample_ids: [rows], the data set's own numbers of the rows, on the CPU.
"""


Objective = Callable[[Tensor, Batch], tuple[Tensor, bool]]
"""(logits [rows, tokens, vocab], the pass they are of) -> (one loss per row [rows], of which the
mean over the logical batch is sent back; whether the pass closes its logical batch)."""


def mean_over_targets(logits: Tensor, batch: Batch) -> tuple[Tensor, bool]:
    """Make losses whose mean over the global batch is the mean loss per target.

    The sum is over *all* ranks' targets and is divided by *their* number, so it does not matter how
    rows are spread over ranks and passes.
    """
    plan = unison.current_plan()
    assert plan is not None
    sums = token_loss_sums(logits, batch["labels"], IGNORE_INDEX)  # [rows]
    # One divisor: the mean over samples times samples per target is the mean over targets.
    losses = sums * (plan.num_samples / max(batch["num_targets"], 1))
    return losses, plan.closes_logical_batch


def train_step(
    parallel: Parallel,
    optimizer: Optimizer,
    scheduler: LRScheduler,
    passes: Iterable[Batch],
    *,
    step: int,
    key: Key,
    objective: Objective = mean_over_targets,
    kfac: unison.KFAC | None = None,
    cast: Callable[[], AbstractContextManager] = nullcontext,
    clip_norm: float | None = None,
    see_loss: Callable[[Tensor], Tensor] = lambda share: share,
) -> tuple[dict[str, float], int]:
    """Take one optimizer step on the logical batch of which this rank gets `passes`.

    `passes` ends with the logical batch. `kfac` makes the step's direction of its gradient.
    `see_loss` is a tracer's: it returns what it is given.

    Returns:
        The step's loss, the norm of the gradient it was taken with and its learning rate, by the
        names of metrics; and the number of its targets.

    Raises:
        Diverged: On every rank, before the parameters change, if loss or gradient is not finite.
    """
    optimizer.zero_grad(set_to_none=True)
    loss, num_targets = 0.0, 0
    for batch in passes:
        num_targets = batch["num_targets"]
        # 1. Forward. Dropout's masks hang on the key, the step and the samples, not on who computes
        #    them.
        with draws_by_sample(key, step, batch["sample_ids"]), cast():
            logits = parallel(batch["input_ids"])  # [rows, tokens, vocab]
        # 2. The loss, of which each sample's part depends on that sample alone. Curvature, if there
        #    is any, is of the same pass.
        if kfac is not None and kfac.wants_statistics:
            # What the loss that is sent back divides the sum over labels by. Only the empirical
            # Fisher asks: it is made of that loss's gradients.
            divisor = max(num_targets, 1) / parallel.gradient_scale
            sampled = kfac.sample(logits, batch["labels"] != IGNORE_INDEX, divisor=divisor)
            sampled.backward(retain_graph=True)
        losses, is_last = objective(logits, batch)
        # In float64, so that the step's loss, rounded to the losses' own precision at the end, does
        # not tell in how many passes it came.
        share = see_loss(unison.batch_mean(losses.double()))
        # 3. Backward. The last pass completes the gradient: ranks sum theirs, and in a private run
        #    what was clipped gets its noise.
        with parallel.passes_on(is_last):
            (share * parallel.gradient_scale).backward()
        loss += share.item()
        if is_last:
            loss = torch.tensor(loss, dtype=losses.dtype).item()

    # 4. The gradient's norm, the same on every rank.
    grad_norm = parallel.clip_grad_norm_(math.inf if clip_norm is None else clip_norm)
    for name, value in {"loss": loss, "gradient norm": grad_norm}.items():
        if not math.isfinite(value):
            raise Diverged(
                f"the {name} became {value} at step {step}; lower --lr, lengthen --warmup-steps or "
                f"tighten --clip-norm"
            )

    # 5. The direction: the gradient itself, or what K-FAC makes of it.
    if kfac is not None:
        kfac.step()

    # 6. The update.
    lr = float(scheduler.get_last_lr()[0])
    optimizer.step()
    scheduler.step()
    return {"train/loss": loss, "train/grad_norm": grad_norm, "train/lr": lr}, num_targets


@torch.no_grad()
def mean_loss(
    model: Callable[[Tensor], Tensor],
    batches: Iterable[Batch],
    *,
    num_rows: int,
    world: World,
    cast: Callable[[], AbstractContextManager] = nullcontext,
) -> float:
    """Mean loss per target over all ranks' batches; every rank must bring the same number.

    A rank without rows brings empty batches: a sharded model gathers its parameters in each pass.
    The mean is the same bits on any number of ranks if the rows' losses are.

    Args:
        model: Runs the forward pass.
        batches: This rank's, with `sample_ids`, the positions of their rows among all.
        num_rows: Rows of all ranks.
        world: The ranks.
        cast: The precision to compute in.
    """
    # Each row has a place, which its rank fills and the others leave 0, so that ranks are added up
    # without rounding and rows in one order.
    sums = torch.zeros(2, num_rows, dtype=torch.float64, device=world.device)  # loss, targets
    for batch in batches:
        with cast():
            logits = model(batch["input_ids"])
        places = batch["sample_ids"].to(world.device)
        sums[0, places] = token_loss_sums(logits, batch["labels"], IGNORE_INDEX).double()
        sums[1, places] = (batch["labels"] != IGNORE_INDEX).sum(dim=1).double()
    loss, targets = world.sum(sums).sum(dim=1).tolist()
    return loss / max(targets, 1)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Move what the model computes with; `sample_ids` stays on the CPU, as one plain tensor."""
    moved = {name: batch[name].to(device) for name in ("input_ids", "labels")}
    return {**batch, **moved, "sample_ids": joined(batch["sample_ids"])}


def joined(value: Tensor) -> Tensor:
    """The rows of a pass as one plain tensor."""
    return torch.cat(value.parts) if isinstance(value, PerGranule) else value
