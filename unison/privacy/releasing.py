"""From clipped sums to private gradients: noise and division of everything that a rank owns."""

from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

from unison.clip.kept import SharesByName
from unison.privacy.mechanism import Release
from unison.privacy.noise import Shares, can_release, finalise, recipes_for, release_all
from unison.privacy.owners import Owned, Owner
from unison.privacy.step_graph import StepGraph
from unison.rng import Key

Own = Mapping[str, tuple[Tensor, Tensor]]
"""What the sum of each used parameter is made of, see `Clipping.shares`."""
Made = tuple[Sequence[Owned], Sequence[Tensor], Sequence[Tensor]]
"""(what this rank owns, values of each, weights of each)"""


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
        self._by_name = sorted(owner.owned, key=attrgetter("name"))
        self._names = [each.name for each in self._by_name]

    def gradients(self, own: Own | None, terms: Terms) -> Iterator[tuple[Owned, Tensor]]:
        """Make the gradients of everything that this rank owns.

        Args:
            own: Where this rank has all of the sums; else the owner has them.
            terms: Noise and division.
        """
        key, release, divisor, num_samples = terms
        all_owned, values, weights = self._in_order_of(own) or self._made_of(own)
        shares = Shares.of(all_owned, values, weights)
        # Parts that are cut in other ways than flat ones draw their noise one by one.
        is_flat = own is not None or all(type(each) is Owned for each in all_owned)
        # What this rank has of its own is per-sample gradients, which are yet to be clipped.
        if own is not None or (is_flat and can_release(shares)):
            gradients = release_all(
                shares, key=key, release=release, divisor=divisor, num_samples=num_samples
            )
            yield from zip(all_owned, _as_gradients(all_owned, gradients), strict=True)
            return
        for owned, total in zip(all_owned, values, strict=True):
            gradient = finalise(
                total.squeeze(0),
                name=owned.name,
                key=key,
                release=release,
                divisor=divisor,
                dtype=owned.parameter.dtype,
                box=owned.box,
            )
            yield owned, owned.as_gradient(gradient)

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
            yield owned, owned.as_gradient(gradient)

    def _in_order_of(self, own: Own | None) -> Made | None:
        """What `_made_of` returns, in order of names: that of values which kernels know already."""
        asked = own.asked if isinstance(own, SharesByName) else None
        if own is None or asked is None or list(own) != self._names:
            return None
        return self._by_name, asked, [weights for _, weights in own.values()]

    def _made_of(self, own: Own | None) -> Made:
        """What this rank owns, and what the sums of it are made of: values and weights of each."""
        if own is not None:
            owned = self._owner.owned
            made = [own.get(each.name) or _unused(each) for each in owned]
            return owned, [values for values, _ in made], [weights for _, weights in made]
        found = [(each, total.view(1, -1)) for each, total in self._owner.totals()]
        ones = {
            device: torch.ones(1, dtype=torch.float64, device=device)
            for device in {total.device for _, total in found}
        }
        totals = [total for _, total in found]
        return [each for each, _ in found], totals, [ones[total.device] for total in totals]


def _as_gradients(owned: Sequence[Owned], gradients: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return `as_gradient` of each, which are tensors of one device in the parameters' shapes."""
    devices = set(map(Tensor.get_device, [each.parameter for each in owned]))
    is_there = devices == {gradients[0].get_device()}
    if is_there and not any(type(each) is not Owned or each.is_part for each in owned):
        return gradients
    return [each.as_gradient(some) for each, some in zip(owned, gradients, strict=True)]


def _unused(owned: Owned) -> tuple[Tensor, Tensor]:
    """No sample used it, and its noise must not tell."""
    device = owned.parameter.device
    weights = torch.zeros(1, dtype=torch.float64, device=device)
    return torch.zeros(1, owned.numel, device=device), weights
