"""Clipped sums of parameters of which every rank of the data axis holds as much: in buckets."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unison.privacy.owners.base import MakeSums, Owned
from unison.privacy.owners.sums import GroupSums, exchange
from unison.shard.deal import BatchPlan
from unison.shard.layout import FlatLayout, ShardPiece, Slot
from unison.shard.ranks import Axes, Ranks

BYTES_PER_BUCKET = 64 << 20  # of sums: large for the network, small beside a model

Held = tuple[Owned, tuple[int, ...]]  # a parameter, and the shape of what this rank holds of it


@dataclass(eq=False)
class _Bucket:
    """Some parameters whose sums are exchanged together."""

    axes: Axes
    layout: FlatLayout
    reduce_dtype: torch.dtype
    device: torch.device

    @property
    def ranks(self) -> Ranks:
        return self.axes.shard

    @property
    def slots(self) -> tuple[Slot, ...]:
        return self.layout.slots

    def piece_places(self) -> list[ShardPiece]:
        return self.layout.pieces(0, 1)


class BucketedSums:
    """Adds clipped sums up over passes and over ranks that all keep the result.

    Args:
        held: The parameters, in an order that every rank shares.
        ranks: The ranks whose sums are added; each has other samples.
    """

    def __init__(self, held: Sequence[Held], ranks: Ranks) -> None:
        axes = Axes(all=ranks, shard=Ranks(None), replicas=ranks)
        self._by_name = {owned.name: owned for owned, _ in held}
        self._groups = [
            GroupSums(
                _Bucket(
                    axes,
                    FlatLayout.of((owned.name, shape) for owned, shape in bucket),
                    torch.int64,
                    bucket[0][0].parameter.device,
                )
            )
            for bucket in _buckets(held, BYTES_PER_BUCKET if ranks.size > 1 else math.inf)
        ]

    def add(self, make_sums: MakeSums, plan: BatchPlan, granules: Sequence[int]) -> None:
        """Add the clipped sums of a pass; see `Owner`."""

        def take_all(group: GroupSums) -> None:
            for granule in granules:
                group.take(granule, make_sums(granule, group.names, group.begun), make_sums.dtype)

        exchange(self._groups, take_all, is_last=plan.closes_logical_batch)

    def totals(self) -> Iterator[tuple[Owned, Tensor]]:
        """Hand out the sums over all ranks; see `Owner`."""
        for bucket in self.totals_by_bucket():
            yield from bucket

    def totals_by_bucket(self) -> Iterator[list[tuple[Owned, Tensor]]]:
        """The same, of one bucket after the other: sums of one dtype, on one device."""
        for group in self._groups:
            totals = zip(group.names, group.take_totals(), strict=True)
            yield [(self._by_name[name], total) for name, total in totals]

    def drop(self) -> None:
        """Forget the sums; see `Owner`."""
        for group in self._groups:
            group.drop()


def _buckets(held: Sequence[Held], most_bytes: float) -> Iterator[list[Held]]:
    """Runs of parameters of one dtype and device, of a bounded size."""
    bucket: list[Held] = []
    size = 0
    for each in held:
        parameter, num_bytes = each[0].parameter, 4 * math.prod(each[1])
        first = bucket[0][0].parameter if bucket else parameter
        is_other = (first.dtype, first.device) != (parameter.dtype, parameter.device)
        if bucket and (is_other or size + num_bytes > most_bytes):
            yield bucket
            bucket, size = [], 0
        bucket.append(each)
        size += num_bytes
    if bucket:
        yield bucket
