"""What a module's forward leaves behind in the module, where it runs once per granule.

[Note: kept by modules] A forward pass may write to the module itself: a router keeps its aux loss,
a rotary embedding its table of cosines, a counter counts, batch norm follows a mean. Granule after
granule, each would find what the one before left, and the last one's would remain; then it matters
how many granules a rank has. So every granule finds the module as it was before the pass, and what
they leave is joined afterwards: values that all granules agree on are set as they are, other
tensors become one value per granule (a loss may be made of them), and everything else that differs
is refused by name. A tensor that was kept for each granule of an earlier batch can no longer be
read: which granule follows which depends on the ranks.

Buffers are part of the model, so more is asked of them. The running statistics of batch norm become
the mean over all granules, added in the canonical tree. Buffers that are no part of `state_dict()`
are tables, on which granules must agree; all others are refused.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrizations import _SpectralNorm

from unison.errors import UnsupportedOperation
from unison.shard.granules import MAPPED_BY, PerGranule
from unison.shard.tree import TreeSum

Key = tuple[nn.Module, str]
"""An attribute of a module."""

_MISSING = object()
_OWN = frozenset(vars(nn.Module())) | {"_flat_weights", "_flat_weight_refs"}


class ModuleState:
    """The attributes and buffers of the modules of a unit, while it runs once per granule.

    Args:
        name: The unit's name, for messages.
        module: The unit's module.
        plan: Of the batch.
        is_recompute: Whether activation checkpointing runs the unit again, which leaves nothing.
    """

    def __init__(self, name: str, module: nn.Module, plan: Any, *, is_recompute: bool) -> None:
        self._name, self._module, self._plan = name, module, plan
        self._is_recompute = is_recompute
        self._modules = list(module.modules())
        self._before = [dict(vars(each)) for each in self._modules]
        self._tensors = {
            (each, key): value
            for each, before in zip(self._modules, self._before, strict=True)
            for key, value in (*each._buffers.items(), *before.items())
            if isinstance(value, Tensor) and not isinstance(value, PerGranule | nn.Parameter)
        }
        self._versions = {key: _version(value) for key, value in self._tensors.items()}
        self._num_buffers = [len(each._buffers) for each in self._modules]
        # Those that may be written in place. Each granule has its own: autograd saves them.
        self._own_buffers: dict[Key, Tensor] = {
            (each, key): value
            for each in self._modules
            if isinstance(each, _NormBase | _SpectralNorm) and each.training
            for key, value in each._buffers.items()
            if value is not None
        }
        self._changes: list[dict[Key, Any]] = []  # of each granule
        self._written: list[dict[Key, Tensor]] = []
        self._per_granule = {
            (each, key): value
            for each, attributes in zip(self._modules, self._before, strict=True)
            for key, value in attributes.items()
            if isinstance(value, PerGranule)
        }

    def containers(self) -> dict[Key, Any]:
        """The lists and dicts that modules hold, of which each granule is to have a copy."""
        return {
            (each, key): value
            for each, attributes in zip(self._modules, self._before, strict=True)
            for key, value in attributes.items()
            if type(value) in (list, dict) and key not in _OWN
        }

    @contextmanager
    def granule(self, index: int, containers: dict[Key, Any]) -> Iterator[list[Tensor]]:
        """Let one granule find everything as it was, and note what it leaves.

        Yields:
            The tensors that modules hold, which are looked after here.
        """
        given = {**containers, **self._own_parts(index)}
        for (each, key), value in given.items():
            vars(each)[key] = value
        own = {place: value.clone() for place, value in self._own_buffers.items()}
        for (each, key), value in own.items():
            each._buffers[key] = value
        try:
            yield [*self._tensors.values(), *own.values()]
        except BaseException:  # checkpointing ends a recompute so, once it has what it needs
            self._put_back()
            raise
        changes, written = self._changes_since(given), self._take_buffers()
        self._changes.append(changes)
        self._written.append(written)

    def _put_back(self) -> None:
        """Let everything be as it was found."""
        for each, before in zip(self._modules, self._before, strict=True):
            for key in [key for key in vars(each) if key not in before]:
                del vars(each)[key]
            vars(each).update(before)
        for (each, key), value in self._tensors.items():
            if key in each._buffers:
                each._buffers[key] = value

    def _own_parts(self, index: int) -> dict[Key, Any]:
        """What was kept as one value per granule: its own, or a tensor that nobody may read."""
        return {
            (each, key): value.parts[index]
            if value.plan is self._plan
            else StaleTensor.of(value, f"{self._path(each)}{key}")
            for (each, key), value in self._per_granule.items()
        }

    def _changes_since(self, given: dict[Key, Any]) -> dict[Key, Any]:
        """What a granule set, other than it found it; all is put back."""
        changes: dict[Key, Any] = {}
        for each, before in zip(self._modules, self._before, strict=True):
            now = vars(each)
            if len(now) == len(before) and all(
                now.get(key, _MISSING) is value for key, value in before.items()
            ):
                continue
            for key in [*before, *(key for key in now if key not in before)]:
                if key in _OWN:
                    continue
                found = given.get((each, key), before.get(key, _MISSING))
                value = now.get(key, _MISSING)
                if value is not found:
                    changes[each, key] = value
            for key in [key for key in now if key not in before]:
                del now[key]
            now.update(before)
        return changes

    def _take_buffers(self) -> dict[Key, Tensor]:
        """What a granule wrote to buffers; all is put back."""
        written: dict[Key, Tensor] = {}
        for place, value in self._tensors.items():
            module, key = place
            now = module._buffers.get(key, value)
            if place in self._own_buffers:
                assert now is not None
                written[place] = now
                module._buffers[key] = value
            elif now is not value:
                self._check_is_table(module, key)
                if now is not None:
                    written[place] = now
                module._buffers[key] = value
            elif _version(value) != self._versions[place]:
                raise self._written_in_place(module, key)
        for module, number in zip(self._modules, self._num_buffers, strict=True):
            if len(module._buffers) != number:
                raise UnsupportedOperation(
                    f"the forward pass of {self._path(module)[:-1]} registers a buffer, which "
                    "granule after granule would find; register it in __init__"
                )
        return written

    def _check_is_table(self, module: nn.Module, key: str) -> None:
        if key not in module._non_persistent_buffers_set:
            raise UnsupportedOperation(
                f"the forward pass sets the buffer {self._path(module)}{key}, which would then "
                "depend on how many granules a rank has; return the value and set the buffer "
                "outside of the forward pass, or register it with persistent=False if it is a "
                "table that does not depend on data"
            )

    def _written_in_place(self, module: nn.Module, key: str) -> UnsupportedOperation:
        return UnsupportedOperation(
            f"the forward pass writes into the tensor {self._path(module)}{key}, which all "
            "granules share, so that its value would depend on how many of them a rank has; return "
            "the new value from the forward pass and set it outside"
        )

    # --- after the calls -------------------------------------------------------------------------

    def join(self, join: Callable[[list[Any]], Any]) -> None:
        """Set what the granules left, as one.

        Args:
            join: Makes one value of one per granule.

        Raises:
            UnsupportedOperation: Naming the attribute or buffer on which granules do not agree.
        """
        if self._is_recompute:
            return
        for each, key in dict.fromkeys(key for changes in self._changes for key in changes):
            values = [
                changes.get((each, key), vars(each).get(key, _MISSING)) for changes in self._changes
            ]
            vars(each)[key] = self._joined(each, key, values, join)
        self._join_buffers()

    def _joined(
        self, module: nn.Module, key: str, values: list[Any], join: Callable[[list[Any]], Any]
    ) -> Any:
        if any(value is _MISSING for value in values):
            raise self._different(module, key)
        if _are_one_table(values):
            return values[0]
        try:
            return join(values)
        except UnsupportedOperation as error:
            raise self._different(module, key) from error

    def _different(self, module: nn.Module, key: str) -> UnsupportedOperation:
        return UnsupportedOperation(
            f"the forward pass sets {self._path(module)}{key} to different values for different "
            "granules, so that it would depend on how many of them a rank has; return the value "
            "from the forward pass instead"
        )

    def _path(self, module: nn.Module) -> str:
        inner = next((path for path, each in self._module.named_modules() if each is module), "")
        return ".".join(part for part in (self._name, inner) if part) + "."

    def _join_buffers(self) -> None:
        statistics: dict[Key, list[Tensor]] = {}
        for module, key in dict.fromkeys(key for written in self._written for key in written):
            before = self._tensors[module, key]
            values = [written.get((module, key), before) for written in self._written]
            if isinstance(module, _NormBase) and before.is_floating_point():
                statistics[module, key] = values
            elif not _are_one_table(values):
                raise self._different(module, key)
            elif (module, key) in self._own_buffers:
                with torch.no_grad():
                    before.copy_(values[0])
            else:
                module._buffers[key] = values[0]
        if statistics:
            average(self._plan, [self._tensors[key] for key in statistics], [*statistics.values()])


def _version(value: Tensor) -> int:
    return 0 if value.is_inference() else value._version


def _are_one_table(values: Sequence[Any]) -> bool:
    """Whether all are the same tensor in every bit, without a history: no matter whose it is."""
    first = values[0]
    return isinstance(first, Tensor) and all(
        isinstance(value, Tensor)
        and not value.requires_grad
        and (value is first or (value.shape == first.shape and torch.equal(value, first)))
        for value in values
    )


class StaleTensor(Tensor):
    """A tensor that was kept for a granule of an earlier batch; it cannot be read."""

    title: str  # where it was kept

    @staticmethod
    def of(value: PerGranule, name: str) -> "StaleTensor":
        """In the place of a value that was kept for each granule."""
        stale = torch.Tensor._make_subclass(StaleTensor, value.parts[0].detach())
        stale.title = name
        return stale

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Refuse."""
        name = next((each.title for each in args if isinstance(each, StaleTensor)), "a tensor")
        raise UnsupportedOperation(
            f"the forward pass reads {name}, which it kept from an earlier batch: which granule "
            "followed which depends on the number of ranks; pass what goes from batch to batch in "
            "and out of the forward pass"
        )


