"""The state of a model as one plain `state_dict`: gathered, or taken apart, unit by unit."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from unison.errors import BadInput
from unison.shard.dtensors import whole
from unison.shard.state.agree import Delivery, agree
from unison.shard.state.entries import Entry, entries_of, named_tensors, ranks_of
from unison.shard.unit import units_of


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

    One flat buffer is gathered at a time, so the device never holds the whole model. Names are
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
    for entry, value in _full_values(module):
        if ranks.rank == 0 or not rank0_only:
            wanted = dtype if dtype is not None and value.is_floating_point() else value.dtype
            copies[id(entry.tensor)] = value.to(device=device, dtype=wanted, copy=True)
    return {
        name: copies[id(value)] for name, value, _ in named_tensors(module) if id(value) in copies
    }


def _full_values(module: nn.Module) -> Iterator[tuple[Entry, Tensor]]:
    """Yield every whole tensor once; a value is good until the next one is asked for."""
    entries = {id(entry.tensor): entry for entry in entries_of(module)}
    for unit in units_of(module):
        for group in unit.groups:
            full = group.gathered()
            for slot, piece in zip(group.slots, group.pieces, strict=True):
                flat = full[slot.offset : slot.offset + slot.numel]
                yield entries.pop(id(piece)), flat.view(slot.shape)
    for entry in entries.values():
        yield entry, whole(entry.tensor, entry.name)


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
    delivery = Delivery.of(ranks, has_state=bool(state), what="the state")
    reports = agree(ranks, lambda: _checked(entries, state, strict) if state else None)
    report = (reports[ranks.rank] if delivery.is_reader else None) or reports[0]
    assert report is not None
    absent = set(report.missing)
    for entry in entries:
        if entry.name not in absent:
            part = delivery.take(
                lambda entry=entry: _read(entry, state or {}),
                name=entry.name,
                shape=entry.shape,
                start=entry.start,
                stop=entry.stop,
                dtype=entry.value.dtype,
                device=entry.device,
            )
            if part is not None:
                entry.store(part.to(entry.value.device))
    delivery.finish()
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
            f"{name!r} has the shape {list(state[name].shape)} instead of {list(entry.shape)}"
            for entry in entries
            for name in entry.names
            if name in given and tuple(state[name].shape) != entry.shape
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
