import itertools
import math

import pytest
import torch

from unison.errors import BadInput
from unison.rng import Cipher, Key, Stream, poisson_sample

KEY = Key.from_seed(21)


def membership(step: int) -> Stream:
    return Stream(KEY, "records", step, "sampling", Cipher.CHACHA20)


def test_whole_equals_any_partition():
    whole = poisson_sample(membership(0), 10**6, 1e-3)
    for cuts in ([0, 500_000, 10**6], [0, 1, 333_333, 333_334, 999_999, 10**6]):
        pairs = itertools.pairwise(cuts)
        parts = [poisson_sample(membership(0), 10**6, 1e-3, start=a, stop=b) for a, b in pairs]
        assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(whole, whole.unique())


def check_inclusion(num_records: int, num_steps: int, q: float) -> None:
    sizes, seen = [], torch.zeros(num_records, dtype=torch.int64)
    for step in range(num_steps):
        chosen = poisson_sample(membership(step), num_records, q)
        seen[chosen] += 1
        sizes.append(len(chosen))
    deviation = math.sqrt(num_records * num_steps * q * (1 - q))
    assert abs(sum(sizes) - num_records * num_steps * q) < 4 * deviation
    # Batch sizes vary as a binomial: a fixed size would betray membership.
    spread = torch.tensor(sizes, dtype=torch.float64).var() / (num_records * q * (1 - q))
    assert abs(float(spread) - 1) < 4 * math.sqrt(2 / num_steps)
    # And records are equally likely: counts of inclusion have the variance of a binomial.
    counts = seen.double()
    ratio = float(counts.var()) / (num_steps * q * (1 - q))
    excess = (1 - 6 * q * (1 - q)) / (num_steps * q * (1 - q))
    assert abs(ratio - 1) < 4 * math.sqrt((2 + excess) / num_records)


def test_inclusion_frequency():
    check_inclusion(50_000, 200, 1e-2)


@pytest.mark.full
def test_inclusion_frequency_of_a_million_records_over_a_thousand_steps():
    check_inclusion(10**6, 1000, 1e-3)


def test_ends_and_errors():
    assert len(poisson_sample(membership(0), 1000, 0.0)) == 0
    assert len(poisson_sample(membership(0), 1000, 1.0)) == 1000
    assert len(poisson_sample(membership(0), 0, 0.5)) == 0
    with pytest.raises(BadInput, match="start <= stop"):
        poisson_sample(membership(0), 10, 0.5, start=4, stop=3)
    with pytest.raises(BadInput, match="between 0 and 1"):
        poisson_sample(membership(0), 10, 1.5)
