"""torch.compile: inside units it compiles; around them it warns and changes nothing.

At one rank there is nothing to gather, and a sharded model compiles as any module does.
"""

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from tests.harness import World, ranks, run_on_ranks
from tests.harness.compiling import NUM_RUNS, counting
from tests.shard.common import DECODER, ordered_run, per_sample_loss, tokens
from unison.models import build
from unison.rng import compiled_draws
from unison.shard import auto_shard, deal, digest, find_blocks

# torch's compiler itself meets warnings while it traces, and must not stop at them.
pytestmark = pytest.mark.filterwarnings("ignore")


def train(
    world: World,
    change: Callable[[nn.Module], None] | None = None,
    around: Callable[[nn.Module], Callable] | None = None,
) -> str:
    torch.compiler.reset()
    model = build(DECODER, seed=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if change is not None:
            change(model)
        auto_shard(model)
        run = model if around is None else around(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            rows = tokens(2, DECODER, 10 * step + world.rank)
            per_sample_loss(run, rows).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return digest(model)


def compile_blocks(model: nn.Module) -> None:
    for block in model.layers:
        block.forward = torch.compile(block.forward, backend=counting, fullgraph=True)


def compile_blocks_in_place(model: nn.Module) -> None:
    for block in model.layers:
        block.compile(backend=counting, fullgraph=True)


def compile_children(model: nn.Module) -> None:
    """As torchtitan does: what `torch.compile(block)` returns takes the block's place."""
    layers: Any = model.layers
    for index, block in enumerate(layers):
        layers[index] = torch.compile(block, backend=counting, fullgraph=True)


def compile_sharded_blocks(model: nn.Module) -> Callable:
    compile_blocks_in_place(model)
    return model


compile_around = partial(torch.compile, backend="aot_eager")


def counted(world: World, change: Callable | None, around: Callable | None) -> tuple[str, int]:
    NUM_RUNS[0] = 0
    return train(world, change, around), NUM_RUNS[0]


@pytest.mark.parametrize(
    "how",
    [
        (compile_blocks, None),
        (compile_blocks_in_place, None),
        (compile_children, None),
        (None, compile_sharded_blocks),
    ],
    ids=["forward", "before sharding", "in its place", "after sharding"],
)
@pytest.mark.parametrize("size", [1, 2])
def test_blocks_may_be_compiled(size, how):
    """S11: `block.compile()` ran uncompiled."""
    expected = run_on_ranks(size, train)[0]
    for found, num_calls in run_on_ranks(size, counted, *how):
        assert found == expected
        assert num_calls >= 2 * DECODER.num_layers  # the compiled code ran, in both steps


@pytest.mark.parametrize("size", [1, 2])
def test_compiling_around_units_changes_nothing(size):
    expected = run_on_ranks(size, train)[0]
    assert run_on_ranks(size, train, None, compile_around)[0] == expected


@ranks(2)
def test_compiling_around_units_warns(world):
    torch.compiler.reset()
    model = compile_around(auto_shard(build(DECODER, seed=0)))
    with pytest.warns(UserWarning, match="Compile the blocks instead"):
        model(tokens(2, DECODER, world.rank)[:, :-1])


@ranks(2)
def test_compiling_around_granules_is_refused(world):
    torch.compiler.reset()
    options: dict[str, Any] = {"reducer": "ordered", "gradient_divisor": 1}
    model = compile_around(auto_shard(build(DECODER, seed=0), **options))
    (rows,) = deal([tokens(4, DECODER, 0)], granule=1)
    with pytest.raises(Exception, match="compile its blocks instead"):
        model(rows[:, :-1])


def compiled_by(backend: str) -> Callable[[nn.Module], None]:
    def change(model: nn.Module) -> None:
        layers: Any = model.layers
        layers[0].compile(backend=backend)
        layers[1] = torch.compile(layers[1], backend=backend)

    return change


def test_blocks_compiled_in_two_ways_are_blocks():
    """Else the model is one unit, in which nothing is compiled."""
    model = build(replace(DECODER, num_layers=2), seed=0)
    compiled_by("aot_eager")(model)
    assert find_blocks(model) == list(model.layers)


def ordered(world: World, backend: str | None, micro_batch: int | None) -> dict:
    torch.compiler.reset()
    config = replace(DECODER, dropout=0.2, num_layers=2)
    with (
        warnings.catch_warnings(),
        mock.patch.object(compiled_draws, "count_draws", wraps=compiled_draws.count_draws) as calls,
    ):
        warnings.simplefilter("ignore")
        found = ordered_run(
            world,
            config,
            granule=2,
            counts=(7, 1),
            micro_batch=micro_batch,
            change=None if backend is None else compiled_by(backend),
        )
    return {**found, "num_compiled": calls.call_count}


@pytest.mark.full
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_one_digest_of_compiled_blocks_with_dropout(backend):
    """Masks belong to samples, and compiled code draws none of its own."""
    expected = run_on_ranks(1, ordered, backend, None)[0]
    for size, micro_batch in ((2, None), (3, None), (2, 4)):
        for found in run_on_ranks(size, ordered, backend, micro_batch):
            assert found["digest"] == expected["digest"]
            assert found["num_compiled"] > 0
    plain = run_on_ranks(1, ordered, None, None)[0]
    assert expected["losses"] == pytest.approx(plain["losses"], rel=1e-5)
    assert expected["num_compiled"] == 2 * (4 + 1)  # blocks, granules of both batches
