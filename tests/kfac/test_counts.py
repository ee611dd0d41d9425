"""What sums are divided by: tokens for inputs, labels for gradients, and the weight of updates."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import unison
from tests.harness import assert_close
from tests.kfac.common import CLASSES, observed, settings
from unison.errors import BadInput, UnsupportedOperation
from unison.kfac.factors import token_weights

TOKENS = 7


class Pooled(nn.Module):
    """Several tokens per label: a layer of each token, and one of their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 3), nn.Linear(3, CLASSES)

    def forward(self, x: Tensor) -> Tensor:  # [batch, tokens, 4] -> [batch, classes]
        return self.last(self.pooled(x))

    def pooled(self, x: Tensor) -> Tensor:  # [batch, tokens, 4] -> [batch, 3]
        return self.first(x).tanh().mean(1)


def mean_of_inputs(x: Tensor) -> Tensor:  # [..., d] -> [d + 1, d + 1]
    rows = F.pad(x.detach().flatten(0, -2), (0, 1), value=1.0)
    return torch.stack([torch.outer(row, row) for row in rows]).mean(0)


def test_inputs_are_divided_by_tokens(gen):
    model, x = Pooled().double(), torch.randn(5, TOKENS, 4, generator=gen, dtype=torch.float64)
    factors = observed(model, x, settings()).factors()
    assert_close(factors["first.weight"]["a"], mean_of_inputs(x), dtype=torch.float64)
    assert_close(factors["last.weight"]["a"], mean_of_inputs(model.pooled(x)), dtype=torch.float64)


def test_gradients_are_divided_by_labels(gen):
    model, x = Pooled().double(), torch.randn(5, TOKENS, 4, generator=gen, dtype=torch.float64)
    found = observed(model, x, settings(fisher="exact")).factors()["last.weight"]["g"]
    p = model(x).softmax(-1).detach()
    expected = sum(torch.diag(each) - torch.outer(each, each) for each in p) / len(p)
    assert_close(found, expected, dtype=torch.float64)


def test_averages_are_the_weighted_mean_of_updates(gen):
    beta, model = 0.75, Pooled().double()
    kfac = unison.KFAC(model, settings(decay=beta, likelihood="gaussian"))
    total, weight = 0.0, 0.0
    for size in (5, 2, 3):
        x = torch.randn(size, TOKENS, 4, generator=gen, dtype=torch.float64)
        logits = model(x)
        kfac.sample(logits).backward(retain_graph=True)
        logits.square().sum().backward()
        kfac.step()
        total = beta * total + (1 - beta) * mean_of_inputs(x)
        weight = beta * weight + (1 - beta)
        assert_close(kfac.factors()["first.weight"]["a"], total / weight, dtype=torch.float64)


def test_a_sample_counts_if_any_of_its_labels_does():
    mask = torch.tensor([[True, False], [False, False], [True, True]])
    assert token_weights(mask, 1, "weight").tolist() == [[True], [False], [True]]
    found = token_weights(torch.tensor([[True], [False]]), 3, "weight")
    assert found.tolist() == [[True] * 3, [False] * 3]


class Padded(nn.Module):
    """A classifier of the mean over a row's real tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 3), nn.Linear(3, CLASSES)

    def forward(self, x: Tensor, is_real: Tensor) -> Tensor:
        h = self.first(x).tanh() * is_real[..., None]
        return self.last(h.sum(1) / is_real.sum(1, keepdim=True))


def test_tokens_that_are_padding_do_not_count(gen):
    model, x = Padded().double(), torch.randn(5, TOKENS, 4, generator=gen, dtype=torch.float64)
    is_real = torch.arange(TOKENS) < torch.tensor([7, 1, 3, 5, 2])[:, None]
    x[~is_real] = 100.0
    found = {}
    for sharing in ("expand", "reduce"):
        kfac = unison.KFAC(model, settings(fisher="exact", sharing=sharing))
        logits = model(x, is_real)
        kfac.sample(logits, token_mask=is_real).backward()
        F.cross_entropy(logits, torch.zeros(5, dtype=torch.int64)).backward()
        kfac.step()
        found[sharing] = kfac.factors()
    a = found["expand"]["first.weight"]["a"]
    assert_close(a, mean_of_inputs(x[is_real][None]), dtype=torch.float64)
    means = torch.stack([row[own].mean(0) for row, own in zip(x, is_real, strict=True)])
    a = found["reduce"]["first.weight"]["a"]
    assert_close(a, mean_of_inputs(means), dtype=torch.float64)
    # Rows as they would come without padding: G is the same, and the rest by the sample.
    total: Tensor = torch.zeros(())
    for row, own in zip(x, is_real, strict=True):
        z = observed_row(model, row[own])
        total = total + z / len(x)
    assert_close(found["expand"]["first.weight"]["g"], total, dtype=torch.float64)
    kfac = unison.KFAC(model, settings())
    logits = model(x, is_real)
    with pytest.raises(BadInput, match=r"token_mask \[batch of 5, tokens\], found \[7\]"):
        kfac.sample(logits, token_mask=is_real[0]).backward()
    kfac.sample(logits, token_mask=is_real[:, 1:]).backward()
    F.cross_entropy(logits, torch.zeros(5, dtype=torch.int64)).backward()
    with pytest.raises(BadInput, match=r"first\.weight is used for 7 tokens .* token_mask has 6"):
        kfac.step()


def observed_row(model: Padded, row: Tensor) -> Tensor:
    """G of the first layer for one row without padding."""
    kfac = unison.KFAC(model, settings(fisher="exact"))
    logits = model(row[None], torch.ones(1, len(row), dtype=torch.bool))
    kfac.sample(logits).backward()
    F.cross_entropy(logits, torch.zeros(1, dtype=torch.int64)).backward()
    kfac.step()
    return kfac.factors()["first.weight"]["g"]


def test_labels_left_out_take_their_tokens_along():
    mask = torch.tensor([[True], [False]])
    tokens = torch.tensor([[True, True, False], [True, True, True]])
    assert token_weights(mask, 3, "weight", tokens & mask).tolist() == [
        [True, True, False],
        [False] * 3,
    ]
    assert token_weights(mask, 1, "weight", tokens).tolist() == [[True], [False]]


def test_batch_norm_in_eval_mode(gen):
    torch.manual_seed(0)
    layers = [
        nn.Conv1d(4, 3, 2),
        nn.BatchNorm1d(3),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(18, CLASSES),
    ]
    model = nn.Sequential(*layers).double()
    nn.init.normal_(model[1].weight)
    x = torch.randn(5, 4, TOKENS, generator=gen, dtype=torch.float64)
    model(3 * x + 1)  # statistics to go by
    model[1].eval()
    y = torch.arange(5) % CLASSES
    factors = observed(model, x, settings(fisher="empirical"), y=y).factors()
    squares: dict[str, Any] = {"1.weight": 0.0, "1.bias": 0.0}
    for row, label in zip(x, y, strict=True):
        model.zero_grad()
        F.cross_entropy(model(row[None]), label[None]).backward()
        for name in squares:
            squares[name] = squares[name] + model.get_parameter(name).grad.square() / len(x)
    for name, expected in squares.items():
        assert_close(factors[name]["d"].view(-1), expected, dtype=torch.float64)
    model[1].train()
    with pytest.raises(UnsupportedOperation, match=r"1\.weight, 1\.bias: batch norm"):
        observed(model, x, settings())
