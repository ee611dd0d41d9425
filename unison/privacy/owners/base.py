"""What an owner of parameters does for private training."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor, nn

from unison.capture import Capture
from unison.clip import SampleNorms
from unison.clip.layers import Layer
from unison.rng import Box
from unison.shard.deal import BatchPlan
from unison.shard.ranks import Ranks
from unison.shard.sharded_tensor import ShardedTensor


class MakeSums(Protocol):
    """Makes this rank's clipped sums; it gives memory back as it goes.

    Attributes:
        dtype: Of the sums, integers; the same on every rank.
    """

    @property
    def dtype(self) -> torch.dtype:
        """See above."""
        ...

    def __call__(
        self, granule: int, names: Sequence[str], before: Sequence[Tensor | None] | None = None
    ) -> list[Tensor | None]:
        """Return the sums of these parameters, None for one not used.

        Every name is asked for once per granule.

        Args:
            granule: Which.
            names: Of the parameters.
            before: Sums of theirs, to which these are added in place; None for one that has none.
        """
        ...


@dataclass(frozen=True, eq=False)
class Owned:
    """A parameter, or the part of it that this rank holds.

    Attributes:
        name: Its canonical name: noise hangs on it.
        parameter: What the optimizer holds.
        shape: Of the whole parameter.
        start: First of its elements that this rank holds, in row-major order.
        stop: One past the last.
    """

    name: str
    parameter: nn.Parameter
    shape: tuple[int, ...]
    start: int
    stop: int

    @cached_property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        total = 1
        for size in self.shape:
            total *= size
        return total

    @property
    def box(self) -> Box:
        """Which elements of the parameter these are."""
        return Box.flat(self.start, self.stop, self.numel)

    def as_gradient(self, values: Tensor) -> Tensor:
        """A gradient of these elements, as the optimizer wants to find it in `.grad`."""
        shape, device = self.parameter.shape, self.parameter.device
        if values.device != device:
            values = values.to(device)
        if isinstance(self.parameter, ShardedTensor):
            return ShardedTensor(values.view(-1), self.parameter.placement)
        return values if values.shape == shape else values.view(shape)

    @cached_property
    def is_part(self) -> bool:
        """Whether this rank holds some of the elements only."""
        return self.stop - self.start < self.numel


class RecordsWhole:
    """An owner whose ranks all hold other samples, and record the uses of whole parameters."""

    ranks: Ranks
    why_uncompiled: str | None = None

    @property
    def everyone(self) -> Ranks:
        """All ranks that train together; see `Owner`."""
        return self.ranks

    @property
    def is_alone(self) -> bool:
        """Whether this rank's own sums are all there is; see `Owner`."""
        return False

    def agreed(self, layers: Sequence[Layer]) -> Sequence[Layer]:
        """What clipping is planned for; see `Owner`."""
        return layers

    def whole_norms(self, norms: Mapping[str, SampleNorms]) -> Mapping[str, SampleNorms]:
        """The norms of samples; see `Owner`."""
        return norms


class Owner(Protocol):
    """Holds the parameters of a module, and adds clipped sums up over passes and ranks.

    Attributes:
        ranks: The ranks that share each logical batch, and hold other samples of it.
        is_ordered: Whether passes are cut into granules: the same bits on any number of ranks.
        can_repeat: Whether the module's forward may be run again when a backward pass ends.
        runs_together: Whether the module's passes are collectives: all ranks run them, or none.
        why_uncompiled: Why the module's passes cannot go through torch.compile; None if they can.
        owned: Every trainable parameter, or this rank's part of it.
    """

    ranks: Ranks
    is_ordered: bool
    can_repeat: bool
    runs_together: bool
    why_uncompiled: str | None
    owned: Sequence[Owned]

    @property
    def everyone(self) -> Ranks:
        """All ranks that train together: they have one key and one ledger."""
        ...

    @property
    def is_alone(self) -> bool:
        """Whether this rank's own sums of a pass, in any order, are those over all ranks."""
        ...

    def agreed(self, layers: Sequence[Layer]) -> Sequence[Layer]:
        """What clipping is planned for, the same on all ranks that must run the same passes."""
        ...

    def whole_norms(self, norms: Mapping[str, SampleNorms]) -> Mapping[str, SampleNorms]:
        """The norms of samples over whole parameters, from those over what this rank records.

        Every rank calls it once for every part of a pass.
        """
        ...

    def installed(self, captures: Mapping[int, Capture]) -> AbstractContextManager[None]:
        """Put tracked parameters in place, for each granule those of its capture."""
        ...

    def add(self, make_sums: MakeSums, plan: BatchPlan, granules: Sequence[int]) -> None:
        """Add the clipped sums of a pass; with the last pass of a logical batch, over ranks.

        Every rank calls it for every pass.
        """
        ...

    def totals(self) -> Iterator[tuple[Owned, Tensor]]:
        """Hand out the sums of a logical batch over all ranks [stop - start], and forget them."""
        ...

    def drop(self) -> None:
        """Forget the sums of a logical batch that was given up."""
        ...

    def detach(self) -> None:
        """Leave the module as it was."""
        ...
