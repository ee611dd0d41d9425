"""Where K-FAC is exact, its step is that of the dense Gauss–Newton matrix, inverted."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import unison
from tests.kfac.common import Transformer, relative, settings

DAMPING = 1e-3


def dense_ggn(model: nn.Module, names: list[str], x: Tensor, kind: str) -> Tensor:
    """The mean over labels of J'HJ for some parameters: brute force."""
    parameters = dict(model.named_parameters())
    chosen = {name: parameters[name].detach() for name in names}
    fixed = {name: p.detach() for name, p in parameters.items() if name not in names}

    def run(chosen: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, {**fixed, **chosen}, (x,))

    outputs = run(chosen)
    jacobian = torch.func.jacrev(run)(chosen)
    flat = torch.cat([jacobian[name].flatten(outputs.ndim) for name in names], dim=-1)
    classes, size = outputs.shape[-1], flat.shape[-1]
    total = torch.zeros(size, size, dtype=torch.float64)
    for z, j in zip(outputs.reshape(-1, classes), flat.flatten(0, -3), strict=True):
        p = z.softmax(-1)
        hessian = torch.eye(classes) if kind == "gaussian" else p.diag() - torch.outer(p, p)
        total += j.T @ hessian.double() @ j
    return total / outputs[..., 0].numel()


def check(
    model: nn.Module, module: str, x: Tensor, kind: str = "gaussian", sharing: str = "expand"
) -> None:
    """The preconditioned gradient of one linear layer against a dense solve."""
    names = [name for name, _ in model.named_parameters() if name.startswith(module + ".")]
    config = settings(
        fisher="exact",
        likelihood=kind,
        sharing=sharing,
        damping=DAMPING,
        damping_form="joint",
        graft="none",
    )
    kfac = unison.KFAC(model, config)
    logits = model(x)
    kfac.sample(logits).backward()
    # Of the likelihood's kind: one that is not is warned of.
    is_class = kfac.config.likelihood == "categorical"
    (logits.log_softmax(-1) if is_class else logits).square().sum().backward()
    parameters = dict(model.named_parameters())
    gradient = torch.cat([parameters[name].grad.flatten() for name in names])
    kfac.step()
    found = torch.cat([parameters[name].grad.flatten() for name in names])
    ggn = dense_ggn(model, names, x, kind)
    expected = torch.linalg.solve(
        ggn + DAMPING * torch.eye(len(ggn), dtype=torch.float64), gradient
    )
    assert relative(found, expected) <= 1e-11
    kfac.detach()


def linear() -> nn.Module:
    return nn.Linear(5, 4).double()


def deep_linear() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 4, bias=False), nn.Linear(4, 3)).double()


def tanh() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4)).double()


def zeros() -> nn.Module:
    model = nn.Linear(5, 4).double()
    nn.init.zeros_(model.weight)
    return model


class Named(nn.Module):
    """A layer with a name of its own."""

    def __init__(self, inner: nn.Module, pools: bool = False) -> None:
        super().__init__()
        self.inner, self.pools = inner, pools

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return y.mean(dim=1) if self.pools else y


ROWS = (7, 5)
CASES: dict[str, tuple[Callable[[], nn.Module], str, tuple[int, ...], str, str]] = {
    "linear, squared error": (linear, "inner", ROWS, "gaussian", "expand"),
    "deep linear, first": (deep_linear, "inner.0", ROWS, "gaussian", "expand"),
    "deep linear, middle": (deep_linear, "inner.1", ROWS, "gaussian", "expand"),
    "deep linear, last": (deep_linear, "inner.2", ROWS, "gaussian", "expand"),
    "tokens, squared error": (linear, "inner", (4, 3, 5), "gaussian", "expand"),
    "tanh, last": (tanh, "inner.2", ROWS, "gaussian", "expand"),
    "one sample, first": (tanh, "inner.0", (1, 5), "categorical", "expand"),
    "one sample, last": (tanh, "inner.2", (1, 5), "categorical", "expand"),
    "equal probabilities": (zeros, "inner", ROWS, "categorical", "expand"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_exact_cases(case):
    make, module, shape, kind, sharing = CASES[case]
    check(Named(make()), module, torch.randn(shape).double(), kind, sharing)


def test_pooled_tokens_are_exact_with_reduce():
    check(Named(linear(), pools=True), "inner", torch.randn(6, 3, 5).double(), sharing="reduce")


def test_the_head_of_a_transformer():
    check(Transformer().double(), "head", torch.randint(0, 11, (3, 4)))


def test_the_wrong_flavour_is_not_exact():
    with pytest.raises(AssertionError):
        check(Named(linear(), pools=True), "inner", torch.randn(6, 3, 5).double())
