"""What a rank of a private run may learn of another's rows, and what ranks have in common."""

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, TensorDataset

import unison
from tests.harness import ranks
from tests.privacy.common import attach, data, make_model, train
from unison.errors import BadInput, NeedsWhole, UnsupportedOperation
from unison.privacy import Shuffled
from unison.shard import ranks as ranks_module
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


# ---- what ranks have in common -------------------------------------------------------------------


@ranks(2)
def test_arguments_that_differ_between_ranks_are_refused(world):
    rank, module = world.rank, make_model()
    given: dict[str, dict[str, Any]] = {
        "max_grad_norm": {"max_grad_norm": 1.0 + rank},
        "noise_multiplier": {"noise_multiplier": 1.0 + rank},
        "key": {"seed": rank},
        "number of records": {"data_loader": own_loader(0, 120 - 8 * rank)},
        "max_physical_batch_size": {"max_physical_batch_size": 2 + rank},
        "trained parameters": {"module": partly_frozen(rank)},
        "lr of parameter group 0": {
            "module": module,
            "optimizer": torch.optim.SGD(module.parameters(), lr=1.0 + rank),
        },
    }
    for name, settings in given.items():
        with pytest.raises(BadInput, match=rf"on all ranks, found(.|\n)*{name}: rank 0 has"):
            attach(**settings)


class Policy:
    def __repr__(self) -> str:
        return f"<Policy object of rank {dist.get_rank()}>"  # where Python has an address


@ranks(2)
def test_settings_that_are_objects_are_not_compared_by_their_addresses(world):
    module = make_model()
    groups = [{"params": module.parameters(), "lr": torch.tensor(0.1), "policy": Policy()}]
    _, module, optimizer, private = attach(module, optimizer=torch.optim.SGD(groups))
    train(module, optimizer, private, 1)


def partly_frozen(rank: int) -> nn.Module:
    module = make_model()
    module[0].requires_grad_(rank > 0)
    return module


class Drawn(Dataset[tuple[Tensor, Tensor]]):
    """Records that are drawn anew whenever they are read."""

    def __init__(self, shift: int) -> None:
        self.shift, (self.x, self.y) = shift, data()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        i = (i + self.shift) % len(self)
        return self.x[i] + torch.randn(6), self.y[i]


def own_loader(shift: int, num_records: int = 120) -> DataLoader[Any]:
    x, y = (each.roll(-shift, 0)[:num_records] for each in data())
    return DataLoader(TensorDataset(x, y), batch_size=12)


@pytest.mark.parametrize("is_drawn", [False, True])
@ranks(2)
def test_data_sets_that_differ_between_ranks_are_refused(world, is_drawn):
    """A share of the data on each rank: every rank would draw from its own, at other rates."""
    torch.manual_seed(world.rank)

    def loader_of(shift: int) -> DataLoader[Any]:
        return DataLoader(Drawn(shift), batch_size=12) if is_drawn else own_loader(shift)

    engine, module, optimizer, private = attach(data_loader=loader_of(60 * world.rank))
    with pytest.raises(BadInput, match=r"different records \(at batch\[1\]\)|\(at batch\[0\]\)"):
        train(module, optimizer, private, 1)
    assert engine.epsilon_if_secret(1e-3) == 0
    _, module, optimizer, private = attach(data_loader=loader_of(0))
    train(module, optimizer, private, 1)


@ranks(2)
def test_a_clip_norm_that_is_set_on_one_rank_is_refused(world):
    engine, module, optimizer, private = attach()
    train(module, optimizer, private, 1)
    engine.mechanism.max_grad_norm = 2.0
    train(module, optimizer, private, 1)
    if world.rank == 0:
        engine.mechanism.max_grad_norm = 3.0
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ranks_module, "PATIENCE_BESIDE_WORK", timedelta(seconds=0.5))
            with pytest.raises(NeedsWhole, match=r"'max_grad_norm': 3\.0.*rank 0 was alone"):
                train(module, optimizer, private, 1)


# ---- DDP -----------------------------------------------------------------------------------------


@ranks(2)
def test_ddp_with_a_static_graph_trains_privately_and_afterwards(world):
    found = []
    for wrap in (lambda module: module, partial(DistributedDataParallel, static_graph=True)):
        engine, module, optimizer, private = attach(wrap(make_model()))
        train(module, optimizer, private, 2)
        found.append([each.detach().clone() for each in module.parameters()])
    assert all(map(torch.equal, *found))
    engine.detach()
    for step in range(3):
        x, y = (each[world.rank + step :: 7] for each in data())
        module.zero_grad()
        cross_entropy(module(x), y).backward()
    gradients = [each.grad.tolist() for each in module.parameters()]
    assert len(set(map(str, world.gather(gradients)))) == 1
