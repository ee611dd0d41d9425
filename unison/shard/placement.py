"""Which elements of a parameter each rank holds, and the boxes that a checkpoint sees of them."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from unison.shard.ranks import Ranks


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

    def is_like(self, other: "Placement") -> bool:
        """Whether every rank holds the same elements of both."""
        return self is other or (self.shape == other.shape and self.ranges == other.ranges)

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
