import pytest
import torch
from torch import nn

from unison.errors import BadInput
from unison.rng import Box, Key, fill_
from unison.rng.inits import Constant, Normal, TruncatedNormal, Uniform

KEY = Key.from_seed(2)


@pytest.mark.parametrize("init", [
    Constant(value=0.5), Uniform(low=-1.0, high=1.0), Normal(std=0.02),
    TruncatedNormal(std=0.02, low=-0.04, high=0.04),
], ids=lambda init: type(init).__name__)  # fmt: skip
def test_a_shard_is_that_part_of_the_whole(init):
    whole = fill_(torch.empty(13, 7), init, KEY, "w")
    columns = fill_(torch.empty(13, 3), init, KEY, "w", Box((13, 7), (0, 2), (13, 5)))
    assert torch.equal(columns, whole[:, 2:5])
    flat = fill_(torch.empty(20), init, KEY, "w", Box.flat(30, 50, 91))
    assert torch.equal(flat, whole.view(-1)[30:50])


def test_names_and_keys_matter():
    init = Normal(std=1.0)
    first = fill_(torch.empty(50), init, KEY, "a")
    assert not torch.equal(first, fill_(torch.empty(50), init, KEY, "b"))
    assert not torch.equal(first, fill_(torch.empty(50), init, Key.from_seed(3), "a"))


def test_parameters_that_require_grad_are_filled():
    weight = nn.Parameter(torch.empty(4, 4))
    fill_(weight, Normal(std=1.0), KEY, "w")
    assert weight.grad_fn is None
    assert float(weight.detach().std()) > 0


def test_errors():
    with pytest.raises(BadInput, match="elements"):
        fill_(torch.empty(3), Normal(std=1.0), KEY, "w", Box((9,), (0,), (4,)))
    with pytest.raises(BadInput, match="expected an Init"):
        fill_(torch.empty(3), "normal", KEY, "w")  # type: ignore[arg-type]
