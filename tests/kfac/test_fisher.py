"""Labels: drawn from the model, the same wherever they are drawn, and right on average."""

import pytest
import torch
from torch import nn

import unison
from tests.kfac.common import CLASSES, Transformer, loss, observed, relative, settings
from unison.errors import BadInput
from unison.kfac.fisher import COLUMNS, DRAWN, drawn_classes
from unison.rng import Key, Stream

STREAM = Stream(Key.from_seed(7), "labels", purpose="kfac")


@pytest.mark.parametrize("kind", DRAWN)
def test_drawn_gradients_have_the_moments_of_the_columns(kind):
    torch.manual_seed(0)
    z = torch.randn(1, 1, 3).double().expand(40_000, 5, 3)
    drawn = DRAWN[kind](z, STREAM, 0).reshape(-1, 3)
    columns = torch.stack([each[0, 0] for each in COLUMNS[kind](z[:1, :1])])
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
    first = [each.rows.first_ids for each in kfac._passes]
    assert first == [(0,), (3,)]
    kfac.step()
