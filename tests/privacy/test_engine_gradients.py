"""What ends up in `.grad`, and backward passes that are refused."""

import functools
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tests.harness.oracle import clipped_sum, per_sample_norms
from tests.privacy.common import (
    NUM_CLASSES,
    NUM_FEATURES,
    attach,
    data,
    losses,
    make_model,
)
from unison.clip import MODES, clipped_gradients
from unison.errors import BadInput, UnsupportedOperation

ALL_MODES = [*MODES, "auto"]
X, Y = data()


def gradients_of_one_batch(mode: str, reduction: str = "mean", **settings) -> None:
    """Every logical batch's gradient, without noise, is that of the functional core."""
    engine, module, optimizer, private = attach(
        clipping=mode, noise_multiplier=0.0, loss_reduction=reduction, **settings
    )
    divisor = 12 if reduction == "mean" else 1
    plain = make_model()
    ids: list[Tensor] = []
    num_checked = 0
    for x, y in private:
        optimizer.zero_grad()
        cross_entropy(module(x), y, reduction=reduction).backward()
        ids.append(private.current.record_ids)
        if private.current.is_last:
            records, ids = torch.cat(ids), []
            plain.load_state_dict(module.state_dict())
            batch = (X[records], Y[records])
            expected = clipped_gradients(plain, losses, batch, max_norm=0.5)
            for name, parameter in module.named_parameters():
                wanted = expected.sums[name] / divisor
                error = (parameter.grad - wanted).norm() / wanted.norm()
                assert error <= 1e-6, (name, float(error))
            torch.testing.assert_close(engine.per_sample_norms(), expected.norms)
            num_checked += 1
        else:
            assert all(parameter.grad is None for parameter in module.parameters())
        optimizer.step()
    assert num_checked == len(private)


@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize("physical", [None, 5])
def test_gradient_of_a_logical_batch(mode, physical):
    gradients_of_one_batch(mode, max_physical_batch_size=physical)


def test_gradient_of_summed_losses():
    gradients_of_one_batch("auto", reduction="sum", max_physical_batch_size=7)


