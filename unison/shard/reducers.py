"""Two ways to sum gradients over ranks: `fast` and `ordered`.

Both collect the gradients of a flat buffer's parameters (`take`), exchange them with others
(`start`) and turn them into this rank's parts of the sum (`finish`); an ordered part is None where
the logical batch was empty, or where a rank that is alone did not use the parameter.
Collectives only sum; the division by the divisor happens once, in `Unit.finish_reduce`.

[Note: unused parameters] A parameter that no rank used must end with no gradient, as it would on
one process (an optimizer moves a parameter whose gradient is zero, but skips one that has none).
Ranks may use different parameters. So a rank keeps the parts of those it did not use itself apart,
and at the end of the backward pass all ranks add up one flag per parameter, in one small sum for
the whole model, and learn which of them count (see `Context`).

[Note: the canonical tree] Floating-point addition does not associate, so a sum has the same bits
everywhere only if its brackets are the same everywhere. Ours are those of a complete binary tree
over the leaves 0, 1, ..., n-1: node (level, index) is the sum of its two children, left + right,
and what is left of the right edge is folded from right to left. A rank that holds leaves [low,
high) can sum exactly the *aligned* subtrees inside that range and no more; `aligned_levels` names
them. All ranks' subtrees, put in leaf order, are then enough to finish the same tree, whatever the
number of ranks.
"""

import itertools
from collections.abc import Callable, Iterable
from operator import iadd
from typing import Any, TypeVar

import torch
from torch import Tensor

from unison.shard.layout import FlatLayout, cut
from unison.shard.ranks import DONE, Ranks, Work

# ------------------------------------------------------------------------------------------------
# The canonical tree.


def aligned_levels(low: int, high: int) -> list[int]:
    """Levels of the maximal aligned subtrees that cover the leaves [low, high), in leaf order.

    >>> aligned_levels(0, 8), aligned_levels(3, 8), aligned_levels(2, 2)
    ([3], [0, 2], [])
    """
    levels = []
    while low < high:
        # The largest power of two that divides `low` and fits before `high`.
        level = (low & -low).bit_length() - 1 if low else (high - low).bit_length() - 1
        while low + (1 << level) > high:
            level -= 1
        levels.append(level)
        low += 1 << level
    return levels


class SubtreeSum:
    """Sums a rank's leaves [low, high) into aligned subtrees, leaves arriving in any order.

    At most log2(high - low) + 1 values are held at a time when leaves come in order. Values are
    added in place: whoever puts one gives it away.
    """

    def __init__(self, low: int, high: int) -> None:
        self._low, self._high = low, high
        self.seen: set[int] = set()  # the single leaves that were put
        self._nodes: dict[tuple[int, int], Tensor] = {}  # (level, index) -> sum

    def put(self, index: int, value: Tensor, level: int = 0) -> None:
        """Add a leaf, or the subtree `index` of a level; siblings that are both there merge."""
        low, high = index << level, (index + 1) << level
        if level == 0:
            self.seen.add(index)
        is_inside = self._low <= low <= high <= self._high
        assert is_inside, f"[{low}, {high}) is not in [{self._low}, {self._high})"
        while True:
            sibling = index ^ 1
            is_mine = (sibling << level) >= self._low and ((sibling + 1) << level) <= self._high
            if not is_mine or (level, sibling) not in self._nodes:
                assert (level, index) not in self._nodes, f"[{low}, {high}) was put twice"
                self._nodes[level, index] = value
                return
            other = self._nodes.pop((level, sibling))
            value = value.add_(other) if index < sibling else other.add_(value)
            level, index = level + 1, index >> 1

    def fill(self, make_zeros: Callable[[], Tensor]) -> None:
        """Let leaves that were not put count as zeros.

        Adding nothing instead would keep a -0.0 that adding 0.0 elsewhere does not.
        """
        for index in set(range(self._low, self._high)) - self.seen:
            self.put(index, make_zeros())

    def take(self) -> list[tuple[int, Tensor]]:
        """Return (level, sum) of the maximal subtrees in leaf order, and forget them."""
        nodes = sorted(self._nodes.items(), key=lambda item: item[0][1] << item[0][0])
        self._nodes = {}
        return [(level, value) for (level, _), value in nodes]


Summand = TypeVar("Summand", Tensor, float)


def tree_sum(subtrees: Iterable[tuple[int, Summand]]) -> Summand | None:
    """Finish the tree from aligned subtrees (level, sum) in leaf order, adding tensors in place.

    Returns:
        The sum of all; None if there is nothing.
    """
    stack: list[tuple[int, Summand]] = []
    for subtree in subtrees:
        stack.append(subtree)
        while len(stack) > 1 and stack[-1][0] == stack[-2][0]:
            level, right = stack.pop()
            stack[-1] = level + 1, iadd(stack[-1][1], right)
    if not stack:
        return None
    total = stack.pop()[1]
    while stack:
        total = iadd(stack.pop()[1], total)
    return total


