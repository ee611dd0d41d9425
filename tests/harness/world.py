"""What a test body sees of the ranks around it."""

from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """One rank's view: the default gloo group is initialised and holds `size` ranks."""

    rank: int
    size: int
    seed: int
    """The running test's seed: the same on every rank and at every world size."""

    def gather(self, value: T) -> list[T]:
        """Return every rank's `value`, in rank order, on every rank."""
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, value)
        return gathered

    def barrier(self) -> None:
        """Wait until every rank is here."""
        dist.barrier()

    def generator(self, stream: int = 0) -> torch.Generator:
        """Return a fresh generator, the same on every rank; `stream` tells several apart."""
        return torch.Generator().manual_seed((self.seed + stream) % 2**63)
