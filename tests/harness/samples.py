"""Sample inputs for every operation that unison registers with `torch.library`.

`tests/test_operations.py` runs `torch.library.opcheck` on each of them. An operation is named as it
was registered (`"unison::fill_normal"`); each sample is the tuple of its arguments, and a dict in
the last place holds keyword arguments. Give odd sizes, an empty tensor, and inputs that require a
gradient where the operation is differentiable. Samples are copied before use, so an operation that
writes into its arguments does no harm.
"""

from typing import Any

import torch

from unison.kernels.random import Cipher, Distribution, Recipe


def _normal_recipe(cipher: Cipher) -> torch.Tensor:
    key = tuple(range(1, cipher.num_key_words + 1))
    return Recipe(cipher, key, Distribution.NORMAL, (0.5, 2.0)).pack()


def _fill(shape: tuple[int, ...], starts: list[int], run: int, cipher: Cipher) -> tuple[Any, ...]:
    return torch.empty(shape), _normal_recipe(cipher), torch.tensor(starts, dtype=torch.int64), run


def _rows(rows: int, vocab: int, dtype: torch.dtype, gap: int = 0) -> tuple[Any, ...]:
    """Logits, some ignored labels, log-sum-exps and gradients."""
    logits = torch.randn(rows, vocab + gap).to(dtype)[:, :vocab]
    labels = torch.arange(rows) % vocab
    labels[1::3] = -100
    wide = torch.promote_types(dtype, torch.float32)
    return logits, labels, logits.to(wide).logsumexp(1), torch.randn(rows, dtype=wide)


_LOGITS = [
    (5, 123, torch.float32, 3),
    (3, 7, torch.float64),
    (4, 9, torch.bfloat16),
    (0, 7, torch.float32),
]
_WORDS = torch.tensor([1, 2, 3, 4])
SAMPLES: dict[str, list[tuple[Any, ...]]] = {
    "unison::cross_entropy_statistics": [(*_rows(*sample)[:2], -100) for sample in _LOGITS],
    "unison::cross_entropy_gradient": [(*_rows(*sample), -100) for sample in _LOGITS],
    "unison::cross_entropy_gradient_": [(*_rows(*sample), -100) for sample in _LOGITS],
    "unison::drop": [
        (torch.randn(3, 7), _WORDS, torch.tensor([4, 9, 2]), 0, 0, 0.5),
        (torch.randn(5, 3, 2), _WORDS, torch.tensor([1, 2, 3]), 2, 1, 0.1),
        (torch.randn(7, 1, dtype=torch.float64), _WORDS, torch.tensor([0, 1]), 1, -1, 0.3),
        (torch.randn(0, 4), _WORDS, torch.tensor([0]), 0, 0, 0.3),
    ],
    "unison::random_fill": [
        _fill((3, 7), [0, 100, 2**34], 7, Cipher.PHILOX),
        _fill((123,), [5], 123, Cipher.CHACHA20),
        _fill((0,), [], 0, Cipher.PHILOX),
    ],
    "unison::permute": [
        (torch.arange(11), torch.tensor([1, 2, 3, 4]), 11, [4, 3], False),
        (torch.tensor([[0, 5], [9, 3]]), torch.tensor([1, 2, 3, 4]), 10, [4, 3], True),
        (torch.empty(0, dtype=torch.int64), torch.tensor([1, 2, 3, 4]), 3, [2, 2], False),
    ],
}
