"""Calling a module once per granule, also where it changes what it is given.

[Note: what granules change] A block of transformers' models writes its keys and values into a cache
that the model hands to all of them. One cache for all granules would let each attend to those that
ran before it. So what a module may change in the values it is given, which is lists, dicts and
transformers' caches, is copied for each granule before the calls, and what the copies have become
is joined into the original after them: where the granules' tensors differ, it then holds one value
per granule. The model sees its own object, changed as it would be without granules, and hands it on
to the next block. Objects of other classes are shared, and refused once a call has changed one.
"""

import copy
import functools
import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.utils._pytree import tree_flatten, tree_iter, tree_unflatten

from unison.errors import UnsupportedOperation
from unison.rng.draw_mode import (
    current_draws,
    following,
    nothing_else_drawn,
    of_granule,
    other_generator_states,
)
from unison.rng.draws import is_draw, is_seeding
from unison.shard.granules import (
    MAPPED_BY,
    PerGranule,
    RefusedTensor,
    draws_of,
    is_in_backward,
    num_granules_of,
    plan_of,
)
from unison.shard.guard.records import caller, lines_of
from unison.shard.reducers import sum_over_granules
from unison.torch_internals import DispatchMode

# ------------------------------------------------------------------------------------------------
# What a module's forward leaves behind in the module, where it runs once per granule.
#
# [Note: kept by modules] A forward pass may write to the module itself: a router keeps its aux
# loss, a rotary embedding its table of cosines, a counter counts, batch norm follows a mean.
# Granule after granule, each would find what the one before left, and the last one's would
# remain; then it matters how many granules a rank has. So every granule finds the module as it
# was before the pass, and what they leave is joined afterwards: values that all granules agree on
# are set as they are, other tensors become one value per granule (a loss may be made of them),
# and everything else that differs is refused by name. A tensor that was kept for each granule of
# an earlier batch can no longer be read: which granule follows which depends on the ranks.
#
# Buffers are part of the model, so more is asked of them. The running statistics of batch norm
# become the mean over all granules, added in the canonical tree. Buffers that are no part of
# `state_dict()` are tables, on which granules must agree; all others are refused.

Place = tuple[nn.Module, bool, str]
"""A module, whether it is one of its buffers, and the name of it or of another attribute."""

_MISSING = object()
_OWN = frozenset(vars(nn.Module())) | {"_flat_weights", "_flat_weight_refs"}


def _held(module: nn.Module, is_buffer: bool) -> dict[str, Any]:
    return module._buffers if is_buffer else vars(module)


