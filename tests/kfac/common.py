"""What the tests of K-FAC share: small models, and factors by loops over tokens."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import unison
from unison.kfac import KFACConfig

CLASSES = 5


class Transformer(nn.Module):
    """One block of attention and one of two layers, with a head: odd sizes, a mask by choice."""

    def __init__(self, d: int = 6, d_ff: int = 9, classes: int = CLASSES) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, d)
        self.q, self.k, self.v = nn.Linear(d, d), nn.Linear(d, d, bias=False), nn.Linear(d, d)
        self.o, self.f1, self.f2 = nn.Linear(d, d), nn.Linear(d, d_ff), nn.Linear(d_ff, d)
        self.norm = nn.LayerNorm(d)
        self.head = nn.Linear(d, classes, bias=False)

    def forward(self, ids: Tensor) -> Tensor:  # [batch, tokens] -> [batch, tokens, classes]
        x = self.embed(ids)
        h = self.norm(x)
        h = F.scaled_dot_product_attention(self.q(h), self.k(h), self.v(h), is_causal=True)
        x = x + self.o(h)
        x = x + self.f2(torch.tanh(self.f1(x)))
        return self.head(x)


def settings(**changes: Any) -> KFACConfig:
    """Settings whose factors are those of one update: no memory, no bound on sizes."""
    same = {"decay": 0.0, "min_layer_size": 0, "update_every": 1, "burn_in": 0}
    return KFACConfig(**{**same, **changes})


def observed(
    model: nn.Module,
    x: Any,
    config: KFACConfig,
    *,
    mask: Tensor | None = None,
    y: Tensor | None = None,
) -> unison.KFAC:
    """K-FAC after one step on one batch."""
    kfac = unison.KFAC(model, config)
    model.zero_grad()
    logits = model(x)
    kfac.sample(logits, mask).backward(retain_graph=True)
    loss(logits, y, mask).backward()
    kfac.step()
    return kfac


def loss(logits: Tensor, y: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
    """The mean cross entropy over the tokens that count."""
    flat = logits.reshape(-1, logits.shape[-1])
    y = torch.zeros(len(flat), dtype=torch.int64) if y is None else y.reshape(-1)
    each = F.cross_entropy(flat, y, reduction="none")
    if mask is None:
        return each.mean()
    return (each * mask.reshape(-1)).sum() / mask.sum()


def relative(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest value."""
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-300))


def flat_gradient(model: nn.Module) -> Tensor:
    """All gradients in one vector."""
    return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
