"""A permutation of [0, n) with random access: shuffling without a table.

A Feistel network on pairs (left, right) in [0, a) x [0, b) with a · b >= n, and cycle walking past
n (`unison.kernels.feistel`). Since a · b exceeds n by less than a, walking is rare. `a` is even, so
that a round can be an odd permutation too.
"""

import math

import torch

from unison.errors import BadInput
from unison.kernels.feistel import Network, permute
from unison.kernels.random import Cipher
from unison.rng.streams import Stream

MAX_SIZE = 1 << 62


class Permutation:
    """A keyed permutation of [0, n) and its inverse, for tensors of indices.

    Guarantees:
        A bijection of [0, n) for every key and 1 <= n <= 2^62; the image of an index depends on
        (stream, n, index) only. Public: for shuffling, not for secrecy.

    Args:
        stream: A Philox stream; its name and step make the shuffle.
        n: Number of items.
    """

    def __init__(self, stream: Stream, n: int) -> None:
        if not 1 <= n <= MAX_SIZE:
            raise BadInput(f"expected 1 <= n <= 2^62, found {n=}")
        if stream.cipher is not Cipher.PHILOX:
            raise BadInput(f"a permutation takes a Philox stream, found {stream!r}")
        self.n = n
        half = math.isqrt(n - 1) + 1  # the square root, rounded up
        num_left = half + half % 2
        self.network = Network(stream.words, n, num_left, -(-n // num_left))

    def __len__(self) -> int:
        return self.n

    def __call__(self, indices: torch.Tensor) -> torch.Tensor:
        """Return the images of `indices` (int64, any shape and device)."""
        return permute(self._checked(indices), self.network, is_inverse=False)

    def inverse(self, images: torch.Tensor) -> torch.Tensor:
        """Return the indices whose images these are."""
        return permute(self._checked(images), self.network, is_inverse=True)

    def _checked(self, indices: torch.Tensor) -> torch.Tensor:
        if indices.dtype != torch.int64:
            raise BadInput(f"expected int64 indices, found {indices.dtype}")
        if indices.numel() and not (int(indices.min()) >= 0 and int(indices.max()) < self.n):
            raise BadInput(f"expected indices in [0, {self.n})")
        return indices

    def __repr__(self) -> str:
        return f"Permutation(n={self.n})"