class ModuleState:
    """The attributes and buffers of the modules of a unit, while it runs once per granule.

    Args:
        name: The unit's name, for messages.
        module: The unit's module.
        plan: Of the batch.
    """

    def __init__(self, name: str, module: nn.Module, plan: Any) -> None:
        self._name, self._module, self._plan = name, module, plan
        self._before = {
            (each, is_buffer): dict(_held(each, is_buffer))
            for each in module.modules()
            for is_buffer in (True, False)
        }
        self._values: dict[Place, Any] = {
            (*of, key): value
            for of, before in self._before.items()
            for key, value in before.items()
            if of[1] or key not in _OWN
        }
        self._tensors = {
            place: value
            for place, value in self._values.items()
            if isinstance(value, Tensor) and not isinstance(value, PerGranule | nn.Parameter)
        }
        self._versions = {place: _version(value) for place, value in self._tensors.items()}
        # Those that may be written in place. Each granule has its own: autograd saves them.
        self._own_buffers = {
            place: value
            for place, value in self._tensors.items()
            if place[1] and isinstance(place[0], _NormBase | _SpectralNorm) and place[0].training
        }
        self._changes: list[dict[Place, Any]] = []  # of each granule

    def containers(self) -> dict[Place, Any]:
        """The lists and dicts that modules hold, of which each granule is to have a copy."""
        return {
            place: value
            for place, value in self._values.items()
            if type(value) in (list, dict) and not place[1]
        }

    @contextmanager
    def granule(self, index: int, containers: dict[Place, Any]) -> Iterator[list[Tensor]]:
        """Let one granule find everything as it was, and note what it leaves.

        Yields:
            The tensors that modules hold, which are looked after here.
        """
        own = {place: value.clone() for place, value in self._own_buffers.items()}
        given = {**containers, **own}
        for place, value in self._values.items():
            if isinstance(value, PerGranule) and value.plan is self._plan:
                given[place] = value.parts[index]
            elif isinstance(value, PerGranule):
                given[place] = _stale(value, f"{self._path(place[0])}{place[2]}")
        for (module, is_buffer, key), value in given.items():
            _held(module, is_buffer)[key] = value
        changes: dict[Place, Any] = {}
        try:
            yield [*self._tensors.values(), *own.values()]
        finally:  # checkpointing ends a recompute by an exception, once it has what it needs
            for of, before in self._before.items():
                now = _held(*of)
                if now.keys() == before.keys() and all(now[key] is before[key] for key in now):
                    continue
                for key in {**before, **now}:
                    place = (*of, key)
                    value = now.get(key, _MISSING)
                    found = given.get(place, before.get(key, _MISSING))
                    if (value is not found and (of[1] or key not in _OWN)) or place in own:
                        changes[place] = value
                for key in now.keys() - before.keys():
                    del now[key]
                now.update(before)
        self._check(changes)
        self._changes.append(changes)

    def _check(self, changes: dict[Place, Any]) -> None:
        """Refuse buffers that are set or made, and tensors that are written to."""
        for module, is_buffer, key in changes:
            if is_buffer and key not in self._before[module, True]:
                raise UnsupportedOperation(
                    f"the forward pass of {self._path(module)[:-1]} registers a buffer, which "
                    "granule after granule would find; register it in __init__"
                )
            was_empty = self._values.get((module, is_buffer, key), _MISSING) is None
            is_table = was_empty or key in module._non_persistent_buffers_set
            if is_buffer and not is_table and (module, True, key) not in self._own_buffers:
                raise UnsupportedOperation(
                    f"the forward pass sets the buffer {self._path(module)}{key}, which would "
                    "then depend on how many granules a rank has; return the value and set the "
                    "buffer outside of the forward pass, or register it with persistent=False "
                    "if it is a table that does not depend on data"
                )
        for place, value in self._tensors.items():
            is_replaced = place[1] and place in changes
            if _version(value) != self._versions[place] and not is_replaced:
                raise UnsupportedOperation(
                    f"the forward pass writes into the tensor {self._path(place[0])}{place[2]}, "
                    "which all granules share, so that its value would depend on how many of them "
                    "a rank has; return the new value from the forward pass and set it outside"
                )

    # --- after the calls -------------------------------------------------------------------------

    def join(self, join: Callable[[list[Any]], Any]) -> None:
        """Set what the granules left, as one.

        Args:
            join: Makes one value of one per granule.

        Raises:
            UnsupportedOperation: Naming the attribute or buffer on which granules do not agree.
        """
        statistics: list[tuple[Tensor, list[Tensor]]] = []
        for place in dict.fromkeys(place for changes in self._changes for place in changes):
            module, is_buffer, key = place
            before = self._values.get(place, _MISSING)
            values = [changes.get(place, before) for changes in self._changes]
            if is_buffer:
                values = [before if value is None else value for value in values]
            is_number = isinstance(before, Tensor) and before.is_floating_point()
            if is_buffer and is_number and isinstance(module, _NormBase):
                statistics.append((before, values))
            elif place in self._own_buffers and _are_one_table(values):
                with torch.no_grad():
                    before.copy_(values[0])
            elif _are_one_table(values):
                _held(module, is_buffer)[key] = values[0]
            else:
                try:
                    if is_buffer or any(value is _MISSING for value in values):
                        raise UnsupportedOperation(f"{key} is not the same for all granules")
                    vars(module)[key] = join(values)
                except UnsupportedOperation as error:
                    raise UnsupportedOperation(
                        f"the forward pass sets {self._path(module)}{key} to different values for "
                        "different granules, so that it would depend on how many of them a rank "
                        "has; return the value from the forward pass instead"
                    ) from error
        if statistics:
            average(self._plan, *zip(*statistics, strict=True))

    def _path(self, module: nn.Module) -> str:
        inner = next((path for path, each in self._module.named_modules() if each is module), "")
        return ".".join(part for part in (self._name, inner) if part) + "."


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


