"""What the tests of sharding share: small models, a dealt run, a plain run."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.harness import World
from unison.models import ModelConfig, build
from unison.shard import (
    auto_shard,
    batch_mean,
    clip_grad_norm_,
    current_plan,
    deal,
    digest,
    fully_shard,
    param_groups,
    param_norm,
)

GPT2 = ModelConfig(
    family="gpt2",
    vocab_size=61,
    context_length=13,
    d_model=24,
    num_layers=3,
    num_heads=4,
    d_ff=40,
    tie_head=True,
)
DECODER = replace(GPT2, family="decoder", tie_head=False)
ODD = replace(GPT2, vocab_size=509, d_model=132, d_ff=77, context_length=11, num_layers=2)


def tokens(num_rows: int, config: ModelConfig, step: int = 0) -> Tensor:  # [rows, context + 1]
    generator = torch.Generator().manual_seed(1000 + step)
    shape = (num_rows, config.context_length + 1)
    return torch.randint(0, config.vocab_size, shape, generator=generator)


def per_sample_loss(model: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:  # [rows]
    logits = model(rows[:, :-1])
    losses = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="none")
    return losses.view(rows.shape[0], -1).mean(dim=1)


def shard(model: nn.Module, how: str, **options: Any) -> nn.Module:
    """`auto` makes the blocks units; `root` leaves everything at the root."""
    return auto_shard(model, **options) if how == "auto" else fully_shard(model, **options)


def ordered_run(
    world: World,
    config: ModelConfig,
    *,
    how: str = "auto",
    counts: tuple[int, ...] = (8, 8),
    granule: int = 1,
    micro_batch: int | None = None,
    max_norm: float = 0.5,
    is_bf16: bool = False,
    optimizer: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    change: Callable[[nn.Module], None] | None = None,
) -> dict[str, Any]:
    """Train with the ordered reducer; returns everything that must not depend on the ranks."""
    model = build(config, seed=1)
    if change is not None:
        change(model)
    shard(model, how, reducer="ordered", gradient_divisor=1, **(options or {}))
    adamw = torch.optim.AdamW(param_groups(model, 0.1), lr=1e-2, **(optimizer or {}))
    losses, norms = [], []
    batches = [tokens(count, config, step) for step, count in enumerate(counts)]
    share = 0.0
    for rows in deal(batches, granule=granule, micro_batch=micro_batch):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_bf16):
            loss = batch_mean(per_sample_loss(model, rows))
        loss.backward()
        share += loss.item()
        plan = current_plan()
        if not (plan and plan.closes_logical_batch):
            continue
        norms.append(clip_grad_norm_(model, max_norm).item())
        adamw.step()
        adamw.zero_grad()
        losses.append(share)
        share = 0.0
    return {
        "digest": digest(model),
        "losses": losses,
        "norms": norms,
        "param_norm": param_norm(model).item(),
    }
