"""Per-sample gradients that are given by factors, of many layers at once: against float64."""

import contextlib
import math
from collections.abc import Callable, Sequence
from unittest import mock

import pytest
import torch
from torch import Tensor

from bench import kernel_checks
from bench.kernel_errors import Setting
from tests.harness import assert_same_bits
from tests.kernels.interpreted import as_on_cuda, interpreted
from tests.kernels.tensors import assert_all_same_bits, weights_of
from unison.kernels import factored

DTYPES = [torch.bfloat16, torch.float16]
LAYERS = [(40, 24), (136, 264), (8, 8)]  # rows, columns: of one tile and of several
# samples, tokens: less than a tile of the Gram matrix, one, three tiles, and the smaller tile
SIZES = [(3, 70), (1, 1), (1, 130), (3, 33)]
LARGE = [(1288, 520), (520, 1288), (256, 256)]  # for GPUs, with 4 samples of 300 tokens


def draw(
    layers: list[tuple[int, int]], size: tuple[int, int], dtype: torch.dtype, device: str = "cpu"
) -> tuple[list[Tensor], list[Tensor]]:
    """Lefts [batch, tokens, rows] and rights [batch, tokens, columns]."""
    gen = torch.Generator(device).manual_seed(sum(size))

    def side(features: int) -> Tensor:
        return torch.randn(*size, features, generator=gen, device=device).to(dtype)

    return [side(rows) for rows, _ in layers], [side(columns) for _, columns in layers]


def sums_of(lefts: Sequence[Tensor], rights: Sequence[Tensor], weights: Tensor) -> list[Tensor]:
    """Each lies in memory of its own, between numbers that nothing may write to."""
    memory, outs = [], []
    for left, right in zip(lefts, rights, strict=True):
        size = left.shape[2] * right.shape[2]
        memory.append(torch.full((size + 16,), 7.0, device=left.device))
        outs.append(memory[-1][8 : 8 + size].view(left.shape[2], right.shape[2]))
        outs[-1].fill_(torch.nan)
    factored.weighted_sums(lefts, rights, weights, outs)
    for each in memory:
        assert each[:8].eq(7).all()
        assert each[-8:].eq(7).all()
    return outs


@pytest.mark.parametrize("add", [False, True])
@interpreted
def test_samples_are_rounded_to_integers_one_by_one(add):
    lefts, rights = draw([(24, 40), (136, 8)], (3, 5), torch.bfloat16)
    weights = weights_of(2, 3) * 2.0**12
    found = [
        torch.full((len(x[0].T), len(y[0].T)), 5, dtype=torch.int32)
        for x, y in zip(lefts, rights, strict=True)
    ]
    with as_on_cuda():
        factored.weighted_sums(lefts, rights, weights, found, add=add)
        for left, right, row, out in zip(lefts, rights, weights, found, strict=True):
            shares = []
            for b in range(3):
                one = torch.zeros_like(out, dtype=torch.float32)
                factored.weighted_sums(
                    [left[b : b + 1]], [right[b : b + 1]], row[None, b : b + 1], [one]
                )
                shares.append(one.double().round())
            assert torch.equal(out.double(), sum(shares) + 5 * add)


def explicit(left: Tensor, right: Tensor) -> tuple[list[Tensor], Tensor]:
    """X of every sample in float64, and the masses Σ_t ‖left_t‖‖right_t‖ [batch]."""
    x, y = left.double(), right.double()
    found = [x[b].T @ y[b] for b in range(len(x))]
    return found, (x.norm(dim=2) * y.norm(dim=2)).sum(1)


