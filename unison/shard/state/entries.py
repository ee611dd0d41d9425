"""What a rank holds of every tensor that a model's state is made of, by name."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from unison.errors import BadInput, UnsupportedOperation
from unison.names import canonical_name
from unison.shard.dtensors import element_ranges, is_dtensor, local_part, mesh_of, show_shards
from unison.shard.layout import Piece
from unison.shard.ranks import Ranks
from unison.shard.unit import units_of


@dataclass(frozen=True)
class Entry:
    """This rank's part of one parameter or persistent buffer.

    Attributes:
        names: All names of it, several where it is tied; the first one is *the* name.
        shape: Its shape in the unsharded model.
        tensor: The parameter or buffer, as the module and an optimizer know it.
        start: First element of the whole that the rank holds.
        stop: One past its last element; equal to `start` where the rank holds none.
        device: Where ranks exchange it: an offloaded piece lies elsewhere than it computes.
        is_parameter: Whether it is a parameter, not a buffer.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    tensor: Tensor
    start: int
    stop: int
    device: torch.device
    is_parameter: bool

    @property
    def name(self) -> str:
        """The first name."""
        return self.names[0]

    @property
    def numel(self) -> int:
        """Elements of the whole."""
        return math.prod(self.shape)

    @property
    def value(self) -> Tensor:
        """What the rank holds: a one-dimensional piece, some rows (under FSDP2), or the whole."""
        return local_part(self.tensor)

    def flat(self) -> Tensor:  # [stop - start]
        """What this rank holds, in one dimension; a view unless the memory is not contiguous."""
        return self.value.detach().reshape(-1)

    @torch.no_grad()
    def store(self, flat: Tensor) -> None:  # [stop - start]
        """Take new values; `flat` may be what `flat()` gave, written in place."""
        if flat.data_ptr() != self.value.data_ptr():
            self.value.copy_(flat.view(self.value.shape))


@dataclass(frozen=True)
class FlatPart:
    """The elements of a tensor that this rank holds, on their way into or out of files.

    Attributes:
        shape: Of the whole tensor.
        start: The first element held.
        values: The elements [held], written in place when loading.
    """

    shape: tuple[int, ...]
    start: int
    values: Tensor

    @property
    def numel(self) -> int:
        """Elements of the whole."""
        return math.prod(self.shape)


def ranks_of(module: nn.Module) -> Ranks:
    """All ranks that hold a part or a copy of a module; they take part in its collectives."""
    units = units_of(module)
    if units:
        return units[0].axes.all
    show_shards(module)
    rows = ((name, value) for name, value in module.named_parameters() if is_dtensor(value))
    name, value = next(rows, (None, None))
    return Ranks.of(None if name is None or value is None else mesh_of(value, name))


def entries_of(module: nn.Module) -> list[Entry]:
    """The state of a module in the order of `state_dict()`, a tied tensor once.

    Names, shapes and order are the same on every rank, and those of the unsharded model.

    Raises:
        BadInput: If a tensor has no memory, or two have one name.
        UnsupportedOperation: If a part of the state is no plain tensor.
    """
    show_shards(module)
    places = {
        id(piece): (place, group.device)
        for unit in units_of(module)
        for group in unit.groups
        for piece, place in zip(group.pieces, group.piece_places(), strict=True)
    }
    names: dict[int, list[str]] = {}
    tensors: dict[int, tuple[Tensor, bool]] = {}
    owners: dict[str, int] = {}
    for name, value, is_parameter in named_tensors(module):
        if owners.setdefault(name, id(value)) != id(value):
            raise BadInput(
                f"two tensors are called {name!r} once the names of wrappers are taken out; rename "
                "a submodule that is called like a wrapper"
            )
        names.setdefault(id(value), []).append(name)
        tensors[id(value)] = (value, is_parameter)
    return [
        _entry(tuple(names[key]), value, is_parameter, places.get(key))
        for key, (value, is_parameter) in tensors.items()
    ]


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    """Yield (canonical name, tensor, is a parameter) as `state_dict()` lists them, ties included.

    Raises:
        UnsupportedOperation: If a submodule keeps extra state, which need not be tensors.
    """
    for path, child in module.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        if type(child).get_extra_state is not nn.Module.get_extra_state:
            raise UnsupportedOperation(
                f"{path or type(child).__name__!r} keeps extra state beside its tensors, which "
                "unison does not save; keep it in persistent buffers"
            )
        for attribute, value in child._parameters.items():
            if value is not None:
                yield canonical_name(prefix + attribute), value, True
        for attribute, value in child._buffers.items():
            if value is not None and attribute not in child._non_persistent_buffers_set:
                yield canonical_name(prefix + attribute), value, False


def _entry(
    names: tuple[str, ...],
    value: Tensor,
    is_parameter: bool,
    sharded: tuple[Piece, torch.device] | None,
) -> Entry:
    """Where the rank's part lies: in one of our units, in rows of FSDP2's, or whole."""
    if value.is_meta:
        raise BadInput(
            f"{names[0]!r} is on the meta device and has no values; materialize the model first"
        )
    if is_dtensor(value):
        mesh = mesh_of(value, names[0])
        start, stop = element_ranges(value, mesh.size())[mesh.get_local_rank()]
        device = torch.device(mesh.device_type)
        return Entry(names, tuple(value.shape), value, start, stop, device, is_parameter)
    if sharded is None:
        shape, stop = tuple(value.shape), value.numel()
        return Entry(names, shape, value, 0, stop, value.device, is_parameter)
    place, device = sharded
    return Entry(names, place.slot.shape, value, place.start, place.stop, device, is_parameter)
