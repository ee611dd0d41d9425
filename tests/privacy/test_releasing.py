"""From what sums are made of to gradients."""

from dataclasses import dataclass
from itertools import compress
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

from tests.harness import assert_same_bits
from unison.clip.kept import SharesByName
from unison.kernels import multi_tensor
from unison.privacy import noise as noises
from unison.privacy.cut import Cut
from unison.privacy.mechanism import Release
from unison.privacy.noise import Shares
from unison.privacy.owners.base import Owned
from unison.privacy.releasing import Releasing, Terms
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

    owned: list[Owned]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("num_samples", [1, 3])
def test_per_sample_gradients_are_clipped_whatever_their_dtype(num_samples, dtype):
    """Also where no kernel takes them: one sample's would have the shape of a sum."""
    parameter, unused = nn.Parameter(torch.zeros(4, 2)), nn.Parameter(torch.zeros(3))
    owner: Any = Alone([Owned("w", parameter, (4, 2), 0, 8), Owned("v", unused, (3,), 0, 3)])
    values = torch.randn(num_samples, 4, 2).to(dtype)
    weights = torch.rand(num_samples, dtype=torch.float64) / 2
    terms = Terms(Key.from_seed(0), WITHOUT_NOISE, 8.0, num_samples)
    made = Releasing(owner).gradients({"w": (values, weights)}, terms)
    gradients = {owned.name: gradient for owned, gradient in made}
    expected = (weights.view(-1, 1, 1) * values.double()).sum(0) / 8
    torch.testing.assert_close(gradients["w"].view(4, 2).double(), expected, rtol=1e-6, atol=1e-7)
    assert not gradients["v"].any()


SHAPES = [(3,), (8, 8), (), (64,), (5, 8), (16, 8), (2, 3), (0, 8), (4, 2, 8), (2, 2, 8), (65,)]


@pytest.mark.parametrize("dtypes", [[torch.float32], [torch.bfloat16, torch.float32]], ids=str)
def test_memories_of_gradients(dtypes):
    """In the parameters' shapes, at multiples of 64 elements, and none over another."""
    every = [dtypes[i % len(dtypes)] for i in range(len(SHAPES))]
    parameters = [nn.Parameter(torch.zeros(s, dtype=t)) for s, t in zip(SHAPES, every, strict=True)]
    cut = Cut(parameters)
    assert cut.is_for(parameters)
    assert not cut.is_for(parameters[1:])
    assert not cut.is_for([each.double() for each in parameters])
    found = cut.empty(torch.device("cpu"))
    for i, (gradient, parameter) in enumerate(zip(found, parameters, strict=True)):
        assert gradient.shape == parameter.shape
        assert gradient.dtype == parameter.dtype
        assert gradient.is_contiguous()
        assert gradient.storage_offset() % 64 == 0
        gradient.fill_(i)
    assert all((gradient == i).all() for i, gradient in enumerate(found))


@pytest.mark.parametrize("shapes", [SHAPES, [(7,)], [(8, 8)], [(2, 3)], [()], [(0,)]], ids=str)
def test_what_kernels_know_of_gradients(shapes):
    """As if each had been asked."""
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    cut = Cut(parameters)
    for _ in range(2):
        found = cut.empty(torch.device("cpu"))
        assert [each.shape for each in found] == [torch.Size(shape) for shape in shapes]
        assert found.meta == multi_tensor.TensorMeta(list(found))
        addresses = np.frombuffer(found.addresses, np.int64).tolist()
        is_there = [each.numel() > 0 for each in found]
        asked = [each.data_ptr() for each in found]
        assert list(compress(addresses, is_there)) == list(compress(asked, is_there))
        assert found.home == torch.device("cpu")


def test_gradients_are_like_their_parameters_whatever_becomes_of_them():
    """A module that is cast while it is trained has gradients of its new dtype."""
    linear = nn.Linear(4, 2)
    owned = [Owned(n, p, tuple(p.shape), 0, p.numel()) for n, p in linear.named_parameters()]
    releasing = Releasing(cast(Any, Alone(owned)))
    terms = Terms(Key.from_seed(0), WITHOUT_NOISE, 1.0, 1)
    one = torch.ones(1, dtype=torch.float64)
    own = SharesByName(
        {"bias": (torch.ones(1, 2), one), "weight": (torch.ones(1, 2, 4), one)},
    )
    values = [value for value, _ in own.values()]
    own.asked = multi_tensor.TensorBatch(values, multi_tensor.TensorMeta(values), False)
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.float32):
        linear.to(dtype)
        for each, gradient in releasing.gradients(own, terms):
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
        for _ in range(2):  # the second time, where the rows lie is known
            found = noises._weights(Shares(names, values, weights, values, (0,) * len(names)))
            padded = [torch.cat([each, each.new_zeros(3 - len(each))]) for each in weights]
            assert found.is_contiguous()
            assert_same_bits(found, torch.stack(padded).float())


def test_values_that_are_known_are_released_in_their_order():
    """And every parameter gets its own all the same."""
    parameters = {name: nn.Parameter(torch.zeros(3)) for name in ("b", "c", "a")}
    owned = [Owned(name, each, (3,), 0, 3) for name, each in parameters.items()]
    one = torch.ones(1, dtype=torch.float64)
    values = [torch.full((1, 3), float(i)) for i in range(3)]
    own = SharesByName(zip("abc", [(value, one) for value in values], strict=True))
    own.asked = multi_tensor.TensorBatch(values, multi_tensor.TensorMeta(values), False)
    releasing = Releasing(cast(Any, Alone(owned)))
    terms = Terms(Key.from_seed(0), WITHOUT_NOISE, 1.0, 1)
    found = {each.name: gradient for each, gradient in releasing.gradients(own, terms)}
    assert {name: float(each[0]) for name, each in found.items()} == {"a": 0, "b": 1, "c": 2}
    del own["b"]  # then they are not all
    own.asked = None
    found = {each.name: gradient for each, gradient in releasing.gradients(own, terms)}
    assert {name: float(each[0]) for name, each in found.items()} == {"a": 0, "b": 0, "c": 2}
