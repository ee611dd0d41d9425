"""Squares and weighted sums of per-sample gradients: compiled against plain torch and float64."""

from collections.abc import Callable
from unittest import mock

import pytest
import torch

from unison.kernels import multi_tensor
from unison.kernels import numba_kernels as compiled
from unison.kernels.multi_tensor import LEAST_ELEMENTS, squared_norms, weighted_sum


def in_plain_torch(run: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A function as it is where nothing is compiled."""

    def wrapped(*args: torch.Tensor) -> torch.Tensor:
        with mock.patch.object(multi_tensor, "_compiled_for", return_value=None):
            return run(*args)

    return wrapped


BACKENDS = {
    "reference": (in_plain_torch(squared_norms), in_plain_torch(weighted_sum)),
    "numba": (compiled.squared_norms, compiled.weighted_sum),
}
SHAPES = [(1, 1), (5, 123), (4, 512), (7, 1025), (3, LEAST_ELEMENTS + 1), (0, 9), (3, 0)]


def sample(shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_against_float64(backend, shape, dtype):
    x, kept = sample(shape, dtype), sample(shape, dtype)
    weights = torch.linspace(0.1, 1.0, shape[0], dtype=torch.float64)
    found = BACKENDS[backend][0](x)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, x.double().square().sum(1), rtol=1e-13, atol=0.0)
    out = torch.full((shape[1],), torch.nan, dtype=dtype)
    BACKENDS[backend][1](x, weights, out)
    expected = (weights @ x.double()).to(dtype)
    rtol = 2.0**-23 if dtype == torch.float32 else 1e-13
    torch.testing.assert_close(out, expected, rtol=rtol, atol=1e-13)
    assert torch.equal(x, kept)  # float64 input is not converted, and must not be written to


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_weight_0_are_left_out(backend):
    x = sample((6, 700))
    weights = torch.tensor([0.5, 0.0, 1.0, 0.0, 0.25, 0.0], dtype=torch.float64)
    is_in = weights != 0
    x[~is_in] = torch.nan
    out = torch.empty(700)
    BACKENDS[backend][1](x, weights, out)
    torch.testing.assert_close(out, (weights[is_in] @ x[is_in].double()).float())


def test_a_row_that_is_not_finite_has_a_norm_that_is_not():
    x = sample((3, LEAST_ELEMENTS))
    x[0, 5], x[1, 7] = torch.nan, torch.inf
    assert squared_norms(x).isfinite().tolist() == [False, False, True]


def test_threads_do_not_change_a_bit():
    x = sample((9, 40_000))
    weights = torch.rand(9, dtype=torch.float64)
    before, results = torch.get_num_threads(), []
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            results.append((squared_norms(x), weighted_sum(x, weights, torch.empty(40_000))))
    finally:
        torch.set_num_threads(before)
    for squares, sums in results[1:]:
        assert torch.equal(squares, results[0][0])
        assert torch.equal(sums, results[0][1])


def test_halves_go_through_plain_torch():
    x = sample((4, LEAST_ELEMENTS), torch.bfloat16)
    torch.testing.assert_close(squared_norms(x), x.double().square().sum(1))
