"""What turns the gradient of a step into its direction, behind one face for the training step.

`Identity` leaves the gradient to the optimizer. `NaturalGradient` is `unison.KFAC` with the
settings of a run.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

import unison
from unison.config import TrainConfig
from unison.data import IGNORE_INDEX
from unison.train.optimization import ADAM_BETAS
from unison.train.parallel import Parallel

State = Mapping[str, Any]


class Preconditioner(Protocol):
    """Sees the passes of a step, then changes its gradient."""

    def prepare(self, state: State | None) -> None:
        """Take what a checkpoint holds, before anything is written; None for a new run."""
        ...

    def describe(self) -> list[str]:
        """What a person should know before the first step, in sentences."""
        ...

    def attached(self) -> AbstractContextManager[object]:
        """Around the steps: hold on to model and optimizer."""
        ...

    def observe(self, logits: Tensor, labels: Tensor, num_targets: int) -> None:
        """Look at a pass, before its loss is sent back.

        Args:
            logits: Of the pass [rows, tokens, vocab].
            labels: Of the pass [rows, tokens]; what is ignored by the loss does not count.
            num_targets: Labels that count in the whole logical batch.
        """
        ...

    def apply(self) -> None:
        """Put the step's direction where its gradient is; every rank must call it."""
        ...

    def state_dict(self) -> State | None:
        """What a checkpoint needs to go on, None for nothing; every rank must call it."""
        ...


class Identity:
    """Leaves gradients as they are."""

    def prepare(self, state: State | None) -> None:
        """Nothing to take."""
        assert state is None

    def describe(self) -> list[str]:
        """Nothing to know."""
        return []

    def attached(self) -> AbstractContextManager[object]:
        """Nothing to hold on to."""
        return nullcontext()

    def observe(self, logits: Tensor, labels: Tensor, num_targets: int) -> None:
        """Nothing to look at."""

    def apply(self) -> None:
        """Nothing to change."""

    def state_dict(self) -> None:
        """Nothing to keep."""


class NaturalGradient:
    """Preconditions with `unison.KFAC`.

    Its labels come from the run's seed and the positions of rows in the global batch, so that they
    do not depend on the number of ranks.

    Args:
        config: The settings, with a `kfac`.
        parallel: The model as the ranks hold it.
        optimizer: The SGD that takes the step.
    """

    def __init__(self, config: TrainConfig, parallel: Parallel, optimizer: Optimizer) -> None:
        assert config.mechanism.kfac is not None
        self._settings = settings_of(config)
        self._parallel, self._optimizer = parallel, optimizer
        self._state: State | None = None
        self._kfac: unison.KFAC | None = None

    # --- around the steps ------------------------------------------------------------------------

    def prepare(self, state: State | None) -> None:
        """See `Preconditioner.prepare`."""
        self._state = state

    def describe(self) -> list[str]:
        """See `Preconditioner.describe`."""
        settings = self._settings
        lengths = {"adam": "Adam's", "sgd": "the gradient's", "none": "their own"}
        return [
            f"K-FAC: damping {settings.damping:g} ({settings.damping_form}), {settings.fisher} "
            f"Fisher, factors every {settings.update_every} steps, more often in the first "
            f"{settings.burn_in}; steps of {lengths[settings.graft]} length, taken by SGD"
        ]

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Watch the model's passes, and give it back at the end."""
        kfac = unison.KFAC(self._parallel.module, self._settings, self._optimizer)
        try:
            if self._state is not None:
                kfac.load_state_dict(self._state)
                self._state = None  # it is as large as the model
            self._kfac = kfac
            yield
        finally:
            kfac.detach()
            self._kfac = None  # see Parallel.module

    def state_dict(self) -> State:
        """See `Preconditioner.state_dict`."""
        return self._attached.state_dict()

    @property
    def _attached(self) -> unison.KFAC:
        assert self._kfac is not None
        return self._kfac

    # --- a step ----------------------------------------------------------------------------------

    def observe(self, logits: Tensor, labels: Tensor, num_targets: int) -> None:
        """Draw labels for the pass, if this step updates the factors."""
        kfac = self._attached
        if not kfac.wants_statistics:
            return
        # What the loss that is sent back divides the sum over labels by. Only the empirical Fisher
        # asks: it is made of that loss's gradients.
        divisor = max(num_targets, 1) / self._parallel.gradient_scale
        sampled = kfac.sample(logits, labels != IGNORE_INDEX, divisor=divisor)
        sampled.backward(retain_graph=True)

    def apply(self) -> None:
        """See `Preconditioner.apply`."""
        self._attached.step()


def settings_of(config: TrainConfig) -> unison.KFACConfig:
    """The settings of `unison.KFAC` in a run."""
    kfac = config.mechanism.kfac
    assert kfac is not None
    return unison.KFACConfig(
        damping=kfac.damping,
        damping_form=kfac.damping_form,
        max_condition_number=kfac.max_condition_number,
        update_every=kfac.update_every,
        invert_every=kfac.invert_every,
        decay=kfac.decay,
        fisher=kfac.fisher,
        graft=kfac.graft,
        betas=ADAM_BETAS,  # the grafted optimizer is that of a run without K-FAC
        kl_clip=kfac.kl_clip,
        max_factor_size=kfac.max_factor_size,
        owner_fraction=config.execution.owner_fraction,
        seed=config.mechanism.seed,
    )


def preconditioner_of(
    config: TrainConfig, parallel: Parallel, optimizer: Optimizer
) -> Preconditioner:
    """What a run's settings ask for."""
    if config.mechanism.kfac is None:
        return Identity()
    return NaturalGradient(config, parallel, optimizer)
