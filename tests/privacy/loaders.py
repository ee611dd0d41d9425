"""Data sets whose records say who they are, and private loaders of them."""

import itertools
import random
import time

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from unison.privacy.loader import PrivateLoader
from unison.privacy.sampling import Poisson, Shuffled, TruncatedPoisson, drawn_records
from unison.rng import Key

KEY = Key.from_seed(3)
N = 50
POISSON = Poisson(rate=0.2)
RARE = Poisson(rate=0.02)  # a third of its draws are empty
SAMPLINGS = {
    "poisson": POISSON,
    "rare": RARE,
    "truncated": TruncatedPoisson(rate=0.2, capacity=7, num_records=N),
    "shuffled": Shuffled(batch_size=10, num_records=N),
}


class Numbered(Dataset):
    """Record i is the pair ([i, i, i], i)."""

    def __init__(self, num_records: int = N) -> None:
        self.num_records = num_records
        self.is_prepared = False

    def __len__(self) -> int:
        return self.num_records

    def __getitem__(self, index):
        return torch.full((3,), float(index)), index


class Uneven(Numbered):
    """Takes longer for some records than for others, so that workers overtake each other."""

    def __getitem__(self, index):
        assert self.is_prepared
        time.sleep(0.002 * (index % 4))
        return super().__getitem__(index)


class Augmented(Numbered):
    def __getitem__(self, index):
        noise = torch.rand(()) + random.random() + np.random.rand()  # noqa: NPY002
        return torch.full((3,), index + 0 * noise), index


def prepare(_worker_id: int) -> None:
    get_worker_info().dataset.is_prepared = True


def private(sampling=POISSON, data=None, key=KEY, shuffle=True, collate_fn=None, **share):
    loader = DataLoader(data or Numbered(), batch_size=10, shuffle=shuffle, collate_fn=collate_fn)
    return PrivateLoader(loader, sampling, key, **share)


def run_epoch(loader: PrivateLoader) -> dict[int, list[list[int]]]:
    """The records of each pass of each step of one pass over the loader; everything checked."""
    steps: dict[int, list[list[int]]] = {}
    is_closed, start = True, 0
    for x, y in loader:
        now = loader.current
        ids = now.record_ids
        assert torch.equal(y, ids)
        assert torch.equal(x, ids[:, None].float().expand(-1, 3))
        assert (x.dtype, y.dtype) == (torch.float32, torch.int64)
        assert now.is_first == is_closed
        assert now.num_samples == len(ids)
        passes = steps.setdefault(now.step, [])
        if now.is_first:
            start = now.first_position
        assert now.first_position == start + sum(map(len, passes))
        assert (now.step, len(passes)) == (max(steps), now.index)
        passes.append(ids.tolist())
        is_closed = now.is_last
        assert loader.is_open == (not is_closed)
        assert loader.next_step == now.step + is_closed
    assert is_closed
    assert loader.current is None
    return steps


def drawn(sampling, key: Key, num_records: int, step: int) -> torch.Tensor:
    """The records of one step."""
    return next(drawn_records(sampling, key, num_records, [step]))


def records_of(loader: PrivateLoader, step: int) -> torch.Tensor:
    """The records that a loader draws for a step."""
    return drawn(loader.sampling, loader._key, len(loader.dataset), step)  # type: ignore[arg-type]


def expected(sampling, steps, key=KEY, num_records=N) -> dict[int, list[int]]:
    return {step: drawn(sampling, key, num_records, step).tolist() for step in steps}


def joined(steps: dict[int, list[list[int]]]) -> dict[int, list[int]]:
    return {step: [*itertools.chain(*passes)] for step, passes in steps.items()}
