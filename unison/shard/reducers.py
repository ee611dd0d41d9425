"""Two ways to sum gradients over ranks: `fast` and `ordered`.

Both collect the gradients of a group's leaves, in whatever order the backward pass makes them, and
then turn them into this rank's shard of the sum. Collectives only sum; the division by the divisor
happens once, in `Unit.finish_reduce`.

[Note: used flags] A parameter that no rank used must end with no gradient, as it would on one
process (an optimizer moves a parameter whose gradient is zero, but skips one that has none). Ranks
may use different parameters, so each sends one flag per parameter along with the gradients: a few
hundred bytes. A rank reads the sums of the flags only if it missed a parameter itself.
"""

import itertools
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from unison.shard.flat_group import FlatGroup
from unison.shard.layout import Slot, aligned
from unison.shard.ranks import Work
from unison.shard.tree import SubtreeSum, TreeSum, aligned_levels


class Reducer(Protocol):
    """Sums the gradients of one flat group."""

    def add(self, granule: int, slot: int, gradient: Tensor) -> None:
        """Take the complete gradient of one parameter in one granule."""
        ...

    def start(self) -> None:
        """Begin the exchange with the other ranks."""
        ...

    def finish(self) -> tuple[Tensor, list[bool]]:
        """Return the shard of the sum [shard length], and which parameters any rank used."""
        ...


class FastReducer:
    """The backend's own reduce-scatter over whatever each rank summed itself."""

    def __init__(self, group: FlatGroup) -> None:
        self._group = group
        ranks, length = group.ranks, group.layout.shard_length(group.ranks.size)
        self._length, self._num_flags = length, aligned(len(group.slots))
        # One row per owner: its shard of the gradient, then the flags.
        self._sent = torch.zeros(
            ranks.size, length + self._num_flags, dtype=group.dtype, device=group.device
        )
        self._gradient = self._sent.new_zeros(0)
        self._used = [False] * len(group.slots)
        self._work: Work | None = None

    def add(self, granule: int, slot: int, gradient: Tensor) -> None:
        """Add a gradient to this rank's own sum."""
        for target, part in _by_owner(self._sent, self._length, self._group.slots[slot], gradient):
            if self._used[slot]:
                target.add_(part)
            else:
                target.copy_(part)
        self._used[slot] = True

    def start(self) -> None:
        """Begin the reduce-scatter."""
        flags = self._sent.new_tensor([float(used) for used in self._used])
        self._sent[:, self._length : self._length + len(self._used)] = flags
        self._gradient = torch.empty_like(self._sent[0])
        self._work = self._group.ranks.reduce_scatter(self._gradient, self._sent.view(-1))

    def finish(self) -> tuple[Tensor, list[bool]]:
        """Wait for the sum."""
        assert self._work is not None
        self._work.wait()
        used = self._used
        if not all(used):
            flags = self._gradient[self._length : self._length + len(used)].tolist()
            used = [flag > 0 for flag in flags]
        return self._gradient[: self._length], used


class OrderedReducer:
    """The canonical tree over global granules (see tree.py), exchanged all to all.

    Args:
        group: The flat group.
        edges: Rank r holds the granules [edges[r], edges[r + 1]) of the logical batch.
    """

    def __init__(self, group: FlatGroup, edges: tuple[int, ...]) -> None:
        self._group, self._edges = group, edges
        rank = group.ranks.rank
        self._mine = (edges[rank], edges[rank + 1])
        self._trees = [SubtreeSum(*self._mine) for _ in group.slots]
        self._levels = [aligned_levels(low, high) for low, high in itertools.pairwise(edges)]
        self._granules: list[set[int]] = [set() for _ in group.slots]
        self._work: Work | None = None
        self._received = group.shard.new_zeros(0)
        self._sent = self._received

    def add(self, granule: int, slot: int, gradient: Tensor) -> None:
        """Take a leaf of the tree; a granule that is not of the batch (a ghost) adds nothing."""
        if self._mine[0] <= granule < self._mine[1]:
            self._granules[slot].add(granule)
            self._trees[slot].put(granule, gradient)

    def start(self) -> None:
        """Pack this rank's subtrees, one row per owner, and begin the exchange.

        Every rank sends the same number of subtrees, padded with zeros: at most 2 log2(granules),
        and one when the world size is a power of two that divides the number of granules.
        """
        group, ranks = self._group, self._group.ranks
        num_nodes = max(1, *(len(levels) for levels in self._levels))
        length = group.layout.shard_length(ranks.size)
        num_flags = aligned(len(group.slots))
        # One row per owner: its shard of every subtree, then the flags.
        self._sent = group.shard.new_zeros(ranks.size, num_nodes * length + num_flags)
        for index, slot in enumerate(group.slots):
            for column, node in enumerate(self._subtrees(index)):
                rows = self._sent[:, column * length :]
                for target, part in _by_owner(rows, length, slot, node):
                    target.copy_(part)
        flags = self._sent.new_tensor([float(len(seen) > 0) for seen in self._granules])
        self._sent[:, num_nodes * length : num_nodes * length + len(flags)] = flags
        self._received = torch.empty_like(self._sent)
        self._work = ranks.exchange(self._received, self._sent)

    def _subtrees(self, slot: int) -> list[Tensor]:
        """This rank's subtrees of a parameter, none if it was not used at all.

        A granule that did not use it counts as zeros, here as on a rank that never used it: adding
        nothing instead would keep a -0.0 that adding 0.0 elsewhere does not.
        """
        tree, seen = self._trees[slot], self._granules[slot]
        if not seen:
            return []
        for granule in set(range(*self._mine)) - seen:
            tree.put(granule, self._group.shard.new_zeros(self._group.slots[slot].shape))
        nodes = tree.take()
        assert [level for level, _ in nodes] == self._levels[self._group.ranks.rank]
        return [node for _, node in nodes]

    def finish(self) -> tuple[Tensor, list[bool]]:
        """Wait, and add the subtrees of all ranks in tree order."""
        assert self._work is not None
        self._work.wait()
        group = self._group
        length = group.layout.shard_length(group.ranks.size)
        total = TreeSum()
        for row, levels in zip(self._received, self._levels, strict=True):
            for index, level in enumerate(levels):
                total.push(row[index * length : (index + 1) * length], level)
        gradient = total.finish()
        used = [len(seen) > 0 for seen in self._granules]
        if not all(used):
            num_flags = aligned(len(used))
            flags = self._received[:, -num_flags:][:, : len(used)]
            used = (flags > 0).any(dim=0).tolist()
        if gradient is None:  # an empty logical batch
            gradient = torch.zeros_like(group.shard)
        return gradient, used


def _by_owner(
    rows: Tensor, length: int, slot: Slot, gradient: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Pair the parts of a parameter's gradient with their places in the owners' rows.

    Args:
        rows: One row per rank [size, at least length], which begins with the rank's shard.
        length: Elements of a shard.
        slot: The parameter's place; it may lie across several shards.
        gradient: The parameter's gradient, in its own shape.

    Yields:
        (view of `rows`, view of `gradient`), both one-dimensional.
    """
    flat, start = gradient.reshape(-1), 0
    while start < slot.numel:
        owner, column = divmod(slot.offset + start, length)
        count = min(length - column, slot.numel - start)
        yield rows[owner, column : column + count], flat[start : start + count]
        start += count
