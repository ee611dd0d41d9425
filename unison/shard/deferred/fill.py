"""Filling: give the tensors of a module memory where they have none, and their initial values.

One tensor at a time: beside what the module holds in the end, no more than one whole tensor is ever
in memory, and that only where its values cannot be made in parts (tape.py).
"""

import itertools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from unison.errors import BadInput, UnisonError, UnsupportedOperation
from unison.shard.deferred.recorder import (
    ORIGINALS,
    InitRecipe,
    active_recorder,
    foreign_attributes,
    recipe_of,
)
from unison.shard.deferred.tape import (
    Operand,
    Streams,
    evaluate,
    fill_part_,
    number_draws,
    ops_behind,
    refuse_unknown,
)
from unison.shard.flat_group import RECIPE
from unison.shard.sharded_tensor import local_part, placement_of
from unison.shard.unit import TAKEN_BY, units_of
from unison.torch_internals import canonical_name, is_dtensor

# ------------------------------------------------------------------------------------------------
# The tensors of a module that have to be filled, where they are, and under which names.

# What `nn.Module` itself keeps; tensors elsewhere in a module's attributes are plain ones.
_NOT_PLAIN = {"_parameters", "_buffers", "_modules", "_flat_weights", ORIGINALS}


Place = tuple[str, Tensor, InitRecipe | None, bool]
"""A tensor of a module: its canonical name, of a tied one the first; itself, under FSDP2 a DTensor;
how to make its values, None if it has values that are to stay; and whether `fully_shard` made it
what a rank holds of a parameter."""


def find_places(module: nn.Module) -> list[Place]:
    """Return the tensors of a module, each once: parameters, buffers, then plain attributes.

    Raises:
        BadInput: One of them cannot be filled; the message names it.
    """
    recipes = {
        id(piece): recipe
        for unit in units_of(module)
        for group in unit.groups
        for piece, recipe in zip(group.pieces, group.recipes, strict=True)
    }
    found: dict[int, Place] = {}
    for name, owner, attribute, tensor in _named_tensors(module):
        if id(tensor) in found:
            continue
        if isinstance(tensor, nn.UninitializedParameter | nn.UninitializedBuffer):
            raise BadInput(
                f"{name!r} belongs to a lazy module, whose shape is not known yet; give the sizes, "
                "or run one batch through the module before it is materialised"
            )
        if id(tensor) in recipes:
            found[id(tensor)] = name, tensor, recipes[id(tensor)], True
        else:
            recipe = None if is_dtensor(tensor) else recipe_of(tensor)
            original = vars(owner).get(ORIGINALS, {}).get(attribute)
            if recipe is None and original is not None:
                # FSDP2 or a cast may have put another tensor in the place of what was built.
                is_cast = tensor.is_meta and tensor.dtype != original.dtype
                recipe = recipe_of(original) if is_dtensor(tensor) or is_cast else None
            found[id(tensor)] = name, tensor, recipe, False
    places = list(found.values())
    for place in places:
        with naming(place[0]):
            _check(*place[1:])
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
    modules = [(f"{path}." if path else "", owner) for path, owner in module.named_modules()]
    for kind in ("_parameters", "_buffers"):
        for prefix, owner in modules:
            for attribute, tensor in getattr(owner, kind).items():
                if tensor is not None:
                    yield canonical_name(prefix + attribute), owner, attribute, tensor
    for prefix, owner in modules:
        for attribute, value in vars(owner).items():
            if attribute not in _NOT_PLAIN:
                tensors = [leaf for leaf in _leaves(value) if isinstance(leaf, Tensor)]
                for index, tensor in enumerate(tensors):
                    if tensor.is_meta or recipe_of(tensor) is not None:
                        part = "" if tensor is value else f".{index}"
                        yield canonical_name(prefix + attribute) + part, owner, attribute, tensor


