"""Labels: drawn from the model, the same wherever they are drawn, and right on average."""

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import unison
from tests.kfac.common import CLASSES, Transformer, loss, observed, relative, settings
from unison.errors import BadInput
from unison.kfac import labels
from unison.kfac.labels import COLUMNS, DRAWN, drawn_classes
from unison.rng import Key, Stream

STREAM = Stream(Key.from_seed(7), "labels", purpose="kfac")


@pytest.mark.parametrize("kind", DRAWN)
def test_drawn_gradients_have_the_moments_of_the_columns(kind):
    torch.manual_seed(0)
    z = torch.randn(1, 1, 3).double().expand(40_000, 5, 3)
    drawn = DRAWN[kind](z, STREAM, 0).reshape(-1, 3)
    columns = torch.stack([COLUMNS[kind](z[:1, :1], c)[0, 0] for c in range(3)])
    assert drawn.mean(dim=0).abs().max() < 5e-3
    assert (drawn.T @ drawn / len(drawn) - columns.T @ columns).abs().max() < 5e-3


@pytest.mark.parametrize("kind", DRAWN)
def test_a_label_depends_on_its_row_and_token_alone(kind):
    z = torch.randn(9, 6, 4)
    whole = DRAWN[kind](z, STREAM, 20)
    part = DRAWN[kind](z[3:7, :4], STREAM, 23)
    assert torch.equal(whole[3:7, :4], part)


@pytest.mark.parametrize("classes", [1, 5, 256, 257, 512, 1000])
def test_many_classes_are_drawn_as_few_are(classes):
    p = torch.softmax(3 * torch.randn(40, 50, classes), dim=-1)
    u = torch.rand(40, 50).double()
    u[0, 0], u[0, 1] = 0.0, 1 - 2.0**-53
    below = p.double().cumsum(dim=-1)
    expected = torch.searchsorted(below, (u * below[..., -1]).unsqueeze(-1), right=True)
    found = drawn_classes(p, u)
    assert torch.equal(found, expected.squeeze(-1).clamp(max=classes - 1))
    z = torch.randn(2, 3, classes)
    gradient = DRAWN["categorical"](z, STREAM, 0)
    drawn = torch.softmax(z, dim=-1) - gradient
    assert relative(drawn.sum(dim=-1), torch.ones(2, 3)) <= 1e-5
    assert relative(drawn.amax(dim=-1), torch.ones(2, 3)) <= 1e-5


@pytest.mark.full
def test_many_draws_come_to_the_exact_fisher():
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, CLASSES)).double()
    x = torch.randn(20, 4).double()
    exact = observed(model, x, settings(fisher="exact")).factors()
    kfac = unison.KFAC(model, settings(fisher="mc", graft="sgd"))
    total = 0.0
    for _ in range(150):
        model.zero_grad()
        logits = model(x)
        kfac.sample(logits).backward()
        loss(logits).backward()
        kfac.step()
        total = total + kfac.factors()["0.weight"]["g"] / 150
    assert relative(total, exact["0.weight"]["g"]) < 0.15
    assert relative(kfac.factors()["0.weight"]["a"], exact["0.weight"]["a"]) < 1e-12


def label_by_label(model: Transformer, x: Tensor) -> dict[str, Tensor]:
    """G of each layer, from one backward pass per (row, token, class)."""
    layers = {name: each for name, each in model.named_modules() if isinstance(each, nn.Linear)}
    total: dict[str, Tensor] = {f"{name}.weight": torch.tensor(0.0) for name in layers}
    outputs: dict[str, Tensor] = {}
    handles = [
        each.register_forward_hook(lambda _, __, out, name=name: outputs.update({name: out}))
        for name, each in layers.items()
    ]
    for row in x:
        z = model(row[None])[0]
        p = z.softmax(-1).detach()
        for token, c in itertools.product(range(z.shape[0]), range(z.shape[1])):
            column = p[token].sqrt()[c] * (p[token] - F.one_hot(torch.tensor(c), z.shape[1]))
            found = torch.autograd.grad(
                z[token], list(outputs.values()), column, retain_graph=True, allow_unused=True
            )
            for name, g in zip(outputs, found, strict=True):
                if g is not None:
                    rows = g.flatten(0, -2)
                    total[f"{name}.weight"] = total[f"{name}.weight"] + rows.T @ rows
    for handle in handles:
        handle.remove()
    return {name: each / x.numel() for name, each in total.items()}


