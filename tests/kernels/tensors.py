"""Many tensors for the kernels that take them at once."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.harness import assert_same_bits
from unison.kernels.random import Cipher, Distribution, Recipe, secure_floats
from unison.rng import Key, Stream, noise_spacing

# Aligned and not, of less and more than a tile, a scalar, none at all.
SHAPES = [(8, 16), (40,), (7,), (33, 4), (1100,), (), (0, 3)]
HALF, SINGLE = torch.bfloat16, torch.float32


def draw(batch: int, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[Tensor]:
    """Per-sample gradients, bfloat16 and float32 in turn."""
    gen = torch.Generator().manual_seed(batch)
    return [
        torch.randn(batch, *shape, generator=gen).to(HALF if i % 2 else SINGLE)
        for i, shape in enumerate(shapes)
    ]


def weights_of(num_tensors: int, batch: int) -> Tensor:
    gen = torch.Generator().manual_seed(7)
    return torch.rand(num_tensors, batch, generator=gen) + 0.1


def recipes_of(num_tensors: int, std: float = 0.7, distance: float | None = None) -> Tensor:
    """Recipes of noise; a small distance has more decided exactly, and changes no value."""
    key, floats = Key.from_seed(3), secure_floats(std, noise_spacing(std))
    if distance is not None:
        floats = (*floats[:2], distance)
    return torch.stack(
        [
            Recipe(
                Cipher.CHACHA20,
                Stream(key, str(i), purpose="noise", cipher=Cipher.CHACHA20).words,
                Distribution.SECURE_NORMAL,
                floats,
            ).pack()
            for i in range(num_tensors)
        ]
    )


def outs_like(values: Sequence[Tensor], dtype: torch.dtype = SINGLE) -> list[Tensor]:
    return [torch.full(each.shape[1:], 3.0, dtype=dtype) for each in values]


def assert_all_same_bits(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    assert_same_bits(*({str(i): x for i, x in enumerate(each)} for each in (found, expected)))