def check(
    lefts: list[Tensor], rights: list[Tensor], of_norms: float = 5e-7, of_elements: float = 2e-6
) -> None:
    """Hold both kernels against float64.

    Errors of squared norms are parts of mass²; of elements, parts of their terms without signs; of
    masses and traces, which have none, parts of themselves.
    """
    batch = len(lefts[0])
    weights = weights_of(len(lefts), batch).to(lefts[0].device)
    grams = factored.grams(lefts, rights)
    squares, masses, *_ = grams
    sums = sums_of(lefts, rights, weights)
    assert all(each.dtype == torch.float64 for each in grams)
    assert all(each.shape == (len(lefts), batch) for each in grams)
    for i, (left, right) in enumerate(zip(lefts, rights, strict=True)):
        expected, mass = explicit(left, right)
        squared = torch.stack([x.square().sum() for x in expected])
        error = (squares[i] - squared).abs() / mass.square()
        assert float(error.max()) <= of_norms, (i, error)
        torch.testing.assert_close(masses[i], mass, rtol=of_elements, atol=0.0)
        for side, traces, squared in (
            (left, grams[2], grams[4]),
            (right, grams[3], grams[5]),
        ):
            gram = side.double() @ side.double().mT
            trace = gram.diagonal(dim1=1, dim2=2).sum(1)
            torch.testing.assert_close(traces[i], trace, rtol=of_elements, atol=0.0)
            torch.testing.assert_close(squared[i], gram.square().sum((1, 2)), rtol=1e-5, atol=0.0)
        own, unsigned = weights[i].double(), explicit(left.abs(), right.abs())[0]
        error = (sums[i] - torch.einsum("b,bij->ij", own, torch.stack(expected))).abs()
        assert float(error.max() / (own @ mass)) <= 2e-6, i
        terms = torch.einsum("b,bij->ij", own, torch.stack(unsigned))
        assert float((error / terms).max()) <= of_elements, i


# ---- against float64 -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
@interpreted
def test_against_float64(size, dtype):
    check(*draw(LAYERS, size, dtype))


@interpreted
def test_features_of_several_runs():
    """Of three, of two with a step that is outside; and more tiles than one group of rows."""
    check(*draw([(1288, 264), (520, 1032)], (1, 5), torch.bfloat16))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@interpreted
def test_tokens_that_cancel(dtype):
    lefts, rights = draw(LAYERS, (2, 40), dtype)
    lefts = [left.repeat(1, 2, 1) for left in lefts]
    noise = [0.01 * torch.randn(right.shape) for right in rights]
    rights = [torch.cat([y, (e - y).to(dtype)], 1) for y, e in zip(rights, noise, strict=True)]
    expected, mass = explicit(lefts[1], rights[1])
    assert float(expected[0].square().sum()) < 1e-3 * float(mass[0].square())
    check(lefts, rights)


@interpreted
def test_every_tile_of_the_gram_matrix_has_its_place():
    """Of many tokens: a root in float32 says where a tile lies."""
    left, right = torch.zeros(2, 1, 128 * 4 + 1, 8, dtype=torch.bfloat16)
    left[..., 0] = right[..., 0] = 1
    left[0, 1::2] *= -1
    squares, masses, *_ = factored.grams([left], [right])
    assert squares.tolist() == [[1.0]]
    torch.testing.assert_close(masses, torch.full_like(masses, 128 * 4 + 1), rtol=1e-12, atol=0.0)


@interpreted
def test_tokens_of_nothing_have_a_little_mass():
    """As much as sums that underflow may be off; and only tokens that are there."""
    from unison.kernels.products_triton import least_norm

    left, right = torch.zeros(2, 5, 40).bfloat16(), torch.zeros(2, 5, 24).bfloat16()
    squares, masses, *_ = factored.grams([left], [right])
    assert squares.tolist() == [[0.0, 0.0]]
    least = torch.full_like(masses, 5 * least_norm(40) * least_norm(24))
    torch.testing.assert_close(masses, least, rtol=1e-6, atol=0.0)


def laid_out(x: Tensor, layout: str) -> Tensor:
    """Return the same numbers, between others that are NaN."""
    batch, tokens, features = x.shape
    match layout:
        case "tokens cut from wider ones":
            found = x.new_full((batch, tokens, features + 24), torch.nan)[..., :features]
        case "samples with a gap":
            found = x.new_full((batch, tokens + 5, features), torch.nan)[:, :tokens]
        case "every other token":
            found = x.new_full((batch, 2 * tokens, features), torch.nan)[:, ::2]
        case "time major":
            found = x.new_empty(tokens, batch, features).transpose(0, 1)
        case _:
            raise AssertionError(layout)
    assert not found.is_contiguous()
    return found.copy_(x)


