"""The state of a model as one plain `state_dict`: gathered, or taken apart, unit by unit."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unison.errors import BadInput
from unison.shard.sharded_tensor import whole
from unison.shard.state.entries import (
    Delivery,
    Entry,
    agree,
    entries_of,
    named_tensors,
    ranks_of,
    require_same,
    together,
)
from unison.shard.state.optimizer import OptimizerState, collect, keys_of_scalars, prepare

# ------------------------------------------------------------------------------------------------
# A safetensors file as a mapping that reads a tensor when it is asked for one.


class Weights(Mapping[str, Tensor]):
    """The tensors of an open file by name; nothing is kept in memory."""

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
    delivery = Delivery(ranks, has_state=bool(state), what="the state")
    reports = agree(ranks, lambda: _checked(entries, state, strict) if state else None)
    report = (reports[ranks.rank] if delivery.is_reader else None) or reports[0]
    assert report is not None
    absent = set(report.missing)
    for entry in entries:
        if entry.name not in absent:
            read = partial(_read, entry, state or {})
            part = delivery.take(read, entry, entry.name, entry.value.dtype)
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


# ------------------------------------------------------------------------------------------------
# An optimizer's whole state in plain tensors, by parameter name: gathered, or taken apart.


def full_optimizer_state_dict(
    module: nn.Module,
    optimizer: Optimizer,
    *,
    rank0_only: bool = False,
    device: str | torch.device = "cpu",
) -> dict[str, Any]:
    """The whole state of an optimizer, by the names of parameters; a collective.

    It is laid out as torch's `get_optimizer_state_dict(..., full_state_dict=True)` lays it out:
    `state` by parameter name, in the parameters' own shapes, and `param_groups` whose `params` are
    names. A parameter without state (frozen, or never given a gradient) is only in the latter.

    Args:
        module: The model whose parameters the optimizer holds, sharded or not.
        optimizer: An elementwise optimizer.
        rank0_only: Whether rank 0 alone keeps the copies; the others get an empty dictionary.
        device: Where the copies lie.

    Raises:
        BadInput: On every rank, if ranks hold different state.
    """
    ranks = ranks_of(module)
    held = together(ranks, lambda: collect(module, optimizer))
    require_same(ranks, held.describe(), what="the optimizer's state")
    keeps = ranks.rank == 0 or not rank0_only
    state: dict[str, dict[str, Any]] = {}
    if keeps:
        for name, values in held.scalars.items():
            state[name] = {
                key: value.to(device=device, copy=True) if isinstance(value, Tensor) else value
                for key, value in values.items()
            }
    for element in held.elements:
        full = whole(element.held, element.entry.name)
        if keeps:
            copy = full.to(device=device, copy=True)
            state.setdefault(element.entry.name, {})[element.key] = copy
    return {"state": state, "param_groups": held.groups} if keeps else {}


def load_full_optimizer_state_dict(
    module: nn.Module, optimizer: Optimizer, state: Mapping[str, Any] | None
) -> None:
    """Give an optimizer the state that `full_optimizer_state_dict` returned; a collective.

    Everything goes by name: parameters may be in another order or grouped otherwise, as long as
    those of one group were saved with equal hyperparameters. The optimizer need not have stepped.
    `foreach`, `fused`, `capturable` and `differentiable` stay as they are in the optimizer.

    Args:
        module: The model whose parameters the optimizer holds, sharded or not.
        optimizer: The optimizer to fill.
        state: The state, on every rank or on rank 0 alone (the others pass None), which then
            broadcasts one tensor at a time.

    Raises:
        BadInput: On every rank, naming what does not fit.
    """
    ranks = ranks_of(module)
    delivery = Delivery(ranks, has_state=bool(state), what="the optimizer's state")
    shapes = {entry.name: entry.tensor.shape for entry in entries_of(module)}
    outlines = agree(ranks, lambda: _outline(state, shapes) if state else None)
    outline = outlines[ranks.rank] or outlines[0]
    assert outline is not None
    elements, install = together(ranks, lambda: prepare(module, optimizer, outline))
    for element in elements:
        entry, key = element.entry, element.key
        part = delivery.take(
            lambda: (state or {})["state"][entry.name][key],  # noqa: B023 - called at once
            entry,
            f"{key} of {entry.name}",
            element.value.dtype,
        )
        if part is not None:
            element.value.copy_(part.view(element.value.shape))
    delivery.finish()
    install()


def _outline(state: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> OptimizerState:
    """What a full state says, without its tensors."""
    if not {"state", "param_groups"} <= state.keys():
        raise BadInput(
            "expected 'state' and 'param_groups' as full_optimizer_state_dict gives them, found "
            f"{sorted(state.keys())}"
        )
    scalar_keys = keys_of_scalars(
        (len(shapes.get(name, ())), values) for name, values in state["state"].items()
    )
    scalars: dict[str, dict[str, Any]] = {}
    dtypes: dict[str, dict[str, torch.dtype]] = {}
    for name, values in state["state"].items():
        for key, value in values.items():
            is_number = not isinstance(value, Tensor) or (
                value.ndim == 0 and (key in scalar_keys or shapes.get(name) != ())
            )
            if is_number:
                scalars.setdefault(name, {})[key] = value
            else:
                dtypes.setdefault(name, {})[key] = value.dtype
    return OptimizerState(
        class_name=None, groups=list(state["param_groups"]), scalars=scalars, dtypes=dtypes
    )
