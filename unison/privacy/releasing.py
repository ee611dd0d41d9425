"""From clipped sums to private gradients: noise and division of everything that a rank owns."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from unison.privacy.mechanism import Release
from unison.privacy.noise import Shares, can_release, finalise, recipes_for, release_all
from unison.privacy.owners import Owned, Owner
from unison.privacy.step_graph import StepGraph
from unison.rng import Key

Own = Mapping[str, tuple[Tensor, Tensor]]
"""What the sum of each used parameter is made of, see `Clipping.shares`."""


class Terms(NamedTuple):
    """On which terms a logical batch is released.

    Attributes:
        key: The key of this step's noise.
        release: What this step applies.
        divisor: A public constant.
        num_samples: Samples in the logical batch.
    """

    key: Key
    release: Release
    divisor: float
    num_samples: int


class Releasing:
    """Releases one logical batch after the other: all parameters at once, where kernels do it.

    Args:
        owner: Who holds the parameters.
    """

    def __init__(self, owner: Owner) -> None:
        self._owner = owner

    def gradients(self, own: Own | None, terms: Terms) -> Iterator[tuple[Owned, Tensor]]:
        """Make the gradients of everything that this rank owns.

        Args:
            own: Where this rank has all of the sums; else the owner has them.
            terms: Noise and division.
        """
        key, release, divisor, num_samples = terms
        all_owned, made = self._made_of(own)
        shares = Shares.of(all_owned, made)
        # Parts that are cut in other ways than flat ones draw their noise one by one.
        is_flat = own is not None or all(type(each) is Owned for each in all_owned)
        # What this rank has of its own is per-sample gradients, which are yet to be clipped.
        if own is not None or (is_flat and can_release(shares)):
            gradients = release_all(
                shares, key=key, release=release, divisor=divisor, num_samples=num_samples
            )
            yield from zip(all_owned, gradients, strict=True)
            return
        for owned, (total, _) in zip(all_owned, made, strict=True):
            gradient = finalise(
                total.squeeze(0),
                name=owned.name,
                key=key,
                release=release,
                divisor=divisor,
                dtype=owned.parameter.dtype,
                box=owned.box,
            )
            yield owned, gradient

    def step(self, graph: StepGraph, own: Own, terms: Terms) -> Iterator[tuple[Owned, Tensor]]:
        """The same by a graph that takes the optimizer's step as well.

        Args:
            graph: Of both.
            own: What the sums are made of: the same object, with the same tensors, whenever it is
                of the same kind.
            terms: Noise and division.
        """
        key, release, divisor, num_samples = terms
        names = [each.name for each in self._owner.owned]
        recipes = recipes_for(names, key, release, num_samples)
        found = graph.replay(
            id(own), lambda: Shares.of(*self._made_of(own)), recipes=recipes, divisor=divisor
        )
        for owned, gradient in found:
            owned.parameter.grad = None  # what it held is trained on: nothing is added to it
            yield owned, gradient

    def _made_of(self, own: Own | None) -> tuple[Sequence[Owned], list[tuple[Tensor, Tensor]]]:
        """What this rank owns, and what the sums of it are made of: values and weights of each."""
        if own is not None:
            owned = self._owner.owned
            return owned, [own.get(each.name) or _unused(each) for each in owned]
        found = [(each, total.view(1, -1)) for each, total in self._owner.totals()]
        ones = {
            device: torch.ones(1, dtype=torch.float64, device=device)
            for device in {total.device for _, total in found}
        }
        return [each for each, _ in found], [(total, ones[total.device]) for _, total in found]


def _unused(owned: Owned) -> tuple[Tensor, Tensor]:
    """No sample used it, and its noise must not tell."""
    device = owned.parameter.device
    weights = torch.zeros(1, dtype=torch.float64, device=device)
    return torch.zeros(1, owned.numel, device=device), weights
