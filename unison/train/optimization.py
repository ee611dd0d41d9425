"""Optimizers and schedules, torch's own by name, and what K-FAC makes of a step's gradient."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

import unison
from unison.config import MechanismConfig, TrainConfig
from unison.data import IGNORE_INDEX
from unison.train.parallel import Parallel

ADAM_BETAS = (0.9, 0.95)


def make_optimizer(model: nn.Module, mechanism: MechanismConfig) -> Optimizer:
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
    match mechanism.schedule:
        case "constant":
            return 1.0
        case "linear":
            return 1 - progress
        case "cosine":
            return 0.5 * (1 + math.cos(math.pi * progress))
        case other:
            raise AssertionError(f"no rule for the schedule {other!r}")


# ---- from gradient to direction ------------------------------------------------------------------


class NaturalGradient:
    """Preconditions a step's gradient with `unison.KFAC`; leaves it alone in a run without `kfac`.

    Its labels come from the run's seed and the positions of rows in the global batch, so that they
    do not depend on the number of ranks.

    Args:
        config: The settings.
        parallel: The model as the ranks hold it.
        optimizer: The SGD that takes the step.
    """

    def __init__(self, config: TrainConfig, parallel: Parallel, optimizer: Optimizer) -> None:
        self._settings = None if config.mechanism.kfac is None else settings_of(config)
        self._parallel, self._optimizer = parallel, optimizer
        self._kfac: unison.KFAC | None = None

    def describe(self) -> list[str]:
        """Say how curvature is made and applied, before the first step."""
        settings = self._settings
        if settings is None:
            return []
        lengths = {"adam": "Adam's", "sgd": "the gradient's", "none": "their own"}
        return [
            f"K-FAC: damping {settings.damping:g} ({settings.damping_form}), {settings.fisher} "
            f"Fisher, factors every {settings.update_every} steps, more often in the first "
            f"{settings.burn_in}; steps of {lengths[settings.graft]} length, taken by SGD"
        ]

    @contextmanager
    def attached(self, state: Mapping[str, Any] | None = None) -> Iterator[None]:
        """Watch the model's passes, and give it back at the end; `state` is a checkpoint's."""
        if self._settings is None:
            assert state is None
            yield
            return
        self._kfac = unison.KFAC(self._parallel.module, self._settings, self._optimizer)
        try:
            if state is not None:
                self._kfac.load_state_dict(state)
                del state  # it is as large as the model
            yield
        finally:
            self._kfac.detach()
            self._kfac = None  # see Parallel.module

    def observe(self, logits: Tensor, labels: Tensor, num_targets: int) -> None:
        """Draw labels for a pass, before its loss is sent back, if this step updates the factors.

        Args:
            logits: Of the pass [rows, tokens, vocab].
            labels: Of the pass [rows, tokens]; what is ignored by the loss does not count.
            num_targets: Labels that count in the whole logical batch.
        """
        if self._kfac is None or not self._kfac.wants_statistics:
            return
        # What the loss that is sent back divides the sum over labels by. Only the empirical Fisher
        # asks: it is made of that loss's gradients.
        divisor = max(num_targets, 1) / self._parallel.gradient_scale
        sampled = self._kfac.sample(logits, labels != IGNORE_INDEX, divisor=divisor)
        sampled.backward(retain_graph=True)

    def apply(self) -> None:
        """Put the step's direction where its gradient is; every rank must call it."""
        if self._kfac is not None:
            self._kfac.step()

    def state_dict(self) -> dict[str, Any] | None:
        """Return the factors and what was made of them, None without; every rank must call it."""
        return None if self._kfac is None else self._kfac.state_dict()


def settings_of(config: TrainConfig) -> unison.KFACConfig:
    """The settings of `unison.KFAC` in a run."""
    assert config.mechanism.kfac is not None
    return unison.KFACConfig(
        **asdict(config.mechanism.kfac),
        betas=ADAM_BETAS,  # the grafted optimizer is that of a run without K-FAC
        owner_fraction=config.execution.owner_fraction,
        seed=config.mechanism.seed,
    )
