"""How the tokens of a batch are cut into chunks, whose logits exist one after the other."""

from collections.abc import Iterator
from typing import NamedTuple

import torch

# Elements of a chunk of logits. On a GPU its GEMM should fill the chip, on a CPU it should not be
# far from the cache. Functions of the device alone: chunks change rounding, and free memory must
# not.
_ELEMENTS = {"cpu": 1 << 22}
_ELEMENTS_ELSEWHERE = 1 << 27


class Chunk(NamedTuple):
    """Some tokens of some samples: all of them, or one sample."""

    samples: slice
    tokens: slice


def rows_per_chunk(vocab: int, device: torch.device) -> int:
    """Return how many tokens' logits exist at once, unless the user says so: at least one."""
    return max(1, _ELEMENTS.get(device.type, _ELEMENTS_ELSEWHERE) // max(1, vocab))


def cut(batch: int, tokens: int, rows: int) -> Iterator[Chunk]:
    """Cut a batch into whole samples, or into runs of one sample's tokens if it is too long.

    Args:
        batch: Number of samples.
        tokens: Tokens per sample.
        rows: Most tokens in a chunk.

    >>> [(c.samples.start, c.samples.stop) for c in cut(5, 10, 25)]
    [(0, 2), (2, 4), (4, 5)]
    >>> [(c.samples.start, c.tokens.start, c.tokens.stop) for c in cut(2, 10, 6)]
    [(0, 0, 5), (0, 5, 10), (1, 0, 5), (1, 5, 10)]
    """
    if tokens == 0:
        return
    if tokens <= rows:
        for samples in _even(batch, rows // tokens):
            yield Chunk(samples, slice(0, tokens))
        return
    for sample in range(batch):
        for part in _even(tokens, rows):
            yield Chunk(slice(sample, sample + 1), part)


def _even(total: int, most: int) -> Iterator[slice]:
    """Cut range(total) into as few runs as can be, and those as even as can be."""
    count = -(-total // most)
    size = -(-total // max(1, count))
    for start in range(0, total, max(1, size)):
        yield slice(start, min(total, start + size))
