"""Optimizers and schedules: torch's own, by name."""

import math

from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

import unison
from unison.config import Mechanism

ADAM_BETAS = (0.9, 0.95)


def make_optimizer(model: nn.Module, mechanism: Mechanism) -> Optimizer:
    """Make the optimizer; norm gains and biases (one dimension) are not decayed."""
    groups = unison.param_groups(model, mechanism.weight_decay)
    match mechanism.optimizer:
        case "adamw":
            return AdamW(groups, lr=mechanism.lr, betas=ADAM_BETAS)
        case "sgd":
            # Where K-FAC has Adam's length, its step is made of averaged gradients already.
            is_averaged = mechanism.kfac is not None and mechanism.kfac.graft == "adam"
            return SGD(groups, lr=mechanism.lr, momentum=0.0 if is_averaged else 0.9)
        case other:
            raise AssertionError(f"no rule for the optimizer {other!r}")


def make_schedule(optimizer: Optimizer, mechanism: Mechanism) -> LRScheduler:
    """Make the schedule: linear warm-up, then the named decay to zero at the last step."""
    return LambdaLR(optimizer, lambda step: lr_factor(step, mechanism))


def lr_factor(step: int, mechanism: Mechanism) -> float:
    """The learning rate at a step, as a part of its peak.

    >>> m = Mechanism(steps=100, warmup_steps=10, schedule="linear")
    >>> [round(lr_factor(s, m), 3) for s in (0, 9, 10, 55, 99)]
    [0.1, 1.0, 1.0, 0.5, 0.011]
    """
    warmup = min(mechanism.warmup_steps, mechanism.steps)
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, mechanism.steps - warmup)
    match mechanism.schedule:
        case "constant":
            return 1.0
        case "linear":
            return 1 - progress
        case "cosine":
            return 0.5 * (1 + math.cos(math.pi * progress))
        case other:
            raise AssertionError(f"no rule for the schedule {other!r}")
