"""A model with every odd kind of state, and the steps that fill its optimizer."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.shard.common import shard


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(12, 21)
        self.down = nn.Linear(21, 12)
        self.norm = nn.LayerNorm(12)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Zoo(nn.Module):
    """Tied, frozen, unused, empty, bf16 and dimensionless parameters; buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.randn(5, 3), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(11))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.embed = nn.Embedding(97, 12)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.BatchNorm1d(12)
        self.low = nn.Linear(12, 12, dtype=torch.bfloat16)
        self.head = nn.Linear(12, 97, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("kept", torch.arange(4))
        self.register_buffer("derived", torch.arange(3), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:  # [rows, tokens] -> [rows, tokens, 97]
        x = self.embed(ids) * self.scale
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x.flatten(0, 1)).view_as(x)
        x = x + self.low(x.bfloat16()).float()
        return self.head(x)


def make_zoo(seed: int = 0) -> Zoo:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Zoo()


def sharded_zoo(seed: int = 0, how: str = "auto", **options: Any) -> nn.Module:
    return shard(make_zoo(seed), how, **options)


def take_steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, count: int, first: int = 0
) -> None:
    """Train with the fast reducer, each rank on a batch of its own."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    for step in range(first, first + count):
        generator = torch.Generator().manual_seed(100 * step + rank)
        ids = torch.randint(0, 97, (6, 5), generator=generator)
        loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups: the blocks, and what is left; the frozen parameter is in neither."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [p for name, p in named if name.startswith("layers.")], "weight_decay": 0.1},
        {"params": [p for name, p in named if not name.startswith("layers.")], "lr": 0.02},
    ]


def adamw(model: nn.Module, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(groups_of(model), **{"lr": 0.01, "weight_decay": 0.0, **options})


def same_state(left: dict[str, Any], right: dict[str, Any]) -> bool:
    """Whether two full optimizer states are equal to the bit."""
    return left["param_groups"] == right["param_groups"] and _same(left["state"], right["state"])


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_same(left[k], right[k]) for k in left)
    if isinstance(left, Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)
    return left == right
