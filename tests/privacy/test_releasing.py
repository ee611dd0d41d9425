"""From what sums are made of to gradients."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from unison.privacy.mechanism import Release
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
