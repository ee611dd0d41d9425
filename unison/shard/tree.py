"""The canonical sum: one binary tree over the global granule index.

[Note: the canonical tree] Floating-point addition does not associate, so a sum has the same bits
everywhere only if its brackets are the same everywhere. Ours are those of a complete binary tree
over the leaves 0, 1, ..., n-1: node (level, index) is the sum of its two children, left + right,
and what is left of the right edge is folded from right to left. A rank that holds leaves [low,
high) can sum exactly the *aligned* subtrees inside that range and no more; `aligned_levels` names
them. All ranks' subtrees, put in leaf order, are then enough to finish the same tree, whatever the
number of ranks.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor


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


class TreeSum:
    """Finishes the tree from aligned subtrees pushed in leaf order, adding in place."""

    def __init__(self) -> None:
        self._stack: list[tuple[int, Tensor]] = []

    def push(self, value: Tensor, level: int = 0) -> None:
        """Add the next subtree of 2**level leaves."""
        self._stack.append((level, value))
        while len(self._stack) > 1 and self._stack[-1][0] == self._stack[-2][0]:
            level, right = self._stack.pop()
            _, left = self._stack.pop()
            self._stack.append((level + 1, left.add_(right)))

    def finish(self) -> Tensor | None:
        """Return the sum of everything pushed, or None if nothing was."""
        if not self._stack:
            return None
        total = self._stack.pop()[1]
        while self._stack:
            total = self._stack.pop()[1].add_(total)
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
    total = TreeSum()
    for value in slots[:-1]:
        total.push(value.clone())
    return total.finish()
