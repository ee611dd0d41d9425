"""Multiplying gradients with inverses, of one layer or of several of equal shape."""

from collections.abc import Mapping, Sequence
from copy import copy

import torch
import torch.nn.functional as F
from torch import Tensor

from unison.kernels import multi_tensor
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
        """Columns that products like best, zeros in those after d_in; None for any."""
        return self._held["a"].shape[-1] if "a" in self._held else None

    @property
    def is_diagonal(self) -> bool:
        """Whether it multiplies entry by entry."""
        return self._held.keys() == {"scale"}

    @property
    def shapes(self) -> tuple[tuple[str, torch.Size], ...]:
        """Of what it holds: inverses of equal shapes can be `stacked`."""
        return tuple((key, value.shape) for key, value in self._held.items())

    def apply(self, y: Tensor) -> Tensor:
        """Precondition a gradient [..., d_out, d_in or `width`], or as many as are stacked."""
        return self.apply_parts(y, [y.shape[-1]])[0]

    def apply_parts(self, y: Tensor, columns: Sequence[int]) -> list[Tensor]:
        """The same, some columns after others, each part contiguous where that costs nothing.

        Args:
            y: The gradient, or as many as inverses are stacked.
            columns: How many each part has; others that are left at the end are left out.
        """
        held = self._held
        if "a" not in held:
            return _parts(self._by_eigen(y) if "q_a" in held else y * held["scale"], columns)
        # As A⁻¹Y', transposed: both are symmetric, and so both products have the sum over the
        # contiguous dimension of both sides, the one layout that is fast in TF32.
        n = y.shape[-1]
        parts = _parts(torch.matmul(held["a"][..., :n, :n], y.mT).mT, columns)
        return [torch.matmul(held["g"], part) for part in parts] if "g" in held else parts

    def _by_eigen(self, y: Tensor) -> Tensor:
        held = self._held
        y = y @ held["q_a"]
        if "q_g" in held:
            y = held["q_g"] @ ((held["q_g"].mT @ y) * held["scale"])
        else:
            y = y * held["scale"]
        return y @ held["q_a"].mT

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


def multiply_all_(values: Sequence[Tensor], scales: Tensor) -> None:
    """Multiply each tensor, in its place, with its number of `scales` [tensors]."""
    flat = [value.view(1, -1) for value in values if value.is_contiguous()]
    if len(flat) == len(values) and scales.dtype == torch.float32 and multi_tensor.is_fast(flat):
        multi_tensor.combine(flat, scales[:, None], flat)  # one launch for all
    else:
        torch._foreach_mul_(list(values), list(scales.unbind()))


def _parts(y: Tensor, columns: Sequence[int]) -> list[Tensor]:
    return list(y[..., : sum(columns)].split(list(columns), dim=-1))


def _aligned(matrix: Tensor) -> Tensor:
    """With rows and columns of zeros where that is faster: the bias's makes most sizes odd."""
    extra = padding_of(len(matrix), matrix)
    return F.pad(matrix, (0, extra, 0, extra)) if extra else matrix
