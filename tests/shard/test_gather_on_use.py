"""Losses that do not come through a unit's outputs: parameters are there when they are read."""

import random
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.harness import World, run_on_ranks
from unison.shard import auto_shard, fully_shard
from unison.shard.ranks import Ranks, Work
from unison.shard.sharded_tensor import ShardedTensor

KEPT: list[Tensor] = []


class Router(nn.Module):
    """A block that keeps a loss of its own."""

    def __init__(self, width: int, where: str) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, 5), nn.Linear(width, width)
        self.scale = nn.Parameter(torch.full((width,), 0.3))
        self.where = where

    def forward(self, x: Tensor) -> Tensor:
        gates = self.gate(x).softmax(-1)
        y = x + self.up(x).tanh() * gates[..., :1] * self.scale
        aux = (self.gate.weight.t().square().sum() + 1) * (gates * self.gate(y)).square().mean()
        if self.where == "attribute":
            self.aux = aux
        else:
            KEPT.append(aux)
        return y


class Net(nn.Module):
    """Routers one after the other."""

    def __init__(self, where: str = "attribute", is_checkpointed: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Router(17, where) for _ in range(4))
        self.head = nn.Linear(17, 3)
        self.is_checkpointed = is_checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x)
        return self.head(x)


@dataclass
class Unknown:
    """An output in which torch finds no tensor."""

    first: Tensor
    second: Tensor


class Wrapped(nn.Module):
    """A block that returns an object of its own class."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(17, 3), nn.Linear(17, 3)

    def forward(self, x: Tensor) -> Unknown:
        return Unknown(self.a(x), self.b(x))


def with_aux(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean() + sum(block.aux for block in model.blocks)


def with_list(model: nn.Module, x: Tensor) -> Tensor:
    KEPT.clear()
    return model(x).square().mean() + sum(KEPT)


def aux_alone(model: nn.Module, x: Tensor) -> Tensor:
    model(x)
    return model.get_submodule("blocks.1").aux + model.get_submodule("blocks.3").aux  # type: ignore[return-value]


def penalty(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    y = model(x)
    (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    return y.mean() + gradient.square().mean()


def penalty_twice(model: nn.Module, x: Tensor) -> Tensor:
    return penalty(model, x) + penalty(model, x * 2)


def compiled(model: Net) -> Net:
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    return model


LOSSES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, Tensor], Tensor]]] = {
    "kept on modules": (Net, with_aux),
    "kept in a list": (lambda: Net("list"), with_list),
    "kept alone": (Net, aux_alone),
    "gradient penalty": (Net, penalty),
    "two gradient penalties": (Net, penalty_twice),
    "kept, checkpointed": (lambda: Net(is_checkpointed=True), with_aux),
    "kept by compiled blocks": (lambda: compiled(Net()), with_aux),
    "kept by compiled blocks alone": (lambda: compiled(Net()), aux_alone),
}


class SlowGather:
    """A gather that is written at its last moment; until then there are NaNs."""

    def __init__(self, full: Tensor, received: Tensor, work: Work) -> None:
        self._full, self._received, self._work = full, received, work

    def wait(self) -> None:
        self._work.wait()
        time.sleep(random.random() * 2e-3)
        self._full.copy_(self._received)


def slow(gather: Callable) -> Callable:
    def start(self: Ranks, full: Tensor, shard: Tensor) -> SlowGather:
        received = torch.empty_like(full)
        if full.is_floating_point():
            full.fill_(torch.nan)
        return SlowGather(full, received, gather(self, received, shard))

    return start


def gradients(
    world: World, name: str, size: int, is_sharded: bool, keeps: bool
) -> dict[str, Tensor | None]:
    make, loss_of = LOSSES[name]
    torch.manual_seed(0)
    model = make().double()
    fed = range(size)
    if is_sharded:
        auto_shard(model, reshard_after_forward=not keeps)
        fed = [world.rank]
    found: dict[str, Tensor | None] = {}
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's compiler meets its own
        if is_sharded:
            patch.setattr(Ranks, "gather", slow(Ranks.gather))
        for step in range(3):  # the first pass does not prefetch yet
            model.zero_grad()
            for rank in fed:
                x = torch.randn(
                    6, 17, generator=torch.Generator().manual_seed(10 * step + rank)
                ).double()
                (loss_of(model, x) / len(fed)).backward()
        for each, parameter in model.named_parameters():
            value = parameter.grad
            found[each] = value.full_tensor() if isinstance(value, ShardedTensor) else value
    return found


COMPILED = ("kept by compiled blocks", "kept by compiled blocks alone")


@pytest.mark.parametrize("keeps", [False, True], ids=["freed", "kept"])
@pytest.mark.parametrize("name", [name for name in LOSSES if name not in COMPILED])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_gradients_are_those_of_one_process(size, name, keeps):
    """S2: three runs of one step gave three gradients, and another shape a crash."""
    check_gradients(size, name, keeps)


@pytest.mark.parametrize("name", COMPILED)
def test_gradients_of_what_compiled_blocks_keep(name):
    check_gradients(2, name, False)


def check_gradients(size: int, name: str, keeps: bool) -> None:
    expected = run_on_ranks(1, gradients, name, size, False, keeps)[0]
    for found in run_on_ranks(size, gradients, name, size, True, keeps):
        for key, value in expected.items():
            if value is None:
                assert found[key] is None
            else:
                torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-12)


def unknown_output(world: World, is_sharded: bool) -> list[Tensor | None]:
    torch.manual_seed(0)
    model = Wrapped()
    fed = range(2)
    if is_sharded:
        fully_shard(model)
        fed = [world.rank]
    for _ in range(2):
        model.zero_grad()
        for rank in fed:
            output = model(torch.full((2, 17), rank + 1.0))
            loss = output.first.sum() + output.second.square().sum()
            (loss / len(fed)).backward()
    grads = [parameter.grad for parameter in model.parameters()]
    return [grad.full_tensor() if isinstance(grad, ShardedTensor) else grad for grad in grads]


def test_an_output_of_an_unknown_class():
    expected = run_on_ranks(1, unknown_output, False)[0]
    for found in run_on_ranks(2, unknown_output, True):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)
