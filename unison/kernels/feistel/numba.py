"""The Feistel network compiled by numba, bit-equal to `reference`."""

import numpy as np
import torch

from unison.kernels.compiled import jit
from unison.kernels.feistel.reference import NUM_ROUNDS, Network
from unison.kernels.random.ciphers import (
    MASK32,
    PHILOX_M0,
    PHILOX_M1,
    PHILOX_ROUNDS,
    PHILOX_W0,
    PHILOX_W1,
)

_U = np.uint64
_M, _M0, _M1, _B32 = _U(MASK32), _U(PHILOX_M0), _U(PHILOX_M1), _U(32)
_W0, _W1 = _U(PHILOX_W0), _U(PHILOX_W1)


@jit
def _shift(r, half, size, words):
    c0, c1, c2, c3 = half, _U(r), words[2], words[3]
    k0, k1 = words[0], words[1]
    for _ in range(PHILOX_ROUNDS):
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c1 = (p1 >> _B32) ^ c1 ^ k0, p1 & _M
        c2, c3 = (p0 >> _B32) ^ c3 ^ k1, p0 & _M
        k0, k1 = (k0 + _W0) & _M, (k1 + _W1) & _M
    return (c0 * size + ((c1 * size) >> _B32)) >> _B32


@jit
def _permute(x, out, words, n, num_left, num_right, is_inverse):
    for i in range(len(x)):
        value = _U(x[i])
        while True:
            left, right = value // num_right, value % num_right
            for step in range(NUM_ROUNDS):
                r = NUM_ROUNDS - 1 - step if is_inverse else step
                size, half = (num_left, right) if r % 2 == 0 else (num_right, left)
                shift = _shift(r, half, size, words)
                if is_inverse:
                    shift = (size - shift) % size
                if r % 2 == 0:
                    left = (left + shift) % num_left
                else:
                    right = (right + shift) % num_right
            value = left * num_right + right
            if value < n:
                break
        out[i] = np.int64(value)


def permute(x: torch.Tensor, network: Network, is_inverse: bool) -> torch.Tensor:
    """Map indices in [0, n) to their images, or back, on the CPU."""
    source = x.reshape(-1).contiguous()
    out = torch.empty_like(source)
    sizes = (_U(network.n), _U(network.num_left), _U(network.num_right))
    words = np.array(network.words, np.uint64)
    _permute(source.numpy(), out.numpy(), words, *sizes, is_inverse)
    return out.view(x.shape)
