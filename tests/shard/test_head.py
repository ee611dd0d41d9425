"""A sharded model that makes its losses without logits: the same bits on any number of ranks."""

from functools import partial

import pytest
import torch

from tests.harness import World, run_on_ranks
from tests.shard.common import GPT2, shard, tokens
from unison.models import build, per_sample_loss
from unison.shard import batch_mean, deal, digest, param_groups


def train(world: World, how: str, has_logits: bool) -> tuple[str, list[float]]:
    """A digest of the parameters, and the loss of every step."""
    model = shard(build(GPT2, seed=1), how, reducer="ordered", gradient_divisor=1)
    optimizer = torch.optim.AdamW(param_groups(model, 0.1), lr=1e-2)
    seen = []
    for rows in deal([tokens(6, GPT2, step) for step in range(3)], granule=2):
        ids, labels = rows[:, :-1], rows[:, 1:]
        losses = per_sample_loss(model(ids), labels) if has_logits else model(ids, labels=labels)
        loss = batch_mean(losses)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    return digest(model), seen


@pytest.mark.parametrize("how", ["auto", "root"])
def test_same_bits_on_two_ranks_and_the_loss_of_the_logits(how):
    ((alone, losses),) = run_on_ranks(1, partial(train, how=how, has_logits=False))
    assert [found for found, _ in run_on_ranks(2, partial(train, how=how, has_logits=False))] == [
        alone,
        alone,
    ]
    ((_, expected),) = run_on_ranks(1, partial(train, how=how, has_logits=True))
    assert losses == pytest.approx(expected, rel=1e-6)
