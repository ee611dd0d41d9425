"""Losses on a GPU: what needs a wait for the device is asked before anything is released."""

import pytest
import torch
import torch.nn.functional as F

from tests.privacy.common import attach, make_model
from unison.errors import UnsupportedOperation

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def step(engine, module, optimizer, private, loss) -> None:
    for x, y in private:
        loss(module, x.cuda(), y.cuda()).backward()
        optimizer.step()
        break


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda m, x, y: (m(x) - m(x).mean(0)).square().sum(1).mean(), "couples rows"),
        (lambda m, x, y: F.cross_entropy(m(x), y.where(y > 0, -100)), "different numbers"),
        (lambda m, x, y: F.cross_entropy(m(x), y) / (y == 1).sum().item(), "couples rows"),
        (
            lambda m, x, y: F.cross_entropy(m(x), y, weight=torch.tensor([0.1, 1, 1]).cuda()),
            "class weights",
        ),
    ],
    ids=["centre", "padded labels", "item", "class weights"],
)
def test_coupled_losses_are_refused_before_budget_is_spent(loss, message):
    parts = attach(make_model().cuda())
    with pytest.raises(UnsupportedOperation, match=message):
        step(*parts, loss)
    assert parts[0].ledger.num_intents == 0
    assert all(each.grad is None for each in parts[1].parameters())
    parts[0].detach()


def test_gradients_are_those_of_the_cpu():
    found = []
    for device in ("cpu", "cuda"):
        engine, module, optimizer, private = attach(make_model().to(device), noise_multiplier=0.0)
        for x, y in private:
            F.cross_entropy(F.dropout(module(x.to(device)), 0.0), y.to(device)).backward()
            optimizer.step()
        found.append([each.grad.cpu() for each in module.parameters()])
        engine.detach()
    for on_cpu, on_gpu in zip(*found, strict=True):
        torch.testing.assert_close(on_gpu, on_cpu, rtol=1e-4, atol=1e-6)


def test_the_loss_of_a_recorded_pass_is_looked_at():
    engine, module, _, private = attach(make_model().cuda(), max_physical_batch_size=16)
    x, y = (each.cuda() for each in next(iter(private)))

    def coupled(x, y):
        losses = F.cross_entropy(module(x), y, reduction="none")
        return losses / losses.detach().mean()

    with pytest.raises(UnsupportedOperation, match="couples rows"):
        engine.capture_graph(coupled, x, y)
    engine.capture_graph(lambda x, y: F.cross_entropy(module(x), y, reduction="none"), x, y)
    engine.detach()