# --- logical batches in several passes -----------------------------------------------------------


class BatchStart:
    """A model as it was before the first pass of a logical batch that comes in several.

    Whether a rank takes one pass or four over its granules must not matter, so every pass begins
    with the same numbers, lists and counts of batches.

    Args:
        module: The model.
        plan: Of the first pass.
    """

    def __init__(self, module: nn.Module, plan: Any) -> None:
        self.plan = plan
        self._attributes = [(each, dict(vars(each))) for each in module.modules()]
        self._contents = [
            (value, value.copy())
            for _, before in self._attributes
            for key, value in before.items()
            if type(value) in (list, dict) and key not in _OWN
        ]
        self._counts = [
            (each.num_batches_tracked, each.num_batches_tracked.clone())
            for each in module.modules()
            if isinstance(each, _NormBase) and each.num_batches_tracked is not None
        ]

    def restore(self, plan: Any) -> None:
        """Begin another pass."""
        self.plan = plan
        for each, before in self._attributes:
            now = vars(each)
            for key in [key for key in now if key not in before]:
                if isinstance(now[key], _PLAIN_VALUES | PerGranule):
                    del now[key]
            now.update(
                (key, value)
                for key, value in before.items()
                if now.get(key) is not value and isinstance(value, _PLAIN_VALUES)
            )
        for value, content in self._contents:
            value.clear()
            value.extend(content) if isinstance(value, list) else value.update(content)
        with torch.no_grad():
            for count, before in self._counts:
                count.copy_(before)


