"""What sums are divided by: tokens for inputs, labels for gradients, and the weight of updates."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import unison
from tests.harness import assert_close
from tests.kfac.common import CLASSES, observed, settings
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
    kfac = unison.KFAC(model, settings(decay=beta))
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
