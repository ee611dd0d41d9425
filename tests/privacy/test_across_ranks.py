"""What a rank of a private run may learn of another's rows."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import unison
from tests.harness import ranks
from tests.privacy.common import attach, data, make_model
from unison.errors import UnsupportedOperation
from unison.privacy import Shuffled
from unison.shard.digest import full_parameters

# ---- rows of other ranks -------------------------------------------------------------------------
#
# A check that replaces rows on one rank sees nothing of what comes from another: here row i of a
# rank meets row i of its neighbour alone.


class Gathered(torch.autograd.Function):
    """Outputs of all ranks, as contrastive losses gather them."""

    @staticmethod
    def forward(ctx: Any, own: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        found = [torch.zeros_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(found, own.contiguous())
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:  # type: ignore[override]
        summed = torch.stack(gradients)
        dist.all_reduce(summed)
        return summed[dist.get_rank()]


def gathered_in_place(h: Tensor) -> Tensor:
    found = [torch.zeros(h.shape) for _ in range(dist.get_world_size())]
    dist.all_gather(found, h.detach().contiguous())
    return found[1 - dist.get_rank()]


def summed_in_place(h: Tensor) -> Tensor:
    total = h.detach().clone()
    dist.all_reduce(total)
    return total


def summed(h: Tensor) -> Any:
    assert dist.group.WORLD is not None
    return functional.all_reduce(h.detach(), "sum", dist.group.WORLD)


def gathered(h: Tensor) -> Any:
    return Gathered.apply(h)[1 - dist.get_rank()]  # type: ignore[index]


def pairs(loss_of: Callable[[nn.Module, Tensor, Tensor], Tensor], model: nn.Module) -> None:
    """Private steps in which all ranks have as many rows."""
    settings = {"sampling": Shuffled(batch_size=4, num_records=120), "data_loader": None}
    settings["data_loader"] = DataLoader(TensorDataset(*data()), batch_size=4, shuffle=True)
    _, model, optimizer, private = attach(model, **settings)
    for _, (x, y) in zip(range(2), private, strict=False):
        loss_of(model, x, y).backward()
        optimizer.step()


@pytest.mark.parametrize("others", [gathered_in_place, summed_in_place, summed, gathered])
@ranks(2)
def test_a_loss_with_rows_of_other_ranks_is_refused(world, others):
    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        h = model(x)
        return ((h - others(h)) ** 2).sum(1).mean()

    with pytest.raises(UnsupportedOperation, match=r"test_across_ranks.*values of other ranks"):
        pairs(loss_of, make_model())


@ranks(2)
def test_inputs_with_rows_of_other_ranks_are_refused(world):
    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(model(x + gathered_in_place(x)), y)

    with pytest.raises(UnsupportedOperation, match="what other ranks sent"):
        pairs(loss_of, make_model())


class Centred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = make_model()

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        return h - summed_in_place(h)


@pytest.mark.parametrize("wrap", [DistributedDataParallel, unison.fully_shard])
@ranks(2)
def test_a_collective_in_forward_is_refused(world, wrap):
    with pytest.raises(UnsupportedOperation, match="calls all_reduce in its forward pass"):
        pairs(lambda model, x, y: cross_entropy(model(x), y), wrap(Centred()))


@ranks(1, 2)
def test_metrics_are_summed_over_ranks(world):
    """Before backward, of copies or of the detached loss itself: gradients know nothing of it."""
    found, metrics = [], []
    for logs in (False, True):
        _, model, optimizer, private = attach(make_model())
        for _, (x, y) in zip(range(3), private, strict=False):
            optimizer.zero_grad()
            outputs = model(x)
            loss = cross_entropy(outputs, y)
            if logs:
                shown, correct = loss.detach(), (outputs.argmax(1) == y).float().sum()
                several = [torch.zeros(1) for _ in range(world.size)]
                dist.all_gather(several, loss.detach().view(1).clone())
                dist.all_reduce(shown)
                dist.all_reduce(correct)
                metrics += [(torch.cat(several).sum().item(), shown.item())]
            loss.backward()
            optimizer.step()
        found.append([each.detach() for _, each in full_parameters(model)])
    assert all(map(torch.equal, *found))
    assert all(a == pytest.approx(b) for a, b in metrics)
    assert len(metrics) == 3
