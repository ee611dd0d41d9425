"""What a module does with a batch, learned once per kind of batch; and how clipping is planned."""

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from unison.capture import AxisTable, check_samples_apart, learn_rows, resized
from unison.clip import AUTO, Learned, Plan
from unison.clip.calibration import Calibration, calibration_of
from unison.clip.learned import learn_layers, mode_of
from unison.errors import UnsupportedOperation
from unison.privacy.border import DerivativesRefused, leaves_of, refuse_leaves
from unison.privacy.inputs import Inputs, OutputDims, probe_losses
from unison.privacy.owners.base import Owner
from unison.privacy.running import ClippingSettings
from unison.privacy.trained import Trained

NUM_PROBED = 3  # samples with which it is learned what the module does


class Learning:
    """Learns of a module, by running it on a few samples, and plans.

    Args:
        module: The user's module.
        settings: How clipping is computed.
        owner: Who holds the module's parameters.
        trained: Looks at them.

    Attributes:
        is_running: Whether the module runs to be learned of, and not to be trained.
    """

    def __init__(
        self, module: nn.Module, settings: ClippingSettings, owner: Owner, trained: Trained
    ) -> None:
        self._module, self._settings = module, settings
        self._owner, self._trained = owner, trained
        self._learned: dict[Any, Learned] = {}
        self.is_running = False

    def learn(self, inputs: Inputs) -> Learned:
        """Return what is known of batches of this kind.

        Raises:
            BadInput: What is trained is not what was made private.
            UnsupportedOperation: An operation has no rule, or samples mix.
        """
        key = (inputs.kind, mode_of(self._module, self._trained.check()))
        learned = self._learned.get(key)
        if learned is None:
            self.is_running = True
            # A few rows tell all, and the same number on every rank.
            samples = tuple(resized(list(inputs.samples), NUM_PROBED))
            try:
                learned = self._learned[key] = self._learned_of(inputs, samples)
            finally:
                self.is_running = False
            self._trained.check()  # the module has run since
        return learned

    def _learned_of(self, inputs: Inputs, samples: tuple[Tensor, ...]) -> Learned:
        batch_dim = self._settings.batch_dim
        rows = self._settings.rows_per_sample
        leaves: list[weakref.ref[Tensor]] = []
        dims = OutputDims(batch_dim, rows)

        def run(module: nn.Module, some: tuple[Tensor, ...]) -> Tensor:
            with DerivativesRefused():
                output = inputs.run(module, some)
            num_samples = len(some[0])
            losses = probe_losses(output, num_samples, dims.of(output, num_samples), rows)
            if losses is None:
                raise UnsupportedOperation(
                    f"no part of the module's output holds its {len(some[0])} samples in dimension "
                    f"{batch_dim}, so it cannot be checked that samples do not mix. Return the "
                    "outputs of each sample beside a loss, as transformers models do"
                )
            leaves.extend(map(weakref.ref, leaves_of(losses)))
            return losses

        axes: AxisTable = learn_rows(self._module, run, samples)
        if axes.is_traced and self._owner.everyone.size > 1 and not self._owner.can_repeat:
            raise UnsupportedOperation(
                "values decide where rows of this module lie, and so how its parameters are used: "
                "ranks that hold parts of them would wait for one another. Train it on one rank, "
                "or wrap it in DistributedDataParallel"
            )
        check_samples_apart(self._module, run, samples, axes)
        layers = self._owner.agreed(learn_layers(self._module, run, samples, axes))
        refuse_leaves(leaves)
        return Learned(axes, tuple(layers))

    def plan(self, learned: Learned, num_rows: int, inputs: Inputs) -> Plan:
        """Return how batches of as many rows are clipped."""
        return learned.plan(
            num_rows,
            mode=self._settings.mode,
            memory_budget=self._settings.memory_budget,
            machine=inputs.device.type,
            timed=self._timed(inputs.device),
            is_alone=self._is_alone,
        )

    @property
    def _is_alone(self) -> bool:
        """Whether a plan is nobody else's, and may depend on more than shapes."""
        return not self._owner.is_ordered and self._owner.everyone.size == 1

    def _timed(self, device: torch.device) -> Calibration | None:
        """What methods take on the device, if plans may depend on it: [Note: calibration]."""
        is_wanted = self._settings.calibrate and self._settings.mode == AUTO
        return calibration_of(device) if is_wanted and self._is_alone else None
