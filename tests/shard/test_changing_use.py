"""Passes of one logical batch that use different parameters."""

import torch
from torch import Tensor, nn

import unison
from tests.harness import World, assert_close, run_on_ranks
from unison.shard import full_parameters


class Turns(nn.Module):
    """Two layers that take turns, pass by pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.num_passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_passes += 1
        return self.layers[(self.num_passes - 1) % 2](x)


def make() -> tuple[Turns, Tensor]:
    torch.manual_seed(5)
    return Turns().double(), torch.randn(4, 3, dtype=torch.float64)


def trained(world: World) -> dict[str, Tensor]:
    model, x = make()
    unison.fully_shard(model, gradient_divisor=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for rows in unison.deal([x], micro_batch=1):
        unison.batch_mean(model(rows).square().sum(-1)).backward()
    optimizer.step()
    return dict(full_parameters(model))


def test_gradients_of_earlier_passes_stay():
    model, x = make()
    losses = [model.layers[i % 2](row).square().sum() for i, row in enumerate(x)]
    torch.stack(losses).mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    expected = {name: each.detach() for name, each in model.named_parameters()}
    for found in run_on_ranks(2, trained):
        assert_close(found, expected, dtype=torch.float64)
