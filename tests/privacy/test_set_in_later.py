"""What sets in later in a run: terms whose weight was 0, layers behind a switch, and hooks."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import unison
from tests.harness import World, assert_close, run_on_ranks
from tests.harness.oracle import clipped_sum
from tests.privacy.common import NUM_CLASSES, NUM_FEATURES, attach, data, loader, losses, make_model
from unison.errors import UnsupportedOperation
from unison.privacy import PrivacyEngine

SETS_IN = 6  # no pass that is checked again in any case


def steps_until_refused(
    module: nn.Module | None, loss_of: Callable[..., Tensor], prepare: Any = None, **settings: Any
) -> int:
    """Steps that were counted before one was refused; -1 if none was."""
    engine, module, optimizer, private = attach(module, **settings)

    def train() -> None:  # catches nothing
        for step, (x, y) in enumerate(private, 1):
            weight = float(step >= SETS_IN)
            if prepare is not None:
                prepare(module, weight)
            optimizer.zero_grad()
            loss_of(module, x, y, weight).backward()
            optimizer.step()

    try:
        train()
    except UnsupportedOperation:
        return engine.ledger.num_intents
    finally:
        engine.detach()
    return -1


def with_term(
    module: nn.Module, x: Tensor, y: Tensor, weight: Any, *, is_coupled: bool = True
) -> Tensor:
    z = module(x)
    term = (z - z.mean(0) if is_coupled else z).square().sum(1).mean()
    return F.cross_entropy(z, y) + weight * term


def plain(module: nn.Module, x: Tensor, y: Tensor, weight: Any) -> Tensor:
    return F.cross_entropy(module(x), y)


@pytest.mark.parametrize("recheck", [True, False])
@pytest.mark.parametrize("number", [float, torch.tensor])
def test_a_term_of_the_loss_is_checked_when_it_sets_in(number, recheck):
    def steps(is_coupled: bool) -> int:
        def loss(module: nn.Module, x: Tensor, y: Tensor, weight: float) -> Tensor:
            return with_term(module, x, y, number(weight), is_coupled=is_coupled)

        return steps_until_refused(None, loss, recheck=recheck)

    assert steps(is_coupled=True) == SETS_IN - 1
    assert steps(is_coupled=False) == -1


class Centred(nn.Module):
    """Mixes rows if a number is not 0."""

    of_class = 0.0
    held: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.net, self.own, self.setup = make_model(), 0, Setup()
        self.register_buffer("held", torch.zeros(()))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1  # a counter is 0 once
        z = self.net(x)
        weight = self.of_class + self.own + self.setup.weight + self.held
        return z + weight * (z - z.mean(0))


class Setup:
    """Of a module."""

    weight = 0.0

    def __init__(self) -> None:
        self.weight = 0.0


PLACES: dict[str, Callable[[Any, float], Any]] = {
    "of its class": lambda module, weight: weight and setattr(module, "of_class", weight),
    "its own": lambda module, weight: setattr(module, "own", weight),
    "in an object": lambda module, weight: setattr(module.setup, "weight", weight),
    "in a buffer": lambda module, weight: module.held.fill_(weight),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_number_of_the_module_is_looked_at_when_it_is_not_0_any_more(place):
    assert steps_until_refused(Centred(), plain, PLACES[place], recheck=False) == SETS_IN - 1


class Grows(nn.Module):
    """Uses a second layer if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.more, self.alpha = make_model(), nn.Linear(NUM_FEATURES, NUM_CLASSES), 0.0

    def forward(self, x: Tensor, more: bool = False) -> Tensor:
        return self.net(x) + (self.more(x) if more or self.alpha else 0.0)


@pytest.mark.parametrize("by_argument", [True, False])
def test_a_layer_that_a_switch_brings_in_is_trained(by_argument):
    engine, module, optimizer, private = attach(
        Grows(),
        noise_multiplier=0.0,
        poisson_sampling=False,
        data_loader=loader(shuffle=True),
    )
    for step, (x, y) in enumerate(private, 1):
        is_on = step >= SETS_IN
        if not by_argument:
            module.alpha = float(is_on)
        before = copy.deepcopy(module)
        optimizer.zero_grad()
        more = {"more": is_on} if by_argument else {}
        F.cross_entropy(module(x, **more), y).backward()
        if is_on:
            before.alpha = 1.0
            expected = clipped_sum(before, losses, (x, y), 0.5)
            found = {name: each.grad * len(x) for name, each in module.named_parameters()}
            assert_close(found, expected)
            assert found["more.weight"].any()
            break
        optimizer.step()
    engine.detach()


