"""Loaders whose settings private sampling would undo: each raises, none is replaced in silence."""

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from unison.errors import BadInput, UnsupportedOperation
from unison.privacy import PrivacyEngine
from unison.privacy.loader import PrivateLoader
from unison.privacy.sampling import Poisson, Shuffled, TruncatedPoisson
from unison.rng import Key

KEY = Key.from_seed(0)
DATA = TensorDataset(torch.arange(20.0))
POISSON = Poisson(rate=0.2)
SHUFFLED = Shuffled(batch_size=4, num_records=20)


class Streamed(IterableDataset):
    def __iter__(self):
        return iter(range(20))


class Endless(Dataset):
    def __getitem__(self, index):
        return index


class Backwards(Sampler):
    def __iter__(self):
        return iter(range(19, -1, -1))

    def __len__(self):
        return 20


class OwnSequential(SequentialSampler):
    pass


class Prefetched(DataLoader):
    def __iter__(self):
        yield from super().__iter__()


def with_sampler(sampler) -> DataLoader:
    return DataLoader(DATA, batch_size=4, sampler=sampler)


REFUSED = {
    "weighted": (
        lambda: with_sampler(WeightedRandomSampler([1.0] * 20, 20)),
        r"sampler of its own \(WeightedRandomSampler\).*another probability",
    ),
    "distributed": (
        lambda: with_sampler(DistributedSampler(DATA, num_replicas=2, rank=0)),
        "DistributedSampler, but every rank draws the same global batch",
    ),
    "subset": (lambda: with_sampler(SubsetRandomSampler(range(5))), r"\(SubsetRandomSampler\)"),
    "own": (lambda: with_sampler(Backwards()), r"\(Backwards\)"),
    "own subclass": (lambda: with_sampler(OwnSequential(DATA)), r"\(OwnSequential\)"),
    "a list": (lambda: with_sampler([3, 1, 2]), r"\(list\)"),
    "replacement": (
        lambda: with_sampler(RandomSampler(DATA, replacement=True)),
        "may take a record twice",
    ),
    "part of an epoch": (
        lambda: with_sampler(RandomSampler(DATA, num_samples=7)),
        "takes 7 records of 20",
    ),
    "part of the data": (
        lambda: with_sampler(SequentialSampler(range(9))),
        "takes 9 records of 20",
    ),
    "batch sampler": (
        lambda: DataLoader(DATA, batch_sampler=BatchSampler(SequentialSampler(DATA), 4, False)),
        r"batch_sampler \(BatchSampler\)",
    ),
    "no batching": (lambda: DataLoader(DATA, batch_size=None), "batch_size=None"),
    "iterable": (lambda: DataLoader(Streamed(), batch_size=4), "Streamed is an IterableDataset"),
    "no length": (lambda: DataLoader(Endless(), batch_size=4), "Endless has no length"),
    "own iteration": (lambda: Prefetched(DATA, batch_size=4), "Prefetched has its own __iter__"),
    "out of order": (
        lambda: DataLoader(DATA, batch_size=4, num_workers=1, in_order=False),
        "in_order=False",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("sampling", [POISSON, SHUFFLED], ids=["poisson", "shuffled"])
def test_what_would_be_replaced_is_refused(kind, sampling):
    build, message = REFUSED[kind]
    with pytest.raises(UnsupportedOperation, match=message) as caught:
        PrivateLoader(build(), sampling, KEY)
    assert "Remedy" in str(caught.value)


@pytest.mark.parametrize("kind", REFUSED)
def test_the_engine_refuses_it_too(kind):
    build, message = REFUSED[kind]
    module = torch.nn.Linear(1, 1)
    made = {"module": module, "optimizer": torch.optim.SGD(module.parameters(), lr=0.1)}
    made |= {"data_loader": build(), "max_grad_norm": 1.0}
    with pytest.raises(UnsupportedOperation, match=message):
        PrivacyEngine().make_private(**made, noise_multiplier=1.0)
    with pytest.raises(UnsupportedOperation, match=message):
        PrivacyEngine().make_private_with_epsilon(
            **made, target_epsilon=1.0, target_delta=1e-2, epochs=1
        )


CONTRADICTIONS = {
    "no loader": (lambda: [torch.ones(4)], POISSON, "found list"),
    "private": (
        lambda: PrivateLoader(DataLoader(DATA, batch_size=4), POISSON, KEY),
        POISSON,
        "private already",
    ),
    "no records": (lambda: DataLoader(TensorDataset(torch.ones(0))), POISSON, "is empty"),
    "not shuffled": (
        lambda: DataLoader(DATA, batch_size=4),
        SHUFFLED,
        "built with shuffle=False",
    ),
    "rest not dropped": (
        lambda: DataLoader(DATA, batch_size=3, shuffle=True),
        Shuffled(batch_size=3, num_records=20),
        "drop_last=False asks for the last 2 records",
    ),
    "another batch size": (
        lambda: DataLoader(DATA, batch_size=5, shuffle=True),
        SHUFFLED,
        r"batches of 4 records.*batch_size=5",
    ),
    "another data set": (
        lambda: DataLoader(DATA, batch_size=4, shuffle=True),
        Shuffled(batch_size=4, num_records=24),
        "24 records, found 20",
    ),
    "another data set, truncated": (
        lambda: DataLoader(DATA, batch_size=4),
        TruncatedPoisson(rate=0.2, capacity=6, num_records=24),
        "24 records, found 20",
    ),
    "full batches only": (
        lambda: DataLoader(DATA, batch_size=3, drop_last=True),
        Poisson(rate=3 / 20),
        "asks for 6 full batches an epoch, but Poisson sampling has 7 steps",
    ),
}


@pytest.mark.parametrize("kind", CONTRADICTIONS)
def test_contradictions_raise(kind):
    build, sampling, message = CONTRADICTIONS[kind]
    with pytest.raises(BadInput, match=message):
        PrivateLoader(build(), sampling, KEY)


def test_the_same_outcome_passes():
    for loader, sampling in [
        (DataLoader(DATA, batch_size=4, drop_last=True), POISSON),  # 5 steps either way
        (DataLoader(DATA, batch_size=3, drop_last=True), Poisson(rate=1 / 6)),
        (DataLoader(DATA, batch_size=4, shuffle=True), POISSON),
        (DataLoader(DATA, batch_size=4, sampler=RandomSampler(DATA)), SHUFFLED),
        (DataLoader(DATA, batch_size=4, shuffle=True), SHUFFLED),  # nothing is left over
        (
            DataLoader(DATA, batch_size=3, shuffle=True, drop_last=True),
            Shuffled(batch_size=3, num_records=20),
        ),
        (DataLoader(DATA, batch_size=4, in_order=False), POISSON),  # no workers to overtake
    ]:
        assert len(PrivateLoader(loader, sampling, KEY)) == len(loader)


def test_other_arguments():
    loader = DataLoader(DATA, batch_size=4)
    with pytest.raises(BadInput, match="max_physical_batch_size must be above 0, found 0"):
        PrivateLoader(loader, POISSON, KEY, max_physical_batch_size=0)
    with pytest.raises(BadInput, match=r"rank=2 num_ranks=2"):
        PrivateLoader(loader, POISSON, KEY, rank=2, num_ranks=2)
