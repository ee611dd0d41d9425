"""Models of transformers in the user's loop: their own loss, and a loss of their logits."""

import gc
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.harness.oracle import clipped_sum
from tests.privacy.common import attach
from unison.errors import UnsupportedOperation
from unison.models import per_sample_loss
from unison.privacy.learning import Learning

transformers = pytest.importorskip("transformers")

NUM_TOKENS, VOCAB = 7, 31


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=8, n_embd=12, n_layer=2, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def rows(num_rows: int = 24) -> Tensor:
    return torch.randint(
        0, VOCAB, (num_rows, NUM_TOKENS), generator=torch.Generator().manual_seed(2)
    )


def attach_gpt2(mode: str):
    dataset = TensorDataset(rows())
    return attach(
        gpt2(), data_loader=DataLoader(dataset, batch_size=6), clipping=mode, noise_multiplier=0.0
    )


def losses(model: nn.Module, ids: Tensor) -> Tensor:
    return per_sample_loss(model(input_ids=ids).logits[:, :-1], ids[:, 1:])


@pytest.mark.parametrize("mode", ["auto", "ghost"])
@pytest.mark.parametrize("is_own", [True, False], ids=["own loss", "loss of logits"])
def test_tied_gpt2_against_the_loop(mode, is_own):
    _, module, _, private = attach_gpt2(mode)
    (ids,) = next(iter(private))
    if is_own:
        module(input_ids=ids, labels=ids).loss.backward()
    else:
        losses(module, ids).mean().backward()
    for name, value in clipped_sum(gpt2(), losses, ids, 0.5).items():
        found = module.get_parameter(name).grad.double() * 6
        error = (found - value).norm() / value.norm()
        assert error <= 2e-6, (name, float(error))


def test_an_uneven_loss_of_its_own_is_refused():
    engine, module, _, private = attach_gpt2("auto")
    (ids,) = next(iter(private))
    labels = ids.clone()
    labels[0, 4:] = -100
    output = module(input_ids=ids, labels=labels)
    with pytest.raises(UnsupportedOperation, match=r"unison\.per_sample_loss"):
        output.loss.backward()
    assert engine.ledger.num_intents == 0


@pytest.mark.parametrize("machine", ["cpu", "cuda"])
def test_uneven_labels_of_an_earlier_pass_are_refused_before_a_release(monkeypatch, machine):
    """A GPU is not waited for in passes before the last one."""
    plan = Learning.plan
    monkeypatch.setattr(
        Learning, "plan", lambda *args, **given: replace(plan(*args, **given), machine=machine)
    )
    data = DataLoader(TensorDataset(rows()), batch_size=12, shuffle=True)
    settings = {"poisson_sampling": False, "max_physical_batch_size": 4}
    engine, module, optimizer, private = attach(gpt2(), data_loader=data, **settings)
    numbers = iter(range(6))

    def train(uneven: int) -> None:
        for (ids,) in private:
            labels = ids.clone()
            if next(numbers) == uneven:
                labels[0, 4:] = -100
            module(input_ids=ids, labels=labels).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    with pytest.raises(UnsupportedOperation, match=r"unison\.per_sample_loss"):
        train(uneven=1)
    assert engine.ledger.num_intents == 0
    assert next(numbers) == (2 if machine == "cpu" else 3)
    private.abandon()
    numbers = iter(range(6))
    train(uneven=-1)
    assert engine.ledger.num_commits == 2


