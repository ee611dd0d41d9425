"""Factors against those of curvlinops, to the last digits of float64."""

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn

from tests.kfac.common import CLASSES, Transformer, observed, relative, settings
from unison.kfac.labels import DRAWN
from unison.rng import Key, Stream

curvlinops = pytest.importorskip("curvlinops")

TOLERANCE = 1e-12
LINEARS = ("q", "k", "v", "o", "f1", "f2", "head")


class ClassesFirst(nn.Module):
    """What torch's cross entropy, and so curvlinops, wants of logits per token."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).movedim(-1, 1)


def peer(
    model: nn.Module, names: tuple[str, ...], x: Tensor, y: Tensor, fisher: str, approx: str
) -> dict[str, tuple[Tensor, Tensor]]:
    """(A, G) of curvlinops, by the name of the layer."""
    model = copy.deepcopy(model)  # it may leave hooks behind
    has_tokens = model(x[:1]).ndim > 2
    wrapped = ClassesFirst(model) if has_tokens else model
    modules = dict(model.named_modules())
    params = [p for name in names for p in modules[name].parameters()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        operator = curvlinops.KFACLinearOperator(
            wrapped,
            nn.CrossEntropyLoss(),
            params,
            [(x, y)],
            fisher_type=fisher,
            kfac_approx=approx,
            num_per_example_loss_terms=y[0].numel(),
            separate_weight_and_bias=False,
            check_deterministic=False,
        )
        _ = operator @ torch.zeros(operator.shape[1], dtype=torch.float64)
    prefix = "model." if has_tokens else ""
    return {
        name: (
            operator._input_covariances[prefix + name],
            operator._gradient_covariances[prefix + name],
        )
        for name in names
    }


def compare(model, names, x, y, *, fisher, sharing="expand", labels=None):
    ours = observed(
        model, x, settings(fisher=fisher, sharing=sharing, policy="kronecker"), y=y
    ).factors()
    kind = {
        "mc": "empirical",
        "empirical": "empirical",
        "exact": "type-2",
        "forward": "forward-only",
    }
    expected = peer(model, names, x, y if labels is None else labels, kind[fisher], sharing)
    for name in names:
        a, g = expected[name]
        found = ours[f"{name}.weight"]
        assert relative(found["a"], a) <= TOLERANCE, name
        if fisher == "forward":
            assert "g" not in found
        else:
            assert relative(found["g"], g) <= TOLERANCE, name


def tokens(batch: int = 4, length: int = 7) -> tuple[Tensor, Tensor]:
    return torch.randint(0, 11, (batch, length)), torch.randint(0, CLASSES, (batch, length))


@pytest.mark.parametrize("fisher", ["empirical", "exact", "forward"])
def test_every_linear_layer_of_a_transformer(fisher):
    # It sends the columns of all tokens back at once, and so has cross products of tokens in what
    # comes before attention; test_fisher.py has those layers by one label after the other.
    names = LINEARS[3:] if fisher == "exact" else LINEARS
    compare(Transformer().double(), names, *tokens(), fisher=fisher)


def test_drawn_labels_are_labels():
    model = Transformer().double()
    x, y = tokens()
    stream = Stream(Key.from_seed(0), "labels", step=0, purpose="kfac")
    z = model(x).detach()
    labels = (z.softmax(-1) - DRAWN["categorical"](z, stream, 0)).argmax(-1)
    compare(model, LINEARS, x, y, fisher="mc", labels=labels)


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f1, self.f2 = nn.Linear(6, 5), nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:  # [batch, tokens, 6]
        return self.f2(torch.tanh(self.f1(x))).mean(dim=1)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("fisher", ["empirical", "exact"])
def test_tokens_that_share_a_weight_before_a_mean(sharing, fisher):
    x, y = torch.randn(5, 3, 6).double(), torch.randint(0, CLASSES, (5,))
    compare(Pooled().double(), ("f1", "f2"), x, y, fisher=fisher, sharing=sharing)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_convolutions(sharing):
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3, stride=2, padding=1),
        nn.Tanh(),
        nn.Conv2d(3, 4, (3, 2), bias=False),
        nn.Flatten(),
        nn.Linear(4 * 2 * 3, CLASSES),
    ).double()
    x, y = torch.randn(6, 2, 7, 8).double(), torch.randint(0, CLASSES, (6,))
    compare(model, ("0", "2", "4"), x, y, fisher="empirical", sharing=sharing)
