"""Which ranks invert and apply which layer.

One number goes from one owner per layer (least memory) to all ranks (least traffic). Everything
here is arithmetic on sizes that all ranks know, so that all come to the same answer.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Assignment:
    """The owners of each layer.

    Attributes:
        owners: For each layer, its ranks; the first one adds up what all ranks send.
        num_ranks: How many ranks there are.
    """

    owners: tuple[tuple[int, ...], ...]
    num_ranks: int

    @property
    def is_replicated(self) -> bool:
        """Whether every rank owns every layer."""
        return all(len(own) == self.num_ranks for own in self.owners)

    def owns(self, rank: int, layer: int) -> bool:
        """Whether a rank owns a layer."""
        return rank in self.owners[layer]

    def source(self, rank: int, layer: int) -> int:
        """From whom a rank gets a layer's step: itself where it can."""
        own = self.owners[layer]
        return rank if rank in own else own[rank % len(own)]


def assign(costs: Sequence[float], num_ranks: int, owner_fraction: float) -> Assignment:
    """Give each layer its owners, the dearest layers first, each to the ranks with least to do.

    Args:
        costs: Of each layer.
        num_ranks: How many ranks there are.
        owner_fraction: Share of them that own a layer: 0 for one, 1 for all.

    >>> assign([4.0, 1.0, 3.0], num_ranks=2, owner_fraction=0.0).owners
    ((0,), (1,), (1,))
    """
    num_owners = min(num_ranks, max(1, round(owner_fraction * num_ranks)))
    load = [(0.0, rank) for rank in range(num_ranks)]
    heapq.heapify(load)
    owners: list[tuple[int, ...]] = [()] * len(costs)
    for index in sorted(range(len(costs)), key=lambda each: (-costs[each], each)):
        chosen = [heapq.heappop(load) for _ in range(num_owners)]
        # The first owner adds up the factors; let it not always be the same rank.
        turn = index % num_owners
        ranks = sorted(rank for _, rank in chosen)
        owners[index] = (*ranks[turn:], *ranks[:turn])
        for busy, rank in chosen:
            heapq.heappush(load, (busy + costs[index], rank))
    return Assignment(tuple(owners), num_ranks)
