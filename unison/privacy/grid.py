"""The grid that clipped sums lie on: whole multiples of one spacing, which add without rounding.

[Note: sums on a grid] The sum of the rows that are computed together, float64, is rounded to a
public grid before it is added to any other. From there on sums are integers: over granules, passes
and ranks they are the same in any order, by any reducer. Emptying a record changes the sum of its
own rows, and no rounding elsewhere: so all that one record can change is what it changes there
([Note: proved sensitivity] in unison/clip/bounds.py), and two roundings of each element.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from unison.clip.measured import SumGrid
from unison.errors import BadInput
from unison.privacy.mechanism import FINER, Release
from unison.rng import noise_spacing


@dataclass(frozen=True)
class Grid:
    """Multiples of a spacing, as integers.

    Attributes:
        spacing: A power of two, a function of public numbers alone.
        dtype: Of the integers: as narrow as the sum of a logical batch allows.
    """

    spacing: float
    dtype: torch.dtype

    @classmethod
    def of(cls, release: Release, num_samples: int) -> "Grid":
        """The grid for a logical batch: as fine as the integers that hold its sum allow.

        It is that of the noise, or at least 16 times as fine: a sum is rounded to the noise's grid
        when it meets the noise, and `sensitivity_factor` counts both roundings.

        Args:
            release: What the step applies.
            num_samples: Samples in the logical batch, none of which exceeds C.

        Raises:
            BadInput: If so many samples are too much for the noise's grid.
        """
        finest = _finest(release, num_samples)
        if release.noise_std == 0:
            return cls(finest[torch.int64], torch.int64)
        spacing = noise_spacing(release.noise_std)
        for dtype, finer in finest.items():
            if finer <= spacing * FINER:
                return cls(finer, dtype)
            if finer <= spacing:
                return cls(spacing, dtype)
        raise BadInput(
            f"{num_samples} samples of norm {release.max_grad_norm} are too much for the grid of a "
            f"noise of standard deviation {release.noise_std}: use a larger noise_multiplier"
        )

    @classmethod
    def of_pass(cls, release: Release, num_samples: int, num_rows: int) -> SumGrid:
        """The grid that kernels use within a pass: this one, or multiples of it that int32 holds.

        Args:
            release: What the step applies.
            num_samples: Samples in the logical batch.
            num_rows: Rows of the pass.
        """
        num_rows = min(num_rows, num_samples)
        if release.noise_std == 0:  # nothing to be proved of it
            return SumGrid(_finest(release, num_rows)[torch.int32])
        whole = found = cls.of(release, num_samples)
        if whole.dtype != torch.int32:
            found = cls.of(release, num_rows)
        return SumGrid(max(found.spacing, whole.spacing), found.dtype == torch.int32)

    def values(self, integers: Tensor) -> Tensor:
        """What integers stand for, float64, exactly."""
        return integers.double() * self.spacing


def _finest(release: Release, num_samples: int) -> dict[torch.dtype, float]:
    """The finest spacings of which integers hold the sum of so many samples, by their dtype."""
    largest = max(1, num_samples) * release.max_grad_norm
    exponent = math.frexp(largest)[1]  # largest < 2^exponent
    return {torch.int32: 2.0 ** (exponent - 30), torch.int64: 2.0 ** (exponent - 50)}
