"""Random numbers that belong to samples: which numbers a model's draws are made of.

[Note: draws] A number that a model draws depends on (key, step, which draw of the pass it is,
global sample, position in the sample), and so neither on the rank nor on what else the rank
computes. A torch function mode (draw_mode.py) sees the draws. Dropout is computed by us
(dropout.py). All other functions run as torch wrote them, for one sample after the other, while
torch's generator is seeded by those numbers (generators.py); so does attention with dropout, whose
fused kernels keep no matrix of weights.

Where are the samples? Along the first dimension, each with the same number of rows in it (hidden
states may be flattened); or along the one other dimension that is as long as there are samples.
What fits neither (a number, a mask over positions, a dropped weight) has nothing to do with
samples, and is the same for all of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from unison import check
from unison.errors import BadInput
from unison.rng.keys import Key
from unison.rng.streams import Stream

Join = Callable[[list[Any]], Any]
"""Makes one value of one per granule."""


@dataclass(eq=False)
class GranuleDraws:
    """Samples that are computed together, and how many draws they have made."""

    ids: Tensor  # int64 [rows], CPU
    count: int = 0
    shared_count: int = 0  # of draws that are the same for all samples

    @cached_property
    def runs(self) -> list[tuple[int, int]]:
        """Rows whose samples follow one another: (how many, id of the first)."""
        found: list[tuple[int, int]] = []
        for sample in self.ids.tolist():
            if found and sample == sum(found[-1]):
                found[-1] = found[-1][0] + 1, found[-1][1]
            else:
                found.append((1, sample))
        return found

    def next_number(self, *, is_shared: bool) -> int:
        """Count a draw; returns its number."""
        if is_shared:
            self.shared_count += 1
            return self.shared_count - 1
        self.count += 1
        return self.count - 1


class BatchDraws:
    """The draws of the passes over one batch.

    Args:
        key: Root key.
        step: Training step.
        sample_ids: Global index of the sample in each row.
        num_granules: In how many granules the rows are computed.
        join: Where operations map over granules: how their results become one.
    """

    def __init__(
        self,
        key: Key,
        step: int,
        sample_ids: Tensor | Sequence[int],
        num_granules: int = 1,
        join: Join | None = None,
    ) -> None:
        check.not_negative(step=step)
        ids = torch.as_tensor(sample_ids, dtype=torch.int64, device="cpu").reshape(-1)
        if len(ids) and int(ids.min()) < 0:
            raise BadInput(f"expected sample ids of 0 or more, found {int(ids.min())}")
        self.key, self.step, self.ids, self.join = key, step, ids, join
        self.granules = [GranuleDraws(each) for each in ids.view(num_granules, -1)]
        self._cuts: dict[int, BatchDraws] = {}
        self._words = [Stream(key, name, step, "draw").words for name in ("rows", "shared")]
        self._tables: dict[tuple[torch.device, int], Tensor] = {}

    def cut(self, num_granules: int, join: Join | None) -> "BatchDraws":
        """The draws of the same rows in granules; the same object each time."""
        if num_granules not in self._cuts:
            self._cuts[num_granules] = BatchDraws(self.key, self.step, self.ids, num_granules, join)
        return self._cuts[num_granules]

    def state(self) -> list[tuple[int, int]]:
        """How many draws each granule has made."""
        return [(rows.count, rows.shared_count) for rows in self.granules]

    def set_state(self, state: list[tuple[int, int]]) -> None:
        """Go on from an earlier `state`."""
        for rows, (count, shared_count) in zip(self.granules, state, strict=True):
            rows.count, rows.shared_count = count, shared_count

    def words(self, number: int, *, is_shared: bool = False) -> tuple[int, ...]:
        """The stream of a draw: that of the step, at a counter of its own."""
        *others, last = self._words[is_shared]
        return *others, (last + number) & 0xFFFFFFFF

    def words_on(self, device: torch.device, number: int) -> Tensor:  # int64 [8]
        """The stream of a draw where a kernel can read it; many are brought at once."""
        place = device, number // _AT_ONCE
        if place not in self._tables:
            words = torch.tensor([0, 0, *self.words(place[1] * _AT_ONCE), 0, 0]).repeat(_AT_ONCE, 1)
            words[:, 5] += torch.arange(_AT_ONCE)
            words[:, 5] &= 0xFFFFFFFF
            self._tables[place] = words.to(device, non_blocking=True)
        return self._tables[place][number % _AT_ONCE]

    def seed(self, number: int, sample: int | None, *, is_shared: bool = False) -> int:
        """A seed for torch's generator, for a draw and a sample; None for all samples."""
        kind = "shared" if is_shared else "rows"
        sample = -1 if sample is None else sample
        secret = self.key.derive("draw", kind, number, self.step, sample, size=8)
        return int.from_bytes(secret, "little") >> 1


_AT_ONCE = 64


def samples_dim(shape: Sequence[int], num_rows: int) -> int | None:
    """The dimension of samples in a tensor of this shape; None if it has none."""
    if len(shape) == 0 or (len(shape) == 1 and shape[0] == 1) or num_rows == 0:
        return None  # one number is no row
    if shape[0] % num_rows == 0:
        return 0
    fitting = [dim for dim, size in enumerate(shape) if size == num_rows]
    return fitting[0] if len(fitting) == 1 else None