def _leaves(value: Any) -> Iterator[Any]:
    """Yield what nested lists, tuples and dictionaries hold."""
    if isinstance(value, list | tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _leaves(item)
    else:
        yield value


def _check(tensor: Tensor, recipe: InitRecipe | None, is_piece: bool) -> None:
    if recipe is None:
        if tensor.is_meta:
            raise BadInput(
                "it has no memory, and nobody recorded how it starts. Build the module inside "
                "`with unison.meta_init():` instead of on the meta device; or give it memory with "
                "to_empty() and load its values"
            )
        return
    operand = recipe.operand
    if operand.shape != tensor.shape:
        raise BadInput(
            f"it has shape {list(tensor.shape)}, but was built with shape "
            f"{list(operand.shape)}; change it inside unison.meta_init()"
        )
    is_labelled = isinstance(getattr(tensor, RECIPE, None), InitRecipe)
    if is_labelled and tensor.is_meta and tensor._version != recipe.num_writes:
        raise BadInput(
            "it was written after unison.meta_init() had ended, where nothing is recorded; move "
            "that code into the context"
        )
    if not is_piece and hasattr(tensor, TAKEN_BY):
        raise BadInput(
            "it is a parameter as it was before fully_shard; look parameters up by their own "
            "attributes instead of keeping them in another one"
        )
    if isinstance(tensor, nn.Parameter) and operand.op is None and operand.numel:
        raise BadInput(
            "it was made with torch.empty and never given a value; initialise it inside "
            "unison.meta_init()"
        )
    if tensor.grad_fn is not None:
        raise UnsupportedOperation(
            "it was computed from parameters with gradients on, so it belongs to a graph that ends "
            "when the module gets its values. Compute it in forward, or under torch.no_grad()"
        )
    refuse_unknown(ops_behind(operand))


def _refuse_shared_parameters(places: list[Place]) -> None:
    """Refuse a parameter whose memory is also that of another tensor: filled apart, they differ."""
    by_buffer: dict[object, list[tuple[str, bool, Operand]]] = {}
    for name, tensor, recipe, _ in places:
        if recipe is not None and tensor.is_meta:
            about = name, isinstance(tensor, nn.Parameter), recipe.operand
            by_buffer.setdefault(recipe.operand.buffer, []).append(about)
    for sharing in by_buffer.values():
        for (first, is_first, a), (second, is_second, b) in itertools.combinations(sharing, 2):
            if (is_first or is_second) and _overlap(a, b):
                raise BadInput(
                    f"{first!r} and {second!r} share memory, but are two tensors. To "
                    "tie parameters, assign one nn.Parameter to both attributes; else clone()"
                )


def _overlap(a: Operand, b: Operand) -> bool:
    """Whether two tensors on one storage have an element in common."""
    if a.offset >= b.end or b.offset >= a.end:
        return False
    num_bytes = max(a.end * a.dtype.itemsize, b.end * b.dtype.itemsize)
    masks = torch.zeros(2, num_bytes, dtype=torch.bool)  # the bytes that each of them touches
    for mask, each in zip(masks, (a, b), strict=True):
        size = each.dtype.itemsize
        strides = [stride * size for stride in each.stride]
        start = mask.storage_offset() + each.offset * size
        mask.as_strided((*each.shape, size), (*strides, 1), start).fill_(True)
    return bool((masks[0] & masks[1]).any())


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
    named = ((name, recipe.operand) for name, _, recipe, _ in places if recipe is not None)
    streams = number_draws(seed, named)
    with torch.device("cpu"), _weak_references_renewed(module):  # values are made on the CPU
        for unit in units_of(module):
            unit.allocate(default)
        if any(is_dtensor(tensor) and tensor.is_meta for _, tensor, _, _ in places):
            # As `to_empty` does it: FSDP2 watches for this call and adopts the new tensors.
            module._apply(partial(_give_memory, device=device))
        plain: dict[object, list[Place]] = {}  # by what they share, where they are views
        for name, tensor, recipe, is_piece in places:
            with naming(name):
                if is_piece or is_dtensor(tensor):
                    if recipe is not None:
                        _fill_part(tensor, recipe.operand, name, streams)
                elif isinstance(tensor, nn.Parameter):
                    _fill_parameter(tensor, recipe, streams, _device_for(tensor, device, default))
                else:
                    key: object = id(tensor)
                    if recipe is not None and tensor.is_meta:
                        key = recipe.operand.buffer, recipe.operand.op
                    plain.setdefault(key, []).append((name, tensor, recipe, is_piece))
        replaced: dict[int, Tensor] = {}
        for sharing in plain.values():
            with naming(sharing[0][0]):
                target = _device_for(sharing[0][1], device, default)
                tensors = _filled_together(sharing, streams, target)
            ids = (id(tensor) for _, tensor, _, _ in sharing)
            replaced.update(zip(ids, tensors, strict=True))
        replace_tensors(module, replaced)
    if not any(is_dtensor(tensor) for _, tensor, _, _ in places):
        for child in module.modules():
            vars(child).pop(ORIGINALS, None)


def _give_memory(tensor: Any, device: torch.device | None) -> Tensor:
    if not (is_dtensor(tensor) and tensor.is_meta):
        return tensor
    return torch.empty_like(tensor, device=device or tensor.device_mesh.device_type)


def _device_for(tensor: Tensor, device: torch.device | None, default: torch.device) -> torch.device:
    return device or (default if tensor.is_meta else tensor.device)


def _fill_part(tensor: Any, operand: Operand, name: str, streams: Streams) -> None:
    """Fill what this rank holds of a parameter."""
    part = local_part(tensor).detach()
    if not is_dtensor(tensor):
        fill_part_(part.view(-1), operand, placement_of(tensor, name).start, streams)
        return
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if not all(type(placement) in (Replicate, Shard) for placement in tensor.placements):
        raise UnsupportedOperation(
            f"{name!r} is placed as {tensor.placements}; only Replicate and Shard parts are boxes"
        )
    shape, start = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    if part.numel() == 0:
        return
    box = [slice(first, first + size) for first, size in zip(start, shape, strict=True)]
    # Its elements as of the whole: a cut along the first dim leaves them in one run.
    strides = torch.empty(tensor.shape, device="meta").stride()
    first = sum(a * stride for a, stride in zip(start, strides, strict=True))
    last = sum((each.stop - 1) * stride for each, stride in zip(box, strides, strict=True))
    if last - first + 1 == part.numel():
        fill_part_(part.view(-1), operand, first, streams)
    else:
        part.copy_(evaluate(operand, streams)[tuple(box)])


def _fill_parameter(
    old: nn.Parameter, recipe: InitRecipe | None, streams: Streams, device: torch.device
) -> None:
    filled = _filled(old, recipe, streams, device)
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


def _filled(
    old: Tensor, recipe: InitRecipe | None, streams: Streams, device: torch.device
) -> Tensor:
    """Return a tensor with its initial values: the same one if it has memory in the right place."""
    if old.device == device:
        new = old
    else:
        new = torch.empty_like(old, device=device, requires_grad=False)
        vars(new).update(foreign_attributes(old))
    if recipe is not None:
        operand, out = recipe.operand, new.detach()
        if out.is_contiguous():
            fill_part_(out.view(-1), operand, 0, streams)
        else:
            out.copy_(evaluate(operand, streams))
        setattr(new, RECIPE, recipe)
    elif new is not old:
        new.copy_(old)
    return new


def _filled_together(places: list[Place], streams: Streams, device: torch.device) -> list[Tensor]:
    """Return tensors with their initial values that share memory as they did when built."""
    if len(places) == 1:
        ((_, old, recipe, _),) = places
        return [_filled(old, recipe, streams, device).requires_grad_(old.requires_grad)]
    operands = [recipe.operand for _, _, recipe, _ in places if recipe is not None]
    largest = max(operands, key=lambda operand: operand.end)
    storage = evaluate(largest, streams).untyped_storage()
    flat = torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[call-overload]
    moved = flat.to(device).untyped_storage()
    tensors = []
    for (_, old, recipe, _), operand in zip(places, operands, strict=True):
        view = operand.on(moved).requires_grad_(old.requires_grad)
        vars(view).update(foreign_attributes(old))
        setattr(view, RECIPE, recipe)
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


# ---- the whole module ----------------------------------------------------------------------------

M = TypeVar("M", bound=nn.Module)


def materialize(module: M, *, seed: int, device: torch.device | str | None = None) -> M:
    """Fill a module that was built under `unison.meta_init`, in place.

    Parameters, buffers and other tensors that the module holds get memory and their initial values,
    as their recorded init makes them. Of a sharded module (`unison.fully_shard`, PyTorch's FSDP2)
    each rank makes its own part only. Called again, it fills the module anew.

    Guarantees:
        A value depends on the seed, on the recorded operations, and, where they are random, on the
        name of the parameter and the index of the element; not on the number of ranks, the device,
        the number of threads or the state of torch's generators. A parameter that is filled by one
        draw gets the bits of `unison.rng.fill_`.

    Args:
        module: What to fill. Names, on which random values hang, are counted from here: call it on
            the whole model.
        seed: Seed of the random values.
        device: Where to put the tensors; torch's default device unless given. Under FSDP2 the
            mesh's. Tensors that have values already keep them and move there.

    Returns:
        The same module; its parameters are the same objects.

    Raises:
        BadInput: A tensor has no memory and no record, or was changed after its recording ended.
        UnsupportedOperation: A tensor depends on an operation that cannot be replayed.
    """
    if not isinstance(module, nn.Module):
        raise BadInput(f"materialize takes a module, found {type(module).__name__}")
    if active_recorder() is not None:
        raise BadInput("call unison.materialize after the `with unison.meta_init():` block")
    where = None if device is None else torch.empty(0, device=device).device
    if (where or torch.get_default_device()).type == "meta":
        raise BadInput("expected a device with memory, found 'meta'; pass another device=")
    places = find_places(module)
    if not any(recipe is not None for _, _, recipe, _ in places):
        raise BadInput(
            f"no tensor of this {type(module).__name__} was built under unison.meta_init(), so "
            "there is nothing to fill; its tensors have the values that they were given"
        )
    fill_places(module, places, seed, where)
    return module
