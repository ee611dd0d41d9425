"""What ranks tell one another beside sums of gradients: lists of tensors, objects, dealt rows.

`OwnerSums` adds vectors up over granules, passes and ranks, each sum on the ranks that own it. Each
rank sends the first owner the vector of its sums, and the owner adds. Fast and ordered differ in
one thing: how a rank's sums are bracketed.

* Fast: one sum per rank, over all its passes; the owner adds them in the order of ranks.
* Ordered: a rank sends its aligned subtrees of the canonical tree over global granules (see
  shard/reducers.py), and the owner finishes the tree: the same bits on any number of ranks.
"""

import math
from bisect import bisect_right
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from unison.errors import BadInput
from unison.rng import BatchDraws
from unison.rng.draw_mode import current_draws
from unison.shard.deal import checked_plan, current_plan, without_plan
from unison.shard.granules import PerGranule, draws_of, num_granules_of, plan_of, split
from unison.shard.ranks import Ranks, gather_objects
from unison.shard.ranks import buckets as buckets
from unison.shard.reducers import SubtreeSum, aligned_levels, tree_sum

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)

BYTES_PER_BUCKET = 256 << 20  # of vectors that travel together, so that never all exist twice


def wire_device(ranks: Ranks) -> torch.device:
    """Where small objects must be to go over the ranks' network."""
    is_nccl = "nccl" in str(dist.get_backend(ranks.group))
    return torch.device("cuda", torch.cuda.current_device()) if is_nccl else torch.device("cpu")


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
) -> tuple[dict[K, Tensor], dict[K, int]]:
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
        or of ranks where there are none: the same on any number of ranks. And for each, whoever
        owns it, how many rows those are.
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
    whole = {
        key: torch.cat([rows for _, rows in sorted(own, key=lambda each: each[0])])
        if own
        else like.new_zeros(0, widths[key])
        for key, own in found.items()
    }
    every = [lengths for each in of_ranks for _, lengths in each]
    return whole, {key: sum(lengths.get(key, 0) for lengths in every) for key in owners}


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


class SharedBlocks:
    """Blocks of something that ranks share in runs, and sums of one tensor per block.

    Args:
        ranks: Everyone.
        num_blocks: Of all ranks; some may have none.

    Attributes:
        numbers: Of this rank's blocks.
    """

    def __init__(self, ranks: Ranks, num_blocks: int) -> None:
        self._ranks = ranks
        self._edges = tuple(num_blocks * rank // ranks.size for rank in range(ranks.size + 1))
        self.numbers = range(self._edges[ranks.rank], self._edges[ranks.rank + 1])

    def owner(self, number: int) -> int:
        """The rank that has a block."""
        return bisect_right(self._edges, number) - 1

    def add(self, values: Iterable[Tensor], shape: Sequence[int], like: Tensor) -> Tensor:
        """The sum over all blocks on every rank, in one tree over their numbers; a collective.

        Args:
            values: One for each of this rank's blocks, which are given away; made one by one, few
                are held at a time.
            shape: Of each, which a rank without blocks could not know.
            like: Of the dtype and on the device in which they are added.
        """
        size, everyone = math.prod(shape), range(self._ranks.size)
        if not size:
            return like.new_zeros(shape)
        # Each rank adds a part of the elements up, and tells the others.
        sizes = [
            size * (rank + 1) // len(everyone) - size * rank // len(everyone) for rank in everyone
        ]
        owners = [(rank, *(other for other in everyone if other != rank)) for rank in everyone]
        sums = OwnerSums(sizes, owners, self._ranks, like, self._edges)
        for number, value in zip(self.numbers, values, strict=True):
            sums.take(number, value.to(like).reshape(-1).split(sizes))
        totals = sums.finish()
        return torch.cat([totals[rank] for rank in everyone if sizes[rank]]).view(tuple(shape))

    def first(self, value: Tensor) -> Tensor:
        """The first rank's value on every rank; a collective."""
        is_first = self._ranks.rank == 0
        return self._ranks.sum_(value.clone() if is_first else torch.zeros_like(value))


# --- dealt batches: which rows of a pass are which samples, and their granules --------------------


PartRows = tuple[int | None, int, Tensor | None]
"""The rows of a part of a pass: the global number of its granule, None if the pass comes whole;
that of its first row; which rows are samples [rows], None if all are."""


def rows_of(
    inputs: Any, num_rows: int, ranks: Ranks, num_before: int
) -> tuple[Sequence[PartRows], tuple[int, ...], int]:
    """Say which rows a pass has, cut as they are computed; a collective if they are not dealt.

    Args:
        inputs: What the module was called with.
        num_rows: Rows of this rank, or of one granule.
        ranks: Everyone; without a plan, their rows are numbered rank after rank.
        num_before: Rows of all ranks in earlier batches of the same step.

    Returns:
        The rows of its parts; the edges of granules, of which rank r holds [edges[r], edges[r + 1])
        in the logical batch; `num_before` for the next pass.

    Raises:
        BadInput: If the batch is in granules and no plan says which.
    """
    num_granules, plan = num_granules_of(inputs), plan_of(inputs) or current_plan()
    if num_granules:
        plan = checked_plan(plan, num_granules)
        edges, granules = plan.edges, plan.granule_ids
        is_real = (plan.sample_ids >= 0).split(plan.granule)
        firsts = [num_before + granule * plan.granule for granule in granules]
        parts: Sequence[PartRows] = list(zip(granules, firsts, is_real, strict=True))
    elif plan is not None and not plan.is_granular and len(plan.sample_ids) == num_rows:
        first = num_before + plan.granule_ids[0] * plan.granule
        edges, parts = (), [(None, first, plan.sample_ids >= 0)]
    else:
        counts = torch.zeros(ranks.size, dtype=torch.int64)
        counts[ranks.rank] = num_rows
        if ranks.size > 1:
            counts = ranks.sum_(counts.to(wire_device(ranks))).cpu()
        before = num_before + int(counts[: ranks.rank].sum())
        return [(None, before, None)], (), num_before + int(counts.sum())
    # The passes of one batch number its rows themselves.
    return parts, edges, num_before + plan.num_samples * plan.closes_logical_batch


def draws_of_pass(inputs: Any) -> BatchDraws | None:
    """The random numbers that a pass over these inputs draws; None if they are torch's own."""
    num_granules = num_granules_of(inputs)
    return draws_of(plan_of(inputs), num_granules) if num_granules else current_draws()


def parts_of(value: Any, num_parts: int) -> list[Any]:
    """A nested value cut into its granules; whole if there is one part and no granules."""
    if num_granules_of(value) == 0 and num_parts == 1:
        return [without_plan(value)]
    return split(value, num_parts)


def joined(parts: Sequence[Tensor], like: Tensor) -> Tensor:
    """The inverse of `parts_of` for a tensor."""
    return PerGranule.of(list(parts)) if isinstance(like, PerGranule) else parts[0]


def tensors_of(value: Tensor) -> list[Tensor]:
    """The tensors of a value, one per granule."""
    return value.parts if isinstance(value, PerGranule) else [without_plan(value)]


def requires_grad(value: Any) -> bool:
    """Whether a value is a tensor that gradients reach; of granules, whether the granules are."""
    return isinstance(value, Tensor) and all(each.requires_grad for each in tensors_of(value))
