"""Clipped sums of one flat group of parameters, added over granules, passes and ranks.

They are integers ([Note: sums on a grid] in grid.py), so that the order in which they are added
does not matter: the backend's own is as good as any.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from unison.shard.layout import FlatLayout, ShardPiece, Slot
from unison.shard.ranks import Axes, Ranks
from unison.shard.reducers import FastReducer, Parts


class Group(Protocol):
    """What the reducers need to know of a flat group; see `unison.shard.flat_group`."""

    axes: Axes
    layout: FlatLayout
    reduce_dtype: torch.dtype
    device: torch.device

    @property
    def ranks(self) -> Ranks:
        """The ranks that share the group's shard."""
        ...

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The places of the parameters."""
        ...

    def piece_places(self) -> list[ShardPiece]:
        """What this rank holds of each parameter."""
        ...


class GroupSums:
    """The sums of one group: begun by `take`, exchanged by `start`, complete after `finish`.

    Sharded ones are exchanged after every pass, so that no whole gradient is held longer. Where
    every rank holds the whole gradient anyway, that is once per logical batch.

    Args:
        group: The parameters.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self._reducer: FastReducer | None = None
        self.totals: Parts = [None] * len(group.slots)

    @property
    def names(self) -> Sequence[str]:
        """Of the slots."""
        return [slot.name for slot in self.group.slots]

    @property
    def begun(self) -> Parts | None:
        """The sums of passes before, for who can add to them in place; None for who has to wait."""
        return self.totals if self._is_alone else None

    @property
    def _is_alone(self) -> bool:
        """Whether there is nothing to exchange."""
        return self.group.axes.all.size == 1

    def take(self, granule: int, sums: Parts, dtype: torch.dtype) -> None:
        """Take this rank's sums of one granule, integers of a dtype that all ranks share."""
        self.group.reduce_dtype = dtype
        if self._is_alone:
            self._add(sums)
            return
        if self._reducer is None:
            self._reducer = FastReducer(self.group)  # type: ignore[arg-type]
        self._reducer.take(granule, sums)

    def start(self, *, is_last: bool) -> None:
        """Begin to exchange what this pass, or the whole logical batch, has come to."""
        if self._reducer is not None and (is_last or self._is_sharded):
            self._reducer.start()

    def finish(self, *, is_last: bool) -> None:
        """Wait for the exchange, and add its result to that of earlier passes."""
        if self._reducer is not None and (is_last or self._is_sharded):
            self._add(self._reducer.finish())
            self._reducer = None

    @property
    def _is_sharded(self) -> bool:
        return self.group.axes.shard.size > 1

    def _add(self, parts: Parts) -> None:
        for slot, part in enumerate(parts):
            before = self.totals[slot]
            if part is None or part is before:
                continue
            self.totals[slot] = part.reshape(-1) if before is None else before.add_(part.view(-1))

    def take_totals(self) -> list[Tensor]:
        """The parts that this rank holds of the sums, zeros where nobody used a parameter."""
        totals: Parts = self.totals
        self.totals = [None] * len(totals)
        return [
            torch.zeros(place.numel, dtype=self.group.reduce_dtype, device=self.group.device)
            if total is None
            else total
            for total, place in zip(totals, self.group.piece_places(), strict=True)
        ]

    def drop(self) -> None:
        """Forget what there is."""
        self._reducer = None
        self.totals = [None] * len(self.totals)


MAX_IN_FLIGHT = 1  # exchanges beside the computation; each holds a group's sums


def exchange(groups: Sequence[GroupSums], make: "TakeAll", *, is_last: bool) -> None:
    """Make the sums of one group after the other, while those of the one before are exchanged.

    Args:
        groups: In an order that every rank shares.
        make: Has a group take its sums.
        is_last: Whether the logical batch is complete.
    """
    running: list[GroupSums] = []
    for group in groups:
        make(group)
        while len(running) >= MAX_IN_FLIGHT:
            running.pop(0).finish(is_last=is_last)
        group.start(is_last=is_last)
        running.append(group)
    for group in running:
        group.finish(is_last=is_last)


class TakeAll(Protocol):
    """Has a group take the sums of all granules of a pass."""

    def __call__(self, group: GroupSums) -> None:
        """Make and take them."""
        ...