def test_labels_of_a_step_that_was_given_up_are_of_no_matter(monkeypatch):
    """On a GPU, where they are looked at in the last pass, which did not come."""
    plan = Learning.plan
    monkeypatch.setattr(
        Learning, "plan", lambda *args, **given: replace(plan(*args, **given), machine="cuda")
    )
    data = DataLoader(TensorDataset(rows()), batch_size=12, shuffle=True)
    settings = {"poisson_sampling": False, "max_physical_batch_size": 4}
    engine, module, optimizer, private = attach(gpt2(), data_loader=data, **settings)
    (ids,) = next(iter(private))
    labels = ids.clone()
    labels[0, 4:] = -100
    module(input_ids=ids, labels=labels).loss.backward()
    private.abandon()
    for (ids,) in private:
        optimizer.zero_grad()
        module(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    assert engine.ledger.num_commits == 2


class Summed(nn.Module):
    """Returns logits with a loss of its own: a sum over rows, or a mean."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.layer, self.reduction = nn.Linear(6, 3), reduction

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.layer(x)
        return nn.functional.cross_entropy(logits, y, reduction=self.reduction), logits


@pytest.mark.parametrize("own", ["sum", "mean"])
def test_a_sum_of_its_own_is_no_mean(own):
    data = TensorDataset(torch.randn(24, 6), torch.arange(24) % 3)
    settings = {"data_loader": DataLoader(data, batch_size=6), "noise_multiplier": 0.0}
    other = "mean" if own == "sum" else "sum"
    engine, module, _, private = attach(Summed(own), loss_reduction=other, **settings)
    batch = next(iter(private))
    with pytest.raises(UnsupportedOperation, match=f"is a {own} over rows and was said to be"):
        module(*batch)[0].backward()
    assert engine.ledger.num_intents == 0
    for said, factor in ((own, 1), (other, 1 / 5 if own == "sum" else 5)):
        _, module, _, private = attach(Summed(own), loss_reduction=said, **settings)
        x, y = next(iter(private))
        assert len(x) == 5
        (module(x, y)[0] * factor).backward()
        assert module.layer.weight.grad is not None


def test_a_loss_of_the_logits_may_be_uneven():
    _, module, _, private = attach_gpt2("auto")
    (ids,) = next(iter(private))
    labels = ids.clone()
    labels[0, 4:] = -100
    output = module(input_ids=ids, labels=labels)
    per_sample_loss(output.logits[:, :-1], labels[:, 1:], ignore_index=-100).mean().backward()
    assert module.transformer.wte.weight.grad is not None


def test_a_loss_that_couples_samples_later_is_found_when_it_is_checked_again():
    """With outputs and own loss in one pass, in few runs of the module."""

    num_runs = 0

    class Later(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.is_coupled = nn.Linear(3, 4), False

        def forward(self, x):
            nonlocal num_runs  # an attribute would be put back
            num_runs += 1
            h = self.inner(x)
            loss = h.square().sum(1).mean()
            return {"h": h, "loss": loss * h.detach().abs().mean() if self.is_coupled else loss}

    module = Later()
    dataset = TensorDataset(torch.randn(64, 3, generator=torch.Generator().manual_seed(0)))
    data_loader = DataLoader(dataset, batch_size=4, shuffle=True)
    engine, module, optimizer, private = attach(
        module, data_loader=data_loader, poisson_sampling=False
    )
    runs = []
    for number, (x,) in enumerate(private, start=1):
        module.is_coupled, num_runs = number == 8, 0
        optimizer.zero_grad()
        loss = module(x)["loss"]
        runs.append(num_runs)
        if number == 8:
            with pytest.raises(UnsupportedOperation, match="an output of the module that is no"):
                loss.backward()
            break
        loss.backward()
        optimizer.step()
    assert runs[2] == runs[4] == 1  # but for passes 1, 2, 4, 8
    assert runs[1] == runs[3] == 1 + 6
    engine.detach()


@pytest.mark.parametrize("is_own", [True, False], ids=["own loss", "loss of logits"])
def test_a_check_leaves_no_logits_behind(is_own):
    """They are the largest tensors there are, and must not wait for the garbage collector."""
    _, module, optimizer, private = attach_gpt2("auto")

    def count() -> int:
        found = [each for each in gc.get_objects() if issubclass(type(each), Tensor)]
        return sum(each.numel() % VOCAB == 0 and each.shape[-1:] == (VOCAB,) for each in found)

    gc.collect()
    gc.disable()
    try:
        for (ids,) in private:
            optimizer.zero_grad()
            if is_own:
                module(input_ids=ids, labels=ids).loss.backward()
            else:
                losses(module, ids).mean().backward()
            optimizer.step()
        left = count()
        gc.collect()
        assert left == count()
    finally:
        gc.enable()
