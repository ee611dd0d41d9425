"""What forward passes leave in modules: statistics, aux losses, tables, counts; at any ranks."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

from tests.harness import World, ranks, run_on_ranks
from unison.errors import UnsupportedOperation
from unison.shard import (
    PerGranule,
    auto_shard,
    batch_mean,
    deal,
    digest,
    full_state_dict,
    fully_shard,
)

WIDTH, SAMPLES, GRANULE = 4, 10, 2


class Block(nn.Module):
    """Keeps an aux loss, a table, a count and lists; normalised by batch and by power iteration."""

    def __init__(self, momentum: float | None = 0.1):
        super().__init__()
        self.linear = spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.norm = nn.BatchNorm1d(WIDTH, momentum=momentum)
        self.register_buffer("table", torch.zeros(0), persistent=False)
        self.calls, self.aux, self.seen = 0, None, []

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.linear(x))
        if self.table.numel() == 0:
            self.table = torch.linspace(-1, 1, WIDTH)
        self.calls += 1
        self.aux = h.square().mean()
        self.seen = [*self.seen[:0], h.detach().amax()]
        return torch.tanh(h + self.table)


class Net(nn.Module):
    def __init__(self, momentum: float | None = 0.1):
        super().__init__()
        self.first = nn.BatchNorm1d(WIDTH)  # outside of units, where operations map by themselves
        self.blocks = nn.ModuleList([Block(momentum), Block(momentum)])
        self.last = self.blocks[0]  # runs twice

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def train(world: World | None, micro_batch: int | None, momentum: float | None) -> dict[str, Any]:
    torch.manual_seed(1)
    net: Any = auto_shard(Net(momentum), reducer="ordered", gradient_divisor=1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    data = torch.randn(3, SAMPLES, WIDTH, generator=torch.Generator().manual_seed(2))
    for rows in deal(list(data[:, : SAMPLES - 1]), granule=GRANULE, micro_batch=micro_batch):
        losses = net(rows).square().sum(dim=1) + net.blocks[0].aux + net.blocks[1].aux
        batch_mean(losses).backward()
        if rows.plan.closes_logical_batch:
            optimizer.step()
            optimizer.zero_grad()
    state = {name: value.tolist() for name, value in full_state_dict(net).items()}
    calls = [block.calls for block in net.blocks]
    return {"digest": digest(net), "calls": calls, "state": state}


@pytest.mark.parametrize("momentum", [0.1, None])
def test_statistics_are_the_mean_over_granules_at_any_number_of_ranks(momentum):
    """S4: an equal digest of different models."""
    expected = train(None, None, momentum)
    assert expected["calls"] == [6, 3]
    assert expected["state"]["first.num_batches_tracked"] == 3
    assert expected["state"]["blocks.1.norm.num_batches_tracked"] == 3
    for size in (2, 3):
        assert run_on_ranks(size, train, None, momentum) == [expected] * size


def test_micro_batches_leave_the_same():
    """But for a module that runs twice in a pass: its statistics are then refused."""
    with pytest.raises(UnsupportedOperation, match="leave out micro_batch"):
        train(None, 4, 0.1)


def test_statistics_are_those_of_batch_norm():
    norm = nn.BatchNorm1d(WIDTH)
    x = torch.randn(6, WIDTH)
    net = auto_shard(nn.Sequential(norm), reducer="ordered", gradient_divisor=1)
    (rows,) = deal([x], granule=3)
    net(rows)
    twins = [nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH)]
    for twin, part in zip(twins, x.split(3), strict=True):
        twin(part)
    for name in ("running_mean", "running_var"):
        mean = torch.stack([getattr(twin, name) for twin in twins]).double().mean(dim=0).float()
        assert torch.equal(getattr(norm, name), mean)


def test_a_digest_sees_buffers():
    one, other = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    assert digest(one) == digest(other)
    other.get_buffer("running_mean")[1] = 1e-30
    assert digest(one) != digest(other)


class Remembers(nn.Module):
    """Adds what it kept from the batch before."""

    def __init__(self):
        super().__init__()
        self.linear, self.hidden = nn.Linear(WIDTH, WIDTH), None

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        h = h if self.hidden is None else h + self.hidden
        self.hidden = h.detach()
        return h


@ranks(1, 2)
def test_what_goes_from_batch_to_batch_is_refused(world):
    net = auto_shard(nn.Sequential(Remembers()), reducer="ordered", gradient_divisor=1)
    loader = iter(deal(torch.randn(2, 8, WIDTH, generator=torch.Generator()), granule=2))
    net(next(loader))
    assert isinstance(net[0].hidden, PerGranule)
    with pytest.raises(UnsupportedOperation, match=r"reads .*0\.hidden, which it kept from an"):
        net(next(loader))


class Fragile(Block):
    def __init__(self, fails: bool):
        super().__init__()
        self.fails = fails

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.seen.append(y)
        if self.fails:
            raise RuntimeError("on purpose")
        return y.sin()


@pytest.mark.parametrize("how", ["checkpointed", "fails"])
@ranks(1, 2)
def test_what_is_not_finished_leaves_nothing(world, how):
    """A recompute ends early by an exception; so may a user's forward pass."""
    block: Any = Fragile(how == "fails")
    fully_shard(block, reducer="ordered", gradient_divisor=1)
    norm, seen = block.norm.running_mean, block.seen
    (rows,) = deal([torch.randn(6, WIDTH, generator=torch.Generator())], granule=2)
    if how == "fails":
        with pytest.raises(RuntimeError, match="on purpose"):
            block(rows)
        assert (block.calls, block.seen, seen) == (0, seen, [])
        assert int(block.norm.num_batches_tracked) == 0
    else:
        y = checkpoint(block, rows, use_reentrant=False)
        left = block.norm.running_mean.clone(), block.aux, len(block.seen)
        batch_mean(y.square().sum(dim=1)).backward()
        assert torch.equal(block.norm.running_mean, left[0])
        assert block.aux is left[1]
        assert (block.calls, len(block.seen)) == (1, left[2])
    assert block.norm.running_mean is norm


@ranks(1, 2)
def test_layers_that_talk_to_other_ranks_are_refused(world):
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SyncBatchNorm(WIDTH))
    auto_shard(net, reducer="ordered", gradient_divisor=1)
    (rows,) = deal([torch.randn(6, WIDTH, generator=torch.Generator())], granule=2)
    with pytest.raises(UnsupportedOperation, match="1 is a SyncBatchNorm"):
        net(rows)