def sum_over_granules(values: dict[int, Tensor], plan: Any) -> Tensor | None:
    """The sum over all granules of a logical batch, whoever holds them; a collective.

    Args:
        values: One value per granule that this rank holds; that of a ghost does not count.
        plan: Of the batch.

    Returns:
        The sum, in the canonical order; None if the batch has no granules.
    """
    first = next(iter(values.values()))
    slots = first.new_zeros(plan.num_granules + 1, *first.shape)  # the last one takes a ghost's
    for granule, value in values.items():
        slots[granule] = value
    # Each slot has one owner and all others add 0.0, which is exact but for the sign of zero.
    plan.ranks.sum_(slots.add_(0.0))
    return tree_sum((0, value.clone()) for value in slots[:-1])


# ------------------------------------------------------------------------------------------------
# The two reducers.

Parts = list[Tensor | None]
"""One value per parameter of a flat buffer: its gradient, or this rank's part of the summed one."""


class FastReducer:
    """The backend's own reduce-scatter over whatever each rank summed itself.

    With replicas, the shards of the sum are then added over those by the backend's all-reduce.

    Args:
        layout: Where the parameters lie in the buffer.
        ranks: Everyone.
        like: Of the dtype and on the device in which sums are made.

    Attributes:
        used: Which parameters this rank added a gradient of.
    """

    def __init__(self, layout: FlatLayout, ranks: Ranks, like: Tensor) -> None:
        self._layout, self._ranks = layout, ranks
        # Zeros, which remain where a parameter is not used and between parameters.
        self._sent = like.new_zeros(layout.padded_length)
        self._places = [self._sent.narrow(0, slot.offset, slot.numel) for slot in layout.slots]
        self._gradient = self._sent
        self.used = [False] * len(layout.slots)
        self._work: Work = DONE

    def take(self, granule: int, gradients: Parts) -> None:
        """Add gradients to this rank's own sum, all of them in one call."""
        for is_first in (True, False):
            chosen = [
                (place, gradient.reshape(-1))
                for place, gradient, is_used in zip(self._places, gradients, self.used, strict=True)
                if gradient is not None and is_used is not is_first
            ]
            if chosen:
                places, values = zip(*chosen, strict=True)
                (torch._foreach_copy_ if is_first else torch._foreach_add_)(places, values)
        self.used = [
            used or gradient is not None
            for used, gradient in zip(self.used, gradients, strict=True)
        ]

    def forget(self, slot: int) -> None:
        """Drop what was taken of one parameter."""
        self._places[slot].zero_()
        self.used[slot] = False

    def start(self) -> None:
        """Begin the reduce-scatter."""
        ranks = self._ranks.shard
        if ranks.size > 1:
            self._gradient = self._sent.new_empty(self._layout.shard_length)
            self._work = ranks.reduce_scatter(self._gradient, self._sent)

    def finish(self) -> Parts:
        """Wait for the sum."""
        self._work.wait()
        self._ranks.replicas.sum_(self._gradient)
        return [*cut(self._gradient, self._layout.pieces[self._ranks.shard.rank])]


