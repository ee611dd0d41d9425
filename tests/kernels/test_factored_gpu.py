"""Per-sample gradients of many layers that are given by factors: compiled, on a GPU."""

import math

import pytest
import torch
from torch import Tensor

from tests.harness import assert_same_bits
from tests.kernels.tensors import assert_all_same_bits, weights_of
from tests.kernels.test_factored import DTYPES, LARGE, LAYERS, check, draw, spoil, sums_of
from unison.kernels import factored

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [(4, 300), (1, 1), (3, 33)], ids=str)
def test_against_float64_on_a_gpu(size, dtype):
    lefts, rights = draw([*LARGE, *LAYERS], size, dtype, "cuda")
    assert all(map(factored.are_taken, lefts, rights))
    check(lefts, rights, of_norms=1e-5, of_elements=1e-5)


def test_what_is_not_finite_stays_where_it_is_on_a_gpu():
    lefts, rights = draw(LARGE, (4, 300), torch.bfloat16, "cuda")
    weights = weights_of(3, 4).cuda()
    weights[:, 1] = 0
    norms, sums = factored.grams(lefts, rights), sums_of(lefts, rights, weights)
    spoil(lefts, rights, math.nan)
    found = factored.grams(lefts, rights)
    assert_all_same_bits(*([each[:, [0, 2, 3]] for each in some] for some in (found, norms)))
    assert_all_same_bits(sums_of(lefts, rights, weights), sums)


def test_the_same_bits_in_every_run():
    lefts, rights = draw(LARGE, (4, 300), torch.bfloat16, "cuda")
    weights = weights_of(3, 4).cuda()
    norms, sums = factored.grams(lefts, rights), sums_of(lefts, rights, weights)
    for _ in range(19):
        assert_all_same_bits(factored.grams(lefts, rights), norms)
        assert_all_same_bits(sums_of(lefts, rights, weights), sums)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_have_the_bits_of_a_layer_alone(dtype):
    from unison.kernels import products_triton as products

    lefts, rights = draw(LARGE, (4, 300), dtype, "cuda")
    weights = weights_of(3, 4).cuda()
    weights[0, 2] = 0
    for i, found in enumerate(sums_of(lefts, rights, weights)):
        alone = torch.empty_like(found)
        products.weighted(lefts[i], rights[i], weights[i], alone, "ieee", add=False)
        assert_same_bits(found, alone)


def test_a_recorded_launch_is_the_launch():
    from unison.kernels.multi_tensor import Tables, tables_kept

    lefts, rights = draw(LARGE, (4, 300), torch.bfloat16, "cuda")
    weights = weights_of(3, 4).cuda()
    outs = [torch.zeros(size, device="cuda") for size in LARGE]

    def run() -> tuple[Tensor, ...]:
        norms = factored.grams(lefts, rights)
        factored.weighted_sums(lefts, rights, weights, outs)
        return (*norms, *outs)

    graph, tables = torch.cuda.CUDAGraph(), Tables(lefts[0].device)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()  # kernels are compiled
        with tables_kept(tables), torch.cuda.graph(graph, stream=stream):
            found = run()
    tables.fill()
    torch.cuda.current_stream().wait_stream(stream)
    for seed in range(3):  # other numbers at the same places
        torch.manual_seed(seed)
        for x in (*lefts, *rights):
            x.normal_()
        weights.uniform_(0.1, 1.0)
        expected = [each.clone() for each in run()]
        for each in outs:
            each.fill_(torch.nan)
        graph.replay()
        assert_all_same_bits(found, expected)