@pytest.mark.parametrize(
    "layout",
    ["tokens cut from wider ones", "samples with a gap", "every other token", "time major"],
)
@interpreted
def test_strides(layout):
    lefts, rights = draw(LAYERS, (2, 19), torch.bfloat16)
    strided = [laid_out(x, layout) for x in lefts], [laid_out(x, layout) for x in rights]
    with as_on_cuda():
        assert all(map(factored.are_taken, *strided))
    # Where numbers lie changes nothing; that they are right is tested above.
    assert_all_same_bits(factored.grams(*strided), factored.grams(lefts, rights))
    weights = weights_of(3, 2)
    assert_all_same_bits(sums_of(*strided, weights), sums_of(lefts, rights, weights))


# ---- apart from one another ----------------------------------------------------------------------


@interpreted
def test_a_layer_does_not_depend_on_the_others():
    lefts, rights = draw(LAYERS, (3, 70), torch.bfloat16)
    weights = weights_of(3, 3)
    assert not weights[0].equal(weights[1])
    norms, sums = factored.grams(lefts, rights), sums_of(lefts, rights, weights)
    for some in ([1], [2, 0]):
        few = [lefts[i] for i in some], [rights[i] for i in some]
        assert_all_same_bits(factored.grams(*few), [each[some] for each in norms])
        assert_all_same_bits(sums_of(*few, weights[some]), [sums[i] for i in some])


def spoil(lefts: Sequence[Tensor], rights: Sequence[Tensor], bad: float) -> None:
    """Put what is not finite into sample 1 of every layer, on its last token too."""
    for left, right in zip(lefts, rights, strict=True):
        left[1, 4] = bad
        right[1, -1, 3] = bad


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@interpreted
def test_a_sample_of_weight_0_is_left_out_whatever_it_holds(bad):
    lefts, rights = draw(LAYERS, (3, 70), torch.bfloat16)
    weights = weights_of(3, 3)
    weights[:, 1] = 0
    expected = sums_of(lefts, rights, weights)
    spoil(lefts, rights, bad)
    assert_all_same_bits(sums_of(lefts, rights, weights), expected)
    weights[2, 1] = 0.5  # in one layer it counts, and in the others it still does not
    *found, last = sums_of(lefts, rights, weights)
    assert_all_same_bits(found, expected[:2])
    assert not last.isfinite().all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@interpreted
def test_norms_of_the_others_are_untouched_by_a_sample_that_is_not_finite(bad):
    lefts, rights = draw(LAYERS, (3, 70), torch.float16)
    expected = factored.grams(lefts, rights)
    spoil(lefts, rights, bad)
    found = factored.grams(lefts, rights)
    assert_all_same_bits(*([each[:, [0, 2]] for each in norms] for norms in (found, expected)))
    assert not found[0][:, 1].isfinite().any()


# ---- what is taken -------------------------------------------------------------------------------