@pytest.mark.parametrize("has_function", [False, True])  # between the module and the logits
def test_exact_is_exact_where_tokens_mix(has_function):
    torch.manual_seed(0)
    model, x = Transformer().double(), torch.randint(0, 11, (3, 4))
    kfac = unison.KFAC(model, settings(fisher="exact"))
    logits = model(x) * 1.0 if has_function else model(x)
    kfac.sample(logits).backward()
    loss(logits).backward()
    kfac.step()
    for name, expected in label_by_label(model, x).items():
        assert relative(kfac.factors()[name]["g"], expected) < 1e-12, name


def test_many_labels_of_a_row_cancel_on_average(monkeypatch):
    monkeypatch.setattr(labels, "MOST_EXACT", CLASSES)
    torch.manual_seed(0)
    model, x = Transformer().double(), torch.randint(0, 11, (2, 4))
    expected = label_by_label(model, x)
    found = observed(model, x.repeat(400, 1), settings(fisher="exact")).factors()
    for name, wanted in expected.items():
        assert relative(found[name]["g"], wanted) < 0.12, name
    monkeypatch.setattr(labels, "uniform", lambda *_, **__: torch.ones(()))  # all the same signs
    found = observed(model, x, settings(fisher="exact")).factors()
    assert relative(found["v.weight"]["g"], expected["v.weight"]) > 0.5


def test_a_loss_of_no_probabilities_is_noticed():
    torch.manual_seed(0)
    x, y = torch.randn(6, 3), torch.randn(6, CLASSES)

    def step(kfac: unison.KFAC, model: nn.Module, loss_of: Any) -> None:
        model.zero_grad()
        logits = model(x)
        kfac.sample(logits).backward()
        loss_of(logits).backward()
        kfac.step()

    losses = {
        "squares": lambda z: F.mse_loss(z, y),
        "one output": lambda z: F.mse_loss(z[:, :1], y[:, :1]),
        "yes or no": lambda z: F.binary_cross_entropy_with_logits(z, y.sigmoid()),
    }
    for loss_of in losses.values():
        model = nn.Linear(3, CLASSES)
        kfac = unison.KFAC(model, settings())
        with pytest.warns(UserWarning, match=r"likelihood='gaussian'\) for squared errors"):
            step(kfac, model, loss_of)
        step(kfac, model, loss_of)  # once
        step(unison.KFAC(model, settings(likelihood="gaussian")), model, loss_of)
    labels, weights = y.argmax(-1), torch.rand(CLASSES)
    for loss_of in (
        lambda z: F.cross_entropy(z, labels, weights, label_smoothing=0.2),
        lambda z: (
            -(y.softmax(-1) * z.log_softmax(-1)).sum() + 1e-4 * z.logsumexp(-1).square().sum()
        ),
        lambda z: z.sum() * 0,
    ):
        model = nn.Linear(3, CLASSES)
        step(unison.KFAC(model, settings()), model, loss_of)


def test_another_seed_or_step_draws_other_labels():
    model = Transformer().double()
    x = torch.randint(0, 11, (4, 7))
    first = observed(model, x, settings(seed=0)).factors()["head.weight"]["g"]
    same = observed(model, x, settings(seed=0)).factors()["head.weight"]["g"]
    other = observed(model, x, settings(seed=1)).factors()["head.weight"]["g"]
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_empirical_takes_the_divisor_of_the_loss():
    model = Transformer().double()
    x, y = torch.randint(0, 11, (4, 7)), torch.randint(0, CLASSES, (4, 7))
    expected = observed(model, x, settings(fisher="empirical"), y=y).factors()
    for config, divisor, scale in (
        (settings(fisher="empirical", loss_reduction="sum"), None, 28),
        (settings(fisher="empirical"), 100, 28 / 100),
    ):
        kfac = unison.KFAC(model, config)
        model.zero_grad()
        logits = model(x)
        kfac.sample(logits, divisor=divisor).backward()
        (loss(logits, y) * scale).backward()
        kfac.step()
        for name, found in kfac.factors().items():
            for side, value in found.items():
                assert relative(value, expected[name][side]) < 1e-12


