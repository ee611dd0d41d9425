"""Two ways to sum gradients over ranks: `fast` and `ordered`.

Both collect the gradients of a group's leaves (`take`), exchange them with others (`start`) and
turn them into this rank's parts of the sum (`finish`); an ordered part is None where the logical
batch was empty, or where a rank that is alone did not use the parameter.
Collectives only sum; the division by the divisor happens once, in `Unit.finish_reduce`.

[Note: unused parameters] A parameter that no rank used must end with no gradient, as it would on
one process (an optimizer moves a parameter whose gradient is zero, but skips one that has none).
Ranks may use different parameters. So a rank keeps the parts of those it did not use itself apart,
and at the end of the backward pass all ranks add up one flag per parameter, in one small sum for
the whole model, and learn which of them count (see `Context`).
"""

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from unison.shard.flat_group import FlatGroup
from unison.shard.layout import Slot
from unison.shard.ranks import DONE, Work
from unison.shard.tree import SubtreeSum, TreeSum, aligned_levels

Parts = list[Tensor | None]
"""One value per parameter of a group: its gradient, or this rank's part of the summed one."""


class FastReducer:
    """The backend's own reduce-scatter over whatever each rank summed itself.

    With replicas, the shards of the sum are then added over those by the backend's all-reduce.
    """

    def __init__(self, group: FlatGroup) -> None:
        self._group = group
        # Zeros, which remain where a parameter is not used and between parameters.
        self._sent = torch.zeros(
            group.layout.padded_length(group.ranks.size),
            dtype=group.reduce_dtype,
            device=group.device,
        )
        self._places = [self._sent[slot.offset : slot.offset + slot.numel] for slot in group.slots]
        self._gradient = self._sent.new_zeros(0)
        self._used = [False] * len(group.slots)
        self._work: Work = DONE

    @property
    def used(self) -> list[bool]:
        """Which parameters this rank added a gradient of."""
        return self._used

    def take(self, granule: int, gradients: Parts) -> None:
        """Add gradients to this rank's own sum, all of them in one call."""
        for is_first in (True, False):
            chosen = [
                slot
                for slot, gradient in enumerate(gradients)
                if gradient is not None and self._used[slot] is not is_first
            ]
            if chosen:
                places = [self._places[slot] for slot in chosen]
                values = [gradients[slot].reshape(-1) for slot in chosen]  # type: ignore[union-attr]
                (torch._foreach_copy_ if is_first else torch._foreach_add_)(places, values)
        self._used = [
            used or gradient is not None
            for used, gradient in zip(self._used, gradients, strict=True)
        ]

    def start(self) -> None:
        """Begin the reduce-scatter."""
        if self._group.ranks.size == 1:
            self._gradient = self._sent
            return
        length = self._group.layout.shard_length(self._group.ranks.size)
        self._gradient = self._sent.new_empty(length)
        self._work = self._group.ranks.reduce_scatter(self._gradient, self._sent)

    def finish(self) -> Parts:
        """Wait for the sum."""
        self._work.wait()
        self._group.axes.replicas.sum_(self._gradient)
        return _parts(self._group, self._gradient)


