"""What forward leaves behind detached: refused where a loss is made of it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tests.privacy.common import NUM_CLASSES, attach, make_model, train
from unison.errors import UnsupportedOperation


class Square(torch.autograd.Function):
    """A function of the user's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * gradients[0]


class Keeps(nn.Module):
    """Keeps what a function makes of its inputs and outputs."""

    def __init__(self, keep: Callable[..., Any]) -> None:
        super().__init__()
        self.net, self.keep = make_model(), keep
        self.queue = [torch.zeros(4, NUM_CLASSES)]
        self.register_buffer("mean", torch.zeros(NUM_CLASSES))
        self.kept: Any = None

    def forward(self, x: Tensor) -> Tensor:
        out = self.net(x)
        self.kept = self.keep(self, x, out)
        return out


def loss_of(out: Tensor, kept: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(out, y) + ((out - kept) ** 2).sum(1).mean()


def filled(self: Any, x: Tensor, out: Tensor) -> Tensor:
    value = torch.zeros(NUM_CLASSES)
    value[:] = out.detach().mean(0)
    return value


def enqueued(self: Any, x: Tensor, out: Tensor) -> Tensor:
    self.queue[0][:2].copy_(out.detach()[:2])
    return self.queue[0]


LEFT = {
    "a mean": lambda self, x, out: out.detach().mean(0),
    "rows": lambda self, x, out: out.detach(),
    "of the inputs": lambda self, x, out: x.mean(),
    "without a graph": lambda self, x, out: [torch.no_grad()(self.net)(x).mean(0)][0],
    "through .data": lambda self, x, out: out.data.mean(0),
    "a custom function": lambda self, x, out: Square.apply(out.detach()).mean(0),
    "out=": lambda self, x, out: torch.mean(out.detach(), 0, out=torch.empty(NUM_CLASSES)),
    "of integers": lambda self, x, out: out.argmax(1).bincount(minlength=NUM_CLASSES).float(),
    "written": filled,
    "a queue": lambda self, x, out: enqueued(self, x, out).mean(0),
}


@pytest.mark.parametrize("what", LEFT)
def test_what_forward_left_behind_does_not_come_into_the_loss(what):
    engine, module, _, private = attach(Keeps(LEFT[what]))
    x, y = next(iter(private))
    out = module(x)
    with pytest.raises(UnsupportedOperation, match=r"sub \(test_left.*did not return.*Return it"):
        loss_of(out, module.kept, y).backward()
    assert engine.ledger.num_intents == 0
    engine.detach()


def test_nor_does_what_the_loop_makes_of_it():
    held: list[Tensor] = []
    for use in (
        lambda kept: (2 * kept - 1).relu(),
        lambda kept: torch.stack([kept, kept])[0],
        lambda kept: torch.zeros(NUM_CLASSES).copy_(kept),
        lambda kept: kept.norm().item(),
        lambda kept: held[-1].mean(0),
    ):
        engine, module, _, private = attach(Keeps(lambda self, x, out: out.detach().mean(0)))
        module.net[0].register_forward_hook(lambda _, given, out: held.append(out.detach()[:, :3]))
        x, y = next(iter(private))
        out = module(x)
        with pytest.raises(UnsupportedOperation, match=r"sub .*(did not return|an earlier step)"):
            loss_of(out, use(module.kept), y).backward()
        engine.detach()
    _, module, _, private = attach(Keeps(lambda self, x, out: out.detach()))
    x, y = next(iter(private))
    losses = cross_entropy(module(x), y, reduction="none")
    with pytest.raises(UnsupportedOperation, match=r"gradient.*did not return"):
        losses.backward(module.kept.mean(1).softmax(0))


def test_what_later_passes_left_behind_is_found_when_they_are_checked_again():
    _, module, optimizer, private = attach(Keeps(lambda self, x, out: out.detach().mean(0)))
    for number, (x, y) in enumerate(private, 1):
        optimizer.zero_grad()
        out = module(x)
        loss = loss_of(out, module.kept if number == 4 else torch.zeros(NUM_CLASSES), y)
        if number == 4:
            with pytest.raises(UnsupportedOperation, match="did not return"):
                loss.backward()
            break
        loss.backward()
        optimizer.step()


CONSTANT = {
    "positions": lambda self, x, out: torch.arange(x.shape[1])[:NUM_CLASSES].to(x),
    "a mask": lambda self, x, out: torch.ones_like(out[:1]).tril()[0],
    "like the rows": lambda self, x, out: torch.zeros_like(out),
    "new": lambda self, x, out: x.new_full((NUM_CLASSES,), 0.5),
    "a shape": lambda self, x, out: torch.broadcast_tensors(torch.ones(NUM_CLASSES), out)[0],
    "a type": lambda self, x, out: torch.ones(NUM_CLASSES, dtype=torch.float64).type_as(out),
    "expanded": lambda self, x, out: torch.ones(NUM_CLASSES).expand_as(out),
    "weights": lambda self, x, out: self.net[2].weight.detach().mean(1),
    "a buffer": lambda self, x, out: self.mean,
    "noise": lambda self, x, out: torch.randn(NUM_CLASSES),
}


@pytest.mark.parametrize("what", CONSTANT)
def test_constants_that_forward_leaves_behind_are_allowed(what):
    _, module, optimizer, private = attach(Keeps(CONSTANT[what]))
    for x, y in private:
        optimizer.zero_grad()
        out = module(x)
        loss_of(out, module.kept, y).backward()
        optimizer.step()
        if what in ("weights", "noise"):  # they change, which a batch of another size may not see
            break


def test_a_published_buffer_is_allowed():
    def keep(self: Any, x: Tensor, out: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * out.detach().mean(0)
        return self.mean

    _, module, optimizer, private = attach(Keeps(keep), public_buffers=["mean"])
    for x, y in private:
        optimizer.zero_grad()
        out = module(x)
        loss_of(out, module.mean, y).backward()
        optimizer.step()
        break  # its values change, which a batch of another size may not see


def test_what_is_left_behind_may_be_looked_at():
    _, module, optimizer, private = attach(Keeps(lambda self, x, out: out.detach().mean(0)))
    seen, total = [], torch.zeros(NUM_CLASSES)
    for x, y in private:
        optimizer.zero_grad()
        cross_entropy(module(x), y).backward()
        optimizer.step()
        total += module.kept
        seen.append(float(module.kept.norm()) + module.kept.sum().item())
    assert len(seen) == len(private)


def test_watching_forward_changes_no_bits_and_draws_no_numbers(monkeypatch):
    from unison.privacy.attachment import Attachment

    states = []
    for is_watched in (True, False):
        if not is_watched:
            monkeypatch.setattr(Attachment, "_watch", lambda *_: None)
        module = nn.Sequential(*make_model(), nn.Dropout(0.5))
        torch.manual_seed(7)
        _, module, optimizer, private = attach(module)
        train(module, optimizer, private, 5)
        drawn = torch.rand(())
        states.append([drawn, *(each.detach().clone() for each in module.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))
