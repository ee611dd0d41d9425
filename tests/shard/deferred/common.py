"""What the tests of deferred init share: to build, to look at tensors, to be refused."""

import math
from typing import Any

import pytest
from torch import Tensor, nn

from tests.shard.deferred.cases import SEED
from unison.rng.inits import Uniform
from unison.shard import materialize, meta_init


def built(make, seed: int = SEED) -> Any:
    with meta_init():
        module = make()
    assert all(tensor.is_meta for tensor in [*module.parameters(), *module.buffers()])
    return materialize(module, seed=seed)


def linear_init(fan_in: int) -> Uniform:
    """What nn.Linear gives its weight."""
    gain = nn.init.calculate_gain("leaky_relu", math.sqrt(5))
    bound = math.sqrt(3.0) * (gain / math.sqrt(fan_in))
    return Uniform(low=-bound, high=bound)


def tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def refused(error, match: str, make, *, at: str) -> None:
    if at == "build":
        with pytest.raises(error, match=match), meta_init():
            make()
    else:
        with meta_init():
            module = make()
        with pytest.raises(error, match=match):
            materialize(module, seed=SEED)