def test_against_the_loop_over_samples():
    engine, module, _, private = attach(make_model(), noise_multiplier=0.0)
    x, y = next(iter(private))
    cross_entropy(module(x), y).backward()
    plain = make_model()
    norms = per_sample_norms(plain, losses, (x, y))
    torch.testing.assert_close(engine.per_sample_norms(), norms, rtol=1e-6, atol=0.0)
    for name, value in clipped_sum(plain, losses, (x, y), 0.5).items():
        error = (module.get_parameter(name).grad.double() * 12 - value).norm() / value.norm()
        assert error <= 1e-6


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(NUM_FEATURES, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def test_several_forward_passes_before_one_backward_pass():
    _, module, _, private = attach(Siamese(), noise_multiplier=0.0, clipping="ghost_bk")
    x, _ = next(iter(private))
    (module(x).square().sum(1) + module(2 * x).sin().sum(1)).mean().backward()

    def both(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().sum(1) + model(2 * x).sin().sum(1)

    plain = Siamese()
    plain.load_state_dict(module.state_dict())
    expected = clipped_gradients(plain, both, x, max_norm=0.5).sums
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter.grad * 12, expected[name], rtol=1e-5, atol=1e-6)


def test_two_passes_and_several_forward_passes_are_refused():
    _, module, _, private = attach(Siamese(), clipping="ghost")
    x, _ = next(iter(private))
    with pytest.raises(UnsupportedOperation, match="'ghost' takes two backward passes"):
        (module(x).sum(1) + module(2 * x).sum(1)).mean().backward()


# ---- a backward too many, or none ----------------------------------------------------------------


class TwoHeads(nn.Module):
    """A body and two heads, of which a loss may use one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(NUM_FEATURES, NUM_FEATURES)
        self.used = nn.Linear(NUM_FEATURES, NUM_CLASSES)
        self.unused = nn.Linear(NUM_FEATURES, NUM_CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(x).tanh()
        return self.used(hidden), self.unused(hidden)


@pytest.mark.parametrize("mode", ALL_MODES)
def test_an_output_that_the_loss_does_not_use(mode):
    torch.manual_seed(0)
    _, module, optimizer, private = attach(TwoHeads(), clipping=mode, noise_multiplier=0.0)
    for (x, y), _ in zip(private, range(3), strict=False):  # later steps know their uses
        optimizer.zero_grad()
        plain = {name: each.detach().clone() for name, each in module.named_parameters()}
        cross_entropy(module(x)[0], y).backward()
        found = {name: each.grad.clone() for name, each in module.named_parameters()}
        alone = TwoHeads()
        alone.load_state_dict(plain)
        expected = clipped_sum(alone, used_losses, (x, y), 0.5)
        for name, each in found.items():
            torch.testing.assert_close(each * 12, expected[name].to(each), msg=name)
        optimizer.step()


def used_losses(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return cross_entropy(module(batch[0])[0], batch[1], reduction="none")


def test_a_second_backward_pass_of_one_batch_is_refused():
    """A peer silently keeps only the last micro-batch (0.68 relative error)."""
    _, module, _, private = attach()
    x, y = next(iter(private))
    cross_entropy(module(x), y).backward()
    with pytest.raises(BadInput, match="went backward already"):
        module(x)
    _, module, _, private = attach()
    x, y = next(iter(private))
    loss = cross_entropy(module(x), y)
    loss.backward(retain_graph=True)
    with pytest.raises(BadInput, match="once per batch"):
        loss.backward()


def test_half_of_a_batch_is_refused():
    _, module, _, private = attach()
    x, _ = next(iter(private))
    with pytest.raises(BadInput, match=r"handed out \d+ samples(.|\n)*max_physical_batch_size"):
        module(x[: len(x) // 2])


def test_a_batch_that_never_went_backward_is_refused():
    *_, private = attach()
    batches = iter(private)
    next(batches)
    with pytest.raises(BadInput, match="step 0 never went backward"):
        next(batches)


def test_a_physical_batch_that_was_skipped_is_refused():
    _, module, _, private = attach(max_physical_batch_size=4)
    batches = iter(private)
    next(batches)
    x, y = next(batches)
    assert private.current.index == 1
    with pytest.raises(BadInput, match="physical batch 1 of step 0 went backward where batch 0"):
        cross_entropy(module(x), y).backward()


def test_a_forward_pass_without_a_batch_of_the_loader():
    _, module, _, _ = attach()
    with pytest.raises(BadInput, match="not a batch of its loader"):
        module(X[:12])
    module.eval()
    module(X[:12])
    module.train()
    with torch.no_grad():
        module(X[:7])


def test_gradients_past_the_capture_are_refused():
    _, module, _, _ = attach()
    module.eval()
    with pytest.raises(UnsupportedOperation, match=r"a gradient reached '\d\.\w+' itself"):
        cross_entropy(module(X[:12]), Y[:12]).backward()


def test_gradients_of_somebody_else_are_refused():
    _, module, optimizer, private = attach()
    x, y = next(iter(private))
    cross_entropy(module(x), y).backward()
    module[0].weight.grad = torch.ones_like(module[0].weight)
    with pytest.raises(BadInput, match=r"0\.weight\.grad is not what the privacy engine put"):
        optimizer.step()


def test_gradients_may_be_changed_in_place():
    _, module, optimizer, private = attach()
    x, y = next(iter(private))
    cross_entropy(module(x), y).backward()
    torch.nn.utils.clip_grad_norm_(module.parameters(), 1e-3)
    optimizer.step()


def test_gradients_add_up_over_logical_batches_as_in_torch():
    found = {}
    for is_added in (True, False):
        _, module, optimizer, private = attach()
        batches = iter(private)
        parts = []
        for _ in range(2):
            x, y = next(batches)
            if not is_added:
                optimizer.zero_grad()
            cross_entropy(module(x), y).backward()
            parts.append(module[0].weight.grad.clone())
        found[is_added] = parts
    torch.testing.assert_close(found[True][1], found[False][0] + found[False][1])


@pytest.mark.parametrize("is_named", [False, True])
def test_a_closure_runs_once(is_named):
    engine, module, optimizer, private = attach()
    _, twin, plain, others = attach()
    calls = []

    def closure(x, y):
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        cross_entropy(module(x), y).backward()

    for batch in itertools.islice(private, 2):
        run: Any = functools.partial(closure, *batch)
        optimizer.step(closure=run) if is_named else optimizer.step(run)
    for x, y in itertools.islice(others, 2):
        plain.zero_grad()
        cross_entropy(twin(x), y).backward()
        plain.step()
    assert calls == [True, True]
    assert (engine.ledger.num_intents, engine.ledger.num_commits) == (2, 2)
    assert torch.equal(module[0].weight, twin[0].weight)


@pytest.mark.parametrize(("said", "found"), [("mean", "sum"), ("sum", "mean")])
def test_a_loss_that_is_not_what_it_was_said_to_be_is_refused(said, found):
    engine, module, _, private = attach(loss_reduction=said)
    x, y = next(iter(private))
    with pytest.raises(UnsupportedOperation, match=f"is a {found} over rows and was said to be a"):
        cross_entropy(module(x), y, reduction=found).backward()
    assert engine.ledger.num_intents == 0
    private.abandon()
    engine.detach()
