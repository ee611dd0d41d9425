"""Runs of a small GPT-2 with K-FAC on any number of ranks, sharded in any way."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.nn.parallel import DistributedDataParallel

import unison
from tests.harness import World
from unison.kfac import KFACConfig
from unison.models import ModelConfig, build
from unison.shard import find_blocks
from unison.shard.digest import full_parameters

CONFIG = ModelConfig(
    family="gpt2",
    vocab_size=19,
    context_length=7,
    d_model=12,
    num_layers=2,
    num_heads=2,
    d_ff=20,
    tie_head=True,
)


def tokens(num_rows: int, step: int) -> Tensor:  # [rows, context + 1]
    generator = torch.Generator().manual_seed(100 + step)
    shape = (num_rows, CONFIG.context_length + 1)
    return torch.randint(0, CONFIG.vocab_size, shape, generator=generator)


def lengths_mask(rows: Tensor) -> Tensor:
    """Every row counts as many tokens as its first one says: uneven token counts."""
    length = rows[:, :1] % CONFIG.context_length + 1
    return torch.arange(CONFIG.context_length) < length


def shard(model: nn.Module, how: str, world: World, reducer: str) -> nn.Module:
    options: dict[str, Any] = {"reducer": reducer, "gradient_divisor": 1}
    match how:
        case "none":
            return model
        case "ddp":
            return DistributedDataParallel(model)
        case "units":
            return unison.auto_shard(model, **options)
        case "root":
            return unison.fully_shard(model, **options)
        case "hybrid":
            mesh = torch.distributed.init_device_mesh(
                "cpu", (2, world.size // 2), mesh_dim_names=("replicate", "shard")
            )
            return unison.auto_shard(model, mesh=mesh, **options)
        case "fsdp2" | "hsdp":
            sizes = (world.size,) if how == "fsdp2" else (2, world.size // 2)
            mesh = torch.distributed.init_device_mesh(
                "cpu", sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :]
            )
            for block in find_blocks(model):
                fsdp.fully_shard(block, mesh=mesh)
            fsdp.fully_shard(model, mesh=mesh)
            if reducer == "ordered":
                unison.use_ordered_reduction(model)
            return model
    raise AssertionError(how)


def run(world: World, case: dict[str, Any]) -> dict[str, Any]:
    """Train a few steps; returns what must not depend on the number of ranks.

    Args:
        world: The ranks.
        case: `how` it is sharded; `counts` of rows of each global batch; `granule` for the ordered
            reducer; `shares` of the rows that each rank takes where batches are not dealt;
            `micro_batch`; `dtype`; `compile` blocks by a backend; `config` of the model; `stop`
            after so many steps and return what is `stored`, or go on from that, with the curvature
            in a `folder`; everything else goes into the settings.
    """
    case = dict(case)
    how, counts = case.pop("how"), case.pop("counts", (6, 7, 6))
    granule, shares = case.pop("granule", None), case.pop("shares", None)
    micro_batch, dtype = case.pop("micro_batch", None), case.pop("dtype", torch.float64)
    stored, stop = case.pop("stored", None), case.pop("stop", None)
    folder, backend = case.pop("folder", None), case.pop("compile", None)
    model = build(case.pop("config", CONFIG), seed=1).to(dtype)
    blocks = find_blocks(model) if backend else []
    model = shard(model, how, world, "ordered" if granule else "fast")
    for each in blocks:
        each.compile(backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    kfac = unison.KFAC(
        model, KFACConfig(**{"update_every": 2, "min_layer_size": 20, **case}), optimizer
    )
    found: dict[str, Any] = {"losses": [], "steps": []}
    first = 0
    if stored is not None:
        unison.load_full_state_dict(model, stored["model"])
        unison.load_full_optimizer_state_dict(model, optimizer, stored["optimizer"])
        if folder is None:
            kfac.load_state_dict(stored["kfac"])
        else:
            kfac.load(folder)
        first = kfac.num_steps
    numbers = list(range(first, len(counts) if stop is None else stop))
    if shares is None:
        batches = unison.deal(
            [tokens(counts[step], step) for step in numbers],
            granule=granule,
            micro_batch=micro_batch,
        )
    else:
        batches = [_share(tokens(counts[step], step), shares, world.rank) for step in numbers]
    total = 0.0
    for rows in batches:
        plan = unison.current_plan()
        logits = model(rows[:, :-1])
        mask = lengths_mask(rows)
        if kfac.wants_statistics:
            kfac.sample(logits, mask).backward(retain_graph=True)
        each = F.cross_entropy(logits.mT, rows[:, 1:], reduction="none") * mask
        if shares is None:
            loss = unison.batch_mean(each.sum(dim=1))
        else:
            loss = each.sum() / counts[kfac.num_steps]
        # They divide by the number of ranks; FSDP2 does not with the ordered reducer.
        is_divided = how == "ddp" or (how in ("fsdp2", "hsdp") and granule is None)
        scale = world.size if is_divided else 1
        (loss * scale).backward()
        total += loss.item()
        if plan is not None and not plan.closes_logical_batch:
            continue
        if how == "none" and world.size > 1:
            for parameter in model.parameters():
                torch.distributed.all_reduce(parameter.grad)
        kfac.step()
        optimizer.step()
        optimizer.zero_grad()
        found["losses"].append(total)
        total = 0.0
    whole = full_parameters(model)
    if how == "hsdp":  # which unison.digest does not know
        whole = [(name, value.full_tensor()) for name, value in model.named_parameters()]
    found["parameters"] = {
        name.removeprefix("module."): value.detach().cpu().clone() for name, value in whole
    }
    found["kfac"] = kfac.state_dict()
    found["digest"] = None if how == "hsdp" else unison.digest(model)
    found["layers"] = [layer.as_dict() for layer in kfac.layers]
    found["usage"] = kfac.memory_usage()
    found["calls"] = dict(kfac._adapter.ranks.num_calls)
    found["shown"] = repr(kfac)
    compiled = kfac._compiled
    found["compiled"] = compiled and (compiled.refusal, compiled.num_graphs)
    if stop is not None:
        if folder is not None:
            kfac.save(folder)
        found["stored"] = {
            "model": unison.full_state_dict(model),
            "optimizer": unison.full_optimizer_state_dict(model, optimizer),
            "kfac": found["kfac"],
        }
    return found


def _share(rows: Tensor, shares: list[int], rank: int) -> Tensor:
    start = sum(shares[:rank])
    return rows[start : start + shares[rank]]


def difference(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """The largest relative difference in factors and parameters."""
    worst = 0.0
    pairs = [(found["parameters"][name], value) for name, value in expected["parameters"].items()]
    for a, b in zip(found["kfac"]["layers"], expected["kfac"]["layers"], strict=True):
        assert a["layer"] == b["layer"]
        for key, value in b["tensors"].items():
            if key.startswith("average") or key == "weight":
                pairs.append((a["tensors"][key], value))
    for value, wanted in pairs:
        scale = float(wanted.abs().max()) or 1.0
        worst = max(worst, float((value - wanted).abs().max()) / scale)
    return worst
