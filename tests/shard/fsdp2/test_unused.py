"""Parameters that not everybody uses, under FSDP2: the bits of our own engine."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.harness import World, ranks, run_on_ranks
from tests.shard.fsdp2.common import fsdp2, train
from unison.shard import auto_shard, batch_mean, deal
from unison.shard.fsdp2 import use_ordered_reduction


class Choosy(nn.Module):
    """A block with parameters that are frozen, never used, or used by some samples only."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.frozen = nn.Linear(width, width), nn.Linear(width, width)
        self.sometimes, self.never = nn.Linear(width, width), nn.Linear(width, width)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor, marks: Tensor) -> Tensor:
        x = x + self.frozen(self.first(x)).tanh()
        return x + self.sometimes(x) if marks.sum() > 0 else x


class Awkward(nn.Module):
    """A model with a block that is called twice and one that is not called at all."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(5, 7), nn.Linear(7, 3)
        self.blocks = nn.ModuleList(Choosy(7) for _ in range(4))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, rows: Tensor) -> Tensor:  # [rows, 6] -> [rows, 3]
        marks, x = rows[:, 0], self.stem(rows[:, 1:])
        for block in (*self.blocks[:3], self.blocks[1]):
            x = block(x, marks)
        return self.head(x)


def squares(model: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:  # [rows]
    return model(rows).square().mean(dim=1)


def awkward_batches(marked: tuple[int, ...]) -> list[Tensor]:
    """Rows whose first feature says whether they use every parameter."""
    batches = []
    for step in range(3):
        rows = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        rows[:, 0] = torch.tensor([float(row in marked) for row in range(8)])
        batches.append(rows)
    return batches


def awkward_run(world: World, kind: str, marked: tuple[int, ...]) -> dict:
    torch.manual_seed(0)
    model = Awkward()
    if kind == "fsdp2":
        use_ordered_reduction(fsdp2(model, world))
    else:
        auto_shard(model, reducer="ordered", gradient_divisor=1)
    return train(model, awkward_batches(marked), squares)


@pytest.mark.parametrize("marked", [(0, 1, 2, 3), (5,), ()], ids=["a half", "one", "none"])
def test_unused_parameters(marked):
    expected = run_on_ranks(1, awkward_run, "engine", marked)[0]
    for size in (1, 4):
        assert run_on_ranks(size, awkward_run, "fsdp2", marked)[0] == expected


@ranks(2)
def test_what_no_rank_used_has_no_gradient(world):
    torch.manual_seed(0)
    model = use_ordered_reduction(fsdp2(Awkward(), world))
    for rows in deal(awkward_batches((5,))[:1], granule=1):
        batch_mean(squares(model, rows)).backward()
    without = {name for name, p in model.named_parameters() if p.grad is None}
    never = {f"blocks.{i}.never.{kind}" for i in range(3) for kind in ("weight", "bias")}
    frozen = {f"blocks.{i}.frozen.{kind}" for i in range(4) for kind in ("weight", "bias")}
    outside = {name for name, _ in model.named_parameters() if name.startswith("blocks.3")}
    assert without == never | frozen | outside | {"unused"}
