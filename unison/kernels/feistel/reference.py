"""The Feistel network in plain torch.

Pairs (left, right) with left in [0, num_left) and right in [0, num_right). Rounds alternate:
left += F(right) mod num_left, then right += F(left) mod num_right, with F from Philox4x32-10.
Results of n and above are walked: the network is applied again until one falls below n.
"""

from dataclasses import dataclass

import torch

from unison.kernels.random.ciphers import MASK32, philox

NUM_ROUNDS = 12
_CHUNK = 1 << 14


@dataclass(frozen=True, repr=False)
class Network:
    """Stream words (two of key, two of counter), the size n, and the sides of the pairs."""

    words: tuple[int, ...]
    n: int
    num_left: int
    num_right: int


def permute(x: torch.Tensor, network: Network, is_inverse: bool) -> torch.Tensor:
    """Map indices in [0, n) to their images, or back."""
    parts = [_walk(part, network, is_inverse) for part in x.reshape(-1).split(_CHUNK)]
    return torch.cat(parts).view(x.shape)


def _walk(x: torch.Tensor, network: Network, is_inverse: bool) -> torch.Tensor:
    once = backward if is_inverse else forward
    x = once(x, network)
    outside = (x >= network.n).nonzero().view(-1)
    while len(outside):
        x[outside] = once(x[outside], network)
        outside = outside[x[outside] >= network.n]
    return x


def forward(x: torch.Tensor, network: Network) -> torch.Tensor:
    """Apply the network once, without walking."""
    left, right = x // network.num_right, x % network.num_right
    for r in range(NUM_ROUNDS):
        if r % 2 == 0:
            left = (left + _shift(r, right, network.num_left, network)) % network.num_left
        else:
            right = (right + _shift(r, left, network.num_right, network)) % network.num_right
    return left * network.num_right + right


def backward(x: torch.Tensor, network: Network) -> torch.Tensor:
    """Undo `forward`."""
    left, right = x // network.num_right, x % network.num_right
    for r in reversed(range(NUM_ROUNDS)):
        if r % 2 == 0:
            left = (left - _shift(r, right, network.num_left, network)) % network.num_left
        else:
            right = (right - _shift(r, left, network.num_right, network)) % network.num_right
    return left * network.num_right + right


def _shift(r: int, half: torch.Tensor, size: int, network: Network) -> torch.Tensor:
    """Return F: floor(64-bit word · size / 2^64); `half` and `size` are below 2^32."""
    zero = torch.zeros_like(half)
    counter = (half & MASK32, zero + r, zero + network.words[2], zero + network.words[3])
    upper, lower, *_ = philox(counter, network.words[:2])
    return (upper * size + ((lower * size) >> 32)) >> 32