def shifted(x: Tensor) -> Tensor:
    """The same tensor one element further on."""
    memory = x.new_zeros(x.numel() + 1)
    return memory[1:].view(x.shape).copy_(x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_aligned_halves_are_taken(dtype):
    left, right = torch.zeros(2, 5, 40, dtype=dtype), torch.zeros(2, 5, 8, dtype=dtype)
    assert not factored.are_taken(left, right)  # on the CPU
    with as_on_cuda():
        assert factored.are_taken(left, right)
        assert factored.are_taken(left[:, ::2, 8:32], right[:, ::2])
        assert not factored.are_taken(left.float(), right.float())


REFUSED: dict[str, Callable[[Tensor], Tensor]] = {
    "float32": Tensor.float,
    "another dtype": Tensor.half,
    "odd features": lambda x: x[..., :12].contiguous(),
    "no features": lambda x: x[..., :0],
    "no samples": lambda x: x[:0],
    "no tokens": lambda x: x[:, :0],
    "features apart": lambda x: x.repeat(1, 1, 2)[..., ::2],
    "transposed": lambda x: x.mT.contiguous().mT,
    "samples expanded": lambda x: x[:1].expand_as(x),
    "tokens expanded": lambda x: x[:, :1].expand_as(x),
    "tokens at odd places": lambda x: x.new_zeros(2, 6, 44)[:, :5, :40],
    "samples at odd places": lambda x: x.new_zeros(2, 204)[:, :200].view(2, 5, 40),
}


@pytest.mark.parametrize("change", REFUSED)
def test_others_are_not_taken(change):
    x = torch.zeros(2, 5, 40, dtype=torch.bfloat16)
    other = REFUSED[change](x)
    # Of as many samples and tokens, as factors of one layer are.
    like = x[: other.shape[0], : other.shape[1]]
    with as_on_cuda():
        assert factored.are_taken(x, x)
        assert not factored.are_taken(other, like)
        assert not factored.are_taken(like, other)


def test_an_odd_address_is_left_for_a_copy():
    x = torch.arange(2 * 5 * 40).view(2, 5, 40).bfloat16()
    odd = shifted(x)
    with as_on_cuda():
        assert factored.are_taken(odd, x)
    assert factored.aligned(x) is x
    moved = factored.aligned(odd)
    assert_same_bits(moved, x)
    assert moved.data_ptr() % 16 == 0 < odd.data_ptr() % 16
    assert moved.stride() == odd.stride()


def test_a_gpu_that_loads_no_tiles_takes_none():
    gpu = torch.device("cuda", 0)
    with mock.patch.object(factored, "shared_bytes", return_value=160 << 10):
        for is_fast in (True, False):
            with mock.patch.object(factored, "loads_tiles", return_value=is_fast):
                assert factored._suits(gpu) == is_fast


def test_a_gpu_with_little_shared_memory_takes_none():
    x = torch.zeros(2, 5, 40, dtype=torch.bfloat16)
    with as_on_cuda(), mock.patch.object(factored, "shared_bytes", return_value=100 << 10):
        assert not factored.are_taken(x, x)


# ---- launches ------------------------------------------------------------------------------------


@interpreted
def test_runs_of_features_are_even():
    from unison.kernels import factored_triton as launch
    from unison.kernels.products_triton import run_of

    for features in range(8, 20_000, 8):
        steps, run = -(-features // launch._STEP), launch._steps_of_run(features, torch.bfloat16)
        num_runs = -(-steps // run)
        assert 0 < run * launch._STEP <= run_of(torch.bfloat16)
        assert num_runs == -(-features // run_of(torch.bfloat16))  # no more than there have to be
        assert 0 <= num_runs * run - steps < num_runs  # steps that are outside: a part of one each


@pytest.mark.parametrize("fails", [False, True])
@interpreted
def test_memory_for_descriptors_is_ours_only_meanwhile(fails):
    import triton
    from triton.runtime import _allocation

    from unison.kernels import factored_triton as launch

    def users(size: int, alignment: int, stream: int | None) -> Tensor:
        raise AssertionError

    before = _allocation._allocator.get()
    triton.set_allocator(users)
    try:
        with contextlib.suppress(KeyError), launch.scratch():
            assert _allocation._allocator.get() is launch._allocate
            if fails:
                raise KeyError
        assert _allocation._allocator.get() is users
    finally:
        triton.set_allocator(before)


@pytest.mark.parametrize(("family", "count"), [("gram", 8), ("products", 3)])
@interpreted
def test_the_bench_checks_many_layers(family, count):
    outcomes = kernel_checks.FAMILIES[family](Setting("cpu", seed=5, repeats=1), torch.bfloat16)
    mine = [each for each in outcomes if each.kernel.startswith("factored")]
    assert len(mine) == count
    assert [each for each in outcomes if not each.is_kept] == []
