"""Initial values: descriptions after `torch.nn.init`, filled over any box.

`torch.nn.init.kaiming_uniform_(w)` both decides a distribution and draws from a generator.
Here the two are apart: `kaiming_uniform(shape)` returns the description, `fill_` draws the
elements of any box of it. So a rank can fill its shard alone, on any device, and the values are
those the full tensor would have.
"""

import math
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch

from unison import check
from unison.errors import BadInput, UnsupportedOperation
from unison.rng.distributions import bernoulli as draw_bernoulli
from unison.rng.distributions import integers as draw_integers
from unison.rng.distributions import normal as draw_normal
from unison.rng.distributions import truncated_normal as draw_truncated_normal
from unison.rng.distributions import uniform as draw_uniform
from unison.rng.inits import (
    Bernoulli,
    Constant,
    Init,
    Integers,
    Normal,
    Shuffle,
    TruncatedNormal,
    Uniform,
)
from unison.rng.keys import Key
from unison.rng.permutation import Permutation
from unison.rng.streams import Box, Stream


def fill_(
    tensor: torch.Tensor,
    init: Init,
    key: Key,
    name: str,
    box: Box | None = None,
    *,
    number: int = 0,
) -> torch.Tensor:
    """Fill `tensor` with the initial values of parameter `name`, in place.

    Guarantees:
        An element's value depends on (init, key, name, number, its index in the whole parameter)
        and, by the final rounding, on the dtype.

    Args:
        tensor: The whole parameter, or the part of it that `box` describes (any shape with as many
            elements, so that flat shards work).
        init: What to fill with.
        key: Root key.
        name: Full name of the parameter: it names the stream.
        box: Which part of the whole parameter `tensor` is; all of it unless given.
        number: Which draw of the parameter this is, where its value is made of several.
    """
    box = Box.whole(tensor.shape) if box is None else box
    stream = Stream(key, name, step=number, purpose="init")
    with torch.no_grad():
        match init:
            case Constant():
                tensor.fill_(init.value)
            case Uniform():
                draw_uniform(stream, box, init.low, init.high, out=tensor)
            case Normal():
                draw_normal(stream, box, init.mean, init.std, out=tensor)
            case TruncatedNormal():
                draw_truncated_normal(
                    stream, box, init.mean, init.std, init.low, init.high, out=tensor
                )
            case Bernoulli():
                drawn = draw_bernoulli(stream, box, init.probability, device=tensor.device)
                tensor.copy_(drawn.view(tensor.shape))
            case Integers():
                drawn = draw_integers(stream, box, init.low, init.high, device=tensor.device)
                tensor.copy_(drawn.view(tensor.shape))
            case Shuffle():
                tensor.copy_(_shuffled(stream, init.size, box).view(tensor.shape))
            case _:
                raise BadInput(f"{name}: expected an Init, found {init!r}")
    return tensor


def uniform(shape: Sequence[int], a: float = 0.0, b: float = 1.0) -> Uniform:
    """Describe `torch.nn.init.uniform_`."""
    return Uniform(low=a, high=b)


def normal(shape: Sequence[int], mean: float = 0.0, std: float = 1.0) -> Normal:
    """Describe `torch.nn.init.normal_`."""
    return Normal(mean=mean, std=std)


def trunc_normal(
    shape: Sequence[int], mean: float = 0.0, std: float = 1.0, a: float = -2.0, b: float = 2.0
) -> TruncatedNormal:
    """Describe `torch.nn.init.trunc_normal_`."""
    return TruncatedNormal(mean=mean, std=std, low=a, high=b)


def constant(shape: Sequence[int], val: float) -> Constant:
    """Describe `torch.nn.init.constant_`."""
    return Constant(value=val)


def ones(shape: Sequence[int]) -> Constant:
    """Describe `torch.nn.init.ones_`."""
    return Constant(value=1.0)


def zeros(shape: Sequence[int]) -> Constant:
    """Describe `torch.nn.init.zeros_`."""
    return Constant(value=0.0)


def fans(shape: Sequence[int]) -> tuple[int, int]:
    """Return (fan in, fan out) of a weight, as torch counts them.

    >>> fans((8, 4, 3, 3))
    (36, 72)
    """
    if len(shape) < 2:
        raise BadInput(f"fan in and fan out need at least 2 dims, found shape {tuple(shape)}")
    receptive = math.prod(shape[2:])
    return shape[1] * receptive, shape[0] * receptive


def kaiming_uniform(
    shape: Sequence[int], a: float = 0.0, mode: str = "fan_in", nonlinearity: str = "leaky_relu"
) -> Uniform:
    """Describe `torch.nn.init.kaiming_uniform_`."""
    bound = math.sqrt(3.0) * _kaiming_std(shape, a, mode, nonlinearity)
    return Uniform(low=-bound, high=bound)


def kaiming_normal(
    shape: Sequence[int], a: float = 0.0, mode: str = "fan_in", nonlinearity: str = "leaky_relu"
) -> Normal:
    """Describe `torch.nn.init.kaiming_normal_`."""
    return Normal(std=_kaiming_std(shape, a, mode, nonlinearity))


def xavier_uniform(shape: Sequence[int], gain: float = 1.0) -> Uniform:
    """Describe `torch.nn.init.xavier_uniform_`."""
    bound = math.sqrt(3.0) * _xavier_std(shape, gain)
    return Uniform(low=-bound, high=bound)


def xavier_normal(shape: Sequence[int], gain: float = 1.0) -> Normal:
    """Describe `torch.nn.init.xavier_normal_`."""
    return Normal(std=_xavier_std(shape, gain))


def orthogonal(shape: Sequence[int], gain: float = 1.0) -> NoReturn:
    """Refuse `torch.nn.init.orthogonal_`."""
    raise UnsupportedOperation(
        "orthogonal_ cannot be replayed for a part of a parameter: its QR decomposition couples "
        "every element with every other. Use xavier_normal_ or normal_ instead, or fill the full "
        "tensor on one rank and load it with load_full_state_dict"
    )


# What a recorded call to torch.nn.init becomes; the key is torch's own name.
DESCRIBE: dict[str, Callable[..., Init]] = {
    "uniform_": uniform,
    "normal_": normal,
    "trunc_normal_": trunc_normal,
    "constant_": constant,
    "ones_": ones,
    "zeros_": zeros,
    "kaiming_uniform_": kaiming_uniform,
    "kaiming_normal_": kaiming_normal,
    "xavier_uniform_": xavier_uniform,
    "xavier_normal_": xavier_normal,
    "orthogonal_": orthogonal,
}


def _shuffled(stream: Stream, size: int, box: Box) -> torch.Tensor:
    """Return the images of a box's elements under the stream's permutation of [0, size)."""
    starts, run = box.rows()
    indices = (starts[:, None] + torch.arange(run)).view(-1)
    return Permutation(stream, size)(indices) if size else indices


def _kaiming_std(shape: Sequence[int], a: float, mode: str, nonlinearity: str) -> float:
    check.one_of(["fan_in", "fan_out"], mode=mode)
    fan = fans(shape)[0 if mode == "fan_in" else 1]
    check.positive(fan=fan)
    return torch.nn.init.calculate_gain(nonlinearity, a) / math.sqrt(fan)  # type: ignore[arg-type]


def _xavier_std(shape: Sequence[int], gain: float) -> float:
    check.positive(fan_in_plus_fan_out=sum(fans(shape)))
    return gain * math.sqrt(2.0 / sum(fans(shape)))
