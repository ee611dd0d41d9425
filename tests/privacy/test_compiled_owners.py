"""Compiled private training under torch's own wrappers: the oracle's result, or a sentence.

FSDP2, DDP and tensor parallelism, compiled by `make_private(compile=)` or by the user.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import unison
from tests.harness import World
from tests.privacy.common import attach
from tests.privacy.sharded import CONFIG, losses, oracle_run, rows, shard
from unison.models import build
from unison.privacy import Poisson
from unison.shard import find_blocks
from unison.shard.digest import full_parameters

STEPS: dict[str, Any] = {"rate": 0.06, "steps": 5}  # some of them empty, or so on a rank


@functools.cache
def oracle() -> dict[str, Any]:
    return oracle_run(**STEPS)


def blocks(model: Any) -> Any:
    """As users of FSDP2 do."""
    for block in find_blocks(getattr(model, "module", model)):
        block.compile(backend="aot_eager")
    return model


def children(model: Any) -> Any:
    """As torchtitan does."""
    layers = getattr(model, "module", model).layers
    for index, block in enumerate(layers):
        layers[index] = torch.compile(block, backend="aot_eager")
    return model


def whole(model: nn.Module) -> Any:
    return torch.compile(model, backend="aot_eager")


def in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="aot_eager")
    return model


def nothing(model: nn.Module) -> nn.Module:
    return model


def run(
    world: World,
    how: str,
    *,
    first: Callable[[Any], Any] = nothing,
    before: Callable[[Any], Any] = nothing,
    after: Callable[[Any], Any] = nothing,
    **settings: Any,
) -> dict[str, Any]:
    """Train privately, compiled before it is sharded (first), and around `make_private`."""
    torch._dynamo.reset()
    own = build(CONFIG, seed=3)
    model = before(shard(first(own), how, world, "fast"))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        engine, model, optimizer, loader = attach(
            model,
            seed=5,
            optimizer=torch.optim.SGD(own.parameters(), lr=0.5, momentum=0.9),
            data_loader=DataLoader(TensorDataset(rows()), batch_size=4),
            sampling=Poisson(rate=STEPS["rate"]),
            expected_batch_size=4,
            noise_multiplier=0.5,
            max_grad_norm=0.2,
            **settings,
        )
        model, done = after(model), 0
        while done < STEPS["steps"]:
            for (ids,) in loader:
                optimizer.zero_grad()
                unison.batch_mean(losses(model, ids)).backward()
                done += loader.current.is_last
                optimizer.step()
                if done == STEPS["steps"]:
                    break
    passes = engine._attached._attachment._compiled
    engine.detach()
    return {
        "told": [str(each.message) for each in found if "ompiled" in str(each.message)],
        "graphs": passes and passes.num_graphs,
        "parameters": {
            unison.names.canonical_name(name): value.double().tolist()
            for name, value in full_parameters(own)
        },
    }


def run_case(world: World, case: dict[str, Any]) -> dict[str, Any]:
    return run(world, **case)
