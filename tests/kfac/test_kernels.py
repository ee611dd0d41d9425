"""The kernels of K-FAC: interpreted against float64, and compiled for an H100 or H200."""

import json

import pytest
import torch

from tests.kernels.interpreted import interpreted, printed_by
from tests.kfac.common import relative


def positive(batch: int, n: int, seed: int = 0) -> torch.Tensor:
    """Symmetric matrices [batch, n, n] in float64, with condition numbers of a few hundred."""
    u = torch.randn(batch, n, 2 * n, generator=torch.Generator().manual_seed(seed)).double()
    return u @ u.mT / max(n, 1) + 0.01 * torch.eye(n).double()


@pytest.mark.parametrize("n", [130, 63, 65, 64, 1])
@interpreted
def test_inverses_of_factors_in_their_place(n):
    from unison.kernels.kfac_triton import invert_factors_

    matrices = positive(3, n)
    expected = torch.linalg.inv(torch.linalg.cholesky(matrices))
    around = torch.full((3, n + 8, n + 12), torch.nan)
    place = around[:, 4 : 4 + n, 8 : 8 + n]
    is_below = torch.ones(n, n).tril().bool()
    place.copy_(torch.where(is_below, matrices.float(), torch.nan))  # the rest is not read
    info = invert_factors_(place)
    assert info.tolist() == [0, 0, 0]
    assert relative(place.double(), expected) <= 2e-6
    assert not place[:, ~is_below].any()
    place.fill_(torch.nan)
    assert around.isnan().all()  # nothing beside it was written
    assert len(invert_factors_(place[:0])) == 0


@interpreted
def test_matrices_without_a_factor_are_told_apart():
    from unison.kernels.kfac_triton import invert_factors_

    matrices = torch.eye(70).repeat(5, 1, 1)
    for number, value in ((1, -1.0), (2, torch.nan), (3, torch.inf)):
        matrices[number, 66, 66] = value
    assert invert_factors_(matrices).tolist() == [0, 1, 1, 1, 0]
    assert torch.equal(matrices[4], torch.eye(70))


@interpreted
def test_inverses_made_of_the_kernels_blocks():
    from unison.kfac import linalg

    linalg.BATCH_LEAF, before = 128, linalg.BATCH_LEAF
    known, linalg.takes = linalg.takes, lambda *values: True
    try:
        matrices = list(positive(2, 150).float())
        matrices[1] = matrices[1][:149, :149]
        found, is_right = linalg.inverses_of_positive(matrices, [0.1, 1.0], 152)
    finally:
        linalg.BATCH_LEAF, linalg.takes = before, known
    assert is_right.tolist() == [True, True]
    for own, matrix, damping in zip(found, matrices, (0.1, 1.0), strict=True):
        exact = torch.linalg.inv(matrix.double() + damping * torch.eye(len(matrix)).double())
        assert relative(own.double(), exact) <= 1e-5


