"""The state of all layers, gathered from their owners, and taken over by new ones."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from unison.errors import BadInput
from unison.kfac.assignment import Assignment
from unison.kfac.graft import Graft
from unison.kfac.layers import Layer
from unison.kfac.owners.base import Ranks
from unison.kfac.owners.gather import tensors_from
from unison.kfac.state import LayerState

GRAFT = "graft."  # what the grafted optimizer remembers, among the tensors of a layer


def with_prefix(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The grafted optimizer's tensors, as they are stored."""
    return {GRAFT + key: value for key, value in tensors.items()}


def gathered_state(
    layers: Sequence[Layer],
    assignment: Assignment,
    own: Mapping[int, Mapping[str, Tensor]],
    ranks: Ranks,
) -> list[dict[str, Any]]:
    """Each layer's description and tensors, on the CPU of every rank; a collective.

    Args:
        layers: All layers.
        assignment: Who owns them.
        own: The tensors of those that this rank owns.
        ranks: Everyone.
    """
    found = []
    for index, layer in enumerate(layers):
        first = assignment.owners[index][0]
        tensors = own[index] if first == ranks.rank else None
        found.append({"layer": layer.as_dict(), "tensors": tensors_from(ranks, first, tensors)})
    return found


def load_into(
    states: Mapping[int, LayerState],
    graft: Graft,
    stored: Sequence[Mapping[str, Any]],
    like: Tensor,
) -> None:
    """Give each layer that this rank owns what was stored of it."""
    for index, state in states.items():
        name = state.layer.name
        if stored[index]["layer"]["name"] != name:
            raise BadInput(f"expected the state of {name}, found {stored[index]['layer']['name']}")
        own = {key: _placed(each, like) for key, each in stored[index]["tensors"].items()}
        grafted = {key: each for key, each in own.items() if key.startswith(GRAFT)}
        graft.load({key.removeprefix(GRAFT): each for key, each in grafted.items()})
        state.load({key: each for key, each in own.items() if key not in grafted})


def _placed(value: Tensor, like: Tensor) -> Tensor:
    """A copy where layers compute; single numbers stay on the host."""
    return value.clone() if value.ndim == 0 else value.to(like.device, copy=True)
