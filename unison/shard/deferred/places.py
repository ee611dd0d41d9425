"""The tensors of a module that have to be filled, where they are, and under which names."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unison.errors import BadInput, UnisonError, UnsupportedOperation
from unison.names import canonical_name
from unison.shard.deferred.recipe import ORIGINALS, Recipe, recipe_of
from unison.shard.deferred.replay import refuse_unknown
from unison.shard.deferred.tape import Geometry, leaves, ops_behind
from unison.shard.dtensors import is_dtensor
from unison.shard.flat_group import RECIPE, FlatGroup
from unison.shard.layout import Piece
from unison.shard.unit import TAKEN_BY, units_of

# What `nn.Module` itself keeps; tensors elsewhere in a module's attributes are plain ones.
_NOT_PLAIN = {"_parameters", "_buffers", "_modules", "_flat_weights", ORIGINALS}


@dataclass(eq=False)
class Place:
    """One tensor of a module.

    Attributes:
        name: Its canonical name; of a tied one the first.
        tensor: The tensor; under FSDP2 a DTensor.
        recipe: How to make its values; None if it has values that are to stay.
        group: The flat buffer that it is a piece of, where `fully_shard` made it one.
        piece: Which elements of the whole parameter it then is.
    """

    name: str
    tensor: Tensor
    recipe: Recipe | None
    group: FlatGroup | None = None
    piece: Piece | None = None

    @property
    def is_parameter(self) -> bool:
        """Whether it is a parameter, rather than a buffer or a plain attribute."""
        return isinstance(self.tensor, nn.Parameter)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor, over all ranks."""
        return tuple(self.tensor.shape)


