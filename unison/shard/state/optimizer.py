"""An optimizer's state by the names of parameters: what is sharded, what is not, how it returns.

[Note: two kinds of state] What an elementwise optimizer keeps for a parameter either has one
value per element (`exp_avg`) and is cut as the parameter is, or is one number (`step`), the
same on every rank. The first kind is stored as tensors; the second, with the hyperparameters of
the groups, as JSON. Nothing depends on the order of parameters or on how they are grouped: all
go by name.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unison.errors import BadInput, UnsupportedOperation
from unison.schema import build, is_a, short
from unison.shard.ranks import agree, meet, together
from unison.shard.sharded_tensor import local_part, whole
from unison.shard.state.entries import (
    Entry,
    deliver,
    entries_of,
    rank_0_reads_alone,
    ranks_of,
    require_same,
)


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype.

    >>> dtype_name(torch.bfloat16)
    'bfloat16'
    """
    assert isinstance(dtype, torch.dtype), f"expected a dtype, found {dtype!r}"
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The dtype of a name.

    Raises:
        BadInput: If this torch knows no such dtype.
    """
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise BadInput(f"expected the name of a torch dtype, found {short(name)}")
    return dtype


# How a step is computed, not what: these stay as they are in the optimizer that loads.
IMPLEMENTATION = frozenset({"foreach", "fused", "capturable", "differentiable"})
NOT_SAVED = IMPLEMENTATION | {"params", "param_names"}


ElementState = tuple[Entry, str, Tensor]
"""State with a value per element: its parameter, its key, and the tensor that an optimizer holds,
which lies on ranks as the parameter does."""


@dataclass(frozen=True, kw_only=True)
class OptimizerState:
    """What an optimizer holds, or held when it was saved, by the names of parameters.

    Attributes:
        class_name: Of the optimizer; None where it was not recorded.
        groups: Per group the names of its `params`, and its hyperparameters; values of a saved one
            may have been through JSON.
        scalars: Per parameter name and key, what is one number: a tensor without dimensions, or a
            plain value.
        dtypes: Per parameter name and key, the dtype of what has a value per element.
        elements: What has a value per element, of which each rank has its part; empty where it has
            not been read.
    """

    class_name: str | None
    groups: list[dict[str, Any]]
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict)
    dtypes: dict[str, dict[str, torch.dtype]] = field(default_factory=dict)
    elements: list[ElementState] = field(default_factory=list)

    def describe(self) -> dict[str, Any]:
        """What must be the same on every rank, by parameter name."""
        described: dict[str, Any] = {f"group {i}": group for i, group in enumerate(self.groups)}
        for name in self.scalars.keys() | self.dtypes.keys():
            scalars = self.scalars.get(name, {}).items()
            numbers = {key: scalar_to_json(value) for key, value in scalars}
            described[name] = numbers | self.dtypes.get(name, {})
        return described

    def to_json(self) -> dict[str, Any]:
        """What is no tensor, as JSON can hold it."""
        scalars = {
            name: {key: scalar_to_json(value) for key, value in values.items()}
            for name, values in self.scalars.items()
        }
        return {"class": self.class_name, "groups": self.groups, "scalars": scalars}

    @classmethod
    def from_json(
        cls,
        content: Mapping[str, Any],
        dtypes: dict[str, dict[str, torch.dtype]],
        *,
        source: object,
    ) -> "OptimizerState":
        """Read what `to_json` gave.

        Raises:
            BadInput: If it is something else.
        """

        def read(name: str, kind: Any) -> Any:
            return build(kind, content.get(name), source, field=f"optimizer.{name}")

        def scalar(value: Any) -> Any:
            if not isinstance(value, dict):
                return value
            try:
                return torch.tensor(value["value"], dtype=dtype_of(value["dtype"])).reshape(())
            except (KeyError, TypeError, ValueError, RuntimeError, OverflowError):
                raise BadInput(
                    f"{source}: optimizer.scalars must hold numbers, found {short(value)}"
                ) from None

        groups = read("groups", list[dict[str, Any]])
        for index, group in enumerate(groups):
            params = group.get("params")
            build(list[str], params, source, field=f"optimizer.groups[{index}].params")
        scalars = {
            name: {key: scalar(value) for key, value in values.items()}
            for name, values in read("scalars", dict[str, dict[str, Any]]).items()
        }
        class_name = read("class", str | None)
        return cls(class_name=class_name, groups=groups, scalars=scalars, dtypes=dtypes)


def scalar_to_json(value: Any) -> Any:
    """One number of state; a tensor keeps its dtype.

    >>> scalar_to_json(torch.tensor(3.0))
    {'dtype': 'float32', 'value': 3.0}
    """
    if isinstance(value, Tensor):
        return {"dtype": dtype_name(value.dtype), "value": value.item()}
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
    entries = [entry for of_group in named for entry in of_group if entry.tensor in optimizer.state]
    states = {entry.name: optimizer.state[entry.tensor] for entry in entries}
    for entry in entries:
        for key, value in states[entry.name].items():
            _check_state(key, value, entry)
    scalars, dtypes = _sorted_state(states, {entry.name: entry.tensor.ndim for entry in entries})
    return OptimizerState(
        class_name=type(optimizer).__name__,
        groups=groups,
        scalars=scalars,
        dtypes=dtypes,
        elements=[(e, key, states[e.name][key]) for e in entries for key in dtypes.get(e.name, ())],
    )


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


def _check_state(key: str, value: Any, entry: Entry) -> None:
    if not isinstance(value, Tensor | bool | int | float | str | None):
        raise UnsupportedOperation(
            f"the optimizer's {key!r} of {entry.name!r} is of type {type(value).__name__}; only "
            "tensors and numbers can be saved"
        )
    if isinstance(value, Tensor) and value.ndim > 0 and value.shape != entry.tensor.shape:
        raise UnsupportedOperation(
            f"the optimizer's {key!r} of {entry.name!r} has the shape {list(value.shape)}, neither "
            f"that of the rank's part, {list(entry.tensor.shape)}, nor one number; only "
            "elementwise optimizers can be saved"
        )


def _sorted_state(
    states: Mapping[str, Mapping[str, Any]], num_dims: Mapping[str, int]
) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, torch.dtype]]]:
    """The numbers among the state of parameters, and the dtypes of what has a value per element.

    A parameter without dimensions does not tell which of its state is elementwise; others do.
    """
    keys = {"step"} | {
        key
        for name, state in states.items()
        if num_dims.get(name, 0) > 0
        for key, value in state.items()
        if isinstance(value, Tensor) and value.ndim == 0
    }
    scalars: dict[str, dict[str, Any]] = {}
    dtypes: dict[str, dict[str, torch.dtype]] = {}
    for name, state in states.items():
        for key, value in state.items():
            may_be_element = num_dims.get(name) == 0 and key not in keys
            if isinstance(value, Tensor) and (value.ndim > 0 or may_be_element):
                dtypes.setdefault(name, {})[key] = value.dtype
            else:
                scalars.setdefault(name, {})[key] = value
    return scalars, dtypes


def prepare(
    module: nn.Module, optimizer: Optimizer, saved: OptimizerState
) -> tuple[list[ElementState], Callable[[], None]]:
    """Match a saved state with an optimizer, by name, and make memory for it.

    State that the optimizer has already, of the right dtype, is written in place.

    Returns:
        The memory to fill, and what then gives the optimizer its state.

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
        (entries[name], key, _memory(optimizer, entries[name], key, dtype))
        for name, keys in saved.dtypes.items()
        for key, dtype in keys.items()
    ]

    def install() -> None:
        """Let the optimizer have the state, by its own `load_state_dict`."""
        index = {name: place for place, name in enumerate(entries)}
        # Copies: an optimizer counts its steps in place.
        state = {index[name]: copy.deepcopy(values) for name, values in saved.scalars.items()}
        for entry, key, held in elements:
            state.setdefault(index[entry.name], {})[key] = held
        numbered = [
            {**group, "params": [index[entry.name] for entry in of_group]}
            for group, of_group in zip(groups, named, strict=True)
        ]
        try:
            optimizer.load_state_dict({"state": state, "param_groups": numbered})
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadInput(
                f"{type(optimizer).__name__} does not take its saved state: "
                f"{type(error).__name__} {error}"
            ) from error
        # torch casts floating-point state to the parameter's dtype, which may hold fewer bits.
        for entry, key, held in elements:
            optimizer.state[entry.tensor][key] = held
        for name, values in saved.scalars.items():
            for key, value in values.items():
                if isinstance(value, Tensor) and key != "step":
                    own = optimizer.state[entries[name].tensor]
                    own[key] = value.to(own[key].device, copy=True)

    return elements, install


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
        merged[key] = _like(key, value, merged.get(key))
    return merged


