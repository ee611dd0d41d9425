"""Statistics with fixed keys: a failure is a change, never bad luck."""

import math
import random
from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy import stats

from unison.errors import BadInput
from unison.rng import (
    Cipher,
    Key,
    Stream,
    bernoulli,
    integers,
    normal,
    secure_normal,
    truncated_normal,
    uniform,
)
from unison.rng.streams import drawn_probability

QUICK, FULL = 10**6, 10**7


def stream(seed: int, name: str = "w", cipher: Cipher = Cipher.PHILOX) -> Stream:
    return Stream(Key.from_seed(seed), name, cipher=cipher)


# Draws as float64 and the cumulative distribution they should have.
CONTINUOUS = {
    "uniform": (lambda s, n: uniform(s, (n,), -1.0, 3.0), stats.uniform(-1, 4)),
    "uniform64": (lambda s, n: uniform(s, (n,), dtype=torch.float64), stats.uniform()),
    "normal": (lambda s, n: normal(s, (n,), 0.5, 2.0), stats.norm(0.5, 2.0)),
    "truncated": (lambda s, n: truncated_normal(s, (n,)), stats.truncnorm(-2, 2)),
    "truncated_side": (
        lambda s, n: truncated_normal(s, (n,), 1.0, 0.5, 1.2, 4.0),
        stats.truncnorm(0.4, 6.0, loc=1.0, scale=0.5),
    ),
    "secure": (lambda s, n: secure_normal(s, (n,), 1.5), stats.norm(0, 1.5)),
}


def cipher_of(name: str) -> Cipher:
    return Cipher.CHACHA20 if name == "secure" else Cipher.PHILOX


def check_continuous(name: str, seed: int, n: int) -> None:
    draw, law = CONTINUOUS[name]
    x = draw(stream(seed, cipher=cipher_of(name)), n).double().numpy()
    other = draw(stream(seed, "other", cipher_of(name)), n).double().numpy()
    mean, variance = float(law.mean()), float(law.var())
    kurtosis = float(law.stats(moments="k"))
    scaled = (x - mean) / math.sqrt(variance)
    # Each figure in units of its own standard deviation.
    assert abs(scaled.mean()) * math.sqrt(n) < 4
    assert abs(scaled.var() - 1) / math.sqrt((kurtosis + 2) / n) < 4
    assert abs(np.mean(scaled[1:] * scaled[:-1])) * math.sqrt(n) < 4
    assert abs(np.mean(scaled * (other - mean)) / math.sqrt(variance)) * math.sqrt(n) < 4
    x.sort()
    cdf = law.cdf(x)
    steps = np.arange(n + 1) / n
    distance = max(np.abs(cdf - steps[1:]).max(), np.abs(cdf - steps[:-1]).max())
    assert stats.kstwobign.sf(distance * math.sqrt(n)) > 1e-4


@pytest.mark.parametrize("name", CONTINUOUS)
@pytest.mark.parametrize("seed", [1, 2])
def test_moments_correlations_and_ks(name, seed):
    check_continuous(name, seed, QUICK)


@pytest.mark.full
@pytest.mark.parametrize("name", CONTINUOUS)
@pytest.mark.parametrize("seed", [3, 4, 5])
def test_moments_correlations_and_ks_on_ten_million(name, seed):
    check_continuous(name, seed, FULL)


def check_discrete(seed: int, n: int) -> None:
    for probability in (1e-3, 0.3, 0.5):
        hits = bernoulli(stream(seed, cipher=Cipher.CHACHA20), (n,), probability)
        deviation = math.sqrt(n * probability * (1 - probability))
        assert abs(int(hits.sum()) - n * probability) / deviation < 4
        lagged = (hits[1:] & hits[:-1]).double().mean() - probability**2
        assert abs(float(lagged)) < 4 * math.sqrt(probability**2 * 1.1 / n) + 4 / n
    for low, high in ((0, 7), (-50, 50), (0, 1000)):
        drawn = integers(stream(seed), (n,), low, high)
        counts = torch.bincount(drawn - low, minlength=high - low).double().numpy()
        assert stats.chisquare(counts).pvalue > 1e-4


@pytest.mark.parametrize("seed", [1, 2])
def test_bernoulli_and_integers(seed):
    check_discrete(seed, QUICK)


@pytest.mark.full
@pytest.mark.parametrize("seed", [3, 4, 5])
def test_bernoulli_and_integers_on_ten_million(seed):
    check_discrete(seed, FULL)


def test_tails_of_secure_normals():
    n = 4_000_000
    x = secure_normal(stream(1, cipher=Cipher.CHACHA20), (n,), 1.0).abs()
    for bound in (2.0, 3.0, 4.0, 5.0):
        expected = n * 2 * stats.norm.sf(bound)
        assert abs(int((x > bound).sum()) - expected) < 4 * math.sqrt(expected) + 1