def find_places(module: nn.Module) -> list[Place]:
    """Return the tensors of a module, each once: parameters, buffers, then plain attributes.

    Raises:
        BadInput: One of them cannot be filled; the message names it.
    """
    pieces = _pieces(module)
    found: dict[int, Place] = {}
    for name, owner, attribute, tensor in _named_tensors(module):
        if id(tensor) in found:
            continue
        if isinstance(tensor, nn.UninitializedParameter | nn.UninitializedBuffer):
            raise BadInput(
                f"{name!r} belongs to a lazy module, whose shape is not known yet; give the sizes, "
                "or run one batch through the module before it is materialised"
            )
        if id(tensor) in pieces:
            group, index, piece = pieces[id(tensor)]
            found[id(tensor)] = Place(name, tensor, group.recipes[index], group, piece)
        else:
            original = vars(owner).get(ORIGINALS, {}).get(attribute)
            found[id(tensor)] = Place(name, tensor, _find_recipe(tensor, original))
    places = list(found.values())
    for place in places:
        with naming(place.name):
            _check(place)
    _refuse_shared_parameters(places)
    return places


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Say of which tensor an error speaks."""
    try:
        yield
    except UnisonError as error:
        raise type(error)(f"cannot make the initial values of {name!r}: {error}") from error


def replace_tensors(module: nn.Module, new: dict[int, Tensor]) -> None:
    """Put other tensors in the place of buffers and plain attributes, by `id` of the old ones."""

    def replaced(value: Any) -> Any:
        if isinstance(value, Tensor):
            return new.get(id(value), value)
        if isinstance(value, list):
            value[:] = [replaced(item) for item in value]
        elif isinstance(value, dict):
            value.update({key: replaced(item) for key, item in value.items()})
        elif type(value) is tuple:
            return tuple(replaced(item) for item in value)
        elif isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(replaced(item) for item in value))
        return value

    for child in module.modules():
        replaced(child._buffers)
        for attribute, value in vars(child).items():
            if attribute not in _NOT_PLAIN:
                vars(child)[attribute] = replaced(value)


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """Yield (canonical name, owner, attribute, tensor), parameters first."""
    modules = list(module.named_modules())
    for kind in ("_parameters", "_buffers"):
        for path, owner in modules:
            for attribute, tensor in getattr(owner, kind).items():
                if tensor is not None:
                    yield canonical_name(_join(path, attribute)), owner, attribute, tensor
    for path, owner in modules:
        for attribute, value in vars(owner).items():
            if attribute not in _NOT_PLAIN:
                tensors = [leaf for leaf in leaves(value) if isinstance(leaf, Tensor)]
                for index, tensor in enumerate(tensors):
                    if tensor.is_meta or recipe_of(tensor) is not None:
                        part = "" if tensor is value else f".{index}"
                        name = canonical_name(_join(path, attribute)) + part
                        yield name, owner, attribute, tensor


def _join(path: str, attribute: str) -> str:
    return f"{path}.{attribute}" if path else attribute


def _pieces(module: nn.Module) -> dict[int, tuple[FlatGroup, int, Piece]]:
    return {
        id(piece): (group, index, place)
        for unit in units_of(module)
        for group in unit.groups
        for index, (piece, place) in enumerate(zip(group.pieces, group.piece_places(), strict=True))
    }


def _find_recipe(tensor: Tensor, original: Tensor | None) -> Recipe | None:
    """The recipe of a tensor, or of what was there before FSDP2 or a cast replaced it."""
    recipe = None if is_dtensor(tensor) else recipe_of(tensor)
    if recipe is None and original is not None:
        is_cast = tensor.is_meta and tensor.dtype != original.dtype
        if is_dtensor(tensor) or is_cast:
            recipe = recipe_of(original)
    return recipe


def _check(place: Place) -> None:
    tensor, recipe = place.tensor, place.recipe
    if recipe is None:
        if tensor.is_meta:
            raise BadInput(
                "it has no memory, and nobody recorded how it starts. Build the module inside "
                "`with unison.meta_init():` instead of on the meta device; or give it memory with "
                "to_empty() and load its values"
            )
        return
    operand = recipe.operand
    if operand.geometry.shape != place.shape:
        raise BadInput(
            f"it has shape {list(place.shape)}, but was built with shape "
            f"{list(operand.geometry.shape)}; change it inside unison.meta_init()"
        )
    is_labelled = isinstance(getattr(tensor, RECIPE, None), Recipe)
    if is_labelled and tensor.is_meta and tensor._version != recipe.num_writes:
        raise BadInput(
            "it was written after unison.meta_init() had ended, where nothing is recorded; move "
            "that code into the context"
        )
    if place.piece is None and hasattr(tensor, TAKEN_BY):
        raise BadInput(
            "it is a parameter as it was before fully_shard; look parameters up by their own "
            "attributes instead of keeping them in another one"
        )
    if place.is_parameter and operand.version.op is None and operand.geometry.numel:
        raise BadInput(
            "it was made with torch.empty and never given a value; initialise it inside "
            "unison.meta_init()"
        )
    if tensor.grad_fn is not None:
        raise UnsupportedOperation(
            "it was computed from parameters with gradients on, so it belongs to a graph that ends "
            "when the module gets its values. Compute it in forward, or under torch.no_grad()"
        )
    refuse_unknown(ops_behind(operand.version))


def _refuse_shared_parameters(places: list[Place]) -> None:
    """Refuse a parameter whose memory is also that of another tensor: filled apart, they differ."""
    by_buffer: dict[object, list[Place]] = {}
    for place in places:
        if place.recipe is not None and place.tensor.is_meta:
            by_buffer.setdefault(place.recipe.operand.version.buffer, []).append(place)
    for sharing in by_buffer.values():
        for index, first in enumerate(sharing):
            for second in sharing[:index]:
                if (first.is_parameter or second.is_parameter) and _overlap(first, second):
                    raise BadInput(
                        f"{second.name!r} and {first.name!r} share memory, but are two tensors. To "
                        "tie parameters, assign one nn.Parameter to both attributes; else clone()"
                    )


def _overlap(first: Place, second: Place) -> bool:
    """Whether two tensors on one storage have an element in common."""
    assert first.recipe is not None
    assert second.recipe is not None
    a, b = first.recipe.operand.geometry, second.recipe.operand.geometry
    if a.offset >= b.end or b.offset >= a.end:
        return False

    def mask(geometry: Geometry) -> Tensor:
        """The bytes of the storage that a tensor touches."""
        size = geometry.dtype.itemsize
        touched = torch.zeros(
            max(a.end * a.dtype.itemsize, b.end * b.dtype.itemsize), dtype=torch.bool
        )
        steps = [stride * size for stride in geometry.stride]
        touched.as_strided((*geometry.shape, size), (*steps, 1), geometry.offset * size).fill_(True)
        return touched

    return bool((mask(a) & mask(b)).any())
