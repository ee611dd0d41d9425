"""Models that are sharded in many ways, and trained privately for a few steps."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import unison
from tests.harness import World
from tests.privacy.common import attach
from tests.privacy.sharded import CONFIG, losses, rows
from unison.models import build
from unison.privacy import Poisson
from unison.shard import auto_shard, find_blocks, full_parameters
from unison.shard.fsdp2 import ordered_model_of


def data(batch_size: int = 4) -> DataLoader[Any]:
    return DataLoader(TensorDataset(rows()), batch_size=batch_size)


def step_by_step(model: nn.Module, optimizer: Any, private: Any, steps: int) -> list[float]:
    """The loop that users write; returns the losses of logical batches."""
    found, share = [], 0.0
    while len(found) < steps:
        for (ids,) in private:
            optimizer.zero_grad()
            loss = unison.batch_mean(losses(model, ids))
            loss.backward()
            share += loss.item()
            if private.current.is_last:
                found, share = [*found, share], 0.0
            optimizer.step()
            if len(found) == steps:
                break
    return found


def shard(model: Any, world: World, how: str, parts: Callable, options: dict[str, Any]) -> None:
    match how:
        case "none":
            return
        case "units":
            auto_shard(model, reducer="ordered", gradient_divisor=1, **options)
            return
        case "hybrid":
            names, shape = ("copies", "parts"), (2, world.size // 2)
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        case _:
            mesh = init_device_mesh("cpu", (world.size,))
    for part in parts(model):
        fully_shard(part, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    if how == "ordered before":
        unison.use_ordered_reduction(model)


def whole(model: nn.Module, how: str) -> dict[str, list]:
    if how != "hybrid":
        return {name: value.double().tolist() for name, value in full_parameters(model)}
    return {name: each.full_tensor().double().tolist() for name, each in model.named_parameters()}


def trained(
    world: World,
    *,
    how: str = "fsdp2",
    config: Any = CONFIG,
    change: Callable[[nn.Module], None] | None = None,
    parts: Callable[[Any], list[nn.Module]] = find_blocks,
    options: dict[str, Any] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    model: Any = build(config, seed=3)
    if change is not None:
        change(model)
    shard(model, world, how, parts, options or {})
    trainable = [each for each in model.parameters() if each.requires_grad]
    engine, model, optimizer, private = attach(
        model,
        seed=5,
        optimizer=torch.optim.AdamW(trainable, lr=1e-2),
        data_loader=data(),
        sampling=Poisson(rate=0.15),
        expected_batch_size=4,
        **{"noise_multiplier": 0.5, "max_grad_norm": 0.2, "recheck": False, **settings},
    )
    found = {
        "losses": step_by_step(model, optimizer, private, steps=3),
        "norms": engine.per_sample_norms().tolist(),
        "parameters": whole(model, how),
    }
    engine.detach()
    assert (ordered_model_of(model) is not None) == (how == "ordered before")
    return found


def trained_as(world: World, case: dict) -> dict:
    return trained(world, **case)
