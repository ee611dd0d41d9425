import math

import pytest
import torch
from torch import nn

from unison.errors import BadInput, UnsupportedOperation
from unison.rng import Box, Key, fill_
from unison.rng import fill as inits
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


SHAPES = [(64, 128), (32, 16, 3, 3), (8, 24, 5)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mode", ["fan_in", "fan_out"])
@pytest.mark.parametrize(("nonlinearity", "a"), [
    ("leaky_relu", 0.0), ("leaky_relu", math.sqrt(5)), ("relu", 0.0), ("tanh", 0.0),
    ("linear", 0.0),
])  # fmt: skip
def test_kaiming_has_torchs_parameters(shape, mode, nonlinearity, a):
    fan = nn.init._calculate_correct_fan(torch.empty(shape), mode)
    std = nn.init.calculate_gain(nonlinearity, a) / math.sqrt(fan)
    assert inits.kaiming_normal(shape, a, mode, nonlinearity).std == pytest.approx(std, rel=1e-15)
    init = inits.kaiming_uniform(shape, a, mode, nonlinearity)
    assert init.high == -init.low == pytest.approx(math.sqrt(3) * std, rel=1e-15)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("gain", [1.0, 0.3])
def test_xavier_has_torchs_parameters(shape, gain):
    fan_in, fan_out = nn.init._calculate_fan_in_and_fan_out(torch.empty(shape))
    assert inits.fans(shape) == (fan_in, fan_out)
    std = gain * math.sqrt(2 / (fan_in + fan_out))
    assert inits.xavier_normal(shape, gain).std == pytest.approx(std, rel=1e-15)
    assert inits.xavier_uniform(shape, gain).high == pytest.approx(math.sqrt(3) * std, rel=1e-15)


@pytest.mark.parametrize("name", sorted(inits.DESCRIBE))
def test_filled_like_torch(name):
    """Mean, spread and range of a fill beside those of torch's own init."""
    shape = (600, 500)
    arguments = (0.25,) if name == "constant_" else ()
    if name == "orthogonal_":
        with pytest.raises(UnsupportedOperation, match="QR"):
            inits.DESCRIBE[name](shape)
        return
    ours = fill_(torch.empty(shape), inits.DESCRIBE[name](shape, *arguments), KEY, "w")
    torch.manual_seed(0)
    theirs = torch.empty(shape)
    getattr(nn.init, name)(theirs, *arguments)
    spread = float(theirs.std())
    assert float(ours.std()) == pytest.approx(spread, rel=0.02)
    assert abs(float(ours.mean() - theirs.mean())) <= 0.02 * spread
    if "uniform" in name or "trunc" in name:
        assert float(ours.max()) == pytest.approx(float(theirs.max()), rel=1e-3)
        assert float(ours.min()) == pytest.approx(float(theirs.min()), rel=1e-3, abs=1e-4)


def test_errors():
    with pytest.raises(BadInput, match="2 dims"):
        inits.xavier_normal((5,))
    with pytest.raises(BadInput, match="fan_in"):
        inits.kaiming_normal((5, 5), mode="fan")
    with pytest.raises(BadInput, match="elements"):
        fill_(torch.empty(3), Normal(std=1.0), KEY, "w", Box((9,), (0,), (4,)))
    with pytest.raises(BadInput, match="expected an Init"):
        fill_(torch.empty(3), "normal", KEY, "w")  # type: ignore[arg-type]