def _stale(value: PerGranule, name: str) -> RefusedTensor:
    """Stands for a tensor that was kept for a granule of an earlier batch."""

    def refuse() -> NoReturn:
        raise UnsupportedOperation(
            f"the forward pass reads {name}, which it kept from an earlier batch: which granule "
            "followed which depends on the number of ranks; pass what goes from batch to batch in "
            "and out of the forward pass"
        )

    return RefusedTensor.of(value.parts[0], refuse)


# --- logical batches in several passes -----------------------------------------------------------

_RESTORED_VALUES = int | float | complex | str | bytes | tuple | None


def begin_pass(module: nn.Module, plan: Any) -> None:
    """Let every pass of a logical batch find the model as the first one did.

    Whether a rank takes one pass or four over its granules must not matter, so every pass begins
    with the same numbers, lists and counts of batches.
    """
    first = plan.accumulation.get(module)
    if first is None:
        if not plan.closes_logical_batch:
            plan.accumulation[module] = plan, _start_of(module)
    elif first[0] is not plan:
        plan.accumulation[module] = plan, first[1]
        first[1]()


def _start_of(module: nn.Module) -> Callable[[], None]:
    """Note a model's state; what is returned restores it."""
    attributes = [(each, dict(vars(each))) for each in module.modules()]
    contents = [
        (value, value.copy())
        for _, before in attributes
        for key, value in before.items()
        if type(value) in (list, dict) and key not in _OWN
    ]
    counts = [
        (each.num_batches_tracked, each.num_batches_tracked.clone())
        for each in module.modules()
        if isinstance(each, _NormBase) and each.num_batches_tracked is not None
    ]

    @torch.no_grad()
    def restore() -> None:
        for each, before in attributes:
            now = vars(each)
            for key in now.keys() - before.keys():
                if isinstance(now[key], _RESTORED_VALUES | PerGranule):
                    del now[key]
            for key, value in before.items():
                if now.get(key) is not value and isinstance(value, _RESTORED_VALUES):
                    now[key] = value
        for value, content in contents:
            _set_items(value, _items(content))
        for count, before in counts:
            count.copy_(before)

    return restore


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
    key = tuple(map(id, buffers))
    held = plan.accumulation.setdefault(key, {})
    for granule, value in zip(plan.granule_ids, flat, strict=True):
        if granule in held:
            raise UnsupportedOperation(
                "batch norm runs twice in one pass of a logical batch that comes in several; leave "
                "out micro_batch, or run the module once per pass"
            )
        held[granule] = value
    if not plan.closes_logical_batch:
        return
    del plan.accumulation[key]
    total = sum_over_granules(held, plan)
    if total is None:
        return
    sizes = [each.numel() for each in buffers]
    for buffer, value in zip(buffers, (total / plan.num_granules).split(sizes), strict=True):
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
        if not is_in_backward():  # what a recompute makes is dropped
            average(plan, buffers, copies)
        return result

    return mapped


MAPPED_BY[F.batch_norm] = _map_norm(F.batch_norm, "training")
MAPPED_BY[F.instance_norm] = _map_norm(F.instance_norm, "use_input_stats")


