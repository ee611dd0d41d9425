"""torch.compile: inside units it compiles, around them it warns and changes nothing."""

import pytest
import torch
from torch import nn

from tests.shard.common import DECODER, per_sample_loss, tokens
from unison.models import build
from unison.shard import auto_shard, digest


def train(change=None, around=None) -> str:
    torch.compiler.reset()
    model = build(DECODER, seed=0)
    if change is not None:
        change(model)
    auto_shard(model)
    run = model if around is None else around(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        per_sample_loss(run, tokens(2, DECODER, step)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return digest(model)


def compile_blocks(model: nn.Module) -> None:
    for block in model.layers:
        block.forward = torch.compile(block.forward, backend="aot_eager")


def compile_blocks_in_place(model: nn.Module) -> None:
    for block in model.layers:
        block.compile(backend="aot_eager")


# torch's compiler itself meets warnings while it traces, and must not stop at them.
pytestmark = pytest.mark.filterwarnings("ignore")


def test_blocks_may_be_compiled_before_they_are_sharded():
    assert train(compile_blocks) == train()


def test_compiling_around_units_changes_nothing():
    expected = train()
    assert train(compile_blocks_in_place) == expected
    assert train(around=lambda model: torch.compile(model, backend="aot_eager")) == expected


def test_compiling_around_units_warns():
    with pytest.warns(UserWarning, match="Compile inside them, before sharding"):
        train(around=lambda model: torch.compile(model, backend="aot_eager"))
