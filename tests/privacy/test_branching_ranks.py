"""Rows that lie where values put them, in a model of parts on ranks; values that part the ranks."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import unison
from tests.harness import World, run_on_ranks
from tests.harness.oracle import clipped_sum
from unison.errors import UnsupportedOperation
from unison.privacy import PrivacyEngine
from unison.shard import full_parameters

WIDTH, TOKENS, ROWS, MAX_NORM = 6, 5, 8, 0.05


class Chooser(nn.Module):
    """Tokens that go to one of two experts, by their values."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(2, WIDTH, WIDTH) / WIDTH)
        self.router = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, WIDTH)
        shares = self.router(flat).softmax(-1)
        made = torch.zeros_like(flat)
        for i in range(2):
            (picked,) = torch.where(shares.argmax(-1) == i)
            own = flat[picked] @ self.experts[i]
            made = made.index_add(0, picked, own * shares[picked, i, None])
        return x + made.view_as(x)


class Chain(nn.Module):
    """Blocks of which one rank leaves some out, from a pass on."""

    def __init__(self, left_out: int | None = None, since: int = 0) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(Chooser() for _ in range(3))
        self.head = nn.Linear(WIDTH, 4)
        self.left_out, self.since, self.num_passes = left_out, since, 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_passes += self.training and torch.is_grad_enabled()
        for i, block in enumerate(self.blocks):
            if i != self.left_out or self.num_passes <= self.since:
                x = block(x)
        return self.head(x.mean(1))


def losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def data() -> tuple[Tensor, Tensor]:
    gen = torch.Generator().manual_seed(4)
    return torch.randn(ROWS, TOKENS, WIDTH, generator=gen), torch.arange(ROWS) % 4


def shard(model: Chain, how: str) -> None:
    if how == "units":
        unison.auto_shard(model, gradient_divisor=1)
    elif how == "kept whole":
        unison.auto_shard(model, gradient_divisor=1, reshard_after_forward=False)
    else:
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)


def whole(model: Chain, how: str) -> dict[str, Tensor]:
    if how == "fsdp2":
        return {name: each.full_tensor().detach() for name, each in model.named_parameters()}
    return {name: each.detach().clone() for name, each in full_parameters(model)}


def trained(
    world: World, left_out: int | None, since: int, how: str, steps: int
) -> dict[str, Tensor] | str:
    model = Chain(left_out if world.rank == 1 else None, since)
    shard(model, how)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = PrivacyEngine()
    settings: dict[str, Any] = {
        "module": model,
        "optimizer": optimizer,
        "data_loader": DataLoader(TensorDataset(*data()), batch_size=ROWS, shuffle=True),
        "noise_multiplier": 0.0,
        "max_grad_norm": MAX_NORM,
        "poisson_sampling": False,
    }
    try:
        _, optimizer, loader = engine.make_private(**settings)
        for _ in range(steps):
            for batch in loader:
                optimizer.zero_grad()
                unison.batch_mean(losses(model, batch)).backward()
                optimizer.step()
    except UnsupportedOperation as error:
        return str(error)
    return whole(model, how)


@functools.cache
def oracle() -> dict[str, Tensor]:
    sums = clipped_sum(Chain(), losses, data(), MAX_NORM)
    before = dict(Chain().named_parameters())
    return {name: before[name].double() - each / ROWS for name, each in sums.items()}


LONG = pytest.mark.full


@pytest.mark.parametrize(
    ("size", "how"),
    [
        *((2, "units"), (2, "fsdp2"), pytest.param(2, "kept whole", marks=LONG)),
        *(pytest.param(3, "units", marks=LONG), pytest.param(3, "fsdp2", marks=LONG)),
    ],
)
def test_rows_by_value_in_parts(size, how):
    for found in run_on_ranks(size, trained, None, 0, how, 1):
        assert isinstance(found, dict), found
        for name, wanted in oracle().items():
            torch.testing.assert_close(found[name].double(), wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("left_out", "since", "how"),
    [
        *((0, 0, "units"), (2, 0, "units"), pytest.param(1, 2, "units", marks=LONG)),
        (2, 2, "units"),
        *((0, 0, "fsdp2"), (2, 2, "fsdp2")),
    ],
)
def test_ranks_that_part_say_so(left_out, since, how):
    """At once, on every rank: while the model is looked at, or in a later step."""
    for found in run_on_ranks(2, trained, left_out, since, how, 4, timeout=60):
        assert isinstance(found, str)
        assert "values decide which parts of this module a pass runs" in found
