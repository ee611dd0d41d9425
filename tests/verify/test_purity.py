"""Forward passes that depend on more than parameters and samples, tried out in one process."""

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from unison.errors import BadInput
from unison.shard import auto_shard
from unison.verify import purity

WIDTH = 4
SHARED, CALLS = torch.zeros(3), []


class Block(nn.Module):
    def __init__(self, run):
        super().__init__()
        self.run, self.linear = run, nn.Linear(WIDTH, WIDTH)
        self.norm, self.drop = nn.BatchNorm1d(WIDTH), nn.Dropout(0.5)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("table", torch.zeros(0), persistent=False)
        self.count, self.cached, self.items, self.queue = 0, None, [], torch.zeros(3)

    def forward(self, x):
        return self.run(self, self.linear(x))


def keeps_an_aux_loss(block, h):
    block.aux = h.square().mean()
    return h


def keeps_a_table(block, h):
    if block.table.numel() == 0:
        block.table = torch.arange(float(WIDTH))
    if block.cached is None:
        block.cached = torch.arange(float(WIDTH))
    return h + block.table + block.cached


def counts_calls(block, h):
    block.count += 1
    return h * block.count


def appends(block, h):
    block.items.append(h.mean())
    return h * len(block.items)


PURE = {
    "linear": lambda block, h: h,
    "dropout": lambda block, h: block.drop(F.dropout(h, 0.2)),
    "drop path": lambda block, h: h * (torch.rand(len(h), 1) < 0.5),
    "batch norm": lambda block, h: block.norm(h),
    "aux loss": keeps_an_aux_loss,
    "table": keeps_a_table,
    "counter": counts_calls,
    "list": appends,
}


def writes_to_a_buffer(block, h):
    block.seen += 1
    return h


def replaces_a_buffer(block, h):
    block.seen = block.seen + h.detach().mean()
    return h


def writes_to_an_attribute(block, h):
    block.queue[0] = h.detach().mean()
    return h


def writes_to_a_global(block, h):
    SHARED.add_(1)
    return h + SHARED[0]


def keeps_a_number(block, h):
    block.mean = h.mean().item()
    return h


def counts_globally(block, h):
    CALLS.append(1)
    return h * len(CALLS)


IMPURE = {
    "buffer": (writes_to_a_buffer, "seen"),
    "buffer replaced": (replaces_a_buffer, "seen"),
    "attribute": (writes_to_an_attribute, "queue|all granules share"),
    "global tensor": (writes_to_a_global, "test_purity.py"),
    "number": (keeps_a_number, "mean to different values|one number first"),
    "global list": (counts_globally, "from one call of the model to the next"),
    "random": (lambda block, h: h * random.random(), "Python's random"),
    "numpy": (lambda block, h: h * float(np.random.rand()), "numpy"),  # noqa: NPY002
}


class Net(nn.Module):
    """A block outside of units and two that are units."""

    def __init__(self, run):
        super().__init__()
        self.first = Block(run)
        self.blocks = nn.ModuleList([Block(run), Block(run)])

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def model_of(run, is_nested: bool) -> nn.Module:
    torch.manual_seed(0)
    return Net(run) if is_nested else Block(run)


@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("name", PURE)
def test_pure(name, is_nested):
    model = model_of(PURE[name], is_nested)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    assert str(purity(model, torch.randn(6, WIDTH), granule=2)).startswith("pure")
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("name", IMPURE)
def test_impure(name, is_nested):
    run, reason = IMPURE[name]
    report = purity(model_of(run, is_nested), torch.randn(6, WIDTH), granule=2)
    assert not report.is_pure
    assert any(part in str(report) for part in reason.split("|"))


def test_a_sharded_model_and_a_loss_of_the_users():
    model = auto_shard(model_of(PURE["dropout"], True), reducer="ordered", gradient_divisor=1)
    report = purity(
        model, (torch.randn(5, WIDTH),), granule=2, loss=lambda y, rows: y.square().sum(dim=1)
    )
    assert report.is_pure


def test_one_granule_tells_nothing():
    with pytest.raises(BadInput, match="two granules"):
        purity(model_of(PURE["linear"], False), torch.randn(2, WIDTH), granule=2)