class OrderedReducer:
    """The canonical tree over global granules (see tree.py), exchanged all to all.

    [Note: two levels] With replicas the exchange has two levels. Inside a copy of the model, each
    owner adds up what the copy's ranks computed: they hold a run of granules, so these are aligned
    subtrees again. Then the owners of the same part exchange those, each finishes the tree for a
    fraction of the part, and all gather the fractions. Brackets are the same as without replicas.

    Args:
        group: The flat group.
        edges: Rank r of all holds the granules [edges[r], edges[r + 1]) of the logical batch.
    """

    def __init__(self, group: FlatGroup, edges: tuple[int, ...]) -> None:
        axes = group.axes
        self._group = group
        self._mine = (edges[axes.all.rank], edges[axes.all.rank + 1])
        first = axes.replicas.rank * axes.shard.size
        self._edges_of_copy = edges[first : first + axes.shard.size + 1]
        self._edges_of_replicas = edges[:: axes.shard.size]
        self._trees = [SubtreeSum(*self._mine) for _ in group.slots]
        self._work: Work = DONE
        self._received = self._sent = torch.zeros(0, dtype=group.reduce_dtype, device=group.device)

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
            self._trees[slot].put(granule, gradient.to(self._group.reduce_dtype))

    @property
    def _is_alone(self) -> bool:
        return self._group.axes.all.size == 1

    def start(self) -> None:
        """Pack this rank's subtrees, one row per owner, and begin the exchange.

        Every rank sends the same number of subtrees, padded with zeros: at most 2 log2(granules),
        and one when the world size is a power of two that divides the number of granules.
        """
        if self._is_alone:
            return
        group, ranks = self._group, self._group.ranks
        num_nodes = _most_nodes(self._edges_of_copy)
        length = group.layout.shard_length(ranks.size)
        # One row per owner: its shard of every subtree.
        self._sent = self._sent.new_zeros(ranks.size, num_nodes * length)
        for index, slot in enumerate(group.slots):
            for column, node in enumerate(self._subtrees(index)):
                rows = self._sent[:, column * length :]
                for target, part in _by_owner(rows, length, slot, node):
                    target.copy_(part)
        self._received = torch.empty_like(self._sent)
        self._work = ranks.exchange(self._received, self._sent)

    def _subtrees(self, slot: int) -> list[Tensor]:
        """This rank's subtrees of a parameter, none if it was not used at all.

        A granule that did not use it counts as zeros, here as on a rank that never used it.
        """
        tree = self._trees[slot]
        if not tree.seen:
            return []
        tree.fill(lambda: self._sent.new_zeros(self._group.slots[slot].shape))
        nodes = tree.take()
        assert [level for level, _ in nodes] == aligned_levels(*self._mine)
        return [node for _, node in nodes]

    def finish(self) -> Parts:
        """Wait, and add the subtrees of all ranks in tree order."""
        if self._is_alone:
            totals = [
                _finish_tree([self._subtrees(slot)], self._mine) for slot in range(len(self._trees))
            ]
            return [None if total is None else total.reshape(-1) for total in totals]
        self._work.wait()
        self._sent = self._sent.new_zeros(0)
        group = self._group
        length = group.layout.shard_length(group.ranks.size)
        of_copy = SubtreeSum(self._edges_of_copy[0], self._edges_of_copy[-1])
        for row, low, high in _runs(self._received, self._edges_of_copy):
            for column, (level, index) in enumerate(_nodes(low, high)):
                of_copy.put(index, row[column * length : (column + 1) * length], level)
        nodes = [node for _, node in of_copy.take()]
        if group.axes.replicas.size > 1:
            total = self._across_replicas(nodes, length)
        else:
            total = _finish_tree([nodes], self._edges_of_replicas)
        if total is None:  # an empty logical batch, here and on every rank
            return [None] * len(group.slots)
        # A copy, since a view would keep the buffer of all ranks' parts as long as the gradient.
        return _parts(group, total.clone())

    def _across_replicas(self, nodes: list[Tensor], length: int) -> Tensor | None:
        """Finish the tree over the copies of the model, each replica for a fraction of the part."""
        replicas = self._group.axes.replicas
        num_nodes = _most_nodes(self._edges_of_replicas)
        width = -(-length // replicas.size)
        sent = self._sent.new_zeros(replicas.size, num_nodes * width)
        for column, node in enumerate(nodes):
            padded = torch.nn.functional.pad(node, (0, replicas.size * width - length))
            sent[:, column * width : (column + 1) * width] = padded.view(replicas.size, width)
        received = torch.empty_like(sent)
        replicas.exchange(received, sent).wait()
        of_replicas = [
            [row[column * width : (column + 1) * width] for column in range(len(_nodes(low, high)))]
            for row, low, high in _runs(received, self._edges_of_replicas)
        ]
        fraction = _finish_tree(of_replicas, self._edges_of_replicas)
        if fraction is None:
            return None
        whole = sent.new_empty(replicas.size * width)
        replicas.gather(whole, fraction.contiguous()).wait()
        return whole[:length]


def _nodes(low: int, high: int) -> list[tuple[int, int]]:
    """(level, index) of the maximal aligned subtrees of the leaves [low, high), in leaf order.

    >>> _nodes(3, 8)
    [(0, 3), (2, 1)]
    """
    nodes = []
    for level in aligned_levels(low, high):
        nodes.append((level, low >> level))
        low += 1 << level
    return nodes


def _most_nodes(edges: tuple[int, ...]) -> int:
    """The most subtrees that one of the ranks between the edges holds; at least one."""
    return max(1, *(len(_nodes(low, high)) for low, high in itertools.pairwise(edges)))


def _runs(rows: Tensor, edges: tuple[int, ...]) -> Iterator[tuple[Tensor, int, int]]:
    """Each rank's row with the granules [low, high) that it stands for."""
    return zip(rows, edges, edges[1:], strict=False)


def _finish_tree(nodes: list[list[Tensor]], edges: tuple[int, ...]) -> Tensor | None:
    """Add up the subtrees of consecutive runs of granules, which begin at granule 0."""
    total = TreeSum()
    for of_run, low, high in zip(nodes, edges, edges[1:], strict=False):
        if of_run:  # none where a lone rank did not use a parameter
            for node, (level, _) in zip(of_run, _nodes(low, high), strict=True):
                total.push(node, level)
    return total.finish()


def _parts(group: FlatGroup, gradient: Tensor) -> Parts:
    """Cut a shard of the sum [shard length] into the pieces' parts."""
    return [gradient.narrow(0, place.shard_offset, place.numel) for place in group.piece_places()]


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