class Hooked(nn.Module):
    """Puts a hook on a part when it is first called, as transformers do for hidden states."""

    has_hooks = False

    def __init__(self) -> None:
        super().__init__()
        self.net, self.seen = make_model(), []

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if not self.has_hooks:
            self.net[0].register_forward_hook(lambda *args: self.seen.append(args[2]))
            self.has_hooks = True
        self.seen.clear()
        z = self.net(x)
        return z, torch.stack(self.seen).sum(0)


def test_hooks_that_forward_puts_on_its_parts_are_there_once():
    engine, module, optimizer, private = attach(Hooked(), noise_multiplier=0.0)
    for x, y in private:
        optimizer.zero_grad()
        z, hidden = module(x)
        (F.cross_entropy(z, y) + hidden.square().sum(1).mean()).backward()
        optimizer.step()
    assert len(module.net[0]._forward_hooks) == len(module.seen) == 1
    engine.detach()


# ---- assertions ----------------------------------------------------------------------------------


def with_assertion(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    z = module(x)
    torch._assert(z.exp().mean() < 50, "too large")  # pytest rewrites `assert`
    return F.cross_entropy(z, y)


def with_exception(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    z = module(x)
    if not torch.isfinite(z.exp().exp()).all():
        raise ValueError("not finite")
    return F.cross_entropy(z, y)


def of_a_distribution(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    z = module(x)
    return -torch.distributions.Normal(z, z.exp()).log_prob(x[:, :NUM_CLASSES]).sum(1).mean()


def caught(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    z = module(x)
    loss = F.cross_entropy(z, y)
    try:
        if z.exp().mean() > 50:
            raise ValueError("too large")
    except ValueError:
        loss = 2 * loss
    return loss


def kept(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    z = module(x)
    is_small = bool(z.exp().mean() < 50)
    if x.ndim != 2:
        raise ValueError("no rows")
    return F.cross_entropy(z, y) * is_small


@pytest.mark.parametrize("loss", [with_assertion, with_exception, of_a_distribution])
def test_an_assertion_that_far_values_would_fail_chooses_no_loss(loss):
    assert steps_until_refused(None, lambda *args: loss(*args[:-1])) == -1


@pytest.mark.parametrize("loss", [caught, kept])
def test_a_truth_that_is_caught_or_kept_does(loss):
    assert steps_until_refused(None, lambda *args: loss(*args[:-1])) == 0


# ---- teachers on ranks ---------------------------------------------------------------------------


def distil(world: World, how: str) -> float | str:
    def net(seed: int) -> nn.Sequential:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(NUM_FEATURES, 8), nn.Tanh(), nn.Linear(8, NUM_CLASSES))

    x, y = data()
    model = unison.auto_shard(net(0), gradient_divisor=1)
    model, optimizer, loader = PrivacyEngine(accountant="rdp").make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=40, shuffle=True),
        noise_multiplier=1e-6,
        max_grad_norm=1.0,
        poisson_sampling=False,
    )
    if how == "copy":
        teacher = copy.deepcopy(model)
    else:
        teacher = net(0)
        for each in (teacher[0], teacher[2], teacher) if how == "fsdp2" else ():
            fully_shard(each)
    teacher.eval()
    try:
        for rows, _ in loader:
            optimizer.zero_grad()
            with torch.no_grad():
                soft = teacher(rows).softmax(-1)
            F.cross_entropy(model(rows), soft).backward()
            optimizer.step()
    except UnsupportedOperation as refused:
        return str(refused)
    model.eval()
    with torch.no_grad():
        return float(model(x).double().sum())


def test_a_sharded_teacher_is_followed():
    """What it computes with is gone when the loss is run again."""
    copied, whole, by_fsdp2 = (
        run_on_ranks(2, distil, how)[0] for how in ("copy", "whole", "fsdp2")
    )
    assert copied == pytest.approx(whole, rel=1e-4)
    assert "reshard_after_forward=False" in by_fsdp2
