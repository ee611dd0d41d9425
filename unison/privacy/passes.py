"""Passes: a logical batch, cut into the physical batches that ranks run one after the other."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from unison import check
from unison.errors import BadInput


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class PhysicalBatch:
    """What one pass of this rank holds of a logical batch. Everything but `step` is private.

    Attributes:
        step: Number of the logical batch.
        record_ids: Records of this pass in the data set [rows], int64; in the order of the batch's
            rows.
        first_position: Position in the logical batch of the first row.
        index: Number of this pass in the logical batch.
        num_passes: Passes in the logical batch, the same on every rank.
        logical_size: Records in the logical batch, over all ranks and passes.
    """

    step: int
    record_ids: Tensor
    first_position: int
    index: int
    num_passes: int
    logical_size: int

    @property
    def num_samples(self) -> int:
        """Records in this pass; 0 where the draw, or this rank's part of it, is empty."""
        return len(self.record_ids)

    @property
    def is_first(self) -> bool:
        """Whether this pass opens the logical batch."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether this pass closes the logical batch."""
        return self.index == self.num_passes - 1

    def __repr__(self) -> str:
        # Records and their number say who took part: they stay out of logs and tracebacks.
        return (
            f"PhysicalBatch(step={self.step}, is_first={self.is_first}, is_last={self.is_last}; "
            "records withheld)"
        )


def cut_passes(
    num_samples: int,
    *,
    rank: int = 0,
    num_ranks: int = 1,
    granule: int = 1,
    max_physical_batch_size: int | None = None,
) -> list[range]:
    """Cut the positions of a logical batch into the passes of one rank.

    Ranks hold contiguous runs of whole granules, as even as can be; a rank's run is cut into
    passes from its front.

    Guarantees:
        Every rank gets the same number of passes, at least one. Each position is in exactly one
        pass of one rank; over ranks, then passes, positions ascend. Only the last granule of the
        batch may be short.

    Args:
        num_samples: Size of the logical batch, over all ranks.
        rank: The rank whose passes to return.
        num_ranks: Ranks that share the batch.
        granule: Samples that stay together on one rank and in one pass.
        max_physical_batch_size: Most samples in a pass, a multiple of `granule`; no limit by
            default.

    Returns:
        The positions of each pass; empty where the rank has no samples left.

    >>> cut_passes(10, rank=1, num_ranks=2, max_physical_batch_size=3)
    [range(5, 8), range(8, 10)]
    >>> cut_passes(1, rank=0, num_ranks=2), cut_passes(1, rank=1, num_ranks=2)
    ([range(0, 0)], [range(0, 1)])
    """
    check.not_negative(num_samples=num_samples)
    check.positive(granule=granule)
    if not 0 <= rank < num_ranks:
        raise BadInput(f"expected 0 <= rank < num_ranks, found {rank=} {num_ranks=}")
    if max_physical_batch_size is not None:
        check.positive(max_physical_batch_size=max_physical_batch_size)
        if max_physical_batch_size % granule:
            raise BadInput(
                "max_physical_batch_size must be a multiple of granule, found "
                f"{max_physical_batch_size=} {granule=}"
            )
    num_granules = -(-num_samples // granule)
    edges = [each * num_granules // num_ranks * granule for each in range(num_ranks + 1)]
    longest = max(granule, *(high - low for low, high in itertools.pairwise(edges)))
    size = max_physical_batch_size or longest
    num_passes = -(-longest // size)
    stop = min(edges[rank + 1], num_samples)
    starts = [min(edges[rank] + index * size, stop) for index in range(num_passes)]
    return [range(start, min(start + size, stop)) for start in starts]


def physical_batches(
    record_ids: Tensor,
    *,
    step: int,
    rank: int = 0,
    num_ranks: int = 1,
    granule: int = 1,
    max_physical_batch_size: int | None = None,
) -> Iterator[PhysicalBatch]:
    """Yield the passes of one rank over the drawn records of a step."""
    runs = cut_passes(
        len(record_ids),
        rank=rank,
        num_ranks=num_ranks,
        granule=granule,
        max_physical_batch_size=max_physical_batch_size,
    )
    for index, run in enumerate(runs):
        yield PhysicalBatch(
            step=step,
            record_ids=record_ids[run.start : run.stop],
            first_position=run.start,
            index=index,
            num_passes=len(runs),
            logical_size=len(record_ids),
        )
