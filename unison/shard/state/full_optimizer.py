"""An optimizer's whole state in plain tensors, by parameter name: gathered, or taken apart."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unison.errors import BadInput
from unison.shard.dtensors import whole
from unison.shard.flat_group import FlatGroup
from unison.shard.state.agree import Delivery, agree, require_same, together
from unison.shard.state.entries import entries_of, ranks_of
from unison.shard.state.installation import SavedState, prepare
from unison.shard.state.optimizer_state import ElementState, collect, keys_of_scalars
from unison.shard.unit import units_of


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
            state[name] = {key: _copied(value, device) for key, value in values.items()}
    for element, value in _full_values(module, held.elements):
        if keeps:
            copy = value.view(element.entry.shape).to(device=device, copy=True)
            state.setdefault(element.entry.name, {})[element.key] = copy
    return {"state": state, "param_groups": held.groups} if keeps else {}


def _copied(value: Any, device: str | torch.device) -> Any:
    return value.to(device=device, copy=True) if isinstance(value, Tensor) else value


def _full_values(
    module: nn.Module, elements: list[ElementState]
) -> Iterator[tuple[ElementState, Tensor]]:
    """Yield every element state with its whole value [numel]; one flat buffer at a time."""
    by_piece: dict[int, list[ElementState]] = defaultdict(list)
    for element in elements:
        by_piece[id(element.entry.tensor)].append(element)
    for unit in units_of(module):
        for group in unit.groups:
            # One gather per key and dtype, in an order that every rank shares.
            alike: dict[tuple[str, torch.dtype], list[tuple[int, ElementState]]] = defaultdict(list)
            for index, piece in enumerate(group.pieces):
                for element in by_piece.pop(id(piece), []):
                    alike[element.key, element.value.dtype].append((index, element))
            for (_, dtype), members in alike.items():
                full = _gathered(group, members, dtype)
                for index, element in members:
                    slot = group.slots[index]
                    yield element, full[slot.offset : slot.offset + slot.numel]
    for left in by_piece.values():
        for element in left:
            yield element, whole(element.held, element.entry.name).reshape(-1)


def _gathered(
    group: FlatGroup, members: list[tuple[int, ElementState]], dtype: torch.dtype
) -> Tensor:  # [padded length]
    """All ranks' parts of one kind of state, laid out as the parameters are."""
    shard = torch.zeros(len(group.shard), dtype=dtype, device=group.device)
    places = group.piece_places()
    for index, element in members:
        part = shard.narrow(0, places[index].shard_offset, places[index].numel)
        part.copy_(element.value.reshape(-1))
    full = torch.empty(
        group.layout.padded_length(group.ranks.size), dtype=dtype, device=group.device
    )
    group.ranks.gather(full, shard).wait()
    return full


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
    delivery = Delivery.of(ranks, has_state=bool(state), what="the optimizer's state")
    shapes = {entry.name: entry.shape for entry in entries_of(module)}
    outlines = agree(ranks, lambda: _outline(state, shapes) if state else None)
    outline = outlines[ranks.rank] or outlines[0]
    assert outline is not None
    installation = together(ranks, lambda: prepare(module, optimizer, outline))
    for element in installation.elements:
        name, key = element.entry.name, element.key
        part = delivery.take(
            lambda name=name, key=key: (state or {})["state"][name][key],
            name=f"{key} of {name}",
            shape=element.entry.shape,
            start=element.entry.start,
            stop=element.entry.stop,
            dtype=element.value.dtype,
            device=element.entry.device,
        )
        if part is not None:
            element.value.copy_(part.view(element.value.shape))
    delivery.finish()
    installation.finish()


def _outline(state: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> SavedState:
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
    return SavedState(
        class_name=None, groups=list(state["param_groups"]), scalars=scalars, dtypes=dtypes
    )
