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
    from unison.kernels import affine as kernels

    wide, shape = x.double(), x.shape[2:]
    for is_centred in (True, False):
        normal = (
            F.layer_norm(wide, shape, eps=eps) if is_centred else F.rms_norm(wide, shape, eps=eps)
        )
        expected = torch.stack([(g.double() * normal).sum(1), g.double().sum(1)], 1)
        both = kernels.sums(x, g, eps, is_centred=is_centred, has_offset=True)
        assert both.dtype == torch.float32
        assert_close(both, expected)
        gain = kernels.sums(x, g, eps, is_centred=is_centred, has_offset=False)
        assert_same_bits(gain, both[:, :1].contiguous())


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
    from unison.kernels import affine as kernels

    x, g = draw((2, 5, 64))
    x = x + 1000
    found = kernels.sums(x, g, 1e-5, is_centred=True, has_offset=False)
    expected = (g.double() * F.layer_norm(x.double(), (64,))).sum(1)
    torch.testing.assert_close(found[:, 0].double(), expected, rtol=0.0, atol=1e-3)


@interpreted
def test_what_is_not_finite_stays_with_its_sample():
    from unison.kernels import affine as kernels

    x, g = draw((3, 17, 20))
    x[1, 16, 3] = torch.nan
    g[2, 0, 0] = torch.inf
    found = kernels.sums(x, g, 1e-5, is_centred=True, has_offset=True)
    assert found.flatten(1).isfinite().all(1).tolist() == [True, False, False]


def test_what_the_kernel_takes():
    from unison.kernels import affine

    x, g = draw((3, 17, 20))
    assert not affine.is_taken(x, g)  # on the CPU


@pytest.mark.parametrize(
    ("widths", "dtype"),
    [
        ((32, 5, 129, 64), torch.bfloat16),
        ((7,), torch.float16),
        ((1 << 5, 2, 3, 40, 33, 31, 2, 96), torch.float32),
        pytest.param((20,) * 8, torch.bfloat16, marks=pytest.mark.full),
    ],
    ids=str,
)
@interpreted
def test_columns_of_many(widths, dtype):
    """Every number of tensors, each with programs of its own: the bits of single launches."""
    from unison.kernels import affine as kernels

    for samples, tokens in ((3, 17), (1, 1), (2, 40)):
        gs = [torch.randn(samples, tokens, width).to(dtype) for width in widths]
        found = kernels.column_sums_of_many(gs)
        assert [each.is_contiguous() for each in found] == [True] * len(gs)
        for each, g in zip(found, gs, strict=True):
            assert_same_bits(each, kernels.column_sums(g))
            assert_close(each, g.double().sum(1))


@pytest.mark.parametrize(
    ("count", "is_centred", "has_offset"),
    [
        (1, True, True),
        (3, False, False),
        *[
            pytest.param(8, is_centred, has_offset, marks=pytest.mark.full)
            for is_centred in (True, False)
            for has_offset in (True, False)
        ],
    ],
)
@interpreted
def test_sums_of_many(count, is_centred, has_offset):
    from unison.kernels import affine as kernels

    options = {"is_centred": is_centred, "has_offset": has_offset}
    for shape in ((2, 17, 20), (1, 1, 5)):
        xs = [torch.randn(shape).bfloat16() for _ in range(count)]
        gs = [torch.randn(shape).bfloat16() for _ in range(count)]
        found = kernels.sums_of_many(xs, gs, 1e-5, **options)
        assert all(each.is_contiguous() for each in found)
        single = [kernels.sums(x, g, 1e-5, **options) for x, g in zip(xs, gs, strict=True)]
        expected = [part.contiguous() for each in single for part in each.unbind(1)]
        for left, right in zip(found, expected, strict=True):
            assert_same_bits(left, right)


@interpreted
def test_many_of_no_samples():
    from unison.kernels import affine as kernels

    x = torch.randn(0, 4, 5)
    found = kernels.sums_of_many([x], [x], 1e-5, is_centred=True, has_offset=True)
    assert [each.shape for each in found] == [(0, 5), (0, 5)]
    assert kernels.column_sums_of_many([x, x])[1].shape == (0, 5)
