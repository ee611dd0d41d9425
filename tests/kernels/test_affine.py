"""Sums for the gain and the offset of a norm: against torch's own norms in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.harness import assert_close, assert_same_bits
from tests.kernels.interpreted import interpreted

# samples, tokens, features: odd, one token, one feature, more than one part, a power of two
SHAPES = [(2, 17, 20), (2, 1, 5), (2, 3, 1), (1, 33, 129), (1, 16, 64), (0, 4, 5)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def draw(shape: tuple[int, int, int], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    gen = torch.Generator().manual_seed(sum(shape))
    x = 3 * torch.randn(shape, generator=gen) + 1
    return x.to(dtype), torch.randn(shape, generator=gen).to(dtype)


def check(x: Tensor, g: Tensor, eps: float = 1e-5) -> None:
    from unison.kernels import multi_tensor as kernels

    wide, shape = x.double(), x.shape[2:]
    for is_centred in (True, False):
        normal = (
            F.layer_norm(wide, shape, eps=eps) if is_centred else F.rms_norm(wide, shape, eps=eps)
        )
        expected = torch.stack([(g.double() * normal).sum(1), g.double().sum(1)])
        both = kernels.norm_sums(x, g, eps, is_centred=is_centred, has_offset=True)
        assert both.dtype == torch.float32
        assert_close(both, expected)
        gain = kernels.norm_sums(x, g, eps, is_centred=is_centred, has_offset=False)
        assert_same_bits(gain, both[:1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@interpreted
def test_against_torch(shape, dtype):
    check(*draw(shape, dtype))


@interpreted
def test_any_strides():
    x, g = draw((2, 5, 20))
    check(x.transpose(0, 1).contiguous().transpose(0, 1), g)
    check(x, torch.randn(2, 1, 20).expand(2, 5, 20))
    check(x[..., :13], g[..., 7:])


@interpreted
def test_an_eps_of_0():
    """Tokens past the last one are rows of zeros, of which there is no norm."""
    check(*draw((2, 5, 8)), eps=0.0)


@interpreted
def test_a_mean_far_from_0():
    from unison.kernels import multi_tensor as kernels

    x, g = draw((2, 5, 64))
    x = x + 1000
    found = kernels.norm_sums(x, g, 1e-5, is_centred=True, has_offset=False)
    expected = (g.double() * F.layer_norm(x.double(), (64,))).sum(1)
    torch.testing.assert_close(found[0].double(), expected, rtol=0.0, atol=1e-3)


@interpreted
def test_what_is_not_finite_stays_with_its_sample():
    from unison.kernels import multi_tensor as kernels

    x, g = draw((3, 17, 20))
    x[1, 16, 3] = torch.nan
    g[2, 0, 0] = torch.inf
    found = kernels.norm_sums(x, g, 1e-5, is_centred=True, has_offset=True)
    assert found.isfinite().all(2).all(0).tolist() == [True, False, False]


def test_what_the_kernel_takes():
    from unison.kernels.multi_tensor import takes_norm

    x, g = draw((3, 17, 20))
    assert not takes_norm(x, g)  # on the CPU


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@interpreted
def test_columns(dtype):
    from unison.kernels import multi_tensor_triton

    for samples, tokens, width in ((3, 17, 32), (1, 1, 1), (2, 40, 129), (2, 600, 5), (0, 4, 5)):
        g = torch.randn(samples, tokens, width).to(dtype)
        found = multi_tensor_triton.column_sums(g)
        assert found.is_contiguous()
        assert found.shape == (samples, width)
        assert_close(found, g.double().sum(1))


@interpreted
def test_no_samples():
    from unison.kernels import multi_tensor as kernels

    x = torch.randn(0, 4, 5)
    found = kernels.norm_sums(x, x, 1e-5, is_centred=True, has_offset=True)
    assert found.shape == (2, 0, 5)
