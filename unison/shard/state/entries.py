"""What a rank holds of every tensor that a model's state is made of; and the whole, on request."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unison.errors import BadInput, UnsupportedOperation
from unison.shard.guard import compare_across_ranks
from unison.shard.layout import Placement
from unison.shard.ranks import Ranks, agree, gather_objects, meet
from unison.shard.sharded_tensor import (
    is_dtensor,
    local_part,
    mesh_of,
    placement_of,
    show_shards,
    whole,
)
from unison.shard.state.files import FlatPart
from unison.shard.unit import units_of
from unison.torch_internals import canonical_name


def require_same(ranks: Ranks, description: Mapping[str, Any], *, what: str) -> None:
    """Refuse a description that differs between ranks; a collective.

    Raises:
        BadInput: On every rank, naming what differs.
    """
    if ranks.size > 1:
        compare_across_ranks(what, dict(sorted(description.items())), ranks.group)


@dataclass(frozen=True)
class Entry:
    """This rank's part of one parameter or persistent buffer.

    Attributes:
        names: All names of it, several where it is tied; the first one is *the* name.
        tensor: The parameter or buffer, as the module and an optimizer know it.
        placement: Which elements of the whole each rank holds.
        is_parameter: Whether it is a parameter, not a buffer.
    """

    names: tuple[str, ...]
    tensor: Tensor
    placement: Placement
    is_parameter: bool

    @property
    def name(self) -> str:
        """The first name."""
        return self.names[0]

    @property
    def value(self) -> Tensor:
        """What the rank holds: a one-dimensional piece, some rows (under FSDP2), or the whole."""
        return local_part(self.tensor)

    def flat_part(self, held: Tensor) -> FlatPart:
        """This rank's elements of the tensor, or of another that lies on ranks as it does.

        They are a view unless the memory is not contiguous.
        """
        values = local_part(held).detach().reshape(-1)
        return tuple(self.tensor.shape), self.placement.start, values

    @torch.no_grad()
    def store(self, flat: Tensor) -> None:  # [stop - start]
        """Take new values; `flat` may be what `flat_part` gave, written in place."""
        if flat.data_ptr() != self.value.data_ptr():
            self.value.copy_(flat.view(self.value.shape))


def ranks_of(module: nn.Module) -> Ranks:
    """All ranks that hold a part or a copy of a module; they take part in its collectives."""
    units = units_of(module)
    if units:
        return units[0].ranks
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
        if value.is_meta:
            raise BadInput(
                f"{name!r} is on the meta device and has no values; materialize the model first"
            )
    return [
        Entry(tuple(names[key]), value, placement_of(value, names[key][0]), is_parameter)
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


def rank_0_reads_alone(ranks: Ranks, *, has_state: bool, what: str) -> bool:
    """Whether rank 0 reads and broadcasts, or every rank reads for itself; a collective.

    Args:
        ranks: Who takes part.
        has_state: Whether this rank has the tensors.
        what: What they are, for the error.

    Raises:
        BadInput: On every rank, if it is neither rank 0 alone nor all ranks that have them.
    """
    holders = gather_objects(ranks, has_state)
    if not holders[0] or (any(holders[1:]) and not all(holders)):
        given = [rank for rank, holds in enumerate(holders) if holds]
        raise BadInput(f"{what} must be given on rank 0 or on every rank, found it on {given}")
    return not all(holders)


Wanted = tuple[Entry, str, torch.dtype, Callable[[], Tensor]]
"""How a tensor lies on ranks, its name for errors, the dtype it is to have, and what reads it."""


def deliver(
    ranks: Ranks, wanted: Iterable[Wanted], *, reads_alone: bool
) -> Iterator[Tensor | None]:
    """Yield this rank's part [stop - start] of each of some whole tensors; a collective.

    Either every rank reads for itself, or rank 0 reads and broadcasts, one tensor at a time. An
    error in reading is kept until the end, and raised on every rank then, since the other ranks are
    already on their way into the next broadcast. None stands for a part that is empty or was not
    read because of an error.
    """
    failure: Exception | None = None
    for entry, name, dtype, read in wanted:
        place = entry.placement
        is_needed = ranks.rank == 0 if reads_alone else place.start < place.stop
        full: Tensor | None = None
        if failure is None and is_needed:
            try:
                value = read()
                if tuple(value.shape) != place.shape:
                    raise BadInput(
                        f"{name!r} must have the shape {list(place.shape)}, "
                        f"found {list(value.shape)}"
                    )
                flat = value.detach().reshape(-1).contiguous()
                full = flat.to(device=place.device, dtype=dtype)
            except Exception as error:
                failure = error
        if reads_alone and place.numel > 0:
            if full is None:
                full = torch.zeros(place.numel, dtype=dtype, device=place.device)
            dist.broadcast(full, group=ranks.group, group_src=0)
        yield None if full is None else full[place.start : place.stop]

    def tell() -> None:
        if failure is not None:
            raise failure

    agree(ranks, tell)


# ---- the whole state -----------------------------------------------------------------------------


class Weights(Mapping[str, Tensor]):
    """The tensors of an open safetensors file by name; each is read when it is asked for."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._names = dict.fromkeys(file.keys())

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._file.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@contextmanager
def open_weights(path: str | Path) -> Iterator[Weights]:
    """Open a safetensors file for `load_full_state_dict`, for example a model's of a run.

    Raises:
        BadInput: If there is no such file, or it is not a safetensors file.
    """
    from safetensors import SafetensorError, safe_open

    if not Path(path).is_file():
        raise BadInput(f"expected a safetensors file at {path}, found none")
    try:
        file = safe_open(path, framework="pt", device="cpu")
    except SafetensorError as error:
        raise BadInput(f"{path} is not a whole file of safetensors: {error}") from None
    with file as opened:
        yield Weights(opened)


