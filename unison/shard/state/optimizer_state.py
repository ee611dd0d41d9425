"""An optimizer's state by the names of parameters: what is sharded, what is not, how it returns.

[Note: two kinds of state] What an elementwise optimizer keeps for a parameter either has one value
per element (`exp_avg`) and is cut as the parameter is, or is one number (`step`), the same on every
rank. The first kind is stored as tensors; the second, with the hyperparameters of the groups, as
JSON. Nothing depends on the order of parameters or on how they are grouped: all go by name.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unison.errors import BadInput, UnsupportedOperation
from unison.shard.dtensors import local_part
from unison.shard.state.dtypes import dtype_name, dtype_of
from unison.shard.state.entries import Entry, entries_of

# How a step is computed, not what: these stay as they are in the optimizer that loads.
IMPLEMENTATION = frozenset({"foreach", "fused", "capturable", "differentiable"})
NOT_SAVED = IMPLEMENTATION | {"params", "param_names"}


@dataclass(frozen=True)
class ElementState:
    """State with one value per element of a parameter: this rank's part of it."""

    entry: Entry
    key: str
    held: Tensor  # as the optimizer holds it

    @property
    def value(self) -> Tensor:
        """This rank's part, of the shape of the parameter's."""
        return local_part(self.held)


@dataclass(frozen=True, kw_only=True)
class OptimizerState:
    """What an optimizer holds, by name; of `elements` each rank has its part, the rest is equal.

    Attributes:
        class_name: Of the optimizer.
        groups: Per group the names of its `params`, and its hyperparameters.
        scalars: Per parameter name and key, what is one number: a tensor without dimensions, or a
            plain value.
        elements: What has a value per element.
    """

    class_name: str
    groups: list[dict[str, Any]]
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict)
    elements: list[ElementState] = field(default_factory=list)

    def describe(self) -> dict[str, Any]:
        """What must be the same on every rank, by parameter name."""
        described: dict[str, Any] = {
            name: {key: scalar_to_json(value) for key, value in values.items()}
            for name, values in self.scalars.items()
        }
        for state in self.elements:
            described.setdefault(state.entry.name, {})[state.key] = str(state.value.dtype)
        for index, group in enumerate(self.groups):
            described[f"group {index}"] = group
        return described


def scalar_to_json(value: Any) -> Any:
    """One number of state; a tensor keeps its dtype.

    >>> scalar_to_json(torch.tensor(3.0))
    {'dtype': 'float32', 'value': 3.0}
    """
    if isinstance(value, Tensor):
        return {"dtype": dtype_name(value.dtype), "value": value.item()}
    return value


def scalar_from_json(value: Any) -> Any:
    """What `scalar_to_json` was given."""
    if isinstance(value, dict):
        return torch.tensor(value["value"], dtype=dtype_of(value["dtype"]))
    return value


def named_groups(module: nn.Module, optimizer: Optimizer) -> list[list[Entry]]:
    """The optimizer's parameters by group, as entries of the module.

    Raises:
        BadInput: If the optimizer holds a parameter that the module does not.
    """
    entries = {id(entry.tensor): entry for entry in entries_of(module)}
    named = []
    for index, group in enumerate(optimizer.param_groups):
        outside = [place for place, p in enumerate(group["params"]) if id(p) not in entries]
        if outside:
            raise BadInput(
                f"the parameters {outside} of the optimizer's group {index} belong to another "
                "module; make the optimizer after sharding, from the parameters of this one"
            )
        named.append([entries[id(parameter)] for parameter in group["params"]])
    return named


def collect(module: nn.Module, optimizer: Optimizer) -> OptimizerState:
    """What an optimizer holds, by name.

    Raises:
        UnsupportedOperation: If a part of it is neither elementwise nor one number.
    """
    named = named_groups(module, optimizer)
    groups = [
        {
            "params": [entry.name for entry in entries],
            **{key: _plain(key, value) for key, value in group.items() if key not in NOT_SAVED},
        }
        for entries, group in zip(named, optimizer.param_groups, strict=True)
    ]
    collected = OptimizerState(class_name=type(optimizer).__name__, groups=groups)
    entries = [entry for of_group in named for entry in of_group if entry.tensor in optimizer.state]
    scalar_keys = keys_of_scalars(
        (entry.tensor.ndim, optimizer.state[entry.tensor]) for entry in entries
    )
    for entry in entries:
        for key, value in optimizer.state[entry.tensor].items():
            if _is_elementwise(key, value, entry, scalar_keys):
                collected.elements.append(ElementState(entry, key, value))
            else:
                collected.scalars.setdefault(entry.name, {})[key] = value
    return collected


def _plain(key: str, value: Any) -> Any:
    """A hyperparameter as JSON can hold it."""
    if isinstance(value, Tensor) and value.ndim == 0:
        return value.item()
    if isinstance(value, tuple | list):
        return [_plain(key, each) for each in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise UnsupportedOperation(
        f"the optimizer's hyperparameter {key!r} is of type {type(value).__name__}; only numbers, "
        "words and lists of them can be saved"
    )


def keys_of_scalars(states: Iterable[tuple[int, Mapping[str, Any]]]) -> set[str]:
    """Keys that hold one number, from pairs of a parameter's number of dimensions and its state.

    A parameter without dimensions does not tell which of its state is elementwise; others do.
    """
    return {"step"} | {
        key
        for num_dims, state in states
        if num_dims > 0
        for key, value in state.items()
        if isinstance(value, Tensor) and value.ndim == 0
    }


def _is_elementwise(key: str, value: Any, entry: Entry, scalar_keys: set[str]) -> bool:
    if not isinstance(value, Tensor):
        if value is None or isinstance(value, bool | int | float | str):
            return False
        raise UnsupportedOperation(
            f"the optimizer's {key!r} of {entry.name!r} is of type {type(value).__name__}; only "
            "tensors and numbers can be saved"
        )
    if value.shape == entry.tensor.shape and not (value.ndim == 0 and key in scalar_keys):
        return True
    if value.ndim == 0:
        return False
    raise UnsupportedOperation(
        f"the optimizer's {key!r} of {entry.name!r} has the shape {list(value.shape)}, neither "
        f"that of the rank's part, {list(entry.tensor.shape)}, nor one number; only elementwise "
        "optimizers can be saved"
    )
