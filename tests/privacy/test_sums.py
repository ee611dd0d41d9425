"""Clipped sums are exact from the rows that are computed together to the noise."""

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.harness import World, run_on_ranks
from tests.privacy import sharded
from unison.clip import MODES
from unison.clip.bounds import SUM_ERROR, Grid, bounded, flat, mass_factor
from unison.errors import BadInput
from unison.ops import Dense, Lookup, Product
from unison.privacy import Poisson, PrivacyEngine, noise
from unison.privacy.mechanism import Release, grid_of, sensitivity_factor
from unison.rng import noise_spacing

C = 1.0


def release_of(noise_multiplier: float, max_grad_norm: float = C) -> Release:
    return Release(
        step=0,
        sampling=Poisson(rate=0.5),
        max_grad_norm=max_grad_norm,
        noise_multiplier=noise_multiplier,
        expected_batch_size=8,
    )


# ---- the grid ------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_samples", [0, 1, 100, 2_000, 5_000, 10**6])
@pytest.mark.parametrize("sigma", [0.0, 1e-3, 0.7, 1.0, 30.0])
def test_a_grid_holds_the_sum_and_is_no_coarser_than_the_noise(num_samples, sigma):
    release = release_of(sigma, max_grad_norm=0.3)
    grid = grid_of(release, num_samples)
    assert math.frexp(grid.spacing)[0] == 0.5  # a power of two
    largest = torch.tensor([num_samples * 0.3, -num_samples * 0.3], dtype=torch.float64)
    integers = (largest / grid.spacing).round().to(grid.dtype)
    assert (integers.double() * grid.spacing - largest).abs().max() <= grid.spacing / 2
    if sigma:
        ratio = noise_spacing(release.noise_std) / grid.spacing
        assert ratio == 1 or ratio >= 16
    else:
        assert grid.spacing <= 2**-48 * max(1, num_samples) * 0.3


def test_sums_of_few_samples_are_as_wide_as_float32():
    assert grid_of(release_of(1.0), 64).dtype == torch.int32
    assert grid_of(release_of(1.0), 1_000).dtype == torch.int32
    assert grid_of(release_of(1.0), 10_000).dtype == torch.int64


def test_too_many_samples_for_the_noise():
    with pytest.raises(BadInput, match="too much for the grid of a noise"):
        grid_of(release_of(1e-12), 10_000)


# ---- what rounding may add -----------------------------------------------------------------------


def test_what_is_counted():
    assert 1 + SUM_ERROR <= sensitivity_factor(1.0, 1) <= 1 + 1.3e-5
    assert sensitivity_factor(0.0, 10**9) == 1 + SUM_ERROR <= 1 + 1e-5


