"""Where each parameter lies in a unit's flat buffer: arithmetic only, no tensors.

[Note: one coordinate system] An element's index in its unit's flat buffer does not depend on the
world size. Optimizer, norm, noise and checkpoint all speak of (unit, index), so that a run can go
on with another number of ranks. Two alignments make the *bits* independent too: every parameter
starts at a multiple of ALIGNMENT and every shard is a multiple of it long, so that a cut never
falls inside a vector register and a fused optimizer sees the same vector bodies and tails
everywhere.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from unison.shard.ranks import Ranks

ALIGNMENT = 256  # elements


def aligned(length: int, alignment: int = ALIGNMENT) -> int:
    """Round a length up to a multiple of the alignment.

    >>> [aligned(n) for n in (0, 1, 256, 257)]
    [0, 256, 256, 512]
    """
    return -(-length // alignment) * alignment


@dataclass(frozen=True)
class Slot:
    """The place of one parameter: `numel` elements from `offset` on."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @cached_property
    def numel(self) -> int:
        """Number of elements; 1 for a parameter of no dimensions."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class FlatLayout:
    """The order and the places of parameters in one flat buffer.

    Attributes:
        slots: The parameters, by increasing offset.
        length: Elements of the buffer before it is padded for the ranks that share it.
        num_ranks: How many do.
        alignment: Every rank's shard is a multiple of it long.
    """

    slots: tuple[Slot, ...]
    length: int
    num_ranks: int = 1
    alignment: int = ALIGNMENT

    @classmethod
    def of(cls, shapes: Iterable[tuple[str, tuple[int, ...]]], num_ranks: int = 1) -> "FlatLayout":
        """Lay out parameters in the order given.

        >>> [slot.offset for slot in FlatLayout.of([("a", (3, 5)), ("b", ()), ("c", (600,))]).slots]
        [0, 256, 512]
        """
        slots, offset = [], 0
        for name, shape in shapes:
            slots.append(Slot(name, tuple(shape), offset))
            offset += aligned(slots[-1].numel)
        return cls(tuple(slots), offset, num_ranks)

    @cached_property
    def shard_length(self) -> int:
        """Elements of every rank's shard, the last one padded.

        >>> FlatLayout.of([("a", (1000,))], num_ranks=3).shard_length
        512
        """
        return aligned(-(-self.length // self.num_ranks), self.alignment)

    @cached_property
    def padded_length(self) -> int:
        """Elements of all shards together."""
        return self.shard_length * self.num_ranks

    @cached_property
    def pieces(self) -> list[list[tuple[int, int, int]]]:
        """What each rank's shard holds of every parameter: (start, stop, offset in the shard).

        These are the elements [start, stop) of the flattened parameter; there may be none.
        """
        length, of_ranks = self.shard_length, []
        for rank in range(self.num_ranks):
            low, high, pieces = rank * length, (rank + 1) * length, []
            for slot in self.slots:
                start = min(max(low - slot.offset, 0), slot.numel)
                stop = max(min(high - slot.offset, slot.numel), start)
                pieces.append((start, stop, min(max(slot.offset - low, 0), length)))
            of_ranks.append(pieces)
        return of_ranks

    @cached_property
    def ranges(self) -> list[tuple[tuple[int, int], ...]]:
        """Which elements [start, stop) of each flattened parameter every rank holds."""
        return [
            tuple((start, stop) for start, stop, _ in of_slot)
            for of_slot in zip(*self.pieces, strict=True)
        ]


def cut(shard: Tensor, pieces: list[tuple[int, int, int]]) -> list[Tensor]:
    """The views of a rank's shard [shard length] that hold each of its `FlatLayout.pieces`."""
    return [shard.narrow(0, offset, stop - start) for start, stop, offset in pieces]


# ------------------------------------------------------------------------------------------------
# Which elements of a parameter each rank holds, and the boxes that a checkpoint sees of them.


@dataclass(frozen=True, eq=False)
class Placement:
    """Which elements of a parameter each rank holds.

    Attributes:
        name: The parameter's name in its unit.
        shape: Of the whole parameter.
        ranges: Rank r holds the elements [start, stop) of `ranges[r]`, of the flattened whole.
        ranks: Who shares it.
        device: Where ranks exchange it: an offloaded piece lies elsewhere.
        is_ordered: Whether results must not depend on the number of ranks.
    """

    name: str
    shape: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...]
    ranks: Ranks
    device: torch.device
    is_ordered: bool = False

    @property
    def start(self) -> int:
        """First element that this rank holds."""
        return self.ranges[self.ranks.rank][0]

    @property
    def stop(self) -> int:
        """One past its last element."""
        return self.ranges[self.ranks.rank][1]

    @property
    def numel(self) -> int:
        """Elements of the whole."""
        return math.prod(self.shape)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Placement":
        return self  # process groups are not copied

    def __str__(self) -> str:
        return f"{self.name!r}, of which this rank holds elements {self.start}:{self.stop}"

    @cached_property
    def boxes(self) -> list[tuple[tuple[int, ...], tuple[int, ...], int]]:
        """This rank's elements as boxes of the whole: (offsets, sizes, first element) of each.

        At most 2N - 1 for N dimensions: rows that are whole, and what is cut off before and after.
        """
        return list(boxes_of(self.shape, self.start, self.stop, is_first=self.ranks.rank == 0))


def boxes_of(
    shape: tuple[int, ...], start: int, stop: int, *, is_first: bool = False
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Cover elements [start, stop) of a shape by boxes (offsets, sizes, first element).

    Args:
        shape: Of the whole.
        start: First element.
        stop: One past the last.
        is_first: Whether to give the one box of a shape without elements: a checkpoint knows a
            name only if somebody writes it.

    >>> [(offsets, sizes) for offsets, sizes, _ in boxes_of((3, 4), 2, 10)]
    [((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 2))]
    """
    if math.prod(shape) == 0 and is_first:
        yield (0,) * len(shape), shape, 0
    if not shape and start < stop:
        yield (), (), 0
        return
    rows = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    while start < stop:
        # The outermost dimension of which a whole row begins here and ends inside.
        dim = next(d for d, row in enumerate(rows) if start % row == 0 and start + row <= stop)
        offsets = tuple(start // row % size for row, size in zip(rows, shape, strict=True))
        count = min((stop - start) // rows[dim], shape[dim] - offsets[dim])
        yield offsets, (1,) * dim + (count, *shape[dim + 1 :]), start
        start += count * rows[dim]
