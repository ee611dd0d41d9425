"""Parameters that change between a forward pass and its backward pass, as torch judges them."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.harness import World, ranks, run_on_ranks
from unison.errors import UnsupportedOperation
from unison.shard import (
    CPUOffload,
    MixedPrecision,
    auto_shard,
    batch_mean,
    deal,
    fully_shard,
)
from unison.shard.sharded_tensor import ShardedTensor

Run = Callable[[nn.Module, Callable[[], None]], None]  # (model, change the parameters)
X = torch.arange(12.0).view(2, 6) / 10


class Block(nn.Module):
    def __init__(self, is_checkpointed: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6)
        self.is_checkpointed = is_checkpointed
        self.aux = torch.zeros(())

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).tanh())

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(self.mlp, x, use_reentrant=False) if self.is_checkpointed else self.mlp(x)
        self.aux = y.square().mean()
        return x + y


class Net(nn.Module):
    def __init__(self, checkpointed: str = "nothing") -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(checkpointed == "inside") for _ in range(3))
        self.head = nn.Linear(6, 2)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            whole = self.checkpointed == "outside"
            x = checkpoint(block, x, use_reentrant=False) if whole else block(x)
        return self.head(x)


def loss_of(model: nn.Module) -> Tensor:
    return model(X + torch.distributed.get_rank()).square().mean()


# ---- what is refused ---------------------------------------------------------------------------


def between(model: nn.Module, change: Callable[[], None]) -> None:
    loss = loss_of(model)
    change()
    loss.backward()


def twice(model: nn.Module, change: Callable[[], None]) -> None:
    loss = loss_of(model)
    loss.backward(retain_graph=True)
    change()
    loss.backward()


def before_another(model: nn.Module, change: Callable[[], None]) -> None:
    """By then the full parameters have been gathered with their new values."""
    loss = loss_of(model)
    change()
    with torch.inference_mode():
        loss_of(model)
    loss_of(model).backward()
    loss.backward()


def of_kept_tensors(model: Any, change: Callable[[], None]) -> None:
    loss_of(model)
    change()
    (model.blocks[0].aux + model.blocks[2].aux).backward()


def in_granules(model: nn.Module, change: Callable[[], None]) -> None:
    for rows in deal([torch.cat([X, X + 1])], granule=1):
        loss = batch_mean(model(rows).square().mean(1))
        change()
        loss.backward()


ORDERED = {"reducer": "ordered", "gradient_divisor": 1}
REFUSED: dict[str, tuple[str, dict[str, Any], Run]] = {
    "freed": ("nothing", {}, between),
    "kept": ("nothing", {"reshard_after_forward": False}, between),
    "bf16": ("nothing", {"mp_policy": MixedPrecision(param=torch.bfloat16)}, between),
    "on the host": ("nothing", {"offload_policy": CPUOffload(parameters=False)}, between),
    "twice": ("nothing", {}, twice),
    "before another": ("nothing", {}, before_another),
    "kept on modules": ("nothing", {}, of_kept_tensors),
    "checkpointed inside": ("inside", {}, between),
    "checkpointed outside": ("outside", {}, between),
    "checkpointed, before another": ("outside", {}, before_another),
    "ordered": ("nothing", ORDERED, in_granules),
}


@pytest.mark.parametrize("name", REFUSED)
@ranks(2)
def test_a_backward_pass_over_changed_parameters_raises(world, name):
    """It read the new values, where one process raises."""
    checkpointed, options, run = REFUSED[name]
    model = auto_shard(Net(checkpointed), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def change() -> None:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()

    with pytest.raises(UnsupportedOperation, match=r"'(blocks.\d|head).* backward\(\) before"):
        run(model, change)


@pytest.mark.parametrize("what", ["compiled", "frozen"])
@ranks(2)
def test_torch_itself_refuses_where_nothing_of_ours_looks(world, what):
    model = Net()
    if what == "frozen":
        model.head.requires_grad_(False)
    else:
        for block in model.blocks:
            block.compile(backend="aot_eager")
    auto_shard(model)

    @torch.no_grad()
    def change() -> None:
        for parameter in (model.head if what == "frozen" else model.blocks).parameters():
            parameter.mul_(2)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's compiler meets its own
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            between(model, change)


# ---- what is right -----------------------------------------------------------------------------


class Pair(nn.Module):
    """Two networks in one unit, and parameters whose gradient needs no value of theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.maker = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.judge = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))
        self.shift = nn.Parameter(torch.ones(6))
        self.codes = nn.Parameter(torch.ones(6), requires_grad=False)

    def forward(self, x: Tensor, part: str) -> Tensor:
        if part == "judge":
            return self.judge(x)
        return self.maker(x + self.shift) + self.codes


def adversaries(world: World, size: int, is_sharded: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model = Pair().double()
    fed = range(size)
    if is_sharded:
        fully_shard(model)
        fed = [world.rank]
    makers = torch.optim.SGD([*model.maker.parameters()], lr=0.1)
    judges = torch.optim.SGD(model.judge.parameters(), lr=0.1)
    for step in range(2):
        made = [model(X.double() + rank + step, "maker") for rank in fed]
        for each in made:
            (model(each.detach(), "judge").mean() / len(fed)).backward()
        judges.step()  # the graph of `made` lives on, and its parameters are as they were
        judges.zero_grad()
        with torch.no_grad():
            model.codes.mul_(0.9)  # and those may change: nothing reads them again
            model.shift.mul_(0.9)
        sum(-model(each, "judge").mean() / len(fed) for each in made).backward()
        makers.step()
        model.zero_grad()
    return [
        each.full_tensor() if isinstance(each, ShardedTensor) else each.detach()
        for each in model.parameters()
    ]


@pytest.mark.parametrize("size", [1, 2])
def test_what_a_backward_pass_does_not_read_may_change(size):
    """At one rank, too: parameters in one buffer do not share a count of writes."""
    expected = run_on_ranks(1, adversaries, size, False)[0]
    for found in run_on_ranks(size, adversaries, size, True):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)
