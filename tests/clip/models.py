"""Models in which records take memory: deep, wide, checkpointed or not."""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    """Four times as wide inside as outside, so that a and g are of about one size in all."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:  # [batch, tokens, width]
        return x + self.down(self.dropout(torch.relu(self.up(self.norm(x)))))


class Deep(nn.Module):
    """Blocks between a table and a head."""

    def __init__(
        self,
        width: int = 16,
        depth: int = 3,
        vocab: int = 40,
        dropout: float = 0.0,
        is_checkpointed: bool = True,
        is_tied: bool = False,
    ) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(depth))
        self.head = nn.Linear(width, vocab, bias=False)
        if is_tied:
            self.head.weight = self.table.weight
        self.is_checkpointed = is_checkpointed

    def forward(self, ids: Tensor) -> Tensor:  # [batch, tokens]
        x = self.table(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x)
        return self.head(x)


def losses(model: nn.Module, ids: Tensor) -> Tensor:  # [batch]
    logits = model(ids[:, :-1])
    found = nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
    return found.float().mean(1) if found.dtype != torch.float64 else found.mean(1)


def ids(batch: int = 5, tokens: int = 12, vocab: int = 40) -> Tensor:
    return torch.randint(0, vocab, (batch, tokens + 1), generator=torch.Generator().manual_seed(7))
