"""A saved optimizer state on its way back into an optimizer: matched by name, then installed."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unison.errors import BadInput
from unison.shard.state.entries import Entry
from unison.shard.state.optimizer_state import NOT_SAVED, ElementState, named_groups


@dataclass(frozen=True, kw_only=True)
class SavedState:
    """What a saved optimizer state says, before its tensors are read.

    Attributes:
        class_name: Of the optimizer; None where it was not recorded.
        groups: As in `OptimizerState`; values may have been through JSON.
        scalars: As in `OptimizerState`.
        dtypes: Per parameter name and key, the dtype of what has a value per element.
    """

    class_name: str | None
    groups: list[dict[str, Any]]
    scalars: dict[str, dict[str, Any]]
    dtypes: dict[str, dict[str, torch.dtype]]


@dataclass(frozen=True)
class Installation:
    """Memory for a saved state, and its way into the optimizer once that is filled."""

    optimizer: Optimizer
    groups: list[dict[str, Any]]
    named: list[list[Entry]]
    scalars: dict[str, dict[str, Any]]
    elements: list[ElementState]

    def finish(self) -> None:
        """Let the optimizer have the state, by its own `load_state_dict`."""
        names = [entry.name for entries in self.named for entry in entries]
        index = {name: place for place, name in enumerate(names)}
        state: dict[int, dict[str, Any]] = {}
        for name, values in self.scalars.items():
            # Copies: an optimizer counts its steps in place.
            state[index[name]] = {key: _copied(value) for key, value in values.items()}
        for element in self.elements:
            state.setdefault(index[element.entry.name], {})[element.key] = element.held
        numbered = [
            {**group, "params": [index[entry.name] for entry in entries]}
            for group, entries in zip(self.groups, self.named, strict=True)
        ]
        self.optimizer.load_state_dict({"state": state, "param_groups": numbered})
        # torch casts floating-point state to the parameter's dtype, which may hold fewer bits.
        for element in self.elements:
            self.optimizer.state[element.entry.tensor][element.key] = element.held
        for entry in (entry for entries in self.named for entry in entries):
            for key, value in self.scalars.get(entry.name, {}).items():
                held = self.optimizer.state[entry.tensor]
                if isinstance(value, Tensor) and key != "step":
                    held[key] = value.to(held[key].device, copy=True)


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def prepare(module: nn.Module, optimizer: Optimizer, saved: SavedState) -> Installation:
    """Match a saved state with an optimizer, by name, and make memory for it.

    State that the optimizer has already, of the right dtype, is written in place.

    Raises:
        BadInput: If class, names or hyperparameters cannot be matched; nothing is changed then.
    """
    if saved.class_name not in (None, type(optimizer).__name__):
        raise BadInput(
            f"the saved state is one of {saved.class_name}, the optimizer is "
            f"{type(optimizer).__name__}; make the same optimizer"
        )
    named = named_groups(module, optimizer)
    owners = {name: group for group in saved.groups for name in group["params"]}
    here = {entry.name for entries in named for entry in entries}
    if here != owners.keys():
        raise BadInput(
            "the optimizer and the saved state are for other parameters: only in the optimizer "
            f"{sorted(here - owners.keys())}, only in the state {sorted(owners.keys() - here)}"
        )
    groups = [
        _merged_group(group, [(entry.name, owners[entry.name]) for entry in entries])
        for group, entries in zip(optimizer.param_groups, named, strict=True)
    ]
    entries = {entry.name: entry for of_group in named for entry in of_group}
    outside = sorted((saved.scalars.keys() | saved.dtypes.keys()) - here)
    if outside:
        raise BadInput(f"the saved state has values for {outside}, which are in none of its groups")
    elements = [
        ElementState(entries[name], key, _memory(optimizer, entries[name], key, dtype))
        for name, keys in saved.dtypes.items()
        for key, dtype in keys.items()
    ]
    return Installation(optimizer, groups, named, saved.scalars, elements)


def _memory(optimizer: Optimizer, entry: Entry, key: str, dtype: torch.dtype) -> Tensor:
    held = optimizer.state[entry.tensor].get(key) if entry.tensor in optimizer.state else None
    if not (
        isinstance(held, Tensor)
        and held.shape == entry.tensor.shape
        and held.dtype == dtype
        and held.is_contiguous()
    ):
        held = torch.zeros_like(
            entry.tensor, dtype=dtype, requires_grad=False, memory_format=torch.contiguous_format
        )
    return held


def _merged_group(
    group: dict[str, Any], owners: list[tuple[str, dict[str, Any]]]
) -> dict[str, Any]:
    """A group with the saved hyperparameters of its members, which must be of one mind."""
    merged = {key: value for key, value in group.items() if key != "params"}
    if not owners:
        return merged
    (first, saved), *others = owners
    hyper = {key: value for key, value in saved.items() if key not in NOT_SAVED}
    for name, other in others:
        for key in hyper.keys() | (other.keys() - NOT_SAVED):
            if hyper.get(key) != other.get(key):
                raise BadInput(
                    f"{first!r} and {name!r} are in one group of the optimizer, but were saved "
                    f"with {key} {hyper.get(key)} and {other.get(key)}; group them apart"
                )
    for key, value in hyper.items():
        merged[key] = _like(value, merged.get(key))
    return merged


def _like(value: Any, before: Any) -> Any:
    """Give a value that came through JSON the type of the one it replaces."""
    if isinstance(before, Tensor):
        return torch.as_tensor(value, dtype=before.dtype, device=before.device)
    if isinstance(before, tuple) and isinstance(value, list):
        return tuple(value)
    return value
