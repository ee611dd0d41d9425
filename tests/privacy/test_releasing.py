"""From what sums are made of to gradients."""

from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
from torch import nn

from tests.harness import assert_same_bits
from unison.parallel import ShardedParam
from unison.privacy import noise as noises
from unison.privacy.mechanism import Release
from unison.privacy.noise import ReleaseTerms, Shares, private_gradients
from unison.privacy.sampling import Poisson
from unison.rng import Key

WITHOUT_NOISE = Release(
    step=0,
    sampling=Poisson(rate=0.1),
    max_grad_norm=1.0,
    noise_multiplier=0.0,
    expected_batch_size=8.0,
)


@dataclass
class Alone:
    """As much of an owner as releasing needs, if it has no sums."""

    params: list[ShardedParam]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("num_samples", [1, 3])
def test_per_sample_gradients_are_clipped_whatever_their_dtype(num_samples, dtype):
    """Also where no kernel takes them: one sample's would have the shape of a sum."""
    parameter, unused = nn.Parameter(torch.zeros(4, 2)), nn.Parameter(torch.zeros(3))
    owner: Any = Alone([ShardedParam.whole("w", parameter), ShardedParam.whole("v", unused)])
    values = torch.randn(num_samples, 4, 2).to(dtype)
    weights = torch.rand(num_samples, dtype=torch.float64) / 2
    terms = ReleaseTerms(Key.from_seed(0), WITHOUT_NOISE, 8.0, num_samples)
    made = private_gradients(owner, {"w": (values, weights)}, terms)
    gradients = {owned.name: gradient for owned, gradient in made}
    expected = (weights.view(-1, 1, 1) * values.double()).sum(0) / 8
    torch.testing.assert_close(gradients["w"].view(4, 2).double(), expected, rtol=1e-6, atol=1e-7)
    assert not gradients["v"].any()


def test_gradients_are_like_their_parameters_whatever_becomes_of_them():
    """A module that is cast while it is trained has gradients of its new dtype."""
    linear = nn.Linear(4, 2)
    owned = [ShardedParam.whole(n, p) for n, p in linear.named_parameters()]
    owner = cast(Any, Alone(owned))
    terms = ReleaseTerms(Key.from_seed(0), WITHOUT_NOISE, 1.0, 1)
    one = torch.ones(1, dtype=torch.float64)
    own = {"bias": (torch.ones(1, 2), one), "weight": (torch.ones(1, 2, 4), one)}
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.float32):
        linear.to(dtype)
        for each, gradient in private_gradients(owner, own, terms):
            assert gradient.dtype == each.parameter.dtype == dtype
            assert gradient.shape == each.parameter.shape
            assert (gradient == 1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_weights_that_are_shared_fill_a_table(dtype):
    weights, names = torch.rand(3, dtype=dtype), ("a", "b")
    values = [torch.zeros(3, 2) for _ in names]
    found = noises._weights(Shares(names, values, [weights] * 2, values, (0, 0)))
    assert found.is_contiguous()
    assert_same_bits(found, torch.stack([weights, weights]).float())


def test_weights_of_sums_and_of_samples_fill_a_table():
    """Some are of one sum, some of all samples, and many are one and the same tensor."""
    one, other = (torch.ones(1, dtype=torch.float64) for _ in range(2))
    first, second = torch.rand(2, 3, dtype=torch.float64)
    for weights in ([first, one, first, second, other, one], [one, first, one]):
        values = [torch.zeros(len(each), 2) for each in weights]
        names = tuple(map(str, range(len(weights))))
        found = noises._weights(Shares(names, values, weights, values, (0,) * len(names)))
        padded = [torch.cat([each, each.new_zeros(3 - len(each))]) for each in weights]
        assert found.is_contiguous()
        assert_same_bits(found, torch.stack(padded).float())


def test_every_parameter_gets_its_own_whatever_the_order():
    parameters = {name: nn.Parameter(torch.zeros(3)) for name in ("b", "c", "a")}
    owned = [ShardedParam.whole(name, each) for name, each in parameters.items()]
    one = torch.ones(1, dtype=torch.float64)
    values = [torch.full((1, 3), float(i)) for i in range(3)]
    own = dict(zip("abc", [(value, one) for value in values], strict=True))
    owner = cast(Any, Alone(owned))
    terms = ReleaseTerms(Key.from_seed(0), WITHOUT_NOISE, 1.0, 1)
    found = {each.name: gradient for each, gradient in private_gradients(owner, own, terms)}
    assert {name: float(each[0]) for name, each in found.items()} == {"a": 0, "b": 1, "c": 2}
    del own["b"]  # nobody used it
    found = {each.name: gradient for each, gradient in private_gradients(owner, own, terms)}
    assert {name: float(each[0]) for name, each in found.items()} == {"a": 0, "b": 0, "c": 2}