# ------------------------------------------------------------------------------------------------
# Watching a pass over granules: whose random numbers it draws, and that it is what it must be.
#
# The same bits on any number of ranks need a forward pass that depends on nothing but parameters
# and the granule. What a model does beside that is made right (draws in rng/draw_mode.py, what it
# is given in `GranuleArguments`, what it leaves in `ModuleState`) or refused. Two looks make sure
# of it: in every pass torch's own generators must not move, and in some passes every operation is
# looked at.

FIRST_PASSES = 2  # of a loader, in which every operation is looked at
LATER_PASSES = 64  # one of so many, after that


@contextmanager
def granular_pass(
    name: str, module: nn.Module, inputs: Any, *, looks_at_writes: bool
) -> Iterator[None]:
    """Around a module's forward pass: the outermost one over a batch in granules is watched.

    Args:
        name: The module's name, for messages.
        module: The module.
        inputs: What it is called with.
        looks_at_writes: Whether nobody else (the capture of private training) writes meanwhile.

    Raises:
        UnsupportedOperation: If it draws, or writes to tensors, in a way that depends on ranks.
    """
    global _is_looking
    num_granules = num_granules_of(inputs)
    plan = draws = None
    if num_granules and not is_in_backward():
        plan = plan_of(inputs)
        draws = draws_of(plan, num_granules)
    if draws is None or draws is current_draws():
        yield
        return
    if plan is not None:
        begin_pass(module, plan)
    with following(draws), nothing_else_drawn(name):
        # Whether this pass is one of those that are looked at is the same on all ranks.
        is_later = plan is not None and (plan.step * 0x9E3779B1 & 0xFFFFFFFF) % LATER_PASSES
        if plan is None or (plan.step >= FIRST_PASSES and is_later):
            yield
            return
        _refuse_sync_batch_norm(name, module)
        others = other_generator_states()
        before, _is_looking = _is_looking, looks_at_writes
        try:
            with DispatchMode(functools.partial(_look, name)):
                yield
        finally:
            _is_looking = before
        if other_generator_states() != others:
            raise UnsupportedOperation(
                f"{name} draws from Python's random or from numpy, whose numbers would be others "
                "at another number of ranks; draw with torch.rand and the like"
            )


def _refuse_sync_batch_norm(name: str, module: nn.Module) -> None:
    """Refuse a layer that talks to other ranks once per granule: they have different numbers."""
    for path, each in module.named_modules():
        if isinstance(each, nn.SyncBatchNorm) and each.training:
            raise UnsupportedOperation(
                f"{name}: {path} is a SyncBatchNorm, whose ranks would wait for one another once "
                "per granule; use BatchNorm, whose running statistics are means over all granules"
            )


# Memory that the running granule may write to, where its operations are looked at: what it was
# given, and what it has made.
_writable: set[int] | None = None
_is_looking = False


@contextmanager
def _looked_at(own: Any) -> Iterator[None]:
    """Let a block be a granule's, which may write to these values, if that is looked at."""
    global _writable
    before = _writable
    if _is_looking:
        _writable = {_memory(value) for value in tree_iter(own) if isinstance(value, Tensor)}
    try:
        yield
    finally:
        _writable = before


