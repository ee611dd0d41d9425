"""Factors added up over granules, passes and ranks, each layer's sum on its owners.

Each rank sends a layer's owner the vector of its sums (packed triangles, then the number of
tokens), and the owner adds. Fast and ordered differ in one thing: how a rank's sums are bracketed.

* Fast: one sum per rank, over all its passes; the owner adds them in the order of ranks.
* Ordered: a rank sends its aligned subtrees of the canonical tree over global granules (see
  shard/tree.py), and the owner finishes the tree: the same bits on any number of ranks.

Layers travel in buckets of a bounded size, so that never all factors exist twice.
"""

from collections.abc import Iterator, Sequence

from torch import Tensor

from unison.errors import BadInput
from unison.kfac.assignment import Assignment
from unison.kfac.owners.exchange import swap
from unison.shard.ranks import Ranks
from unison.shard.tree import SubtreeSum, TreeSum, aligned_levels

BYTES_PER_BUCKET = 256 << 20


class FactorSums:
    """The sums of one update of the factors.

    Args:
        sizes: Elements of each layer's vector; layers of none take no part.
        assignment: Who owns which layer.
        ranks: Everyone.
        like: Of the dtype and on the device that sums are made in.
        edges: Rank r has the granules [edges[r], edges[r + 1]); empty for the fast way.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        assignment: Assignment,
        ranks: Ranks,
        like: Tensor,
        edges: tuple[int, ...] = (),
    ) -> None:
        self._sizes, self._assignment, self._ranks, self._like = sizes, assignment, ranks, like
        self._edges = edges or tuple(range(ranks.size + 1))  # fast: one leaf per rank
        self._is_ordered = bool(edges)
        self._mine = self._edges[ranks.rank], self._edges[ranks.rank + 1]
        self._trees = [SubtreeSum(*self._mine) for _ in sizes]
        self._seen: set[int] = set()
        self._sums: list[Tensor | None] = [None] * len(sizes)

    def take(self, granule: int | None, vectors: Sequence[Tensor | None]) -> None:
        """Take the vectors of one granule or pass, one per layer; None counts as zeros.

        The caller gives them away: they are added in place.
        """
        if self._is_ordered:
            assert granule is not None
            if not self._mine[0] <= granule < self._mine[1]:
                return  # a ghost, on a rank without samples
            if granule in self._seen:
                raise BadInput(
                    f"granule {granule} was sampled twice in one step: several batches of "
                    "unison.deal went into it. Deal one batch per step, cut with micro_batch=..."
                )
            self._seen.add(granule)
            for tree, vector, size in zip(self._trees, vectors, self._sizes, strict=True):
                tree.put(granule, self._zeros(size) if vector is None else vector)
            return
        for index, vector in enumerate(vectors):
            before = self._sums[index]
            if vector is not None:
                self._sums[index] = vector if before is None else before.add_(vector)

    def finish(self) -> dict[int, Tensor]:
        """The sums over all ranks of the layers that this rank owns; a collective."""
        totals: dict[int, Tensor] = {}
        for bucket in self._buckets():
            totals.update(self._shared(bucket, self._added(bucket)))
        return totals

    def _added(self, bucket: list[int]) -> dict[int, Tensor]:
        """Sums of the layers of which this rank is the first owner."""
        first = [own[0] for own in self._assignment.owners]
        sent: list[list[Tensor]] = [[] for _ in range(self._ranks.size)]
        for layer in bucket:
            sent[first[layer]] += self._nodes(layer)
        own = [layer for layer in bucket if first[layer] == self._ranks.rank]
        expected = [
            [self._sizes[layer] for layer in own for _ in self._levels(rank)]
            for rank in range(self._ranks.size)
        ]
        received = swap(self._ranks, sent, expected, self._like)
        return {
            layer: self._finish_tree(
                [
                    nodes[index * len(self._levels(rank)) :][: len(self._levels(rank))]
                    for rank, nodes in enumerate(received)
                ],
                self._sizes[layer],
            )
            for index, layer in enumerate(own)
        }

    def _shared(self, bucket: list[int], totals: dict[int, Tensor]) -> dict[int, Tensor]:
        """The same for all owners: each first owner sends its sums to the others."""
        owners = self._assignment.owners
        if all(len(own) == 1 for own in owners):
            return totals
        everyone = range(self._ranks.size)
        sent = [[totals[i] for i in bucket if i in totals and r in owners[i]] for r in everyone]
        mine = [layer for layer in bucket if self._ranks.rank in owners[layer]]
        from_rank = [[layer for layer in mine if owners[layer][0] == r] for r in everyone]
        expected = [[self._sizes[layer] for layer in of_rank] for of_rank in from_rank]
        received = swap(self._ranks, sent, expected, self._like)
        return {
            layer: value
            for layers, values in zip(from_rank, received, strict=True)
            for layer, value in zip(layers, values, strict=True)
        }

    def _levels(self, rank: int) -> list[int]:
        return aligned_levels(self._edges[rank], self._edges[rank + 1])

    def _nodes(self, layer: int) -> list[Tensor]:
        """What this rank sends of a layer: one vector per aligned subtree."""
        if self._is_ordered:
            tree = self._trees[layer]
            for granule in sorted(set(range(*self._mine)) - self._seen):
                tree.put(granule, self._zeros(self._sizes[layer]))
            return [value for _, value in tree.take()]
        total = self._sums[layer]
        self._sums[layer] = None
        return [self._zeros(self._sizes[layer]) if total is None else total]

    def _finish_tree(self, nodes: list[list[Tensor]], size: int) -> Tensor:
        total = TreeSum()
        for rank, of_rank in enumerate(nodes):
            for value, level in zip(of_rank, self._levels(rank), strict=True):
                # Received parts are views of one buffer; what is kept must not keep all of it.
                total.push(value if self._ranks.size == 1 else value.clone(), level)
        found = total.finish()
        return self._zeros(size) if found is None else found

    def _zeros(self, size: int) -> Tensor:
        return self._like.new_zeros(size)

    def _buckets(self) -> Iterator[list[int]]:
        bucket: list[int] = []
        filled = 0
        for layer, size in enumerate(self._sizes):
            if size == 0:
                continue
            if bucket and filled + size * self._like.itemsize > BYTES_PER_BUCKET:
                yield bucket
                bucket, filled = [], 0
            bucket.append(layer)
            filled += size * self._like.itemsize
        if bucket:
            yield bucket
