"""Which rows a step takes, and which of them a rank holds.

The rows of a step are a function of (seed, step) alone. Ranks cut that one global list into
contiguous parts, so that adding ranks never changes what a step is made of.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unison.data import RowDataset
from unison.rng import Key, Permutation, Stream
from unison.shard import PerGranule


@dataclass(frozen=True, kw_only=True)
class RowOrder:
    """An endless order of rows: epoch after epoch, each in a new permutation.

    Attributes:
        num_rows: Rows in the data set.
        batch_size: Rows per step, over all ranks.
        seed: Seed of the permutations.
    """

    num_rows: int
    batch_size: int
    seed: int

    def rows_of_step(self, step: int) -> np.ndarray:  # [batch_size], int64
        """The global batch of a step, in its canonical order.

        A batch larger than what is left of an epoch continues in the next one; every row comes
        once per epoch.
        """
        positions = np.arange(step * self.batch_size, (step + 1) * self.batch_size, dtype=np.int64)
        epochs, offsets = np.divmod(positions, self.num_rows)
        rows = np.empty_like(positions)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            stream = Stream(Key.from_seed(self.seed), "rows", int(epoch), purpose="shuffle")
            permutation = Permutation(stream, self.num_rows)
            rows[chosen] = permutation(torch.from_numpy(offsets[chosen])).numpy()
        return rows


def global_batches(
    data: RowDataset, order: RowOrder, steps: range
) -> Iterator[dict[str, Tensor | int]]:
    """The global batch of each of some steps, the same on every rank; `unison.deal` cuts it up.

    Beside the rows it has `num_targets`, the targets that count, and `sample_ids` [rows], the data
    set's own numbers of the rows.
    """
    for step in steps:
        rows = order.rows_of_step(step)
        yield {
            **data.rows(rows),
            "sample_ids": torch.from_numpy(rows),
            "num_targets": int(data.num_targets(rows).sum()),
        }


def to_device(batch: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Move what the model computes with; `sample_ids` stays on the CPU, as one plain tensor."""
    moved = {name: batch[name].to(device) for name in ("input_ids", "labels")}
    ids = batch["sample_ids"]
    ids = torch.cat(ids.parts) if isinstance(ids, PerGranule) else ids
    return {**batch, **moved, "sample_ids": ids}


def part_of_rank(rows: np.ndarray, *, rank: int, world_size: int) -> np.ndarray:
    """This rank's contiguous part of a global list; the parts differ by at most one row.

    >>> [part_of_rank(np.arange(7), rank=r, world_size=3).tolist() for r in range(3)]
    [[0, 1, 2], [3, 4], [5, 6]]
    """
    return np.array_split(rows, world_size)[rank]