def _like(key: str, value: Any, before: Any) -> Any:
    """Give a value that came through JSON the type of the one it replaces.

    Raises:
        BadInput: If it is no such value.
    """
    numbers = value if isinstance(before, tuple) and isinstance(value, list | tuple) else [value]
    is_plain = before is None or isinstance(before, str | Tensor)
    if not is_plain and not all(is_a(each, bool) or is_a(each, float) for each in numbers):
        raise BadInput(f"the saved {short(key)} is {short(value)}, here it is {before!r}")
    if isinstance(before, Tensor):
        return torch.as_tensor(value, dtype=before.dtype, device=before.device)
    if isinstance(before, tuple) and isinstance(value, list):
        return tuple(value)
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
    meet(ranks, "full_optimizer_state_dict", may_be_late=True)
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
    for entry, key, part in held.elements:
        full = whole(part, entry.name)
        if keeps:
            state.setdefault(entry.name, {})[key] = full.to(device=device, copy=True)
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
    meet(ranks, "load_full_optimizer_state_dict", may_be_late=True)
    reads_alone = rank_0_reads_alone(ranks, has_state=bool(state), what="the optimizer's state")
    num_dims = {entry.name: entry.tensor.ndim for entry in entries_of(module)}
    outlines = agree(ranks, lambda: _outline(state, num_dims) if state else None)
    outline = outlines[ranks.rank] or outlines[0]
    assert outline is not None
    elements, install = together(ranks, lambda: prepare(module, optimizer, outline))

    def read(entry: Entry, key: str) -> Tensor:
        return (state or {})["state"][entry.name][key]

    wanted = (
        (entry, f"{key} of {entry.name}", local_part(held).dtype, partial(read, entry, key))
        for entry, key, held in elements
    )
    # Strict, so that the parts come to their end, where all ranks hear of an error.
    parts = deliver(ranks, wanted, reads_alone=reads_alone)
    for (_, _, held), part in zip(elements, parts, strict=True):
        if part is not None:
            local_part(held).copy_(part.view(local_part(held).shape))
    install()


def _outline(state: Mapping[str, Any], num_dims: Mapping[str, int]) -> OptimizerState:
    """What a full state says, without its tensors."""
    if not {"state", "param_groups"} <= state.keys():
        raise BadInput(
            "expected 'state' and 'param_groups' as full_optimizer_state_dict gives them, found "
            f"{sorted(state.keys())}"
        )
    scalars, dtypes = _sorted_state(state["state"], num_dims)
    return OptimizerState(
        class_name=None, groups=list(state["param_groups"]), scalars=scalars, dtypes=dtypes
    )
