"""Inverses: against dense ones, in every form of damping, and what happens where there is none."""

import pytest
import torch
from torch import Tensor

from tests.kfac.common import relative, settings
from unison.kfac import KFACConfig, NotInvertible
from unison.kfac.inverse import Inverse, _dampings, _stats_of, apply, invert

FORMS = [
    ("pi", "eigen"),
    ("pi", "cholesky"),
    ("factored", "eigen"),
    ("factored", "cholesky"),
    ("joint", "eigen"),
]


def invert_kronecker(a: Tensor, g: Tensor | None, config: KFACConfig, name: str) -> Inverse:
    return invert({name: {"a": a} if g is None else {"a": a, "g": g}}, config)[name]


def invert_diagonal(diagonal: Tensor, config: KFACConfig, name: str) -> Inverse:
    return invert({name: {"d": diagonal}}, config)[name]


def applied(inverse: Inverse, y: Tensor) -> Tensor:
    return apply(inverse, y, [y.shape[-1]])[0]


def damping_of(a: Tensor, g: Tensor, config: KFACConfig) -> tuple[float, float]:
    stats = _stats_of({"": {"a": a, "g": g}}, config)[""]
    found = _dampings({side: mean for side, (_, mean, *_) in stats.items()}, config)
    return found["a"], found["g"]


def factor(n: int, rank: int | None = None) -> Tensor:
    u = torch.randn(n, rank or 2 * n).double()
    return u @ u.T / u.shape[1]


def dense(a: Tensor, g: Tensor, config) -> Tensor:
    """The damped block that is to be inverted, on row-major [d_out, d_in]."""
    if config.damping_form == "joint":
        block = torch.kron(g, a)
        return block + config.damping * torch.eye(len(block), dtype=torch.float64)
    on_a, on_g = damping_of(a, g, config)
    return torch.kron(
        g + on_g * torch.eye(len(g), dtype=torch.float64),
        a + on_a * torch.eye(len(a), dtype=torch.float64),
    )


@pytest.mark.parametrize(("form", "inverse"), FORMS)
@pytest.mark.parametrize("rank", [2, None])
def test_inverses_are_those_of_the_dense_block(form, inverse, rank):
    config = settings(damping=1e-2, damping_form=form, inverse=inverse)
    a, g, y = factor(5, rank), factor(4, rank), torch.randn(4, 5).double()
    found = applied(invert_kronecker(a, g, config, "layer"), y)
    expected = torch.linalg.solve(dense(a, g, config), y.flatten()).view(4, 5)
    assert relative(found, expected) <= 1e-10


def test_pi_balances_the_two_sides():
    a, g = 100 * factor(5), factor(4)
    on_a, on_g = damping_of(a, g, settings(damping=1e-2))
    assert on_a * on_g == pytest.approx(1e-2)
    assert on_a / on_g == pytest.approx(float(a.diagonal().mean() / g.diagonal().mean()))
    on_a, on_g = damping_of(a, torch.zeros_like(g), settings(damping=1e-2))
    assert on_a == on_g == pytest.approx(0.1)


def test_each_side_may_have_its_own_damping():
    config = settings(damping=(0.5, 0.25), damping_form="factored")
    assert damping_of(factor(3), factor(2), config) == (0.5, 0.25)


@pytest.mark.parametrize("inverse", ["eigen", "cholesky"])
def test_without_g_the_identity_stands_in_its_place(inverse):
    a, y = factor(5), torch.randn(4, 5).double()
    found = applied(invert_kronecker(a, None, settings(damping=1e-2, inverse=inverse), "layer"), y)
    expected = y @ torch.linalg.inv(a + 1e-2 * torch.eye(5, dtype=torch.float64))
    assert relative(found, expected) <= 1e-10


def test_a_diagonal():
    d = torch.rand(4, 5).double()
    found = applied(invert_diagonal(d, settings(damping=0.1), "layer"), torch.ones(4, 5).double())
    assert relative(found, 1 / (d + 0.1)) <= 1e-14


@pytest.mark.parametrize(("form", "inverse"), FORMS)
def test_condition_numbers_are_bounded(form, inverse):
    config = settings(damping=0.0, damping_form=form, inverse=inverse, max_condition_number=100.0)
    a, g = factor(6, rank=2), factor(5, rank=2)
    found = invert_kronecker(a, g, config, "layer")
    eye = torch.eye(30).double().view(30, 5, 6)
    block = torch.stack([applied(found, each).flatten() for each in eye])
    values = torch.linalg.eigvalsh(block)
    bound = 100.0 if form == "joint" else 100.0**2
    assert float(values[-1] / values[0]) <= bound * 1.01


@pytest.mark.parametrize(("form", "inverse"), FORMS)
def test_what_cannot_be_inverted_names_layer_eigenvalue_and_remedy(form, inverse):
    config = settings(damping=0.0, damping_form=form, inverse=inverse)
    with pytest.raises(
        NotInvertible, match=r"blocks\.0\.weight.*smallest eigenvalue.*Raise damping"
    ):
        invert_kronecker(torch.zeros(3, 3), factor(2).float(), config, "blocks.0.weight")
    with pytest.raises(NotInvertible, match="A of 'w' holds values that are not finite"):
        invert_kronecker(torch.full((3, 3), torch.nan), factor(2).float(), config, "w")
    with pytest.raises(NotInvertible, match="diagonal of 'w' cannot be inverted"):
        invert_diagonal(torch.zeros(3), config, "w")
    with pytest.raises(NotInvertible, match="diagonal of 'w' holds values that are not finite"):
        invert_diagonal(torch.full((3,), torch.inf), config, "w")


def test_cholesky_tries_float64_and_then_jitter():
    # Of rank one and size 1e8: float32 cannot hold the damping beside it.
    u = 1e4 * torch.ones(4, 1)
    a = u @ u.T
    config = settings(damping=(1e-3, 1.0), damping_form="factored", inverse="cholesky")
    found = invert_kronecker(a, torch.eye(2), config, "layer")
    exact = torch.linalg.inv(a.double() + 1e-3 * torch.eye(4, dtype=torch.float64))
    assert relative(found["a"].double(), exact) <= 1e-3
    # Slightly indefinite by rounding: only a jitter helps.
    a = torch.diag(torch.tensor([1.0, -1e-7]))
    config = settings(damping=(1e-9, 1.0), damping_form="factored", inverse="cholesky")
    assert torch.isfinite(invert_kronecker(a, torch.eye(2), config, "layer")["a"]).all()
    with pytest.raises(NotInvertible, match="smallest eigenvalue is -1"):
        invert_kronecker(-torch.eye(2), torch.eye(2), config, "layer")


def test_a_side_of_nothing_is_no_reason_to_fail():
    config = settings(damping=1e-2, damping_form="factored")
    found = invert_kronecker(torch.zeros(0, 0), torch.eye(2), config, "layer")
    assert applied(found, torch.zeros(2, 0)).shape == (2, 0)
