"""Models whose samples are hard to bound: tokens that cancel, tokens that are all one."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.harness.oracle import PerSampleLoss

TOKENS, WIDTH, VOCAB = 64, 24, 11


class Signed(nn.Module):
    """A linear layer whose tokens count with weights of their own."""

    def __init__(self, weights: Tensor) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("weights", weights)

    def forward(self, x: Tensor) -> Tensor:  # [batch, tokens, width] to [batch, tokens]
        return self.up(x).sum(2) * self.weights


class SignedTied(nn.Module):
    """A table that is looked up and multiplied with, with the same weights."""

    def __init__(self, weights: Tensor) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, WIDTH)
        self.register_buffer("weights", weights)

    def forward(self, ids: Tensor) -> Tensor:  # [batch, tokens] to [batch, tokens]
        x = self.table(ids)
        logits = x.detach() @ self.table.weight.t()
        return (logits.sum(2) + x.sum(2)) * self.weights


def added(model: nn.Module, batch: Tensor) -> Tensor:  # [batch]
    return model(batch).float().sum(1)


def _pairs(rest: float) -> Tensor:
    """+1, -1, +1, -1, ... but for a rest."""
    signs = torch.ones(TOKENS)
    signs[1::2] = -1 + rest
    return signs


def _floats(batch: int, *, is_paired: bool) -> Tensor:
    x = torch.randn(batch, TOKENS, WIDTH, generator=torch.Generator().manual_seed(3))
    if is_paired:
        x[:, 1::2] = x[:, ::2]
    return x


def _ids(batch: int, *, is_paired: bool) -> Tensor:
    ids = torch.randint(0, VOCAB, (batch, TOKENS), generator=torch.Generator().manual_seed(4))
    if is_paired:
        ids[:, 1::2] = ids[:, ::2]
    return ids


def _one_large_token(batch: int) -> Tensor:
    x = _floats(batch, is_paired=False)
    x[:, 5] *= 1e3
    return x


@dataclass(frozen=True)
class Hard:
    """A model, a batch for it, and one loss per sample."""

    make: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    loss: PerSampleLoss = added


HARD: dict[str, Hard] = {
    "cancelling": Hard(lambda: Signed(_pairs(2.0**-7)), lambda n: _floats(n, is_paired=True)),
    "cancelling to nothing": Hard(
        lambda: Signed(_pairs(0.0)), lambda n: _floats(n, is_paired=True)
    ),
    "cancelling lookups": Hard(
        lambda: SignedTied(_pairs(2.0**-7)), lambda n: _ids(n, is_paired=True)
    ),
    "constant": Hard(
        lambda: Signed(torch.full((TOKENS,), 0.1)),
        lambda n: torch.full((n, TOKENS, WIDTH), 1.1),
    ),
    "constant lookups": Hard(
        lambda: SignedTied(torch.full((TOKENS,), 0.1)),
        lambda n: torch.full((n, TOKENS), 7, dtype=torch.int64),
    ),
    "one large token": Hard(lambda: Signed(torch.ones(TOKENS)), _one_large_token),
}
