"""Gradients to the owners of layers, and steps back to those who hold the parameters.

A layer is preconditioned as a whole matrix by its owner, whatever cuts its parameters: a flat shard
may end in the middle of a row. So each owner is sent the parts of its layers that others hold, and
sends back what each of them holds of the step: as many bytes as a gradient's reduce-scatter and
gather. Where every rank has whole gradients the first half is nothing, and where every rank owns
every layer the second is.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from unison.kfac.assignment import Assignment
from unison.kfac.layers import Layer
from unison.kfac.owners.base import Held, Owner, by_name, write_all
from unison.kfac.owners.exchange import swap


class Routes:
    """Who sends what to whom; arithmetic that every rank does alike.

    Args:
        owner: Holds the parameters.
        layers: What is preconditioned.
        assignment: By whom.
    """

    def __init__(self, owner: Owner, layers: Sequence[Layer], assignment: Assignment) -> None:
        self._layers, self._assignment = layers, assignment
        self._held = by_name(owner)
        self._ranks, self._num_places = owner.ranks, owner.num_places
        dtype = torch.float32
        for each in owner.held:
            dtype = torch.promote_types(dtype, each.parameter.dtype)
        self.like = torch.zeros(0, dtype=dtype, device=owner.device)
        self._mine = [self._pieces([index]) for index in self._owned_by(owner.ranks.rank)]

    def _pieces(self, layers: Sequence[int]) -> list[Held]:
        """The parameters of some layers, in order."""
        return [self._held[name] for index in layers for name in self._layers[index].parameters]

    def _owned_by(self, rank: int) -> list[int]:
        return [i for i in range(len(self._layers)) if self._assignment.owns(rank, i)]

    def gradients(self) -> dict[str, Tensor]:
        """The whole gradients of the layers that this rank owns; a collective if they are cut.

        Layers of which this rank has no gradient at all are left out: no rank has one.
        """
        wholes = None
        if self._num_places > 1:
            mine = [each for of_layer in self._mine for each in of_layer]
            gathered = zip(mine, self._gathered(mine), strict=True)
            wholes = {each.name: torch.cat(parts).view(each.shape) for each, parts in gathered}
        found = {}
        for of_layer in self._mine:
            if not any(each.has_gradient for each in of_layer):
                continue
            for each in of_layer:
                whole = each.gradient(each.shape) if wholes is None else wholes[each.name]
                found[each.name] = whole.to(self.like)
        return found

    def _gathered(self, mine: Sequence[Held]) -> list[list[Tensor]]:
        """The parts of this rank's parameters at every place of its copy of the model."""
        ranks, size = self._ranks, self._num_places
        first = ranks.rank // size * size  # of the ranks that hold the same copy
        copies = range(first, first + size)
        sent: list[list[Tensor]] = [[] for _ in range(ranks.size)]
        expected: list[list[int]] = [[] for _ in range(ranks.size)]
        for rank in copies:
            sent[rank] = [each.gradient() for each in self._pieces(self._owned_by(rank))]
            expected[rank] = [_length(each, rank - first) for each in mine]
        received = swap(ranks, sent, expected, self.like)
        return [[received[rank][i].to(self.like) for rank in copies] for i in range(len(mine))]

    def give(self, steps: Mapping[str, Tensor]) -> None:
        """Put steps where the gradients were; a collective unless every rank owns every layer.

        Args:
            steps: Of the parameters of the layers that this rank owns, in any shape; one that is
                missing had no gradient on any rank.
        """
        ranks, size = self._ranks, self._num_places
        source = self._assignment.source
        if self._assignment.is_replicated:
            place = ranks.rank % size
            write_all(
                (self._held[name], self._part(steps, self._held[name], place)) for name in steps
            )
            return
        everyone, indices = range(ranks.size), range(len(self._layers))
        sent = [
            [
                self._part(steps, each, rank % size).reshape(-1)
                for each in self._pieces([i for i in indices if source(rank, i) == ranks.rank])
            ]
            for rank in everyone
        ]
        expected = [
            self._pieces([i for i in indices if source(ranks.rank, i) == rank]) for rank in everyone
        ]
        place = ranks.rank % size
        sizes = [[_length(each, place) for each in of_rank] for of_rank in expected]
        received = swap(ranks, sent, sizes, self.like)
        write_all(
            pair
            for of_rank, values in zip(expected, received, strict=True)
            for pair in zip(of_rank, values, strict=True)
        )

    def _part(self, steps: Mapping[str, Tensor], each: Held, place: int) -> Tensor:
        start, stop = each.ranges[place]
        step = steps.get(each.name)
        if step is None:
            return self.like.new_zeros(stop - start)
        return step if stop - start == step.numel() else step.reshape(-1)[start:stop]


def _length(each: Held, place: int) -> int:
    start, stop = each.ranges[place]
    return stop - start
