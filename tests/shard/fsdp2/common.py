"""What the tests of ordered reduction on FSDP2 share: models under FSDP2, and a run of one."""

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from tests.harness import World
from tests.shard.common import GPT2, per_sample_loss
from unison.models import ModelConfig, build
from unison.rng import Key, draws_by_sample
from unison.shard import (
    batch_mean,
    clip_grad_norm_,
    current_plan,
    deal,
    digest,
    find_blocks,
    param_groups,
    param_norm,
)


def lm(config: ModelConfig = GPT2) -> Any:
    return build(config, seed=1)


def fsdp2(
    model: Any, world: World, parts: Callable[[Any], list[nn.Module]] = find_blocks, **options: Any
) -> Any:
    """Shard as users of FSDP2 do: the blocks, then the root."""
    mesh = init_device_mesh("cpu", (world.size,))
    for part in parts(model):
        fully_shard(part, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def train(
    model: nn.Module,
    batches: Iterable[Tensor],
    loss_of: Callable[[Any, Tensor], Tensor] = per_sample_loss,
    *,
    granule: int | None = 1,
    micro_batch: int | None = None,
    max_norm: float = 0.5,
    is_bf16: bool = False,
    has_dropout: bool = False,
    optimizer: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Train a sharded model; returns everything that must not depend on the ranks."""
    adamw = torch.optim.AdamW(param_groups(model, 0.1), lr=1e-2, **(optimizer or {}))
    losses, norms, share = [], [], 0.0
    for rows in deal(batches, granule=granule, micro_batch=micro_batch):
        plan = current_plan()
        assert plan is not None
        dropout = draws_by_sample(Key.from_seed(3), plan.step, plan.sample_ids)
        with (
            torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_bf16),
            dropout if has_dropout else nullcontext(),
        ):
            loss = batch_mean(loss_of(model, rows))
        loss.backward()
        share += loss.item()
        if plan.closes_logical_batch:
            norms.append(clip_grad_norm_(model, max_norm).item())
            adamw.step()
            adamw.zero_grad()
            losses, share = [*losses, share], 0.0
    return {
        "digest": digest(model),
        "losses": losses,
        "norms": norms,
        "param_norm": param_norm(model).item(),
    }


class Collectives(TorchDispatchMode):
    """Counts collectives by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.counts[func._schema.name.removeprefix("c10d::")] += 1
        return func(*args, **(kwargs or {}))
