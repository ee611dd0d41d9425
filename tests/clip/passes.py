"""A small model with every kind of use, and passes over it as private training runs them."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unison.capture import Capture, learn_axes
from unison.clip import Clipping, plan_clipping
from unison.clip.functional import learn_layers

BATCH, TOKENS, WIDTH = 3, 4, 8


class Model(nn.Module):
    """Every kind of use: a table, norms, matrices of both layouts, one used twice, odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, WIDTH)
        self.norm, self.rms = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH, bias=False)
        self.flat = nn.Parameter(torch.randn(WIDTH, 16) / 4)  # laid out the other way round
        self.flat_bias = nn.Parameter(torch.zeros(16))
        self.twice = nn.Linear(WIDTH, WIDTH)
        self.odd = nn.Linear(16, 3)  # of a size that products are not fast for

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.embedding(ids))
        x = x + self.down(F.gelu(self.up(x)))
        x = self.twice(self.twice(self.rms(x)))
        y = torch.addmm(self.flat_bias, x.reshape(-1, WIDTH), self.flat)
        return self.odd(y.tanh().view(*x.shape[:2], 16)).square().mean((1, 2))


def run(model: nn.Module, ids: Tensor) -> Tensor:
    return model(ids)


class Passes:
    """Passes over batches, as private training runs them."""

    def __init__(self, model: nn.Module, ids: Tensor) -> None:
        self.model = model
        self.axes = learn_axes(model, run, ids)
        layers = learn_layers(model, run, ids, self.axes)
        self.plan = plan_clipping(layers, mode="grad_materialize", machine="cpu")

    def clipping(self, ids: Tensor) -> Clipping:
        """Run one pass."""
        clipping = Clipping(self.plan, len(ids))
        capture = Capture(
            self.model, len(ids), axes=self.axes, on_record=clipping.take, is_light=True
        )
        with capture.installed():
            run(self.model, ids).sum().backward()
        return clipping


def result_of(clipping: Clipping) -> dict[str, Tensor]:
    norms = clipping.norms()
    coefficients = dict.fromkeys(norms, torch.linspace(0.5, 1, BATCH, dtype=torch.float64))
    shares = {name: (x.clone(), w) for name, (x, w) in clipping.shares(coefficients).items()}
    found = {f"{name} {i}": part for name, each in shares.items() for i, part in enumerate(each)}
    return {**found, "squared": norms.squared, "upper": norms.upper}


def assert_same_bits(found: Clipping, expected: Clipping) -> None:
    left, right = result_of(found), result_of(expected)
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


def batch(seed: int, size: int = BATCH) -> Tensor:
    return torch.randint(0, 7, (size, TOKENS), generator=torch.Generator().manual_seed(seed))
