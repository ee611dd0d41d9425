"""What ranks tell one another beside sums of gradients: lists of tensors, objects, errors.

`OwnerSums` adds vectors up over granules, passes and ranks, each sum on the ranks that own it. Each
rank sends the first owner the vector of its sums, and the owner adds. Fast and ordered differ in
one thing: how a rank's sums are bracketed.

* Fast: one sum per rank, over all its passes; the owner adds them in the order of ranks.
* Ordered: a rank sends its aligned subtrees of the canonical tree over global granules (see
  shard/reducers.py), and the owner finishes the tree: the same bits on any number of ranks.
"""

from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from unison.errors import BadInput
from unison.shard.ranks import Ranks
from unison.shard.reducers import SubtreeSum, aligned_levels, tree_sum
from unison.shard.state.entries import buckets as buckets
from unison.shard.state.entries import gather_objects
from unison.shard.state.entries import together as together

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)

BYTES_PER_BUCKET = 256 << 20  # of vectors that travel together, so that never all exist twice


def wire_device(ranks: Ranks) -> torch.device:
    """Where small objects must be to go over the ranks' network."""
    is_nccl = "nccl" in str(dist.get_backend(ranks.group))
    return torch.device("cuda", torch.cuda.current_device()) if is_nccl else torch.device("cpu")


def broadcast_object(ranks: Ranks, source: int, value: T) -> T:
    """One rank's value, which can be pickled, on every rank; a collective."""
    return ranks.broadcast_object(value, source)


def largest(ranks: Ranks, device: torch.device, *values: int) -> list[int]:
    """The largest of each number over ranks; a collective."""
    if ranks.size == 1:
        return list(values)
    return ranks.max_(torch.tensor(values, device=device)).tolist()


def added(ranks: Ranks, device: torch.device, *values: int) -> list[int]:
    """The sum of each number over ranks; a collective."""
    if ranks.size == 1:
        return list(values)
    return ranks.sum_(torch.tensor(values, device=device)).tolist()


def swap(
    ranks: Ranks,
    sent: Sequence[Sequence[Tensor]],
    expected: Sequence[Sequence[int]],
    like: Tensor,
) -> list[list[Tensor]]:
    """Send a list of flat tensors to every rank, and receive one from each: one all-to-all.

    What a rank sends to itself is not copied.

    Args:
        ranks: Everyone.
        sent: For each rank, the tensors it gets.
        expected: For each rank, the sizes of the tensors that come from it.
        like: Of the dtype and on the device in which they travel.
    """
    me = ranks.rank
    if ranks.size == 1:
        return [list(sent[0])]
    outgoing = [
        [] if rank == me else [each.reshape(-1).to(like) for each in of_rank]
        for rank, of_rank in enumerate(sent)
    ]
    sizes_out = [sum(len(each) for each in of_rank) for of_rank in outgoing]
    sizes_in = [0 if rank == me else sum(sizes) for rank, sizes in enumerate(expected)]
    flat = [each for of_rank in outgoing for each in of_rank]
    buffer = torch.cat(flat) if flat else like.new_zeros(0)
    received = like.new_empty(sum(sizes_in))
    dist.all_to_all_single(received, buffer, sizes_in, sizes_out, group=ranks.group)
    ranks.num_calls["exchange"] += 1
    ranks.bytes_sent["exchange"] += buffer.nbytes
    return [
        list(sent[me]) if rank == me else list(part.split(list(expected[rank])))
        for rank, part in enumerate(received.split(sizes_in))
    ]


def gather_rows(
    ranks: Ranks,
    pieces: Sequence[tuple[int | None, Mapping[K, Tensor]]],
    owners: Mapping[K, Sequence[int]],
    widths: Mapping[K, int],
    like: Tensor,
) -> dict[K, Tensor]:
    """Rows that all ranks have made, on the ranks that own them; a collective.

    Args:
        ranks: Everyone.
        pieces: This rank's granules (None for a pass that comes whole), each with its rows
            [any, width] by what they are of; what is missing has none.
        owners: The ranks that get the rows of each.
        widths: Columns of each.
        like: Of the dtype and on the device in which they travel.

    Returns:
        For each that this rank owns, the rows of all ranks [all, width] in the order of granules,
        or of ranks where there are none: the same on any number of ranks.
    """
    sizes = [(granule, {key: len(rows) for key, rows in own.items()}) for granule, own in pieces]
    of_ranks = gather_objects(ranks, sizes)
    sent = [
        [own[key] for _, own in pieces for key in owners if key in own and rank in owners[key]]
        for rank in range(ranks.size)
    ]
    mine = [key for key in owners if ranks.rank in owners[key]]
    expected = [
        [
            (granule, key, lengths[key])
            for granule, lengths in each
            for key in mine
            if key in lengths
        ]
        for each in of_ranks
    ]
    numbers = [[count * widths[key] for _, key, count in each] for each in expected]
    received = swap(ranks, sent, numbers, like)
    found: dict[K, list[tuple[int, Tensor]]] = {key: [] for key in mine}
    for each, values in zip(expected, received, strict=True):
        for (granule, key, _), rows in zip(each, values, strict=True):
            found[key].append((granule or 0, rows.reshape(-1, widths[key]).to(like)))
    return {
        key: torch.cat([rows for _, rows in sorted(own, key=lambda each: each[0])])
        if own
        else like.new_zeros(0, widths[key])
        for key, own in found.items()
    }


