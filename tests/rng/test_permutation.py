import itertools
import math

import numpy as np
import pytest
import torch
from scipy import stats

from unison.errors import BadInput
from unison.kernels.random import apply_rounds, using_backend
from unison.rng import Cipher, Key, Permutation, Stream


def permutation(n: int, seed: int = 0) -> Permutation:
    return Permutation(Stream(Key.from_seed(seed), "shuffle"), n)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 7, 9, 15, 25, 31, 101, 1001, 4096, 4097, 65_537])
def test_bijection(n):
    p = permutation(n)
    indices = torch.arange(n)
    images = p(indices)
    assert torch.equal(images.sort().values, indices)
    assert torch.equal(p.inverse(images), indices)


@pytest.mark.parametrize("n", [10**9, 10**9 + 7, 2**40 + 1, 2**62])
def test_spot_checks_on_many_rows(n):
    p = permutation(n)
    indices = torch.randint(0, n, (2000,), generator=torch.Generator().manual_seed(0)).unique()
    images = p(indices)
    assert int(images.min()) >= 0
    assert int(images.max()) < n
    assert len(images.unique()) == len(indices)
    assert torch.equal(p.inverse(images), indices)
    assert torch.equal(p(indices[10:20]), images[10:20])
    # Neighbours go far apart, and places are uniform.
    consecutive = p(torch.arange(n // 2, n // 2 + 2000)).double() / n
    assert stats.kstest(consecutive.numpy(), "uniform").pvalue > 1e-4
    lag = np.corrcoef(consecutive[1:].numpy(), consecutive[:-1].numpy())[0, 1]
    assert abs(lag) < 4 / math.sqrt(2000)


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6])
def test_every_order_is_equally_likely(n):
    torch.set_num_threads(1)  # the tensors are too small to share; undone after the test
    num_keys = 8000
    p = permutation(n)
    keys = torch.randint(0, 1 << 32, (4, num_keys, 1), generator=torch.Generator().manual_seed(n))
    network = list(keys), p.sides  # one key to a row
    images = apply_rounds(torch.arange(n).expand(num_keys, n), *network)
    while bool((images >= n).any()):
        images = torch.where(images >= n, apply_rounds(images, *network), images)
    codes = (images * n ** torch.arange(n)).sum(1)
    found, counts = codes.unique(return_counts=True)
    assert len(found) == len(list(itertools.permutations(range(n))))
    assert stats.chisquare(counts.numpy()).pvalue > 1e-4


@pytest.mark.parametrize("n", [1, 2, 7, 1000, 10**9 + 7, 2**62])
def test_backends_are_equal(n):
    p = permutation(n)
    indices = torch.randint(0, n, (3000,), generator=torch.Generator().manual_seed(1))
    results = []
    for backend in ("reference", "numba"):
        with using_backend(backend):
            results.append((p(indices), p.inverse(indices)))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_operation_passes_opcheck():
    words = torch.tensor([1, 2, 3, 4])
    torch.library.opcheck(
        torch.ops.unison.permute.default, (torch.arange(9), words, 9, [4, 3], False)
    )


def test_streams_give_different_orders():
    key = Key.from_seed(0)
    orders = [
        Permutation(Stream(key, "shuffle", step), 1000)(torch.arange(1000)) for step in (0, 1)
    ]
    assert not torch.equal(*orders)


def test_shapes_and_errors():
    p = permutation(10)
    assert p(torch.arange(6).view(2, 3)).shape == (2, 3)
    assert p(torch.empty(0, dtype=torch.int64)).shape == (0,)
    assert len(p) == 10
    for bad in (torch.tensor([10]), torch.tensor([-1]), torch.tensor([1.0])):
        with pytest.raises(BadInput):
            p(bad)
    for n in (0, 2**62 + 1):
        with pytest.raises(BadInput, match="n="):
            permutation(n)
    with pytest.raises(BadInput, match="Philox"):
        Permutation(Stream(Key.from_seed(0), "s", cipher=Cipher.CHACHA20), 5)
