"""A physical batch on its way through the module: what is held of it until its sums are made."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from torch import Tensor

from unison.capture import Capture, Surroundings
from unison.clip import Clipping
from unison.privacy.dealing import Part
from unison.privacy.passes import PhysicalBatch


@dataclass(frozen=True, kw_only=True)
class ClippingSettings:
    """How clipping is computed. Nothing here changes what is computed, but for rounding.

    Attributes:
        mode: `"auto"` or one of `unison.clip.MODES`.
        memory_budget: Bytes that clipping may hold, or None for no bound.
        batch_dim: Dimension of the samples in the module's inputs and outputs.
    """

    mode: str
    memory_budget: int | None
    batch_dim: int


class Phase(Enum):
    """How far one captured pass has come."""

    FORWARD = auto()  # captured, not sent back yet
    BACKWARD = auto()
    DONE = auto()


@dataclass(eq=False)
class RunningPart:
    """Rows that are computed together, on their way through the module."""

    rows: Part
    clipping: Clipping
    capture: Capture
    coefficients: Mapping[str, Tensor] | None = None


@dataclass(eq=False)
class RunningPass:
    """One physical batch on its way through the module."""

    batch: PhysicalBatch
    parts: dict[int, RunningPart]  # by granule
    context: ExitStack
    has_leaf_inputs: bool = False  # the user wants gradients of the batch itself
    call: tuple[tuple, dict[str, Any], Surroundings] | None = None  # if it is to be run again
    phase: Phase = Phase.FORWARD

    @property
    def num_backwards(self) -> int:
        """Backward passes that clipping takes."""
        return max((part.clipping.plan.num_backwards for part in self.parts.values()), default=1)
