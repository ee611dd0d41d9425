"""Who owns which layer, and how symmetric matrices travel."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unison.kfac.factors import packed, triangle_size, unpacked
from unison.kfac.layers import assign, source_of

COSTS = st.lists(st.floats(0, 1e12), max_size=40)


@given(COSTS, st.integers(1, 9), st.floats(0, 1))
def test_every_layer_has_as_many_owners(costs, num_ranks, fraction):
    found = assign(costs, num_ranks, fraction)
    expected = min(num_ranks, max(1, round(fraction * num_ranks)))
    for own in found:
        assert len(set(own)) == len(own) == expected
        assert set(own) <= set(range(num_ranks))
    for layer in range(len(costs)):
        for rank in range(num_ranks):
            source = source_of(found[layer], rank)
            assert source in found[layer]
            assert source == rank or rank not in found[layer]


@given(COSTS, st.integers(1, 9))
def test_no_rank_does_much_more_than_its_share(costs, num_ranks):
    found = assign(costs, num_ranks, 0.0)
    load = [0.0] * num_ranks
    for (owner,), cost in zip(found, costs, strict=True):
        load[owner] += cost
    # The bound of giving the dearest first: 4/3 of the best, which is at least both of these.
    best = max([sum(costs) / num_ranks, *costs, *_second(costs, num_ranks)], default=0.0)
    assert max(load) <= 4 / 3 * best * (1 + 1e-9) + 1e-9


def _second(costs: list[float], num_ranks: int) -> list[float]:
    """With one layer more than ranks, two of the dearest share a rank."""
    dear = sorted(costs, reverse=True)
    return [dear[num_ranks - 1] + dear[num_ranks]] if len(dear) > num_ranks else []


@pytest.mark.parametrize("n", [0, 1, 2, 7])
def test_matrices_come_back_as_they_were(n):
    u = torch.randn(n, n + 1)
    matrix = u @ u.T
    matrix = (matrix + matrix.T) / 2
    vector = packed(matrix)
    assert vector.shape == (triangle_size(n),) == (n * (n + 1) // 2,)
    assert torch.equal(unpacked(vector, n), matrix)
