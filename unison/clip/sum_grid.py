"""The grid that samples' shares are rounded to, where kernels add them up inside of one product."""

from typing import NamedTuple

import torch
from torch import Tensor


class SumGrid(NamedTuple):
    """Multiples of a spacing, which int32 numbers count.

    Integers add without rounding: what one sample adds to a sum does not depend on the others.

    Attributes:
        spacing: A power of two; or a tensor of one, for passes that are recorded once for many.
        is_held: Whether int32 holds the sum of a pass.
    """

    spacing: float | Tensor
    is_held: bool = True

    def weights(self, coefficients: Tensor) -> Tensor:
        """Coefficients of shares that are counted in spacings, float32: a shift of exponents."""
        return (coefficients / self.spacing).float()

    def weight(self, device: torch.device) -> Tensor:
        """What a count weighs [1], float64."""
        if isinstance(self.spacing, Tensor):
            return self.spacing
        return torch.full((1,), self.spacing, dtype=torch.float64, device=device)
