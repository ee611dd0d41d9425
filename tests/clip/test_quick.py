"""Known uses: what later passes keep is what the first one kept, to the bit."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.kernels.interpreted import as_on_cuda, interpreted
from unison.capture import Capture, learn_axes
from unison.capture.names import Places
from unison.capture.sites import Alike
from unison.clip import Clipping, plan_clipping
from unison.clip.learned import learn_layers

BATCH, TOKENS, WIDTH = 3, 4, 8


class Model(nn.Module):
    """Every kind of use that is known, and some that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, WIDTH)
        self.norm, self.rms = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH, bias=False)
        self.flat = nn.Parameter(torch.randn(WIDTH, 16) / 4)  # laid out the other way round
        self.flat_bias = nn.Parameter(torch.zeros(16))
        self.twice = nn.Linear(WIDTH, WIDTH)
        self.odd = nn.Linear(16, 3)  # of a size that products are not fast for
        self.is_extra = False

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.embedding(ids))
        x = x + self.down(F.gelu(self.up(x)))
        x = self.twice(self.twice(self.rms(x)))
        y = torch.addmm(self.flat_bias, x.reshape(-1, WIDTH), self.flat)
        if self.is_extra:
            y = y + self.up(x).reshape(-1, 16)
        return self.odd(y.tanh().view(*x.shape[:2], 16)).square().mean((1, 2))


def run(model: nn.Module, ids: Tensor) -> Tensor:
    return model(ids)


class Passes:
    """Passes over batches, as private training runs them."""

    def __init__(self, model: nn.Module, ids: Tensor) -> None:
        self.model, self.places = model, Places(model)
        self.axes = learn_axes(model, run, ids)
        layers = learn_layers(model, run, ids, self.axes)
        self.plan = plan_clipping(layers, mode="grad_materialize", machine="cpu")

    def clipping(self, ids: Tensor, kind: str | None) -> Clipping:
        """Run one pass; of no kind, nothing is known of its uses."""
        clipping = Clipping(self.plan, len(ids))
        capture = Capture(
            self.model,
            len(ids),
            axes=self.axes,
            on_record=clipping.take,
            known=self.places if kind else None,
            is_light=True,
            alike=Alike(kind, lambda: clipping) if kind else None,
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


@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.full), torch.bfloat16], ids=str
)
@interpreted
def test_known_uses_keep_the_same_bits(dtype):
    model = Model().to(dtype)
    passes = Passes(model, batch(0))
    with as_on_cuda():
        for seed in range(4):
            found = passes.clipping(batch(seed), "kind")
        known = set(found._kept.found)
        assert_same_bits(found, passes.clipping(batch(3), None))
    # Three passes to know them; parameters that are used twice, and odd sizes, need records.
    norms = {"norm.weight", "norm.bias", "rms.weight"}
    assert known == norms | {"up.weight", "up.bias", "down.weight", "flat", "flat_bias"}


@interpreted
def test_what_is_not_as_it_was_goes_the_general_way():
    model = Model()
    passes = Passes(model, batch(0))
    with as_on_cuda():
        for seed in range(3):
            passes.clipping(batch(seed), "kind")
        model.is_extra = True  # a known parameter is used once more
        passes.axes = learn_axes(model, run, batch(0))
        found = passes.clipping(batch(5), "kind")
        assert "up.weight" not in found._kept
        assert_same_bits(found, passes.clipping(batch(5), None))
        model.is_extra = False
        with torch.no_grad():
            model.up.weight.data = model.up.weight.data.clone().mul_(2)  # other memory
        found = passes.clipping(batch(6), "kind")
        assert not found._kept
        assert_same_bits(found, passes.clipping(batch(6), None))
        found = passes.clipping(batch(7, size=2), "kind")  # another shape under the same kind
        assert len(found.norms()) == len(passes.plan.layers)