class KeyReport(NamedTuple):
    """Which names did not fit, after a load with `strict=False`."""

    missing: list[str]
    unexpected: list[str]


def full_state_dict(
    module: nn.Module,
    *,
    rank0_only: bool = False,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
) -> dict[str, Tensor]:
    """The whole state of a model, as the unsharded model's `state_dict()` has it; a collective.

    One tensor is gathered at a time, so the device never holds the whole model. Names are
    those of the unsharded model, in its order: persistent buffers are there (this rank's own), and
    a tied parameter under all its names, as one tensor.

    Args:
        module: The model, sharded or not.
        rank0_only: Whether rank 0 alone keeps the copies; the others get an empty dictionary.
        dtype: What to cast floating-point values to; None leaves them as they are.
        device: Where the copies lie.

    Returns:
        Copies by name: `plain.load_state_dict(full_state_dict(sharded))` works, and so does the
        reverse with `load_full_state_dict`.
    """
    copies: dict[int, Tensor] = {}
    ranks = ranks_of(module)
    for entry in entries_of(module):
        value = whole(entry.tensor, entry.name)
        if ranks.rank == 0 or not rank0_only:
            wanted = dtype if dtype is not None and value.is_floating_point() else value.dtype
            copies[id(entry.tensor)] = value.to(device=device, dtype=wanted, copy=True)
    return {
        name: copies[id(value)] for name, value, _ in named_tensors(module) if id(value) in copies
    }


def load_full_state_dict(
    module: nn.Module, state: Mapping[str, Tensor] | None, *, strict: bool = True
) -> KeyReport:
    """Fill a model from a whole state; a collective.

    Args:
        module: The model, sharded or not; its parameters have memory.
        state: The state by the names of the unsharded model, on every rank or on rank 0 alone (the
            others pass None), which then broadcasts one tensor at a time. It may be lazy, reading a
            tensor when it is asked for one, as `open_weights` does: a rank asks for one at a time,
            and only for those of which it keeps a part. Values are cast to the model's dtypes. A
            tied parameter needs to be there under one of its names.
        strict: Whether names that are missing or too many are an error.

    Returns:
        The names that are missing and those that were not expected.

    Raises:
        BadInput: On every rank, naming what does not fit. Names are checked before anything is
            changed, and so are shapes unless the state is lazy.
    """
    ranks, entries = ranks_of(module), entries_of(module)
    meet(ranks, "load_full_state_dict", may_be_late=True)
    reads_alone = rank_0_reads_alone(ranks, has_state=bool(state), what="the state")
    reports = agree(ranks, lambda: _checked(entries, state, strict) if state else None)
    report = reports[0 if reads_alone else ranks.rank] or reports[0]
    assert report is not None
    present = [entry for entry in entries if entry.name not in report.missing]
    wanted = (
        (entry, entry.name, entry.value.dtype, partial(_read, entry, state or {}))
        for entry in present
    )
    # Strict, so that the parts come to their end, where all ranks hear of an error.
    parts = deliver(ranks, wanted, reads_alone=reads_alone)
    for entry, part in zip(present, parts, strict=True):
        if part is not None:
            entry.store(part.to(entry.value.device))
    return report


def _checked(entries: list[Entry], state: Mapping[str, Tensor], strict: bool) -> KeyReport:
    """Compare names, and shapes where they are at hand."""
    given = set(state.keys())
    missing = [entry.name for entry in entries if not given.intersection(entry.names)]
    expected = {name for entry in entries for name in entry.names}
    unexpected = sorted(given - expected)
    faults = []
    if strict and missing:
        faults.append(f"missing {missing}")
    if strict and unexpected:
        faults.append(f"unexpected {unexpected}")
    if isinstance(state, dict):
        faults += [
            f"{name!r} has the shape {list(state[name].shape)} instead of "
            f"{list(entry.tensor.shape)}"
            for entry in entries
            for name in entry.names
            if name in given and tuple(state[name].shape) != entry.tensor.shape
        ]
    if faults:
        raise BadInput(f"the state does not fit the model: {'; '.join(faults)}")
    return KeyReport(missing, unexpected)


def _read(entry: Entry, state: Mapping[str, Tensor]) -> Tensor:
    """Read one tensor; a tied one that is there more than once must be one."""
    first, *others = (name for name in entry.names if name in state)
    value = state[first]
    for name in others:
        other = state[name]
        if other is not value and not torch.equal(other, value):
            raise BadInput(
                f"{first!r} and {name!r} are tied in the model, but differ in the state; give one"
            )
    return value