def test_what_is_forgotten_raises():
    model = nn.Linear(3, CLASSES)
    kfac = unison.KFAC(model, settings(fisher="empirical"))
    with pytest.raises(BadInput, match="no forward pass"):
        kfac.sample(torch.zeros(2, CLASSES))
    logits = model(torch.randn(2, 3))
    with pytest.raises(BadInput, match="retain_graph=True"):
        kfac.sample(logits).backward(retain_graph=False)
    with pytest.raises(BadInput, match="no labels were sampled"):
        kfac.step()
    logits = model(torch.randn(2, 3))
    kfac.sample(logits).backward()
    with pytest.raises(BadInput, match="called twice"):
        kfac.sample(logits).backward()
    with pytest.raises(BadInput, match=r"loss.backward\(\), which did not run"):
        kfac.step()
    kfac = unison.KFAC(model, settings())
    model(torch.randn(2, 3))
    with pytest.raises(BadInput, match="batch of 2"):
        kfac.sample(torch.zeros(3, CLASSES)).backward()
    with pytest.raises(BadInput, match="mask of shape"):
        kfac.sample(torch.zeros(2, CLASSES), torch.ones(2, 2)).backward()
    with pytest.raises(BadInput, match="not made of what the module"):
        kfac.sample(torch.zeros(2, CLASSES, requires_grad=True) * 2).backward()
    with pytest.raises(BadInput, match="not made of what the module"):
        kfac.sample(model(torch.randn(2, 3)).detach()).backward()


def test_exact_is_for_few_outputs():
    model = nn.Linear(2, 2000)
    kfac = unison.KFAC(model, settings(fisher="exact"))
    logits = model(torch.randn(1, 2))
    with pytest.raises(BadInput, match="2000 outputs"):
        kfac.sample(logits).backward()


def test_two_dealt_batches_in_one_step_draw_labels_of_their_own():
    model = Transformer().double()
    x = torch.randint(0, 11, (3, 7))
    kfac = unison.KFAC(model, settings())
    for rows in unison.deal([x, x]):
        logits = model(rows)
        kfac.sample(logits).backward()
        loss(logits).backward()
    first = [tuple(part.first_id for part in each.parts) for each in kfac._passes]
    assert first == [(0,), (3,)]
    kfac.step()


class Counting(nn.Module):
    """Writes to itself whenever it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(3, 4), nn.Linear(4, CLASSES)
        self.num_passes, self.seen, self.total = 0, [], torch.zeros(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        self.num_passes += 1
        self.seen.append(x)
        self.total += x.detach().sum(0)
        return self.head(x)


def test_passes_for_statistics_leave_the_module_as_it_was():
    model, x = Counting(), torch.randn(4, 3)
    kfac = unison.KFAC(model, settings())
    logits = model(x)
    total = model.total.clone()
    kfac.sample(logits).backward()
    loss(logits).backward()
    kfac.step()
    assert (model.num_passes, len(model.seen)) == (1, 1)
    assert torch.equal(model.total, total)


def test_a_module_may_be_part_of_another():
    """Its inputs have a graph, which is the user's to go back through."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, CLASSES)).double()
    x, alone = torch.randn(6, 3).double(), copy.deepcopy(model[1])
    found = []
    for module, inputs in ((model[1], model[0](x)), (alone, model[0](x).detach())):
        kfac = unison.KFAC(module, settings())
        logits = module(inputs)
        kfac.sample(logits).backward()
        loss(logits).backward()
        kfac.step()
        found.append(module.weight.grad)
    assert torch.equal(*found)
    assert model[0].weight.grad is not None
