"""The fast reducer against one plain process, in every setting a training loop can get into."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.harness import World, assert_close, ranks, run_on_ranks
from tests.shard.common import per_sample_loss, shard, tokens
from unison.models import ModelConfig, build, preset
from unison.shard import auto_shard, full_parameters, fully_shard, units_of
from unison.shard.sharded_tensor import ShardedTensor, local_part

WORLD_SIZES = (1, 2, 3)


class Block(nn.Module):
    """A block with a frozen matrix, a scale, and an adapter, as fine-tuning has them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.down = nn.Linear(width, 3, bias=False)
        self.up = nn.Linear(3, width)
        self.scale = nn.Parameter(torch.tensor(1.1))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.frozen(x) * self.scale + self.up(self.down(x)))


class Net(nn.Module):
    """Blocks between parameters of the root: bare, tied, listed, unused."""

    def __init__(self, width: int = 17) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.randn(width))
        self.embed = nn.Embedding(11, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.gains = nn.ParameterList(torch.ones(width) for _ in range(2))
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Linear(4, 4)
        self.register_buffer("offset", torch.full((width,), 0.25))

    def forward(self, ids: Tensor) -> Tensor:  # [rows, tokens] -> [rows, tokens, 11]
        x = self.embed(ids) + self.start + self.offset
        for block in self.blocks:
            x = block(x) * self.gains[0]
        return self.head(x * self.gains[1])


def make_net(**_) -> Net:
    torch.manual_seed(3)
    return Net().double()


def loss_of(model: Callable, rows: Tensor) -> Tensor:
    logits = model(rows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def rows_of(world_rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + world_rank)
    return torch.randint(0, 11, (2, 6), generator=generator)


Step = Callable[[nn.Module, torch.optim.Optimizer, list[Tensor]], None]
"""A step takes the model, the optimizer and this process's list of batches."""


def plain_step(model, optimizer, batches) -> None:
    sum(loss_of(model, rows) / len(batches) for rows in batches).backward()
    optimizer.step()
    optimizer.zero_grad()


def accumulating_step(model, optimizer, batches) -> None:
    for rows in batches:
        for half in rows.split(1):
            (loss_of(model, half) / 2 / len(batches)).backward()
    optimizer.step()
    optimizer.zero_grad()


def two_forwards_step(model, optimizer, batches) -> None:
    """Two graphs before one backward, then two backwards of two other graphs."""
    first = [loss_of(model, rows) for rows in batches]
    second = [loss_of(model, rows.flip(0)) for rows in batches]
    (sum(first) / len(batches) + sum(second) / len(batches)).backward()
    third = sum(loss_of(model, rows) for rows in batches) / len(batches)
    fourth = sum(loss_of(model, rows.flip(1)) for rows in batches) / len(batches)
    third.backward()
    fourth.backward()
    optimizer.step()
    optimizer.zero_grad()


def evaluating_step(model, optimizer, batches) -> None:
    """Evaluation between steps, between forward and backward, and after the optimizer."""
    with torch.no_grad():
        model(batches[0][:, :-1])
    loss = sum(loss_of(model, rows) / len(batches) for rows in batches)
    with torch.no_grad():
        model(batches[0][:, :-1])
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        model(batches[0][:, :-1])
    optimizer.zero_grad()


class Stop(Exception):
    pass


def stop(*_) -> None:
    raise Stop


def failing_step(model, optimizer, batches) -> None:
    """An exception in a forward and one in a backward pass; then a step as if nothing happened."""
    for register in ("register_forward_pre_hook", "register_full_backward_hook"):
        handle = getattr(model.blocks[1].up, register)(stop)
        with pytest.raises(Stop):
            sum(loss_of(model, rows) for rows in batches).backward()
        handle.remove()
    optimizer.zero_grad()
    plain_step(model, optimizer, batches)


STEPS = {
    "plain": plain_step,
    "accumulation": accumulating_step,
    "several forwards": two_forwards_step,
    "evaluation": evaluating_step,
    "exceptions": failing_step,
}


def train(world: World, step: Step, how: str | None, change=None, num_steps: int = 3, **options):
    """Train; `how` None means one plain process that is fed every rank's batches."""
    model = make_net()
    if change is not None:
        change(model)
    if how is not None:
        shard(model, how, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    for number in range(num_steps):
        ranks = [world.rank] if how else range(options["num_ranks"])
        step(model, optimizer, [rows_of(rank, number) for rank in ranks])
    if how is None:
        return {name: p.detach() for name, p in model.named_parameters()}
    return dict(full_parameters(model))


def compare(step: Step, size: int, how: str, change=None, **options) -> None:
    expected = run_on_ranks(1, partial(train, num_ranks=size), step, None, change)[0]
    for found in run_on_ranks(size, partial(train, **options), step, how, change):
        assert found.keys() == expected.keys()
        assert_close(found, expected, dtype=torch.float64)


@pytest.mark.parametrize("size", WORLD_SIZES)
@pytest.mark.parametrize("how", ["auto", "root"])
@pytest.mark.parametrize("name", STEPS)
def test_training_loops(name, how, size):
    compare(STEPS[name], size, how)


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("reshard", [False, 1, 2, 4])
def test_reshard_after_forward(name, reshard):
    compare(STEPS[name], 4, "auto", reshard_after_forward=reshard)


class Inside(nn.Module):
    def __init__(self, block: nn.Module, is_reentrant: bool) -> None:
        super().__init__()
        self.block, self.is_reentrant = block, is_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=self.is_reentrant)


def checkpoint_inside(model: Net, is_reentrant: bool) -> None:
    model.blocks = nn.ModuleList(Inside(block, is_reentrant) for block in model.blocks)


def checkpoint_outside(model: Net, is_reentrant: bool) -> None:
    """Checkpoint the call of each block, so that its unit's forward is what is run again."""

    class Outside(Block):
        def __call__(self, x: Tensor) -> Tensor:
            return checkpoint(super().__call__, x, use_reentrant=is_reentrant)

    for block in model.blocks:
        block.__class__ = Outside


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("is_reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize("where", [checkpoint_inside, checkpoint_outside])
@pytest.mark.parametrize("reshard", [True, False])
def test_activation_checkpointing(where, is_reentrant, size, reshard):
    change = partial(where, is_reentrant=is_reentrant)
    compare(plain_step, size, "auto", change, reshard_after_forward=reshard)
    compare(two_forwards_step, size, "auto", change, reshard_after_forward=reshard)


def gradients(world: World, how: str | None, num_ranks: int) -> dict[str, Tensor | None]:
    model = make_net()
    if how:
        shard(model, how)
    ranks = [world.rank] if how else range(num_ranks)
    sum(loss_of(model, rows_of(rank, 0)) / len(ranks) for rank in ranks).backward()
    return {
        name: None if p.grad is None else local_part(p.grad) for name, p in model.named_parameters()
    }


@pytest.mark.parametrize("reshard", [True, False, 1])
@ranks(2)
def test_a_forward_pass_sees_what_was_written_since_the_last_one(world, reshard):
    """Full parameters, or a part of them, are still there when no backward pass came."""
    plain, x = make_net(), rows_of(world.rank, 0)
    model = shard(make_net(), "auto", reshard_after_forward=reshard)
    for _ in range(2):
        torch.testing.assert_close(model(x), plain(x))
        with torch.no_grad():
            for parameter in (*model.parameters(), *plain.parameters()):
                parameter.mul_(0.5)


def test_unused_and_frozen_parameters_have_no_gradient():
    expected = run_on_ranks(1, gradients, None, 2)[0]
    for found in run_on_ranks(2, gradients, "auto", 2):
        assert {n for n, g in found.items() if g is None} == {
            n for n, g in expected.items() if g is None
        }
    assert expected["unused.weight"] is None
    assert expected["blocks.0.frozen.weight"] is None


class OnePath(nn.Module):
    """Each rank uses another expert of one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    def forward(self, x: Tensor, which: int) -> Tensor:
        return self.experts[which](x)


def route(world: World, size: int, is_sharded: bool) -> dict[str, Tensor | None]:
    torch.manual_seed(0)
    model = OnePath().double()
    fed = range(size)
    if is_sharded:
        fully_shard(model)
        fed = [world.rank]
    for rank in fed:
        x = torch.full((2, 3), rank + 1.0, dtype=torch.float64)
        (model(x, min(rank, 1)).square().sum() / len(fed)).backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {
        name: grad.full_tensor() if isinstance(grad, ShardedTensor) else grad
        for name, grad in grads.items()
    }


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_use_different_parameters(size):
    """What a rank did not use adds nothing to the sum; what nobody used has no gradient."""
    expected = run_on_ranks(1, route, size, False)[0]
    assert expected["experts.2.weight"] is None
    for found in run_on_ranks(size, route, size, True):
        for name, value in expected.items():
            if value is None:
                assert found[name] is None
            else:
                torch.testing.assert_close(found[name], value)


def call_recurrent(world: World, is_sharded: bool) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LSTM(3, 4, batch_first=True))
    if is_sharded:
        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        loss = model(torch.ones(2, 5, 3))[0].square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.filterwarnings("ignore:all 2 ranks were fed the same batch")
def test_recurrent_modules():
    """They keep a second list of their parameters, which must not go stale."""
    alone = run_on_ranks(1, call_recurrent, False)[0]
    assert run_on_ranks(2, call_recurrent, True)[0] == pytest.approx(alone)


def fine_print(world: World, config: ModelConfig) -> dict:
    """The tolerances of the design: from equal parameters, and after 20 AdamW steps."""
    model, plain = build(config), build(config)
    auto_shard(model)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (model, plain)]
    worst_loss = worst_gradient = 0.0
    for step in range(20):
        rows = tokens(8, config, step)
        mine = rows.chunk(world.size)[world.rank]
        loss = per_sample_loss(model, mine).mean()
        expected = per_sample_loss(plain, rows).mean()
        mean = sum(world.gather(loss.item())) / world.size
        worst_loss = max(worst_loss, abs(mean - expected.item()) / expected.item())
        loss.backward()
        expected.backward()
        if step == 0:
            worst_gradient = max(gradient_errors(model, plain))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    reference = dict(plain.named_parameters())
    error = sum(
        (value - reference[name].detach()).square().sum() for name, value in full_parameters(model)
    )
    size = sum(value.detach().square().sum() for value in reference.values())
    parameters = float((error / size).sqrt())
    return {"loss": worst_loss, "gradient": worst_gradient, "parameters": parameters}


def gradient_errors(model: nn.Module, plain: nn.Module) -> list[float]:
    """Relative error of this rank's part of the gradient, unit by unit."""
    reference = {name: p.grad for name, p in plain.named_parameters()}
    names = {id(piece): name for name, piece in model.named_parameters()}
    errors = []
    for unit in units_of(model):
        error = size = 0.0
        for group in unit.groups:
            own = group.layout.pieces[group.ranks.shard.rank]
            for piece, (start, stop, _) in zip(group.pieces, own, strict=True):
                expected = reference[names[id(piece)]].flatten()[start:stop]
                found = local_part(piece.grad).flatten()
                error += (found - expected).square().sum().item()
                size += expected.square().sum().item()
        errors.append((error / size) ** 0.5 if size else 0.0)
    return errors


@pytest.mark.full
@pytest.mark.parametrize("size", [2, 4, 8])
def test_twenty_steps_of_small_stay_close(size):
    found = run_on_ranks(size, fine_print, preset("small"), timeout=600)[0]
    assert found["loss"] <= 1e-6
    assert found["gradient"] <= 1e-6
    assert found["parameters"] <= 5e-6
