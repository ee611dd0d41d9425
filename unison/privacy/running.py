"""Batches under way: what is held of a physical and of a logical one until its sums are made."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor

from unison.capture import Capture, RngAutocastState
from unison.clip import Clipping, SampleNorms
from unison.clip.measured import SumGrid
from unison.dynamo import DynamoBackend
from unison.privacy.dealing import Part
from unison.privacy.grid import Grid
from unison.privacy.mechanism import Release
from unison.privacy.passes import PhysicalBatch
from unison.rng import Key


@dataclass(frozen=True, kw_only=True)
class ClippingSettings:
    """How clipping is computed. Nothing here changes what is computed, but for rounding.

    Attributes:
        mode: `"auto"` or one of `unison.clip.MODES`.
        memory_budget: Bytes that clipping may hold, or None for no bound.
        batch_dim: Dimension of the samples in the module's inputs and outputs.
        calibrate: Whether `"auto"` may time methods on the GPU.
        rows_per_sample: Rows of the module's inputs that belong to one sample.
        recheck: Whether module and loss are checked again at passes 2, 4, 8, …; else the first of
            each kind is.
        public_buffers: Names of buffers, or patterns of them, that may hold what passes write.
        compile: The backend that passes are compiled with; None if they are not.
    """

    mode: str
    memory_budget: int | None
    batch_dim: int
    calibrate: bool = True
    rows_per_sample: int = 1
    recheck: bool = True
    public_buffers: tuple[str, ...] = ()
    compile: DynamoBackend | None = None


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
    num_backwards: int  # backward passes that clipping takes
    call: tuple[tuple, dict[str, Any], RngAutocastState] | None = None  # if it is to be run again
    phase: Phase = Phase.FORWARD

    def __post_init__(self) -> None:
        self._captures = [part.capture for part in self.parts.values()]

    def close(self) -> None:
        """Let go of the module and of what was recorded: the pass is over, or given up."""
        self.context.close()
        for capture in self._captures:
            capture.release()
        self.parts.clear()
        self.call = None


class PassSums:
    """Makes the clipped sums of a pass that has ended: integers, on a grid; see `MakeSums`.

    Integers add without rounding: over granules, passes and ranks the sum is the same in any order,
    and emptying a record changes it by what it changes in that record's own rows.

    Attributes:
        grid: On which they lie; set before they are made.
    """

    grid: Grid

    def __init__(self, parts: dict[int, RunningPart]) -> None:
        self._parts = dict(parts)

    def __call__(
        self, granule: int, names: Sequence[str], before: Sequence[Tensor | None] | None = None
    ) -> list[Tensor | None]:
        """Return this rank's clipped sums of these parameters; see `MakeSums`."""
        part = self._parts[granule]
        assert part.coefficients is not None
        totals = dict(zip(names, before or [None] * len(names), strict=True))
        part.clipping.add_on_grid(
            part.coefficients, totals, spacing=self.grid.spacing, dtype=self.grid.dtype
        )
        return list(totals.values())

    @property
    def dtype(self) -> torch.dtype:
        """Of the sums."""
        return self.grid.dtype

    def shares(self) -> dict[str, tuple[Tensor, Tensor]] | None:
        """Hand out what the sums are made of, if all rows were computed together.

        See `Clipping.shares`; None, if there are several granules.
        """
        if len(self._parts) != 1:
            return None
        ((_, part),) = self._parts.items()
        assert part.coefficients is not None
        return part.clipping.shares(part.coefficients)


Coefficients = Callable[
    [PhysicalBatch, Part, Mapping[str, SampleNorms]], tuple[Mapping[str, Tensor], SumGrid]
]
"""(batch, rows, norms of each used parameter) -> a coefficient per row for each parameter, and the
grid that shares are rounded to."""
AddSums = Callable[[PhysicalBatch, PassSums], None]
"""(batch, what makes the clipped sums), when a backward pass has ended."""


@dataclass(eq=False)
class LogicalBatch:
    """A logical batch under way."""

    release: Release
    next_pass: int
    norms: list[Tensor]  # of this rank's samples, of each part of each pass [samples]
    positions: list[Tensor]  # where they stand in the logical batch [samples]
    rates: list[Any]  # the optimizer's learning rates when it began
    key: Key | None = None  # of its noise, once the ledger holds its intent
