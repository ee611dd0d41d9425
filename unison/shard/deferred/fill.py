"""Filling: give the tensors of a module memory where they have none, and their initial values.

One tensor at a time: beside what the module holds in the end, no more than one whole tensor is ever
in memory, and that only where its values cannot be made in parts (local.py).
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from unison.errors import BadInput
from unison.shard.deferred.fsdp2 import give_memory, local_box
from unison.shard.deferred.local import fill_part_
from unison.shard.deferred.places import Place, naming, replace_tensors
from unison.shard.deferred.recipe import ORIGINALS, foreign_attributes
from unison.shard.deferred.replay import Streams, contents, evaluate
from unison.shard.deferred.tape import Operand
from unison.shard.dtensors import is_dtensor, local_part
from unison.shard.flat_group import RECIPE
from unison.shard.unit import units_of


@torch.no_grad()
def fill_places(
    module: nn.Module, places: list[Place], seed: int, device: torch.device | None
) -> None:
    """Fill the tensors of a module that have a recipe, and give those without memory some.

    Args:
        module: Whose tensors.
        places: The tensors.
        seed: Of the random values.
        device: Where they are to be; None for where they are, or else torch's default device.
    """
    default = device or torch.get_default_device()
    named = ((p.name, p.recipe.operand.version) for p in places if p.recipe is not None)
    streams = Streams.of(seed, named)
    with torch.device("cpu"), _weak_references_renewed(module):  # values are made on the CPU
        for unit in units_of(module):
            unit.allocate(default)
        if any(is_dtensor(place.tensor) and place.tensor.is_meta for place in places):
            give_memory(module, device)
        plain: list[Place] = []
        for place in places:
            with naming(place.name):
                if place.piece is not None:
                    _fill_piece(place, streams)
                elif is_dtensor(place.tensor):
                    _fill_distributed(place, streams)
                elif place.is_parameter:
                    _fill_parameter(place, streams, _device_for(place, device, default))
                else:
                    plain.append(place)
        replaced: dict[int, Tensor] = {}
        for sharing in _by_storage(plain):
            with naming(sharing[0].name):
                target = _device_for(sharing[0], device, default)
                tensors = _filled_together(sharing, streams, target)
            replaced.update(zip(map(id, (p.tensor for p in sharing)), tensors, strict=True))
        replace_tensors(module, replaced)
    if not any(is_dtensor(place.tensor) for place in places):
        for child in module.modules():
            vars(child).pop(ORIGINALS, None)


def _device_for(place: Place, device: torch.device | None, default: torch.device) -> torch.device:
    return device or (default if place.tensor.is_meta else place.tensor.device)


def _fill_piece(place: Place, streams: Streams) -> None:
    if place.recipe is not None:
        assert place.piece is not None
        part = local_part(place.tensor).detach().view(-1)
        fill_part_(part, place.recipe.operand, place.piece.start, streams)


def _fill_distributed(place: Place, streams: Streams) -> None:
    if place.recipe is None:
        return
    operand, out = place.recipe.operand, place.tensor._local_tensor  # type: ignore[attr-defined]
    box = local_box(place.tensor, place.name)
    starts, run = box.rows()
    if len(starts) <= 1:
        fill_part_(out.view(-1), operand, int(starts[0]) if run else 0, streams)
        return
    corner = tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))
    out.copy_(evaluate(operand, streams)[corner])


def _fill_parameter(place: Place, streams: Streams, device: torch.device) -> None:
    old = place.tensor
    filled = _filled(place, streams, device)
    if filled is old:
        return
    new = torch.Tensor._make_subclass(type(old), filled, old.requires_grad)
    vars(new).update(vars(filled))
    # The object stays the same, so that whoever holds it, an optimizer say, holds the new values.
    try:
        torch.utils.swap_tensors(old, new)
    except RuntimeError as error:
        raise BadInput(
            "something refers to it as it was without memory, a view or a weak reference; drop "
            f"that first ({error})"
        ) from error


def _filled(place: Place, streams: Streams, device: torch.device) -> Tensor:
    """Return a tensor with its initial values: the same one if it has memory in the right place."""
    old = place.tensor
    if old.device == device:
        new = old
    else:
        new = torch.empty_like(old, device=device, requires_grad=False)
        vars(new).update(foreign_attributes(old))
    if place.recipe is not None:
        fill_whole_(new.detach(), place.recipe.operand, streams)
        setattr(new, RECIPE, place.recipe)
    elif new is not old:
        new.copy_(old)
    return new


def fill_whole_(out: Tensor, operand: Operand, streams: Streams) -> None:
    """Fill a tensor of an operand's shape with its values."""
    if out.is_contiguous():
        fill_part_(out.view(-1), operand, 0, streams)
    else:
        out.copy_(evaluate(operand, streams))


def _by_storage(places: list[Place]) -> list[list[Place]]:
    """Put together the tensors without memory that are views of one storage."""
    groups: dict[object, list[Place]] = {}
    for place in places:
        is_view = place.recipe is not None and place.tensor.is_meta
        key = place.recipe.operand.version if is_view and place.recipe else place
        groups.setdefault(key, []).append(place)
    return list(groups.values())


def _filled_together(places: list[Place], streams: Streams, device: torch.device) -> list[Tensor]:
    """Return tensors with their initial values that share memory as they did when built."""
    if len(places) == 1:
        (place,) = places
        tensor = _filled(place, streams, device)
        return [tensor.requires_grad_(place.tensor.requires_grad)]
    operands = [place.recipe.operand for place in places if place.recipe is not None]
    largest = max(operands, key=lambda operand: operand.geometry.end)
    storage = contents(largest.version, streams, at_least=largest)
    flat = torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[call-overload]
    moved = flat.to(device).untyped_storage()
    tensors = []
    for place, operand in zip(places, operands, strict=True):
        view = operand.geometry.on(moved).requires_grad_(place.tensor.requires_grad)
        vars(view).update(foreign_attributes(place.tensor))
        setattr(view, RECIPE, place.recipe)
        tensors.append(view)
    return tensors


@contextmanager
def _weak_references_renewed(module: nn.Module) -> Iterator[None]:
    """Let recurrent modules, which keep a second list of their parameters, see the new ones."""
    recurrent = [child for child in module.modules() if isinstance(child, nn.RNNBase)]
    pieces = {
        id(each) for unit in units_of(module) for group in unit.groups for each in group.pieces
    }
    for child in recurrent:
        child._flat_weight_refs = []  # they would keep parameters from being given memory
    yield
    for child in recurrent:
        weights = [getattr(child, name, None) for name in child._flat_weights_names]
        child._flat_weights = weights
        child._flat_weight_refs = [w if w is None else weakref.ref(w) for w in weights]
        if not any(id(weight) in pieces for weight in weights):
            child.flatten_parameters()  # cuDNN's own layout; on other devices nothing happens
