"""What a complete logical batch was like. Un-noised functions of private data: no ε covers them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unison.privacy.dealing import gather_norms
from unison.privacy.mechanism import Release
from unison.privacy.ranks import Ranks


@dataclass(frozen=True, kw_only=True)
class Diagnostics:
    """What is known of one logical batch. Un-noised functions of private data: no ε covers them.

    Attributes:
        step: Number of the logical batch.
        num_samples: Samples in it.
        median_norm: Median of the samples' gradient norms before clipping; NaN of an empty batch.
        clipped_fraction: Part of the samples whose gradient was longer than C.
        num_dropped: Samples whose gradient was not finite, and that were left out.
    """

    step: int
    num_samples: int
    median_norm: float
    clipped_fraction: float
    num_dropped: int


@dataclass(frozen=True, eq=False)
class BatchNorms:
    """The norms of a complete logical batch: this rank's, which a collective puts together.

    Attributes:
        release: What its step applied.
        mine: Norms of this rank's samples before clipping [samples].
        positions: Where they stand in the logical batch [samples].
        num_samples: Samples of all ranks.
    """

    release: Release
    mine: Tensor
    positions: Tensor
    num_samples: int

    @classmethod
    def of(
        cls,
        release: Release,
        norms: Sequence[Tensor],
        positions: Sequence[Tensor],
        num_samples: int,
    ) -> "BatchNorms":
        """Put the parts of one or several passes together; every pass has at least one."""
        return cls(release, torch.cat(list(norms)), torch.cat(list(positions)), num_samples)

    def gathered(self, ranks: Ranks) -> Tensor:
        """All ranks' norms in the order of the logical batch [num_samples]; a collective."""
        return gather_norms(ranks, self.mine, self.positions, self.num_samples)

    def diagnostics(self, ranks: Ranks) -> Diagnostics:
        """The figures that are shown; a collective."""
        norms = self.gathered(ranks)
        finite = norms[norms.isfinite()]
        is_clipped = ~(norms <= self.release.max_grad_norm)
        return Diagnostics(
            step=self.release.step,
            num_samples=len(norms),
            median_norm=float(finite.median()) if len(finite) else float("nan"),
            clipped_fraction=float(is_clipped.double().mean()) if len(norms) else 0.0,
            num_dropped=len(norms) - len(finite),
        )
