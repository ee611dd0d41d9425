"""Where each parameter lies in a unit's flat buffer: arithmetic only, no tensors.

[Note: one coordinate system] An element's index in its unit's flat buffer does not depend on the
world size. Optimizer, norm, noise and checkpoint all speak of (unit, index), so that a run can go
on with another number of ranks. Two alignments make the *bits* independent too: every parameter
starts at a multiple of ALIGNMENT and every shard is a multiple of it long, so that a cut never
falls inside a vector register and a fused optimizer sees the same vector bodies and tails
everywhere.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

ALIGNMENT = 256  # elements


def aligned(length: int) -> int:
    """Round a length up to a multiple of ALIGNMENT.

    >>> [aligned(n) for n in (0, 1, 256, 257)]
    [0, 256, 256, 512]
    """
    return -(-length // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Slot:
    """The place of one parameter: `numel` elements from `offset` on."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a parameter of no dimensions."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Piece:
    """What one rank's shard holds of one parameter.

    Attributes:
        slot: The parameter.
        start: First element of the parameter that this shard holds.
        stop: One past its last element; equal to `start` where it holds none.
        shard_offset: Where the piece begins in the shard.
    """

    slot: Slot
    start: int
    stop: int
    shard_offset: int

    @property
    def numel(self) -> int:
        """Elements that this rank holds of the parameter."""
        return self.stop - self.start


@dataclass(frozen=True)
class FlatLayout:
    """The order and the places of parameters in one flat buffer.

    Attributes:
        slots: The parameters, by increasing offset.
        length: Elements of the buffer before it is padded for a world size.
    """

    slots: tuple[Slot, ...]
    length: int

    @classmethod
    def of(cls, shapes: Iterable[tuple[str, tuple[int, ...]]]) -> "FlatLayout":
        """Lay out parameters in the order given.

        >>> [slot.offset for slot in FlatLayout.of([("a", (3, 5)), ("b", ()), ("c", (600,))]).slots]
        [0, 256, 512]
        """
        slots, offset = [], 0
        for name, shape in shapes:
            slots.append(Slot(name, tuple(shape), offset))
            offset += aligned(slots[-1].numel)
        return cls(tuple(slots), offset)

    def shard_length(self, world_size: int) -> int:
        """Elements of every rank's shard, the last one padded.

        >>> FlatLayout.of([("a", (1000,))]).shard_length(3)
        512
        """
        return aligned(-(-self.length // world_size))

    def padded_length(self, world_size: int) -> int:
        """Elements of all shards together."""
        return self.shard_length(world_size) * world_size

    def gaps(self, world_size: int) -> list[tuple[int, int]]:
        """The runs [low, high) of the padded buffer that no parameter fills.

        >>> FlatLayout.of([("a", (3, 5)), ("b", (256,))]).gaps(1)
        [(15, 256)]
        """
        ends = [slot.offset + slot.numel for slot in self.slots]
        starts = [*(slot.offset for slot in self.slots[1:]), self.padded_length(world_size)]
        return [(low, high) for low, high in zip(ends, starts, strict=True) if low < high]

    def pieces(self, rank: int, world_size: int) -> list[Piece]:
        """What a rank's shard holds of every parameter, empty pieces included."""
        length = self.shard_length(world_size)
        low, high = rank * length, (rank + 1) * length
        pieces = []
        for slot in self.slots:
            start = min(max(low - slot.offset, 0), slot.numel)
            stop = max(min(high - slot.offset, slot.numel), start)
            shard_offset = min(max(slot.offset - low, 0), length)
            pieces.append(Piece(slot, start, stop, shard_offset))
        return pieces
