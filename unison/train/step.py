"""One optimizer step over the global batch, top to bottom."""

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

import unison
from unison.data import IGNORE_INDEX
from unison.errors import Diverged
from unison.models import token_loss_sums
from unison.rng import Key, dropout_context
from unison.train.parallel import Parallel
from unison.train.world import World

Batch = dict[str, Any]
"""One pass of a dealt batch.

input_ids, labels: [rows, tokens], plain or one value per granule. num_targets: int, the targets of
the whole logical batch. sample_ids: [rows], the data set's own numbers of the rows, on the CPU.
"""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one step showed: the mean loss per target of the global batch, and its gradient norm."""

    loss: float
    grad_norm: float
    lr: float
    num_targets: int


def train_step(
    parallel: Parallel,
    optimizer: Optimizer,
    scheduler: LRScheduler,
    passes: Iterable[Batch],
    *,
    step: int,
    key: Key,
    cast: Callable[[], AbstractContextManager] = nullcontext,
    clip_norm: float | None = None,
) -> StepResult:
    """Take one optimizer step on the global batch of which this rank gets `passes`.

    The loss is the sum over *all* ranks' targets divided by *their* number, so it does not matter
    how rows are spread over ranks and passes. `passes` ends with the logical batch.

    Raises:
        Diverged: On every rank, before the parameters change, if loss or gradient is not finite.
    """
    optimizer.zero_grad(set_to_none=True)
    loss, num_targets = 0.0, 0
    for batch in passes:
        plan = unison.current_plan()
        assert plan is not None
        num_targets = batch["num_targets"]
        # 1. Forward: each sample's own sum. Dropout's masks hang on the key, the step and the
        #    samples, not on who computes them.
        with dropout_context(key, step, batch["sample_ids"]), cast():
            logits = parallel(batch["input_ids"])  # [rows, tokens, vocab]
        sums = token_loss_sums(logits, batch["labels"], IGNORE_INDEX)  # [rows]
        # 2. One divisor: the mean over samples times samples per target is the mean over targets.
        share = unison.batch_mean(sums * (plan.num_samples / max(num_targets, 1)))
        # 3. Backward; ranks sum their gradients here.
        with parallel.passes_on(plan.closes_logical_batch):
            (share * parallel.gradient_scale).backward()
        loss += share.item()

    # 4. The gradient's norm, the same on every rank.
    grad_norm = parallel.clip_grad_norm_(math.inf if clip_norm is None else clip_norm)
    for name, value in {"loss": loss, "gradient norm": grad_norm}.items():
        if not math.isfinite(value):
            raise Diverged(
                f"the {name} became {value} at step {step}; lower --lr, lengthen --warmup-steps or "
                f"tighten --clip-norm"
            )

    # 5. The update.
    lr = float(scheduler.get_last_lr()[0])
    optimizer.step()
    scheduler.step()
    return StepResult(loss=loss, grad_norm=grad_norm, lr=lr, num_targets=num_targets)


@torch.no_grad()
def mean_loss(
    model: Callable[[Tensor], Tensor],
    batches: Iterable[Batch],
    *,
    world: World,
    cast: Callable[[], AbstractContextManager] = nullcontext,
) -> float:
    """Mean loss per target over all ranks' batches; every rank must bring the same number.

    A rank without rows brings empty batches: a sharded model gathers its parameters in each pass.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=world.device)  # loss, targets
    for batch in batches:
        with cast():
            logits = model(batch["input_ids"])
        sums[0] += token_loss_sums(logits, batch["labels"], IGNORE_INDEX).sum()
        sums[1] += (batch["labels"] != IGNORE_INDEX).sum()
    loss, targets = world.sum(sums).tolist()
    return loss / max(targets, 1)
