"""One optimizer step over the global batch, top to bottom."""

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from unison.data import IGNORE_INDEX
from unison.errors import Diverged
from unison.rng import Key, dropout_context
from unison.train.world import World

Batch = dict[str, Tensor]  # input_ids, labels: [rows, tokens]; sample_ids: [rows]


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one step showed: the mean loss per target of the global batch, and its gradient norm."""

    loss: float
    grad_norm: float
    lr: float
    num_targets: int


def loss_sum(model: torch.nn.Module, batch: Batch, cast: AbstractContextManager) -> Tensor:
    """Sum of the cross-entropy over the targets of some rows, in nats."""
    with cast:
        logits = model(batch["input_ids"])  # [rows, tokens, vocab]
    precise = torch.promote_types(logits.dtype, torch.float32)  # a sum of many: never in bf16
    return F.cross_entropy(
        logits.flatten(0, 1).to(precise),
        batch["labels"].flatten(),
        ignore_index=IGNORE_INDEX,
        reduction="sum",
    )


def count_targets(batch: Batch) -> Tensor:
    """Number of targets that count, as a tensor of no dimensions."""
    return (batch["labels"] != IGNORE_INDEX).sum()


def train_step(
    model: DistributedDataParallel,
    optimizer: Optimizer,
    scheduler: LRScheduler,
    micro_batches: list[Batch],
    *,
    step: int,
    world: World,
    key: Key,
    cast: Callable[[], AbstractContextManager] = nullcontext,
    clip_norm: float | None = None,
) -> StepResult:
    """Take one optimizer step on the global batch of which this rank holds `micro_batches`.

    The loss is the sum over *all* ranks' targets divided by *their* number, so it does not matter
    how rows are spread over ranks and micro-batches. Every rank must bring the same number of
    micro-batches, at least one.

    Raises:
        Diverged: On every rank, before the parameters change, if loss or gradient is not finite.
    """
    # 1. How many targets the whole batch has: the one divisor of everything below.
    num_targets = world.sum(sum_of(count_targets(batch) for batch in micro_batches)).clamp(min=1)

    # 2. Forward and backward, micro-batch by micro-batch; ranks talk in the last backward only.
    optimizer.zero_grad(set_to_none=True)
    total = torch.zeros((), device=world.device)
    for index, batch in enumerate(micro_batches):
        is_last = index == len(micro_batches) - 1
        # Dropout's masks hang on the key, the step and the samples, not on who computes them.
        masks = dropout_context(key, step, batch["sample_ids"])
        with masks, nullcontext() if is_last else model.no_sync():
            loss = loss_sum(model, batch, cast()) / num_targets
            # DDP divides the summed gradient by the number of ranks; undo it here, once.
            (loss * world.size).backward()
        total += loss.detach()
    loss_value = world.sum(total).item()

    # 3. The gradient's norm, which every rank computes from the same all-reduced gradient.
    bound = float("inf") if clip_norm is None else clip_norm
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), bound).item()
    for name, value in {"loss": loss_value, "gradient norm": grad_norm}.items():
        if not math.isfinite(value):
            raise Diverged(
                f"the {name} became {value} at step {step}; lower --lr, lengthen --warmup-steps or "
                f"tighten --clip-norm"
            )

    # 4. The update.
    lr = float(scheduler.get_last_lr()[0])
    optimizer.step()
    scheduler.step()
    return StepResult(loss=loss_value, grad_norm=grad_norm, lr=lr, num_targets=int(num_targets))


@torch.no_grad()
def mean_loss(
    model: torch.nn.Module,
    batches: Iterable[Batch],
    *,
    world: World,
    cast: Callable[[], AbstractContextManager] = nullcontext,
) -> float:
    """Mean loss per target over all ranks' batches; a rank may bring none.

    Give the bare module, not its DDP wrapper: ranks may hold different numbers of batches, and the
    wrapper would talk to the others in each of them.
    """
    was_training = model.training
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=world.device)  # loss, targets
    for batch in batches:
        sums[0] += loss_sum(model, batch, cast())
        sums[1] += count_targets(batch)
    model.train(was_training)
    loss, targets = world.sum(sums).tolist()
    return loss / max(targets, 1)


def sum_of(values: Iterable[Tensor]) -> Tensor:
    """Sum of a non-empty sequence of tensors."""
    return torch.stack(list(values)).sum()
