"""A keyed permutation of [0, n) by a Feistel network: one operation, two backends, equal bits.

Pairs (left, right) with left in [0, num_left) and right in [0, num_right). Rounds alternate:
left += F(right) mod num_left, then right += F(left) mod num_right, with F from Philox4x32-10.
Results of n and above are walked: the network is applied again until one falls below n.
"""

from dataclasses import dataclass
from importlib import import_module

import torch
from torch import Tensor

from unison.kernels.random import MASK32, is_numba_chosen, philox

NUM_ROUNDS = 12
_CHUNK = 1 << 14


@dataclass(frozen=True, repr=False)
class Network:
    """Stream words (two of key, two of counter), the size n, and the sides of the pairs."""

    words: tuple[int, ...]
    n: int
    num_left: int
    num_right: int


@torch.library.custom_op("unison::permute", mutates_args=())
def _permute(x: Tensor, words: Tensor, n: int, sides: list[int], is_inverse: bool) -> Tensor:
    network = Network(tuple(words.tolist()), n, sides[0], sides[1])
    if x.device.type == "cpu" and is_numba_chosen(x.numel()):  # 6 times as fast on 2 cores
        return import_module("unison.kernels.numba_kernels").permute(x, network, is_inverse)
    return permute_reference(x, network, is_inverse)


@_permute.register_fake
def _(x: Tensor, words: Tensor, n: int, sides: list[int], is_inverse: bool):
    return torch.empty_like(x)


def permute(x: Tensor, network: Network, is_inverse: bool) -> Tensor:
    """Return the images (or, inverted, the sources) of indices in [0, n): int64, any shape."""
    words = torch.tensor(network.words, dtype=torch.int64)
    return _permute(x, words, network.n, [network.num_left, network.num_right], is_inverse)


def permute_reference(x: Tensor, network: Network, is_inverse: bool) -> Tensor:
    """Map indices in [0, n) to their images, or back, in plain torch."""
    parts = [_walk(part, network, is_inverse) for part in x.reshape(-1).split(_CHUNK)]
    return torch.cat(parts).view(x.shape)


def _walk(x: Tensor, network: Network, is_inverse: bool) -> Tensor:
    x = apply_rounds(x, network, is_inverse)
    outside = (x >= network.n).nonzero().view(-1)
    while len(outside):
        x[outside] = apply_rounds(x[outside], network, is_inverse)
        outside = outside[x[outside] >= network.n]
    return x


def apply_rounds(x: Tensor, network: Network, is_inverse: bool = False) -> Tensor:
    """Apply the network once, or undo it, without walking."""
    left, right = x // network.num_right, x % network.num_right
    sign = -1 if is_inverse else 1
    for r in range(NUM_ROUNDS)[::sign]:
        if r % 2 == 0:
            left = (left + sign * _shift(r, right, network.num_left, network)) % network.num_left
        else:
            right = (right + sign * _shift(r, left, network.num_right, network)) % network.num_right
    return left * network.num_right + right


def _shift(r: int, half: Tensor, size: int, network: Network) -> Tensor:
    """Return F: floor(64-bit word · size / 2^64); `half` and `size` are below 2^32."""
    zero = torch.zeros_like(half)
    counter = (half & MASK32, zero + r, zero + network.words[2], zero + network.words[3])
    upper, lower, *_ = philox(counter, network.words[:2])
    return (upper * size + ((lower * size) >> 32)) >> 32