def _look(name: str, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run an operation, unless it draws as nobody counts, or writes what all granules see."""
    if current_draws() is None:  # a module is tried out, and this is nobody's batch
        return func(*args, **kwargs)
    if not is_seeding() and is_draw(func, args, kwargs):
        raise UnsupportedOperation(
            f"{name}: {_name_of(func)} draws random numbers in a way that cannot be "
            "given to samples, so that they would be others at another number of ranks; draw "
            "with torch.rand, torch.bernoulli, F.dropout and the like"
        )
    if _writable is None:
        return func(*args, **kwargs)
    for value in written_by(func, args, kwargs) if func._schema.is_mutable else ():
        if value.numel() and _memory(value) not in _writable:
            line = lines_of(caller(sys._getframe(1))[1])[0]
            raise UnsupportedOperation(
                f"{name}: {_name_of(func)} writes to a tensor of shape {list(value.shape)} that "
                f"was there before, at {line}. All granules share it, so that its value would "
                "depend on how many of them a rank has; return the new value from the forward "
                "pass and set it outside"
            )
    result = func(*args, **kwargs)
    _writable.update(_memory(value) for value in tree_iter(result) if isinstance(value, Tensor))
    return result


def written_by(func: Any, args: tuple, kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors whose content an operation changes, by its schema."""
    written = [
        args[index] if index < len(args) else kwargs.get(argument.name)
        for index, argument in enumerate(func._schema.arguments)
        if argument.is_write
    ]
    return [each for each in tree_iter(written) if isinstance(each, Tensor)]


def _name_of(func: Any) -> str:
    return func._schema.name.partition("::")[2]


def _memory(value: Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return value.untyped_storage().data_ptr()


Call = Callable[[int, tuple, dict[str, Any]], Any]
"""(index of the granule on this rank, its arguments, its keyword arguments) -> its output."""


# On a forward that puts each granule's parameters in place: what it calls then.
CALLED_BY_GRANULE = "_unison_called_by_granule"


_running: int | None = None


def running_granule() -> int | None:
    """Which of this rank's granules a module is called for; None where it gets all at once."""
    return _running


def call_each_granule(
    name: str, module: nn.Module, call: Call, num_granules: int, args: tuple, kwargs: dict[str, Any]
) -> Any:
    """Call a module once per granule and make one output of theirs.

    Args:
        name: The module's name, for messages.
        module: The module.
        call: Runs the module for one granule.
        num_granules: How many there are on this rank.
        args: The module's arguments, with values per granule in them.
        kwargs: Its keyword arguments.

    Returns:
        The output, its tensors one value per granule.

    Raises:
        UnsupportedOperation: If a Python value differs between granules, or a granule changed an
            object that all granules share.
    """
    global _running
    plan = plan_of((args, kwargs))
    is_recompute = is_in_backward()
    handed = GranuleArguments(name, num_granules, plan)
    state = ModuleState(name, module, plan)
    containers = state.containers()
    given = handed.split((args, tuple(kwargs.values())))
    # What a recompute leaves in modules is dropped.
    kept = GranuleArguments(name, num_granules, plan) if is_recompute else handed
    held = kept.split(tuple(containers.values()), is_kept=True)
    outputs = []
    for index, (own_args, own_values) in enumerate(given):
        own_kwargs = dict(zip(kwargs, own_values, strict=True))
        own = dict(zip(containers, held[index], strict=True))
        with of_granule(index), state.granule(index, own) as tensors:
            writable = (own_args, own_kwargs, own, tensors, handed.made[index])
            with _looked_at(writable):
                before, _running = _running, index
                try:
                    outputs.append(call(index, own_args, own_kwargs))
                finally:
                    _running = before
    handed.check_shared()
    handed.join_changes()
    if not is_recompute:
        state.join(handed.join)
    return handed.join(outputs)


def holds_cache(value: Any) -> bool:
    """Whether there is one of transformers' caches in a nested value."""
    return any(_is_cache(type(item)) for item in tree_iter(value, is_leaf=_is_changeable))


class GranuleArguments:
    """What the granules of one call were given."""

    def __init__(self, name: str, num_granules: int, plan: Any) -> None:
        self._name, self._num_granules, self._plan = name, num_granules, plan
        self.made: list[list[Tensor]] = [[] for _ in range(num_granules)]  # tensors of their own
        self._copies: dict[int, list[Any]] = {}  # id of an original -> its copies
        self._originals: dict[int, Any] = {}  # id of the first granule's copy -> original
        self._joined: dict[int, Any] = {}  # id of the first granule's copy -> what became of it
        self._shared: list[tuple[Any, list[tuple[Any, int]]]] = []  # and what was in them

    def split(self, value: Any, *, is_in_cache: bool = False, is_kept: bool = False) -> list[Any]:
        """One nested value per granule, each with its own parts.

        Args:
            value: What to split.
            is_in_cache: Whether its tensors are written to in place.
            is_kept: Whether modules keep it: values per granule of other batches cannot be read.
        """
        flat, spec = tree_flatten(value, is_leaf=_is_changeable)
        if not flat:
            return [value] * self._num_granules
        columns = [self._column(item, is_in_cache, is_kept) for item in flat]
        return [tree_unflatten(list(row), spec) for row in zip(*columns, strict=True)]

    def _column(self, item: Any, is_in_cache: bool, is_kept: bool) -> list[Any]:
        if isinstance(item, PerGranule) and is_kept and item.plan is not self._plan:
            stale = _stale(item, f"a list or dict of {self._name}")
            self._originals[id(stale)] = item
            return [stale] * self._num_granules
        if isinstance(item, PerGranule):
            for made, own in zip(self.made, item.parts, strict=True):
                made.append(own)
            self._originals[id(item.parts[0])] = item
            return item.parts
        if isinstance(item, Tensor) and is_in_cache:  # of a fixed length; written to in place
            copies = [item.clone() for _ in range(self._num_granules)]
            return self._column(PerGranule.of(copies, self._plan), False, False)
        if _is_changeable(item):
            return self._copied(item, is_in_cache or _is_cache(type(item)), is_kept)
        if not isinstance(item, _PLAIN_VALUES):
            self._shared.append((item, self._contents(item)))
        return [item] * self._num_granules

    def _copied(self, original: Any, is_in_cache: bool, is_kept: bool) -> list[Any]:
        if id(original) in self._copies:
            return self._copies[id(original)]
        copies = [copy.copy(original) for _ in range(self._num_granules)]
        self._copies[id(original)] = copies
        self._originals[id(copies[0])] = original
        columns = {
            key: self.split(value, is_in_cache=is_in_cache, is_kept=is_kept)
            for key, value in _items(original).items()
        }
        for index, own in enumerate(copies):
            _set_items(own, {key: column[index] for key, column in columns.items()})
        return copies

    # --- after the calls -------------------------------------------------------------------------

    def join_changes(self) -> None:
        """Let every list, dict and cache be what its copies have become."""
        for copies in self._copies.values():
            self.join(copies)

    def join(self, values: list[Any]) -> Any:
        """Make one nested value of one per granule."""
        first = values[0]
        if isinstance(first, Tensor) and all(isinstance(value, Tensor) for value in values):
            given = self._originals.get(id(first))
            if isinstance(given, PerGranule) and (
                isinstance(first, RefusedTensor) or _are_same(values, given.parts)
            ):
                return given
            return PerGranule.of(values, self._plan)
        if any(type(value) is not type(first) for value in values):
            raise self._different(values)
        if _is_changeable(first):
            return self._join_copies(values)
        columns, specs = zip(
            *(tree_flatten(value, is_leaf=_is_changeable) for value in values), strict=True
        )
        is_leaf = specs[0].is_leaf()
        if is_leaf and all(value is first or value == first for value in values):
            return first
        if is_leaf or any(spec != specs[0] for spec in specs):
            raise self._different(values)
        joined = [self.join(list(column)) for column in zip(*columns, strict=True)]
        return tree_unflatten(joined, specs[0])

    def _join_copies(self, copies: list[Any]) -> Any:
        if id(copies[0]) in self._joined:
            return self._joined[id(copies[0])]
        # One that a granule has made itself is new: the first one becomes that of all.
        original = self._originals.get(id(copies[0]), copies[0])
        self._joined[id(copies[0])] = original
        before, after = _items(original), [_items(own) for own in copies]
        if any(items.keys() != after[0].keys() for items in after):
            raise self._different(copies)
        joined = {}
        for key in after[0]:
            values = [items[key] for items in after]
            is_kept = key in before and original is not copies[0]
            is_kept = is_kept and _are_same(values, [before[key]] * len(values))
            joined[key] = before[key] if is_kept else self.join(values)
        _set_items(original, joined)
        return original

    def _different(self, values: list[Any]) -> UnsupportedOperation:
        return UnsupportedOperation(
            f"{self._name} gives different Python values for different granules: {values[:3]}"
        )

    # --- objects that all granules share ---------------------------------------------------------

    def check_shared(self) -> None:
        """Refuse a call that changed what all granules share.

        Raises:
            UnsupportedOperation: Naming the class of the object.
        """
        for item, before in self._shared:
            after = self._contents(item)
            is_same = len(before) == len(after) and all(
                version == version_after and (old is new or _is_equal(old, new))
                for (old, version), (new, version_after) in zip(before, after, strict=True)
            )
            if not is_same:
                raise UnsupportedOperation(
                    f"{self._name} changed the {type(item).__name__} that it was given, which all "
                    "granules share, so that each would see what the others wrote; return the new "
                    "values from its forward instead"
                )

    def _contents(self, item: Any) -> list[tuple[Any, int]]:
        """What is in an object, and how often each tensor was written to."""
        found = []
        for value in _walk(item, _DEPTH):
            if isinstance(value, PerGranule):
                raise UnsupportedOperation(
                    f"{self._name} is given a {type(item).__name__}, which holds one value per "
                    "granule that cannot be told apart; pass tensors, tuples or dicts of them, or "
                    "register the class with torch.utils._pytree.register_dataclass"
                )
            has_version = isinstance(value, Tensor) and not value.is_inference()
            found.append((value, value._version if has_version else 0))
        return found


_DEPTH = 3  # how far below an object changes are looked for
_CONTAINERS = (list, dict, OrderedDict, defaultdict, deque)
_PLAIN_VALUES = int | float | complex | str | bytes | None | torch.dtype | torch.device | torch.Size
# Not looked into: tensors count what is written to them, and code is the model's own.
_UNSEEN = Tensor | nn.Module | type | types.ModuleType | types.FunctionType | types.MethodType


def _is_changeable(value: Any) -> bool:
    """Whether it is copied for each granule."""
    return type(value) in _CONTAINERS or _is_cache(type(value))


@functools.cache
def _is_cache(kind: type) -> bool:
    """Whether a class is a cache of transformers, or a layer of one; imports nothing."""
    return any(base.__module__ == "transformers.cache_utils" for base in kind.__mro__)


def _items(value: Any) -> dict[Any, Any]:
    if isinstance(value, list | deque):
        return dict(enumerate(value))
    return dict(value) if type(value) in _CONTAINERS else dict(vars(value))


def _set_items(value: Any, items: dict[Any, Any]) -> None:
    if isinstance(value, list | deque):
        value.clear()
        value.extend(items.values())
    else:
        own = value if type(value) in _CONTAINERS else vars(value)
        own.clear()
        own.update(items)


def _are_same(values: list[Any], others: list[Any]) -> bool:
    return all(value is other for value, other in zip(values, others, strict=True))


def _is_equal(old: Any, new: Any) -> bool:
    return type(old) is type(new) and isinstance(old, _PLAIN_VALUES) and old == new


def _walk(value: Any, depth: int) -> Iterator[Any]:
    """An object and what it holds, as far as this is seen without running its code."""
    if not isinstance(value, list | tuple | dict | set | deque):  # those are what they hold
        yield value
    if depth == 0 or isinstance(value, _UNSEEN):
        return
    if isinstance(value, dict):
        held = [*value.keys(), *value.values()]
    elif isinstance(value, list | tuple | set | deque):
        held = list(value)
    else:
        held = list(getattr(value, "__dict__", {}).values())
    for each in held:
        yield from _walk(each, depth - 1)
