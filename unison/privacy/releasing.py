"""From clipped sums to private gradients: noise and division of everything that a rank owns."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from unison.parallel import ParallelAdapter, ShardedParam
from unison.privacy.cut import Gradients
from unison.privacy.given import Released
from unison.privacy.grid import Grid
from unison.privacy.mechanism import Release
from unison.privacy.noise import Shares, can_release, finalise, recipes_for, release_all
from unison.privacy.step_graph import StepGraph
from unison.rng import Key

Own = Mapping[str, tuple[Tensor, Tensor]]
"""What the sum of each used parameter is made of, see `Clipping.shares`."""
Made = tuple[Sequence[ShardedParam], Sequence[Tensor], Sequence[Tensor]]
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

    @property
    def grid(self) -> Grid:
        """On which sums over passes and ranks lie."""
        return Grid.of(self.release, self.num_samples)


class Releasing:
    """Releases one logical batch after the other: all parameters at once, where kernels do it.

    Args:
        owner: Who holds the parameters.
    """

    def __init__(self, owner: ParallelAdapter) -> None:
        self._owner = owner
        self._names = tuple(each.name for each in owner.params)

    def gradients(self, own: Own | None, terms: Terms) -> Iterable[tuple[ShardedParam, Tensor]]:
        """Make the gradients of everything that this rank owns, as they are asked for.

        Args:
            own: Where this rank has all of the sums; else the owner has them.
            terms: Noise and division.
        """
        # What this rank has of its own is per-sample gradients, which are yet to be clipped.
        if own is not None:
            return Released(partial(self._of_own, own, terms))
        return self._of_totals(terms)

    def _of_own(self, own: Own, terms: Terms) -> tuple[Sequence[ShardedParam], Sequence[Tensor]]:
        owned, values, weights = self._made_of_own(own)
        gradients = _all_released(Shares.of(owned, values, weights), terms)
        return owned, _as_gradients(owned, gradients, _are_whole(owned))

    def _of_totals(self, terms: Terms) -> Iterator[tuple[ShardedParam, Tensor]]:
        key, release, divisor, _ = terms
        all_owned, values, weights = self._totals(terms.grid)
        shares = Shares.of(all_owned, values, weights)
        # Parts that are cut in other ways than flat ones draw their noise one by one.
        if all(not each.is_dtensor for each in all_owned) and can_release(shares):
            gradients = _all_released(shares, terms)
            gradients = _as_gradients(all_owned, gradients, _are_whole(all_owned))
            yield from zip(all_owned, gradients, strict=True)
            return
        for owned, total in zip(all_owned, values, strict=True):
            gradient = finalise(
                total.squeeze(0),
                grid=terms.grid,
                name=owned.name,
                key=key,
                release=release,
                divisor=divisor,
                dtype=owned.parameter.dtype,
                box=owned.box,
            )
            yield owned, owned.as_gradient(gradient)

    def step(
        self, graph: StepGraph, own: Own, terms: Terms
    ) -> Iterator[tuple[ShardedParam, Tensor]]:
        """The same by a graph that takes the optimizer's step as well.

        Args:
            graph: Of both.
            own: What the sums are made of: the same object, with the same tensors, whenever it is
                of the same kind.
            terms: Noise and division.
        """
        key, release, divisor, num_samples = terms
        recipes = recipes_for(self._names, key, release, num_samples)
        found = graph.replay(
            id(own), lambda: Shares.of(*self._made_of_own(own)), recipes=recipes, divisor=divisor
        )
        for owned, gradient in found:
            owned.parameter.grad = None  # what it held is trained on: nothing is added to it
            yield owned, owned.as_gradient(gradient)

    def _made_of_own(self, own: Own) -> Made:
        """What this rank owns, and what the sums of it are made of: values and weights of each."""
        owned = self._owner.params
        made = [own.get(each.name) or _unused(each) for each in owned]
        return owned, [values for values, _ in made], [weights for _, weights in made]

    def _totals(self, grid: Grid) -> Made:
        """The sums over passes and ranks, as integers of which each weighs a spacing."""
        found = [(each, total.view(1, -1)) for each, total in self._owner.totals()]
        weights = {
            device: torch.full((1,), grid.spacing, dtype=torch.float64, device=device)
            for device in {total.device for _, total in found}
        }
        totals = [total for _, total in found]
        return [each for each, _ in found], totals, [weights[total.device] for total in totals]


def _all_released(shares: Shares, terms: Terms) -> Gradients:
    key, release, divisor, num_samples = terms
    return release_all(shares, key=key, release=release, divisor=divisor, num_samples=num_samples)


def _are_whole(owned: Sequence[ShardedParam]) -> bool:
    """Whether these are plain parameters, of which this rank holds all."""
    return all(not each.is_dtensor and not each.is_part for each in owned)


def _as_gradients(
    owned: Sequence[ShardedParam], gradients: Gradients, are_whole: bool
) -> Sequence[Tensor]:
    """Return `as_gradient` of each, which are tensors of one device in the parameters' shapes."""
    if are_whole and gradients.home == gradients[0].device:
        return gradients
    return [each.as_gradient(some) for each, some in zip(owned, gradients, strict=True)]


def _unused(owned: ShardedParam) -> tuple[Tensor, Tensor]:
    """No sample used it, and its noise must not tell."""
    device = owned.parameter.device
    weights = torch.zeros(1, dtype=torch.float64, device=device)
    return torch.zeros(1, owned.numel, device=device), weights