class OwnerSums:
    """Sums of vectors over granules, passes and ranks, each on its owners.

    Args:
        sizes: Elements of each vector; those of none take no part.
        owners: The ranks that get each sum; the first one adds.
        ranks: Everyone.
        like: Of the dtype and on the device that sums are made in.
        edges: Rank r has the granules [edges[r], edges[r + 1]); empty for the fast way.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        owners: Sequence[tuple[int, ...]],
        ranks: Ranks,
        like: Tensor,
        edges: tuple[int, ...] = (),
    ) -> None:
        self._sizes, self._owners, self._ranks, self._like = sizes, owners, ranks, like
        self._is_ordered = bool(edges)
        edges = edges or tuple(range(ranks.size + 1))  # fast: one leaf per rank
        self._levels = [aligned_levels(edges[r], edges[r + 1]) for r in range(ranks.size)]
        self._mine = edges[ranks.rank], edges[ranks.rank + 1]
        self._trees = [SubtreeSum(*self._mine) for _ in sizes]
        self._seen: set[int] = set()
        self._sums: list[Tensor | None] = [None] * len(sizes)

    def take(self, granule: int | None, vectors: Sequence[Tensor | None]) -> bool:
        """Take the vectors of one granule or pass; None counts as zeros.

        The caller gives them away: they are added in place.

        Returns:
            Whether they count; a ghost's do not.
        """
        if self._is_ordered:
            assert granule is not None
            if not self._mine[0] <= granule < self._mine[1]:
                return False  # a ghost, on a rank without samples
            if granule in self._seen:
                raise BadInput(
                    f"granule {granule} was sampled twice in one step: several batches of "
                    "unison.deal went into it. Deal one batch per step, cut with micro_batch=..."
                )
            self._seen.add(granule)
            for tree, vector in zip(self._trees, vectors, strict=True):
                if vector is not None:
                    tree.put(granule, vector)
            return True
        for index, vector in enumerate(vectors):
            before = self._sums[index]
            if vector is not None:
                self._sums[index] = vector if before is None else before.add_(vector)
        return True

    def finish(self) -> dict[int, Tensor]:
        """The sums over all ranks that this rank owns, by their numbers; a collective."""
        totals: dict[int, Tensor] = {}
        sent = [index for index, size in enumerate(self._sizes) if size]
        itemsize = self._like.itemsize
        for bucket in buckets(sent, lambda i: self._sizes[i] * itemsize, BYTES_PER_BUCKET):
            totals.update(self._shared(bucket, self._added(bucket)))
        return totals

    def _added(self, bucket: list[int]) -> dict[int, Tensor]:
        """The sums of which this rank is the first owner."""
        sent: list[list[Tensor]] = [[] for _ in range(self._ranks.size)]
        for index in bucket:
            sent[self._owners[index][0]] += self._nodes(index)
        own = [index for index in bucket if self._owners[index][0] == self._ranks.rank]
        expected = [[self._sizes[i] for i in own for _ in levels] for levels in self._levels]
        received = swap(self._ranks, sent, expected, self._like)
        totals = {}
        for number, index in enumerate(own):
            # Received parts are views of one buffer; what is kept must not keep all of it.
            found = tree_sum(
                (level, value if self._ranks.size == 1 else value.clone())
                for levels, nodes in zip(self._levels, received, strict=True)
                for level, value in zip(levels, nodes[number * len(levels) :], strict=False)
            )
            totals[index] = self._like.new_zeros(self._sizes[index]) if found is None else found
        return totals

    def _shared(self, bucket: list[int], totals: dict[int, Tensor]) -> dict[int, Tensor]:
        """The same for all owners: each first owner sends its sums to the others."""
        owners = self._owners
        if all(len(own) == 1 for own in owners):
            return totals
        everyone = range(self._ranks.size)
        sent = [[totals[i] for i in bucket if i in totals and r in owners[i]] for r in everyone]
        mine = [index for index in bucket if self._ranks.rank in owners[index]]
        from_rank = [[index for index in mine if owners[index][0] == r] for r in everyone]
        expected = [[self._sizes[index] for index in of_rank] for of_rank in from_rank]
        received = swap(self._ranks, sent, expected, self._like)
        return {
            index: value
            for indices, values in zip(from_rank, received, strict=True)
            for index, value in zip(indices, values, strict=True)
        }

    def _nodes(self, index: int) -> list[Tensor]:
        """What this rank sends of a sum: one vector per aligned subtree."""
        tree, total = self._trees[index], self._sums[index]
        if total is not None:  # fast: the rank's one leaf
            tree.put(self._ranks.rank, total)
            self._sums[index] = None
        tree.fill(partial(self._like.new_zeros, self._sizes[index]))
        return [value for _, value in tree.take()]
