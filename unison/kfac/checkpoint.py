"""The state of all layers: gathered from their owners or written by them, taken over by others.

`gathered_state` is whole on every rank. `save_layers` is a checkpoint in the format of
`unison.save_checkpoint` (docs/checkpoints.md): each owner writes its own layers, and whoever owns a
layer later reads that one.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unison.errors import BadInput
from unison.kfac.assignment import Assignment
from unison.kfac.graft import Graft
from unison.kfac.layers import Layer
from unison.kfac.owners.base import Ranks
from unison.kfac.owners.gather import tensors_from
from unison.kfac.state import LayerState
from unison.shard.state.checkpoint import (
    Manifest,
    SavedTensor,
    read_manifest,
    read_parts,
    settle,
    write_folder,
)
from unison.shard.state.entries import FlatPart, from_rank_0, gather_objects

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
    stored: Mapping[int, Mapping[str, Any]],
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


def save_layers(
    folder: Path,
    layers: Sequence[Layer],
    own: Mapping[int, Mapping[str, Tensor]],
    extra: dict[str, Any],
    ranks: Ranks,
) -> None:
    """Write layers to a checkpoint's folder, each rank its own; a collective.

    Args:
        folder: Which every rank can reach; it appears when it is complete.
        layers: All layers.
        own: The tensors of those that this rank writes, by the layer's number.
        extra: What else is written, as JSON can hold it; that of rank 0 is.
        ranks: Everyone.
    """
    parts = {
        _key(layers[index], key): FlatPart(tuple(each.shape), 0, each.reshape(-1))
        for index, tensors in own.items()
        for key, each in tensors.items()
    }
    mine = {key: SavedTensor(part.shape, part.values.dtype) for key, part in parts.items()}
    tensors = {
        key: each for of_rank in gather_objects(ranks, mine) for key, each in of_rank.items()
    }
    write_folder(folder, parts, tensors, ranks, optimizer=None, extra=extra)


def open_layers(folder: Path, ranks: Ranks) -> Manifest:
    """What a checkpoint holds; a collective.

    Raises:
        BadInput: On every rank, if it is not one of `save_layers`.
    """

    def read() -> Manifest:
        settle(folder)
        manifest = read_manifest(folder)
        if "layers" not in manifest.extra:
            raise BadInput(f"{folder} holds no curvature: it was not written by KFAC.save")
        return manifest

    return from_rank_0(ranks, read)


def read_layers(
    folder: Path,
    manifest: Manifest,
    states: Mapping[int, LayerState],
    like: Tensor,
    ranks: Ranks,
) -> dict[int, dict[str, Any]]:
    """What is stored of the layers that this rank owns, by their numbers; a collective.

    The result is what `load_into` takes. A rank reads the bytes of its own layers.
    """
    found: dict[int, dict[str, Any]] = {}
    parts: dict[str, FlatPart] = {}
    for index, state in states.items():
        prefix = _key(state.layer, "")
        tensors = {}
        for key, saved in manifest.tensors.items():
            if key.startswith(prefix):
                device = like.device if saved.shape else "cpu"  # single numbers stay on the host
                value = torch.empty(saved.shape, dtype=saved.dtype, device=device)
                tensors[key.removeprefix(prefix)] = value
                parts[key] = FlatPart(saved.shape, 0, value.view(-1))
        found[index] = {"layer": state.layer.as_dict(), "tensors": tensors}
    read_parts(folder, parts, manifest, ranks)
    return found


def _key(layer: Layer, key: str) -> str:
    """What a tensor is called in a checkpoint."""
    return f"kfac/{layer.name}/{key}"


def _placed(value: Tensor, like: Tensor) -> Tensor:
    """A copy where layers compute; single numbers stay on the host."""
    return value.clone() if value.ndim == 0 else value.to(like.device, copy=True)
