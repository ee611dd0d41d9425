"""A module that is wrapped in DistributedDataParallel after make_private, as accelerate does."""

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import unison
from tests.harness.ranks import ranks
from tests.privacy.common import attach, train


@ranks(2)
def test_it_trains_as_without(world):
    engine, module, optimizer, private = attach(max_physical_batch_size=3)
    train(DistributedDataParallel(module), optimizer, private, 3)
    engine.detach()
    engine, plain, optimizer, private = attach(max_physical_batch_size=3)
    train(plain, optimizer, private, 3)
    engine.detach()
    for mine, other in zip(module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, other)


@ranks(2)
def test_other_ranks_than_those_of_make_private_are_refused(world):
    own = torch.distributed.new_group([world.rank], use_local_synchronization=True)
    engine, module, _, private = attach()
    wrapped = DistributedDataParallel(module, process_group=own)
    x, _ = next(iter(private))
    with pytest.raises(unison.BadInput, match="make the process group"):
        wrapped(x)
    engine.detach()
