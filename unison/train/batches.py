"""Which rows a step takes, and which of them a rank holds.

The rows of a step are a function of (seed, step) alone. Ranks cut that one global list into
contiguous parts, so that adding ranks never changes what a step is made of.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from unison.data import RowDataset
from unison.errors import BadInput
from unison.rng import Key, Permutation, Stream


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


def part_of_rank(rows: np.ndarray, *, rank: int, world_size: int) -> np.ndarray:
    """This rank's contiguous part of a global list; the parts differ by at most one row.

    >>> [part_of_rank(np.arange(7), rank=r, world_size=3).tolist() for r in range(3)]
    [[0, 1, 2], [3, 4], [5, 6]]
    """
    return np.array_split(rows, world_size)[rank]


def num_micro_batches(batch_size: int, *, world_size: int, micro_batch_size: int | None) -> int:
    """Forward passes per step on every rank: the same number everywhere, and no empty one.

    >>> num_micro_batches(16, world_size=2, micro_batch_size=3)
    3

    Raises:
        BadInput: If some rank, or some forward pass, would get no row.
    """
    if batch_size < world_size:
        raise BadInput(
            f"batch_size must be at least the number of ranks, found {batch_size} rows for "
            f"{world_size} ranks; raise --batch-size or lower --nproc"
        )
    most, fewest = -(-batch_size // world_size), batch_size // world_size
    passes = -(-most // (micro_batch_size or most))
    if passes > fewest:
        raise BadInput(
            f"{batch_size} rows on {world_size} ranks do not give every rank {passes} micro-batches"
            f" of {micro_batch_size}; choose a --batch-size that is a multiple of the ranks"
        )
    return passes


def load_rows(data: RowDataset, rows: np.ndarray, device: torch.device) -> dict[str, Tensor]:
    """Fetch rows as tensors of [rows, tokens] on the device, with the rows' own numbers.

    `sample_ids` [rows] stays on the CPU: it says which samples these are, whatever rank holds them.
    """
    tensors = {name: tensor.to(device) for name, tensor in data.rows(rows).items()}
    return {**tensors, "sample_ids": torch.from_numpy(rows)}
