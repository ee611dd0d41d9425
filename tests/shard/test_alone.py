"""One rank with the fast reducer: gradients of several granules, and of several passes."""

import copy

import pytest
import torch
from torch import nn

import unison
from tests.harness import assert_close


@pytest.mark.parametrize("micro_batch", [None, 2])
@pytest.mark.parametrize("granule", [None, 1, 2])
def test_gradients_of_all_granules_are_added(
    granule: int | None, micro_batch: int | None, gen: torch.Generator
):
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x = torch.randn(7, 5, generator=gen, dtype=torch.float64)
    sharded = unison.fully_shard(copy.deepcopy(model), reducer="fast", gradient_divisor=1)
    for rows in unison.deal([x], granule=granule, micro_batch=micro_batch):
        unison.batch_mean(sharded(rows).square().sum(-1)).backward()
    model(x).square().sum(-1).mean().backward()
    expected = {name: each.grad for name, each in model.named_parameters()}
    found = {name: each.grad for name, each in sharded.named_parameters()}
    assert_close(found, expected, dtype=torch.float64)
