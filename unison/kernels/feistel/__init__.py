"""A keyed permutation of [0, n) by a Feistel network: one operation, two backends, equal bits."""

from functools import cache
from importlib import import_module

import torch

from unison.kernels import random
from unison.kernels.feistel import reference
from unison.kernels.feistel.reference import Network

__all__ = ["Network", "permute"]


@cache
def _numba():
    return import_module("unison.kernels.feistel.numba").permute


@torch.library.custom_op("unison::permute", mutates_args=())
def _permute(
    x: torch.Tensor, words: torch.Tensor, n: int, sides: list[int], is_inverse: bool
) -> torch.Tensor:
    network = Network(tuple(words.tolist()), n, sides[0], sides[1])
    fast = x.device.type == "cpu" and random.is_numba_chosen(x.numel())
    return (_numba() if fast else reference.permute)(x, network, is_inverse)


@_permute.register_fake
def _(x: torch.Tensor, words: torch.Tensor, n: int, sides: list[int], is_inverse: bool):
    return torch.empty_like(x)


def permute(x: torch.Tensor, network: Network, is_inverse: bool) -> torch.Tensor:
    """Return the images (or, inverted, the sources) of indices in [0, n): int64, any shape."""
    words = torch.tensor(network.words, dtype=torch.int64)
    return _permute(x, words, network.n, [network.num_left, network.num_right], is_inverse)
