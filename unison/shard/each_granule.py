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
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_iter, tree_unflatten

from unison.errors import UnsupportedOperation
from unison.rng.draw_mode import of_granule
from unison.shard.granules import PerGranule, plan_of
from unison.shard.module_state import ModuleState, StaleTensor
from unison.shard.watch import look_at_granule

Call = Callable[[int, tuple, dict[str, Any]], Any]
"""(index of the granule on this rank, its arguments, its keyword arguments) -> its output."""


# On a forward that puts each granule's parameters in place: what it calls then.
CALLED_BY_GRANULE = "_unison_called_by_granule"


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
    plan = plan_of((args, kwargs))
    is_recompute = torch._C._current_graph_task_id() != -1
    handed = _Handed(name, num_granules, plan)
    state = ModuleState(name, module, plan, is_recompute=is_recompute)
    containers = state.containers()
    given = handed.split((args, tuple(kwargs.values())))
    # What a recompute leaves in modules is dropped.
    held = (_Handed(name, num_granules, plan) if is_recompute else handed).split_kept(
        tuple(containers.values())
    )
    outputs = []
    for index, (own_args, own_values) in enumerate(given):
        own_kwargs = dict(zip(kwargs, own_values, strict=True))
        own_containers = held[index]
        own = dict(zip(containers, own_containers, strict=True))
        with (
            of_granule(index),
            state.granule(index, own) as tensors,
            look_at_granule(own_args, own_kwargs, own, tensors, handed.made[index]),
        ):
            outputs.append(call(index, own_args, own_kwargs))
    handed.check_shared()
    handed.join_changes()
    state.join(handed.join)
    return handed.join(outputs)


def holds_cache(value: Any) -> bool:
    """Whether there is one of transformers' caches in a nested value."""
    return any(_is_cache(type(item)) for item in tree_iter(value, is_leaf=_is_changeable))


class _Handed:
    """What the granules of one call were given."""

    def __init__(self, name: str, num_granules: int, plan: Any) -> None:
        self._name, self._num_granules, self._plan = name, num_granules, plan
        self._is_kept = False
        self.made: list[list[Tensor]] = [[] for _ in range(num_granules)]  # tensors of their own
        self._copies: dict[int, list[Any]] = {}  # id of an original -> its copies
        self._originals: dict[int, Any] = {}  # id of the first granule's copy -> original
        self._joined: dict[int, Any] = {}  # id of the first granule's copy -> what became of it
        self._shared: list[tuple[Any, list[tuple[Any, int]]]] = []  # and what was in them

    def split(self, value: Any, *, is_in_cache: bool = False) -> list[Any]:
        """One nested value per granule, each with its own parts."""
        flat, spec = tree_flatten(value, is_leaf=_is_changeable)
        if not flat:
            return [value] * self._num_granules
        columns = [self._column(item, is_in_cache) for item in flat]
        return [tree_unflatten(list(row), spec) for row in zip(*columns, strict=True)]

    def split_kept(self, value: Any) -> list[Any]:
        """As `split`, of what modules keep: values per granule of other batches cannot be read."""
        self._is_kept = True
        try:
            return self.split(value)
        finally:
            self._is_kept = False

    def _column(self, item: Any, is_in_cache: bool) -> list[Any]:
        if isinstance(item, PerGranule) and self._is_kept and item.plan is not self._plan:
            stale = StaleTensor.of(item, f"a list or dict of {self._name}")
            self._originals[id(stale)] = item
            return [stale] * self._num_granules
        if isinstance(item, PerGranule):
            for made, own in zip(self.made, item.parts, strict=True):
                made.append(own)
            self._originals[id(item.parts[0])] = item
            return item.parts
        if isinstance(item, Tensor) and is_in_cache:  # of a fixed length; written to in place
            copies = [item.clone() for _ in self._each]
            return self._column(PerGranule.of(copies, self._plan), False)
        if _is_changeable(item):
            return self._copied(item, is_in_cache or _is_cache(type(item)))
        if not isinstance(item, _PLAIN_VALUES):
            self._shared.append((item, self._contents(item)))
        return [item] * self._num_granules

    @property
    def _each(self) -> range:
        return range(self._num_granules)

    def _copied(self, original: Any, is_in_cache: bool) -> list[Any]:
        if id(original) in self._copies:
            return self._copies[id(original)]
        copies = self._copies[id(original)] = [copy.copy(original) for _ in self._each]
        self._originals[id(copies[0])] = original
        columns = {
            key: self.split(value, is_in_cache=is_in_cache)
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
                isinstance(first, StaleTensor) or _are_same(values, given.parts)
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
        if any(spec != specs[0] for spec in specs):
            raise self._different(values)
        if specs[0].is_leaf():
            if all(value is first or value == first for value in values):
                return first
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