class OrderedReducer:
    """The canonical tree over global granules (see above), exchanged all to all.

    [Note: two levels] With replicas the exchange has two levels. Inside a copy of the model, each
    owner adds up what the copy's ranks computed: they hold a run of granules, so these are aligned
    subtrees again. Then the owners of the same part exchange those, each finishes the tree for a
    fraction of the part, and all gather the fractions. Brackets are the same as without replicas.

    Args:
        layout: Where the parameters lie in the buffer.
        ranks: Everyone.
        like: Of the dtype and on the device in which sums are made.
        edges: Rank r of all holds the granules [edges[r], edges[r + 1]) of the logical batch.
    """

    def __init__(
        self, layout: FlatLayout, ranks: Ranks, like: Tensor, edges: tuple[int, ...]
    ) -> None:
        self._layout, self._ranks, self._like = layout, ranks, like
        self._mine = (edges[ranks.rank], edges[ranks.rank + 1])
        first = ranks.replicas.rank * ranks.shard.size
        self._edges_of_copy = edges[first : first + ranks.shard.size + 1]
        self._edges_of_replicas = edges[:: ranks.shard.size]
        self._trees = [SubtreeSum(*self._mine) for _ in layout.slots]
        self._work: Work = DONE
        self._received = self._sent = like

    @property
    def used(self) -> list[bool]:
        """Which parameters some granule of this rank used."""
        return [bool(tree.seen) for tree in self._trees]

    def take(self, granule: int, gradients: Parts) -> None:
        """Take the leaves of one granule."""
        for slot, gradient in enumerate(gradients):
            if gradient is not None:
                self.put(granule, slot, gradient)

    def put(self, granule: int, slot: int, gradient: Tensor) -> None:
        """Take a leaf of the tree; a granule that is not of the batch (a ghost) adds nothing."""
        if self._mine[0] <= granule < self._mine[1]:
            self._trees[slot].put(granule, gradient.to(self._like.dtype))

    def start(self) -> None:
        """Pack this rank's subtrees, one row per owner, and begin the exchange.

        Every rank sends the same number of subtrees, padded with zeros: at most 2 log2(granules),
        and one when the world size is a power of two that divides the number of granules.
        """
        ranks = self._ranks.shard
        if self._ranks.size == 1:
            return
        length = self._layout.shard_length
        num_nodes = _most_nodes(self._edges_of_copy)
        # One row per owner: its shard of every subtree.
        self._sent = self._like.new_zeros(ranks.size, num_nodes, length)
        for index, slot in enumerate(self._layout.slots):
            for column, (_, node) in enumerate(self._subtrees(index)):
                flat, start = node.reshape(-1), 0
                while start < slot.numel:  # it may lie across several shards
                    owner, first = divmod(slot.offset + start, length)
                    part = flat[start : start + length - first]
                    self._sent[owner, column, first : first + len(part)] = part
                    start += len(part)
        self._received = torch.empty_like(self._sent)
        self._work = ranks.exchange(self._received, self._sent)

    def _subtrees(self, slot: int) -> list[tuple[int, Tensor]]:
        """This rank's subtrees (level, sum) of a parameter, none if it was not used at all.

        A granule that did not use it counts as zeros, here as on a rank that never used it.
        """
        tree = self._trees[slot]
        if not tree.seen:
            return []
        tree.fill(lambda: self._like.new_zeros(self._layout.slots[slot].shape))
        nodes = tree.take()
        assert [level for level, _ in nodes] == aligned_levels(*self._mine)
        return nodes

    def finish(self) -> Parts:
        """Wait, and add the subtrees of all ranks in tree order."""
        if self._ranks.size == 1:
            totals = [tree_sum(self._subtrees(slot)) for slot in range(len(self._trees))]
            return [None if total is None else total.reshape(-1) for total in totals]
        self._work.wait()
        self._sent = self._like
        of_copy = SubtreeSum(self._edges_of_copy[0], self._edges_of_copy[-1])
        for row, (low, high) in zip(
            self._received, itertools.pairwise(self._edges_of_copy), strict=True
        ):
            for part, level in zip(row, aligned_levels(low, high), strict=False):
                of_copy.put(low >> level, part, level)
                low += 1 << level
        nodes = of_copy.take()
        has_replicas = self._ranks.replicas.size > 1
        total = self._across_replicas(nodes) if has_replicas else tree_sum(nodes)
        if total is None:  # an empty logical batch, here and on every rank
            return [None] * len(self._trees)
        # A copy, since a view would keep the buffer of all ranks' parts as long as the gradient.
        return [*cut(total.clone(), self._layout.pieces[self._ranks.shard.rank])]

    def _across_replicas(self, nodes: list[tuple[int, Tensor]]) -> Tensor | None:
        """Finish the tree over the copies of the model, each replica for a fraction of the part."""
        replicas, length = self._ranks.replicas, self._received.shape[2]
        width = -(-length // replicas.size)
        num_nodes = _most_nodes(self._edges_of_replicas)
        sent = self._like.new_zeros(replicas.size, num_nodes, width)
        for column, (_, node) in enumerate(nodes):
            padded = torch.nn.functional.pad(node, (0, replicas.size * width - length))
            sent[:, column] = padded.view(replicas.size, width)
        received = torch.empty_like(sent)
        replicas.exchange(received, sent).wait()
        runs = itertools.pairwise(self._edges_of_replicas)
        fraction = tree_sum(
            (level, part)
            for row, run in zip(received, runs, strict=True)
            for level, part in zip(aligned_levels(*run), row, strict=False)
        )
        if fraction is None:
            return None
        whole = sent.new_empty(replicas.size * width)
        replicas.gather(whole, fraction.contiguous()).wait()
        return whole[:length]


def _most_nodes(edges: tuple[int, ...]) -> int:
    """The most subtrees that one of the ranks between the edges holds; at least one."""
    return max(1, *(len(aligned_levels(*run)) for run in itertools.pairwise(edges)))
