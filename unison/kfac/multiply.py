"""Multiplying gradients with inverses, of one layer or of several of equal shape."""

from collections.abc import Mapping, Sequence
from copy import copy

import torch
import torch.nn.functional as F
from torch import Tensor

from unison.kfac.device import padding_of


class Inverse:
    """What to multiply a layer's gradient [d_out, d_in] with.

    Args:
        tensors: `a` and `g` (inverses), or `q_a`, `q_g` and `scale` (eigenvectors), or `scale`
            alone (diagonal). Without `g` or `q_g` the identity is meant.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._held = dict(tensors)
        self._d_in = 0
        if "a" in tensors:
            self._d_in = len(tensors["a"])
            self._held["a"] = _aligned(tensors["a"])

    @property
    def tensors(self) -> dict[str, Tensor]:
        """What it was made of."""
        if "a" not in self._held:
            return dict(self._held)
        return {**self._held, "a": self._held["a"][..., : self._d_in, : self._d_in]}

    @property
    def width(self) -> int | None:
        """Columns that `apply` likes best, zeros in those after d_in; None for any."""
        return self._held["a"].shape[-1] if "a" in self._held else None

    @property
    def is_diagonal(self) -> bool:
        """Whether it multiplies entry by entry."""
        return self._held.keys() == {"scale"}

    @property
    def shapes(self) -> tuple[tuple[str, torch.Size], ...]:
        """Of what it holds: inverses of equal shapes can be `stacked`."""
        return tuple((key, value.shape) for key, value in self._held.items())

    def apply(self, y: Tensor, out: Tensor | None = None) -> Tensor:
        """Precondition a gradient [..., d_out, d_in or `width`].

        Args:
            y: The gradient, or as many as inverses are stacked.
            out: Where to put the result; may be y.
        """
        held = self._held
        if "a" in held:
            # As A⁻¹Y', transposed: both are symmetric, and so both products have the sum over the
            # contiguous dimension of both sides, the one layout that is fast in TF32.
            n = y.shape[-1]
            y = torch.matmul(held["a"][..., :n, :n], y.mT).mT
            return torch.matmul(held["g"], y, out=out) if "g" in held else _put(y, out)
        if "q_a" not in held:
            return _put(y * held["scale"], out)
        y = y @ held["q_a"]
        if "q_g" not in held:
            return torch.matmul(y * held["scale"], held["q_a"].mT, out=out)
        y = held["q_g"] @ ((held["q_g"].mT @ y) * held["scale"])
        return torch.matmul(y, held["q_a"].mT, out=out)

    @property
    def nbytes(self) -> int:
        """Bytes that it holds."""
        return sum(value.nbytes for value in self._held.values())


def stacked(inverses: Sequence[Inverse]) -> Inverse:
    """One inverse for as many gradients, of equal shapes; each is a view of it afterwards."""
    whole = copy(inverses[0])
    whole._held = {}
    for key, first in inverses[0]._held.items():
        # One side after the other: only one is there twice.
        values = [each._held[key] for each in inverses]
        value = torch.stack(values) if len(values) > 1 else first.unsqueeze(0)
        for place, each in enumerate(inverses):
            each._held[key] = value[place]
        whole._held[key] = value
    return whole


def _put(value: Tensor, out: Tensor | None) -> Tensor:
    return value if out is None else out.copy_(value)


def _aligned(matrix: Tensor) -> Tensor:
    """With rows and columns of zeros where that is faster: the bias's makes most sizes odd."""
    extra = padding_of(len(matrix), matrix)
    return F.pad(matrix, (0, extra, 0, extra)) if extra else matrix
