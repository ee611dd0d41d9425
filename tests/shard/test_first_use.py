"""What ranks compare before they compute: their models, and the batches they are fed."""

import warnings

import pytest
import torch
from torch import nn

from tests.harness import World, run_on_ranks
from unison.errors import BadInput
from unison.shard import deal, fully_shard


def other_model(world: World) -> str:
    model = fully_shard(nn.Linear(4, 4 if world.rank == 0 else 6))
    with pytest.raises(BadInput) as met:
        model(torch.zeros(1, 4))
    return str(met.value)


def test_different_models_are_refused_on_every_rank():
    for text in run_on_ranks(2, other_model):
        assert "the sharded model" in text
        assert "weight" in text


def feed(world: World, is_same: bool) -> int:
    model = fully_shard(nn.Linear(4, 4))
    x = torch.ones(2, 4) * (1 if is_same else world.rank + 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(x).sum().backward()
        model(x).sum().backward()
    return sum("fed the same batch" in str(warning.message) for warning in caught)


@pytest.mark.parametrize("is_same", [True, False])
def test_ranks_fed_the_same_batch_are_warned_once(is_same):
    """Note 000: every rank had the whole data set."""
    assert run_on_ranks(2, feed, is_same) == [int(is_same)] * 2


def different_batches(world: World) -> str:
    with pytest.raises(BadInput) as met:
        list(deal([torch.full((4, 2), float(world.rank))]))
    return str(met.value)


def test_deal_refuses_different_batches():
    assert all("without a DistributedSampler" in t for t in run_on_ranks(2, different_batches))
