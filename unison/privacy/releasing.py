"""From clipped sums to private gradients: noise and division of everything that a rank owns."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from unison.privacy.mechanism import Release
from unison.privacy.noise import Share, can_release, finalise, release_all
from unison.privacy.owners import Owned, Owner
from unison.rng import Key

Own = Mapping[str, tuple[Tensor, Tensor]]
"""What the sum of each used parameter is made of, see `Clipping.shares`."""


class Releasing:
    """Releases one logical batch after the other: all parameters at once, where kernels do it.

    Args:
        owner: Who holds the parameters.
    """

    def __init__(self, owner: Owner) -> None:
        self._owner = owner

    def gradients(
        self, own: Own | None, *, key: Key, release: Release, divisor: float, num_samples: int
    ) -> Iterator[tuple[Owned, Tensor]]:
        """Make the gradients of everything that this rank owns.

        Args:
            own: Where this rank has all of the sums; else the owner has them.
            key: The key of this step's noise.
            release: What this step applies.
            divisor: A public constant.
            num_samples: Samples in the logical batch.
        """
        shares = self._shares(own)
        # Parts that are cut in other ways than flat ones draw their noise one by one.
        is_flat = all(type(owned) is Owned for owned, _ in shares)
        # What this rank has of its own is per-sample gradients, which are yet to be clipped.
        if own is not None or (is_flat and can_release([share for _, share in shares])):
            made = release_all(
                [share for _, share in shares],
                key=key,
                release=release,
                divisor=divisor,
                num_samples=num_samples,
            )
            yield from zip((owned for owned, _ in shares), made, strict=True)
            return
        for owned, share in shares:
            gradient = finalise(
                share.values.squeeze(0),
                name=owned.name,
                key=key,
                release=release,
                divisor=divisor,
                dtype=owned.parameter.dtype,
                box=owned.box,
            )
            yield owned, gradient

    def _shares(self, own: Own | None) -> list[tuple[Owned, Share]]:
        """What the sums of everything that this rank owns are made of."""
        if own is None:
            found = [(owned, total.view(1, -1)) for owned, total in self._owner.totals()]
            ones = {
                device: torch.ones(1, dtype=torch.float64, device=device)
                for device in {total.device for _, total in found}
            }
            return [(owned, Share.of(owned, total, ones[total.device])) for owned, total in found]
        shares = []
        for owned in self._owner.owned:
            device = owned.parameter.device
            if owned.name in own:
                values, weights = own[owned.name]
            else:  # no sample used it, and its noise must not tell
                values = torch.zeros(1, owned.numel, device=device)
                weights = torch.zeros(1, dtype=torch.float64, device=device)
            shares.append((owned, Share.of(owned, values, weights)))
        return shares