def test_drawn_probabilities_are_what_the_threshold_says():
    generator = random.Random(0)
    for q in (0.0, 1.0, 0.5, 2.0**-64, *(generator.random() ** 9 for _ in range(300))):
        drawn = Fraction(math.floor(Fraction(q) * 2**63), 2**63)
        assert Fraction(drawn_probability(q)) == drawn
        assert q < 2.0**-11 or drawn == Fraction(q)


def test_tiny_probabilities_are_exact():
    # The threshold, not the luck of a sample: floor(q · 2^63) of 2^63 draws count.
    from unison.kernels.random import Distribution, Recipe, draw

    for q in (1e-6, 2.0**-63, 0.5, 1.0 - 2.0**-53):
        count = math.floor(q * 2**63)
        for value, expected in ((count - 1, True), (count, False)):
            if value >= 1 << 63:
                continue
            words = torch.tensor([[value >> 31], [(value << 1) & 0xFFFFFFFF]])
            recipe = Recipe(Cipher.CHACHA20, (), Distribution.BERNOULLI, (), (count - 1,))
            assert bool(draw(recipe, words, torch.bool)) is expected
    assert not bernoulli(stream(0), (10_000,), 0.0).any()
    assert bernoulli(stream(0), (10_000,), 1.0).all()


def test_integers_are_the_exact_scaled_product():
    from unison.kernels.random import scale_128

    words = torch.randint(0, 1 << 32, (4, 500), generator=torch.Generator().manual_seed(0))
    words[:, 0], words[:, 1] = 0, (1 << 32) - 1
    r = [sum(int(w) << (96 - 32 * i) for i, w in enumerate(column)) for column in words.t()]
    for n in (1, 2, 3, 1000, 2**31 + 1, 2**32, 2**40 + 7, 2**62 + 12345, 2**63 - 1):
        assert scale_128(words, n).tolist() == [(x * n) >> 128 for x in r]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-0.1, 0.3), (-3.0, -1.0), (0.9, 1.1)])
def test_uniform_never_leaves_the_interval(dtype, low, high):
    x = uniform(stream(2), (300_000,), low, high, dtype=dtype).double()
    assert float(x.min()) >= low
    assert float(x.max()) < high


def test_uniform_at_its_highest_word_stays_below_high():
    from unison.kernels.random import Distribution, Recipe, draw

    drawn = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        at = torch.tensor(1.0, dtype=dtype)
        top = float(torch.nextafter(at, torch.tensor(0.0, dtype=dtype)))
        recipe = Recipe(Cipher.PHILOX, (), Distribution.UNIFORM24, (0.0, 1.0, 0.0, top))
        drawn[dtype] = float(draw(recipe, torch.tensor([[0xFFFFFFFF]]), dtype))
    assert all(value < 1 for value in drawn.values()), drawn


def test_uniform_of_width_zero_and_impossible_ranges():
    assert (uniform(stream(0), (5,), 2.0, 2.0) == 2).all()
    with pytest.raises(BadInput, match="wider dtype"):
        uniform(stream(0), (5,), 1.0001, 1.0002, dtype=torch.bfloat16)
    with pytest.raises(BadInput, match="low <= high"):
        uniform(stream(0), (5,), 2.0, 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_truncated_normal_stays_inside(dtype):
    x = truncated_normal(stream(3), (300_000,), 0.0, 0.02, -0.03, 0.05, dtype=dtype).double()
    assert float(x.min()) >= -0.03
    assert float(x.max()) <= 0.05
    with pytest.raises(BadInput, match="too little"):
        truncated_normal(stream(3), (4,), 0.0, 1.0, 8.0, 9.0)


def test_truncated_normal_with_open_ends_is_the_normal_law():
    x = truncated_normal(stream(3), (QUICK,), 0.0, 1.0, -math.inf, math.inf).double()
    assert abs(float(x.var()) - 1) < 4 * math.sqrt(2 / QUICK)


@pytest.mark.parametrize("bad", [
    lambda s: normal(s, (3,), std=-1.0), lambda s: normal(s, (3,), mean=math.nan),
    lambda s: bernoulli(s, (3,), 1.5), lambda s: integers(s, (3,), 5, 5),
    lambda s: integers(s, (3,), -(1 << 63), (1 << 63) - 1),
    lambda s: normal(s, (3,), out=torch.empty(4)), lambda s: normal(s, (3,), dtype=torch.int32),
    lambda s: uniform(s, (3,), dtype=torch.int64),
])  # fmt: skip
def test_bad_arguments_raise(bad):
    with pytest.raises(BadInput):
        bad(stream(0))


def test_values_are_pinned():
    # A change here is a change of every initial value and mask: it needs a new version of the law.
    drawn = normal(stream(0), (3,), dtype=torch.float64)
    pinned = ["0x1.dc184f0f6091ep+0", "0x1.3feff9dabb638p-3", "-0x1.d4c9aff094977p-1"]
    assert [float(x).hex() for x in drawn] == pinned