_PLAIN_VALUES = int | float | complex | str | bytes | tuple | None


def begin_pass(module: nn.Module, plan: Any) -> None:
    """Let every pass of a logical batch find the model as the first one did."""
    starts = plan.accumulation.starts
    start = starts.get(module)
    if start is None:
        if not plan.closes_logical_batch:
            starts[module] = BatchStart(module, plan)
    elif start.plan is not plan:
        start.restore(plan)


# --- running statistics --------------------------------------------------------------------------


@torch.no_grad()
def average(plan: Any, buffers: Sequence[Tensor], values: Sequence[Sequence[Tensor]]) -> None:
    """Let buffers be the mean of what each granule of the logical batch would make of them.

    A collective, in the last pass of the batch.

    Args:
        plan: Of the pass.
        buffers: What is set.
        values: For each buffer, what each granule of this pass makes of it.
    """
    flat = [
        torch.cat([each.reshape(-1).double() for each in of]) for of in zip(*values, strict=True)
    ]
    held = plan.accumulation.statistics.setdefault(tuple(map(id, buffers)), {})
    for granule, value in zip(plan.granule_ids, flat, strict=True):
        if granule in held:
            raise UnsupportedOperation(
                "batch norm runs twice in one pass of a logical batch that comes in several; leave "
                "out micro_batch, or run the module once per pass"
            )
        held[granule] = value
    if not plan.closes_logical_batch:
        return
    del plan.accumulation.statistics[tuple(map(id, buffers))]
    if plan.num_granules == 0:
        return
    slots = flat[0].new_zeros(plan.num_granules + 1, len(flat[0]))  # the last one takes a ghost's
    for granule, value in held.items():
        slots[granule] = value
    # Each slot has one owner and all others add 0.0, which is exact but for the sign of zero.
    plan.ranks.sum_(slots.add_(0.0))
    total = TreeSum()
    for value in slots[:-1]:
        total.push(value.clone())
    mean = total.finish() / plan.num_granules
    for buffer, value in zip(buffers, mean.split([each.numel() for each in buffers]), strict=True):
        buffer.copy_(value.view_as(buffer))


def _map_norm(func: Callable, use_statistics: str) -> Callable:
    """How a normalisation that follows statistics maps over granules, outside of units."""
    arguments = signature(func)

    def mapped(call: Callable, args: tuple, kwargs: dict[str, Any], plan: Any) -> Any:
        bound = arguments.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        buffers = [given["running_mean"], given["running_var"]]
        has_statistics = all(type(each) is Tensor for each in buffers)
        if not has_statistics or not given[use_statistics]:
            return call(*args, **kwargs)
        copies = [[each.clone() for _ in plan.granule_ids] for each in buffers]
        for key, own in zip(("running_mean", "running_var"), copies, strict=True):
            given[key] = PerGranule.of(own, plan)
        result = call(*bound.args, **bound.kwargs)
        if torch._C._current_graph_task_id() == -1:  # what a recompute makes is dropped
            average(plan, buffers, copies)
        return result

    return mapped


MAPPED_BY[F.batch_norm] = _map_norm(F.batch_norm, "training")
MAPPED_BY[F.instance_norm] = _map_norm(F.instance_norm, "use_input_stats")