@pytest.mark.parametrize("kind", ["product", "lookup", "both"])
def test_a_sample_whose_tokens_cancel_counts_by_its_mass(kind):
    """Its rounding is that of its terms: were it clipped by its norm, it could be any."""
    half = torch.randn(2, 8, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    g = torch.cat([half, -half], 1) * 1e12
    ones = torch.ones(2, 16, 3, dtype=torch.float64)
    product = Product(ones, g, False, (5, 3))
    lookup = Lookup(torch.zeros(2, 16, dtype=torch.int64), g, (4, 5))
    records = {"product": [product], "lookup": [lookup], "both": [product, product]}[kind]
    norms = bounded(records, torch.zeros(2, dtype=torch.float64))
    mass = g.norm(dim=2).sum(1) * (1 if kind == "lookup" else 3**0.5)
    shares = flat(norms, C).values * mass * (2 if kind == "both" else 1)
    assert (shares * mass_factor(records, 2) <= C * (1 + 1e-5)).all()


def test_ordinary_samples_are_clipped_by_their_norm():
    generator = torch.Generator().manual_seed(1)
    a, g = (torch.randn(64, 1024, 8, generator=generator) for _ in range(2))
    record = Product(a, g, False, (8, 8))
    squared = torch.einsum("bto,bti->boi", g.double(), a.double()).flatten(1).square().sum(1)
    assert torch.allclose(bounded([record], squared).upper, squared, rtol=1e-6)


def test_more_rows_than_are_proved():
    with pytest.raises(BadInput, match="give make_private a max_physical_batch_size"):
        mass_factor([Dense(torch.zeros(70_000, 1))], 70_000)
    assert mass_factor([Dense(torch.zeros(65_536, 1))], 65_536) < 1


class Aligned(nn.Module):
    """The gradient of a row is the row."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_features))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def sum_of(
    monkeypatch: pytest.MonkeyPatch, module: nn.Module, rows: Tensor, weights: Tensor, **kwargs: Any
) -> Tensor:
    """The clipped sum of a logical batch as it meets the noise."""
    found = []
    finalise = noise.finalise

    def watched(integers: Tensor, *, grid: Grid, **others: Any) -> Tensor:
        found.append((integers.double() * grid.spacing).flatten())
        return finalise(integers, grid=grid, **others)

    engine = PrivacyEngine(secure_noise=False, accountant="rdp")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    settings = {"noise_multiplier": 0.0, "seed": 1, "recheck": False} | kwargs
    with warnings.catch_warnings(), monkeypatch.context() as patched:
        warnings.simplefilter("ignore")
        patched.setattr(noise, "finalise", watched)
        module, optimizer, loader = engine.make_private(
            module=module,
            optimizer=optimizer,
            data_loader=DataLoader(TensorDataset(rows, weights), batch_size=len(rows)),
            max_grad_norm=C,
            sampling=Poisson(rate=1.0),
            loss_reduction="sum",
            **settings,
        )
        for x, weight in loader:
            (module(x) * weight).sum().backward()
    engine.detach()
    return torch.cat(found)


def adversarial_rows(num_rows: int) -> Tensor:
    """Rows of norm C in nearly one direction: every rounding of their sum is as large as can be."""
    generator = torch.Generator().manual_seed(2)
    rows = 1 + 0.3 * torch.rand(num_rows, 16, generator=generator)
    return rows / rows.norm(dim=1, keepdim=True) * 1.01


@pytest.mark.parametrize(
    ("num_rows", "physical"),
    [
        (1024, None),
        pytest.param(65_536, None, marks=pytest.mark.full),
        (200, 1),
        (1000, 37),
        pytest.param(1024, 1, marks=pytest.mark.full),
        pytest.param(65_536, 1000, marks=pytest.mark.full),
    ],
)
def test_emptying_a_record_changes_the_sum_by_what_is_counted(num_rows, physical, monkeypatch):
    """Q4: 1.0043 in one pass of 65,536 rows, and 1.0102 in 1,024 passes of one."""
    rows, weights = adversarial_rows(num_rows), torch.ones(num_rows)
    settings = {"max_physical_batch_size": physical}
    whole = sum_of(monkeypatch, Aligned(16), rows, weights, **settings)
    for place in (0, num_rows // 2, num_rows - 1):
        emptied = weights.clone()
        emptied[place] = 0
        other = sum_of(monkeypatch, Aligned(16), rows, emptied, **settings)
        assert (whole - other).norm() <= C * (1 + SUM_ERROR)


# ---- one shape: what other rows compute does not depend on a record ------------------------------


class Chaotic(nn.Module):
    """Q1: the last bit of a row's features decides its gradient; rows do not mix."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.kind = kind
        self.features: nn.Module = nn.Linear(24, 8)
        if kind == "conv":
            self.features = nn.Sequential(
                nn.Unflatten(1, (1, 4, 6)), nn.Conv2d(1, 2, 3, padding=1), nn.Flatten()
            )
        self.features.requires_grad_(False)
        self.v = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.features(x)
        if self.kind == "gelu":
            h = nn.functional.gelu(h)
        return torch.tanh(1e4 * torch.sin(3e8 * h[:, :1])) * self.v


SIZES = [1, 2, 8, 9, 16, 33]


@pytest.mark.parametrize("kind", ["linear", "conv", "gelu"])
@pytest.mark.parametrize(
    "size", [pytest.param(n, marks=() if n in SIZES else pytest.mark.full) for n in range(1, 34)]
)
def test_a_module_that_amplifies_rounding(size, kind, monkeypatch):
    check_neighbours(monkeypatch, size, kind)


@pytest.mark.parametrize("mode", [*MODES])
@pytest.mark.parametrize("physical", [None, 4])
@pytest.mark.parametrize(
    "compile", [False, pytest.param({"backend": "aot_eager"}, marks=pytest.mark.full)]
)
def test_in_every_mode(mode, physical, compile, monkeypatch):  # noqa: A002
    check_neighbours(
        monkeypatch,
        9,
        "linear",
        clipping=mode,
        max_physical_batch_size=physical,
        compile=compile,
    )


def check_neighbours(
    monkeypatch: pytest.MonkeyPatch, size: int, kind: str, **settings: Any
) -> None:
    torch._dynamo.reset()
    rows = torch.randn(size, 24, generator=torch.Generator().manual_seed(4))
    weights = torch.ones(size, 1)
    whole = sum_of(monkeypatch, Chaotic(kind), rows, weights, **settings)
    for place in sorted({0, size // 2, size - 1}):
        others, emptied = rows.clone(), weights.clone()
        others[place], emptied[place] = 0, 0
        found = sum_of(monkeypatch, Chaotic(kind), others, emptied, **settings)
        assert (whole - found).norm() <= C * (1 + 1e-6)


# ---- any order ----------------------------------------------------------------------------------


def fast_run(world: World, how: str) -> dict[str, Any]:
    found = sharded.private_run(world, how=how, granule=2, reducer="fast", steps=2)
    return {name: found[name] for name in ("norms", "digest")}


@pytest.mark.parametrize(
    ("how", "sizes"),
    [
        ("zero3", (2,)),
        pytest.param("zero3", (1, 3, 5), marks=pytest.mark.full),
        pytest.param("ddp", (2, 3), marks=pytest.mark.full),
    ],
)
def test_one_digest_with_the_fast_reducer(how, sizes):
    expected = run_on_ranks(1, fast_run, "none")[0]
    for size in sizes:
        for found in run_on_ranks(size, fast_run, how):
            assert found == expected
