"""A recipe: how to make the values of one tensor. It travels on the tensor itself."""

import copy
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unison.shard.deferred.recorder import active_recorder
from unison.shard.deferred.tape import (
    Buffer,
    Geometry,
    Op,
    Operand,
    Version,
    has_no_memory,
    redrawn,
    set_version,
    version_of,
)
from unison.shard.flat_group import RECIPE

aten = torch.ops.aten

ORIGINALS = "_unison_originals"  # on a module: its tensors as they were built
_COPIES = "unison copies"  # in the memo of a deepcopy: the parts of the tape copied so far


@dataclass(frozen=True)
class Recipe:
    """How to make the values of a tensor.

    Attributes:
        operand: What to evaluate.
        num_writes: torch's count of writes to the tensor when its recording ended.
    """

    operand: Operand
    num_writes: int

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        # Of a tensor that has values: the copy's are the same, and not for `materialize` to change.
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        # Who saves a module saves its values; a file must not need unison to be read.
        return OrderedDict, ()


class Originals(dict[str, Tensor]):
    """The parameters and buffers of a module as they were built, by attribute.

    PyTorch's FSDP2 puts other objects in the place of parameters, and a cast in that of buffers,
    and so they lose what hangs on them.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> "Originals":
        return Originals({name: copy.deepcopy(tensor, memo) for name, tensor in self.items()})

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, ()


class Copier:
    """The `__deepcopy__` of a tensor without memory: the copy gets a recipe too.

    A copy is drawn under its own name, so that blocks made by copying one block start differently,
    as they would had each been constructed.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __call__(self, memo: dict[Any, Any]) -> Tensor:
        """Return the copy, as `copy.deepcopy` asks for it."""
        original = self._tensor
        if id(original) not in memo:
            memo[id(original)] = _copied(original, memo)
        return memo[id(original)]

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError(
            "a module built under unison.meta_init() has no values to save yet; call "
            "unison.materialize(module, seed=...) first"
        )


def recipe_of(tensor: Tensor) -> Recipe | None:
    """Return how to make a tensor's values, if it was built under `meta_init`."""
    label = getattr(tensor, RECIPE, None)
    if not isinstance(label, Recipe):
        label = None
    version = version_of(tensor) if has_no_memory(tensor) else None
    if version is None:  # it has memory, or was cast since and lies on another storage
        return label
    num_writes = tensor._version if label is None else label.num_writes
    return Recipe(Operand(version, Geometry.of(tensor)), num_writes)


def label(tensor: Tensor) -> None:
    """Write a tensor's recipe on it, so that it survives sharding and copying."""
    version = version_of(tensor)
    assert version is not None, "only what is on the tape is labelled"
    setattr(tensor, RECIPE, Recipe(Operand(version, Geometry.of(tensor)), tensor._version))
    make_copyable(tensor)


def make_copyable(tensor: Tensor) -> None:
    """Let `copy.deepcopy` of a tensor copy its recipe."""
    tensor.__deepcopy__ = Copier(tensor)  # type: ignore[method-assign]


def foreign_attributes(tensor: Tensor) -> dict[str, Any]:
    """What others have set on a tensor."""
    ours = (RECIPE, "__deepcopy__")
    return {name: value for name, value in vars(tensor).items() if name not in ours}


def _copied(original: Tensor, memo: dict[Any, Any]) -> Tensor:
    twin = torch.empty_strided(
        original.shape, original.stride(), dtype=original.dtype, device="meta"
    )
    recipe = recipe_of(original)
    if recipe is not None:
        version = redrawn(recipe.operand.version, memo.setdefault(_COPIES, {}))
        _set_content(twin, Operand(version, recipe.operand.geometry))
    if isinstance(original, nn.Parameter):  # torch's own copies of these have no attributes either
        twin = torch.Tensor._make_subclass(type(original), twin, original.requires_grad)
    else:
        vars(twin).update(copy.deepcopy(foreign_attributes(original), memo))
    recorder = active_recorder()
    if recorder is not None:
        recorder.remember(twin)
        make_copyable(twin)
    elif recipe is not None:
        label(twin)
    return twin


def _set_content(tensor: Tensor, operand: Operand) -> None:
    """Let the content of a new tensor be that of an operand."""
    geometry = Geometry.of(tensor)
    if operand.geometry == geometry:
        set_version(tensor, operand.version)
        return
    buffer = Buffer()
    cast = Op(aten._to_copy.default, (operand,), {"dtype": tensor.dtype}, ((buffer, geometry),))
    set_version(tensor, Version(buffer, cast))