def in_rows(rows: int, columns: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix and the column after it, of rows that are `width` elements apart."""
    whole = torch.randn(rows, width)
    return whole[:, :columns], whole[:, columns]


@pytest.mark.parametrize("is_held", [None, 0.0, 1.0])
@interpreted
def test_averages_that_lie_in_rows_are_adams(is_held):
    from unison.kernels import kfac_triton, multi_tensor

    torch.manual_seed(0)
    means = [
        *in_rows(40, 264, 272),  # loaded wide, and its bias not
        *in_rows(5, 3, 8),
        in_rows(6, 12, 16)[0].view(6, 4, 3),
        torch.randn(512),
        torch.randn(7),
        torch.randn(0, 2),
    ]
    gradients = [torch.randn(each.shape) for each in means]
    variances = [torch.rand(each.shape) for each in means]
    own = [each.clone() for each in (*means, *variances)]
    flag = None if is_held is None else torch.tensor(is_held)
    settings = (5, (0.8, 0.9), 1e-3, flag)
    expected = multi_tensor.moments(gradients, own[: len(means)], own[len(means) :], *settings)
    found = kfac_triton.moments(gradients, means, variances, *settings)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0.0)
    for each, wanted in zip((*means, *variances), own, strict=True):
        torch.testing.assert_close(each, wanted, rtol=1e-6, atol=1e-7)
    # What lies behind the rows is as it was.
    torch.manual_seed(0)
    before, after = torch.randn(40, 272)[:, 265:], means[0]._base
    assert after is not None
    assert torch.equal(after[:, 265:], before)


@pytest.mark.parametrize("classes", [1, 37, 256, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@interpreted
def test_drawn_labels_are_those_of_probabilities(classes, dtype):
    from unison.kernels import kfac_triton
    from unison.kfac.labels import drawn_classes

    torch.manual_seed(0)
    kfac_triton.BLOCK = 256
    z = (3 * torch.randn(2, 6, classes + 3)).to(dtype)[..., :classes]
    u = torch.rand(2, 6, dtype=torch.float64)
    if classes > 10:  # none of probability 0 is drawn, at neither end
        z[0, 0, :3] = z[1, 1, -3:] = z[1, 2, 255 : min(260, classes)] = -torch.inf
        u[0, 0], u[1, 1] = 0.0, 1 - 2.0**-53
    gradient = kfac_triton.drawn(z, u)
    p = torch.softmax(z.double(), dim=-1)
    y = drawn_classes(p, u).unsqueeze(-1)
    assert (p.gather(-1, y) > 0).all()
    expected = p.scatter_add(-1, y, torch.full(y.shape, -1.0).double())
    assert gradient.dtype == dtype
    assert gradient.shape == z.shape
    # The interpreter cuts bits off; the compiled kernel rounds, see below.
    tolerance = 2.0**-8 if dtype == torch.bfloat16 else 1e-6
    assert relative(gradient.double(), expected) <= tolerance
    z[0, 3, 0] = torch.nan
    is_bad = kfac_triton.drawn(z, u).isnan().all(dim=-1)
    assert is_bad.nonzero().tolist() == [[0, 3]]
    assert kfac_triton.drawn(z[:0], u[:0]).shape == (0, 6, classes)


@interpreted
def test_labels_are_drawn_as_often_as_they_are_probable():
    from unison.kernels.kfac_triton import drawn

    z = torch.tensor([0.1, 0.0, 0.4, 0.2, 0.3]).log().expand(2, 50, 5)
    u = (torch.arange(100, dtype=torch.float64) + 0.5).view(2, 50) / 100
    counts = (drawn(z, u) < 0).sum(dim=(0, 1))
    assert (counts - torch.tensor([10, 0, 40, 20, 30])).abs().max() <= 1


COMPILED = """
import json
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

def compiled(kernel, options, types, **constants):
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32")
        for name in kernel.arg_names
    }
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    made = triton.compile(
        ASTSource(kernel, signature, places), target=GPUTarget("cuda", 90, 32), options=options
    )
    ptx = made.asm["ptx"]
    return {"atomic": ptx.count("atom."), "shared": made.metadata.shared,
            "barriers": ptx.count("bar.sync"), "wide": ptx.count("ld.global.v4"),
            "rounded": ptx.count("cvt.rn.bf16")}

def cases():
    from unison.kernels import kfac_triton
    yield kfac_triton.invert_factors_kernel, {"num_warps": 8, "num_stages": 1}, {
        "matrices": "*fp32", "lowers": "*fp32", "infos": "*i32"}, {"TILE": kfac_triton.TILE}
    yield kfac_triton.drawn_kernel, {"num_warps": 8}, {
        "logits": "*bf16", "uniforms": "*fp64", "out": "*bf16"}, {"BLOCK": kfac_triton.BLOCK}
    types = {"table": "*i64", "tensors": "*i32", "first_tiles": "*i64", "squares": "*fp32",
             "is_held": "*fp32", "beta1": "fp32", "beta2": "fp32", "scale1": "fp32",
             "scale2": "fp32", "eps": "fp32"}
    height, length = kfac_triton._LONG
    yield kfac_triton.moments_kernel, {"num_warps": 8}, types, {
        "HAS_FLAG": True, "ALIGNED": True, "HEIGHT": height, "LENGTH": length}

print(json.dumps({kernel.__name__: compiled(kernel, options, types, **constants)
                  for kernel, options, types, constants in cases()}))
"""


@pytest.mark.full
def test_all_kernels_compile():
    found = json.loads(printed_by(COMPILED).splitlines()[-1])
    for name, counts in found.items():
        assert counts["atomic"] == 0, name
        assert counts["shared"] <= 227 << 10, name
    assert found["invert_factors_kernel"]["barriers"] > 0
    assert found["moments_kernel"]["wide"] > 0
    assert found["drawn_kernel"]["rounded"] > 0
