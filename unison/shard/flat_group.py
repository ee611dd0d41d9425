"""The storage of some of a unit's parameters: one flat buffer, sharded or full.

[Note: sharded and full] Two tensors, never one with two meanings:

* `shard` [shard length] is this rank's part. It always exists. The parameters that the module's
  `named_parameters()` shows and the optimizer updates are one-dimensional views of it, the *pieces*
  (empty where the rank holds nothing of a parameter).
* `full` [padded length] holds all ranks' shards while a forward or backward pass needs them. Its
  storage is resized to nothing in between, rather than the tensor dropped, so that what autograd
  saved in the forward pass still points to it when it is filled again for the backward pass.

The computation sees *leaves*: views of `full` in the parameters' own shapes that require gradients.
There is one set of them per granule (see engine.py): each granule's gradient arrives apart.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

import torch
from torch import Tensor, nn

from unison.shard.layout import FlatLayout, Piece, Slot
from unison.shard.ranks import DONE, Ranks, Work

ORIGINAL_SHAPE = "_unison_original_shape"  # on a piece: the shape of the whole parameter


class Phase(Enum):
    """What a flat buffer holds at the moment."""

    SHARDED = auto()  # `full` has no memory
    GATHERING = auto()  # a collective is writing `full`
    FULL = auto()  # `full` holds the parameters


@dataclass(frozen=True)
class Use:
    """One place where a module holds a parameter; a tied parameter has several."""

    module: nn.Module
    attribute: str


@dataclass
class ParameterInfo:
    """A parameter on its way into a flat buffer."""

    name: str
    value: nn.Parameter
    uses: list[Use] = field(default_factory=list)


class FlatGroup:
    """Parameters of one unit that share dtype and `requires_grad`."""

    def __init__(
        self, parameters: list[ParameterInfo], ranks: Ranks, neighbours: Ranks | None = None
    ) -> None:
        first = parameters[0].value
        self.ranks = ranks
        self._neighbours = neighbours  # who shares the parameters between forward and backward
        self._kept: Tensor | None = None
        self.dtype, self.device = first.dtype, first.device
        self.requires_grad = first.requires_grad
        self.uses = [parameter.uses for parameter in parameters]
        self.layout = FlatLayout.of((p.name, tuple(p.value.shape)) for p in parameters)
        self.shard = torch.zeros(
            self.layout.shard_length(ranks.size), dtype=self.dtype, device=self.device
        )
        self.full = torch.empty(
            self.layout.padded_length(ranks.size), dtype=self.dtype, device=self.device
        )
        self._full_bytes = self.full.untyped_storage().nbytes()
        self.phase = Phase.SHARDED
        self._work: Work = DONE
        self._gathered_version = self._kept_version = -1
        self.pieces: list[nn.Parameter] = []
        for parameter, piece in zip(parameters, self.piece_places(), strict=True):
            self._adopt(parameter.value, piece)
        if ranks.size == 1:
            # One rank's shard *is* the whole: nothing is copied, and nothing ever freed.
            self.full = self.shard.detach()
            self.phase = Phase.FULL
        else:
            self.full.untyped_storage().resize_(0)
        self._leaves: dict[int, list[Tensor]] = {}

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The places of the parameters."""
        return self.layout.slots

    def piece_places(self) -> list[Piece]:
        """What this rank holds of each parameter."""
        return self.layout.pieces(self.ranks.rank, self.ranks.size)

    @torch.no_grad()
    def _adopt(self, parameter: nn.Parameter, piece: Piece) -> None:
        """Copy this rank's piece of a parameter into the shard and make the piece a parameter."""
        view = self.shard.narrow(0, piece.shard_offset, piece.numel)
        if not parameter.is_meta:
            view.copy_(parameter.detach().reshape(-1)[piece.start : piece.stop])
        part = nn.Parameter(view, requires_grad=self.requires_grad)
        setattr(part, ORIGINAL_SHAPE, piece.slot.shape)
        self.pieces.append(part)

    # --- gather and free -------------------------------------------------------------------------

    def start_gather(self) -> None:
        """Begin to fill `full`, unless it holds, or is getting, the current values."""
        if self.phase is not Phase.SHARDED:
            if self.ranks.size == 1 or self._gathered_version == self.shard._version:
                return
            self.free()  # an optimizer stepped since: what is there is stale
        self.full.untyped_storage().resize_(self._full_bytes)
        self._gathered_version = self.shard._version
        # Through `.data`, which has a version counter of its own: to autograd this write is no
        # change, since it restores what was saved.
        if self._kept is not None and self._kept_version == self.shard._version:
            assert self._neighbours is not None
            self._work = self._neighbours.gather(self.full.data, self._kept)
        else:
            self._work = self.ranks.gather(self.full.data, self.shard.detach())
        self.phase = Phase.GATHERING

    def finish_gather(self) -> None:
        """Wait until `full` holds the parameters."""
        self.start_gather()
        if self.phase is Phase.GATHERING:
            self._work.wait()
            self._work = DONE
            self.phase = Phase.FULL

    def free(self) -> None:
        """Give the memory of `full` back."""
        if self.ranks.size == 1:
            return
        if self.phase is Phase.GATHERING:
            self._work.wait()
            self._work = DONE
        self.full.untyped_storage().resize_(0)
        self.phase = Phase.SHARDED

    def free_after_forward(self) -> None:
        """Give memory back until the backward pass, keeping a larger part where that was asked."""
        if self._neighbours is not None and self.phase is Phase.FULL and self.ranks.size > 1:
            parts = self.full.detach().view(self._neighbours.size, -1)
            self._kept = parts[self._neighbours.rank].clone()
            self._kept_version = self._gathered_version
        self.free()

    def end_backward(self) -> None:
        """Give all memory back that only this step needed."""
        self._kept = None
        self.free()

    # --- leaves ----------------------------------------------------------------------------------

    def leaves(self, granule: int, on_gradient: Callable[[int, int, Tensor], None]) -> list[Tensor]:
        """The views of `full` that one granule computes with, one per parameter.

        Args:
            granule: Which granule; the same one gets the same leaves until `drop_leaves`, so that
                several forward passes add up in one gradient.
            on_gradient: Called with (granule, slot index, leaf) when a leaf's gradient is complete.
        """
        if granule not in self._leaves:
            self._leaves[granule] = [
                self._make_leaf(index, slot, granule, on_gradient)
                for index, slot in enumerate(self.slots)
            ]
        return self._leaves[granule]

    def _make_leaf(
        self,
        index: int,
        slot: Slot,
        granule: int,
        on_gradient: Callable[[int, int, Tensor], None],
    ) -> Tensor:
        view = self.full.detach().as_strided(
            slot.shape, _contiguous_strides(slot.shape), slot.offset
        )
        if not self.requires_grad:
            return view
        leaf = nn.Parameter(view)
        leaf.register_post_accumulate_grad_hook(lambda leaf: on_gradient(granule, index, leaf))
        return leaf

    @property
    def num_leaves(self) -> int:
        """Leaves that can receive a gradient in the backward pass to come."""
        return len(self._leaves) * len(self.slots) if self.requires_grad else 0

    def drop_leaves(self) -> None:
        """Forget all leaves; the next forward pass makes new ones."""
        self._leaves.clear()


def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
