"""Philox4x32-10 and ChaCha20 in plain torch: int64 tensors that hold 32-bit words.

Both are pure functions of (key, counter). Sums and products are masked to 32 bits after each
operation; products of two 32-bit words wrap in int64, which keeps their low 64 bits, and a masked
shift reads the upper half as if the product were unsigned.
"""

from collections.abc import Sequence

import torch

MASK32 = 0xFFFFFFFF
PHILOX_M0, PHILOX_M1 = 0xD2511F53, 0xCD9E8D57
PHILOX_W0, PHILOX_W1 = 0x9E3779B9, 0xBB67AE85
PHILOX_ROUNDS = 10
CHACHA_CONSTANTS = (0x61707865, 0x3320646E, 0x79622D32, 0x6B206574)  # "expand 32-byte k"
CHACHA_DOUBLE_ROUNDS = 10

Words = tuple[torch.Tensor, ...]


def philox(counter: Sequence[torch.Tensor], key: Sequence[int]) -> Words:
    """Apply Philox4x32-10 (Salmon et al., 2011) to a batch of 128-bit counters.

    Args:
        counter: Four int64 tensors of one shape, each holding 32-bit words.
        key: Two 32-bit words.

    Returns:
        Four int64 tensors of that shape, each holding 32-bit words.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(PHILOX_ROUNDS):
        p0, p1 = c0 * PHILOX_M0, c2 * PHILOX_M1
        c0, c2 = ((p1 >> 32) & MASK32) ^ c1 ^ k0, ((p0 >> 32) & MASK32) ^ c3 ^ k1
        c1, c3 = p1 & MASK32, p0 & MASK32
        k0, k1 = (k0 + PHILOX_W0) & MASK32, (k1 + PHILOX_W1) & MASK32
    return c0, c1, c2, c3


def philox_blocks(block: torch.Tensor, key: Sequence[int]) -> torch.Tensor:
    """Return the words of the given blocks: int64 [*block.shape, 4].

    Args:
        block: int64 block numbers, at least 0: counter words 0 and 1.
        key: Two key words, then counter words 2 and 3, fixed for a stream.
    """
    fixed = torch.zeros_like(block)
    counter = (block & MASK32, block >> 32, fixed + key[2], fixed + key[3])
    return torch.stack(philox(counter, key[:2]), dim=-1)


def _rotate(x: torch.Tensor, n: int) -> torch.Tensor:
    return ((x << n) & MASK32) | (x >> (32 - n))


def _quarter_round(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor) -> Words:
    a = (a + b) & MASK32
    d = _rotate(d ^ a, 16)
    c = (c + d) & MASK32
    b = _rotate(b ^ c, 12)
    a = (a + b) & MASK32
    d = _rotate(d ^ a, 8)
    c = (c + d) & MASK32
    b = _rotate(b ^ c, 7)
    return a, b, c, d


def chacha20(state: torch.Tensor) -> torch.Tensor:
    """Apply the ChaCha20 block function, feed-forward included (RFC 8439, section 2.3).

    Args:
        state: int64 [16, ...]: constants, 8 key words, then the four counter and nonce words.
            The function does not care how those four are split, so the RFC's 32-bit counter with
            a 96-bit nonce and the 64-bit counter that unison uses are the same code.

    Returns:
        int64 [16, ...]: the key stream block.
    """
    a, b, c, d = state.view(4, 4, *state.shape[1:]).unbind(0)
    for _ in range(CHACHA_DOUBLE_ROUNDS):
        a, b, c, d = _quarter_round(a, b, c, d)
        b, c, d = b.roll(-1, 0), c.roll(-2, 0), d.roll(-3, 0)  # columns become diagonals
        a, b, c, d = _quarter_round(a, b, c, d)
        b, c, d = b.roll(1, 0), c.roll(2, 0), d.roll(3, 0)
    return (torch.cat((a, b, c, d)) + state) & MASK32


def chacha20_blocks(block: torch.Tensor, key: Sequence[int]) -> torch.Tensor:
    """Return the words of the given blocks: int64 [*block.shape, 16].

    Args:
        block: int64 block numbers, at least 0: the 64-bit block counter.
        key: Eight key words, then two nonce words.
    """
    fixed = torch.zeros_like(block)
    state = [fixed + word for word in (*CHACHA_CONSTANTS, *key[:8])]
    state += [block & MASK32, block >> 32, fixed + key[8], fixed + key[9]]
    return chacha20(torch.stack(state)).movedim(0, -1)
