"""Tensors that were made of a batch in a module's forward, and that no tape has.

They are known by identity while they live, and by their memory where they were written to: a queue
is seen through all views of it.
"""

import weakref
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from unison.privacy.sampling import unpacked


def memory_of(value: Tensor) -> int:
    """Where the memory of a tensor begins, which views of it share; the first granule's."""
    first = unpacked(value)[0]
    try:
        return first.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # sparse tensors have several
        return id(first)


class KeptValues:
    """Knows some tensors, and keeps none of them alive."""

    def __init__(self) -> None:
        self._objects: dict[int, weakref.ref[Tensor]] = {}
        self._written: dict[int, StorageWeakRef] = {}  # by memory

    def __bool__(self) -> bool:
        return bool(self._objects)

    def __contains__(self, value: Any) -> bool:
        """Whether a value is one of them, or lies where they were written."""
        if not isinstance(value, Tensor):
            return False
        found = self._objects.get(id(value))
        if found is not None and found() is value:
            return True
        written = self._written.get(memory_of(value)) if self._written else None
        return written is not None and not written.expired()

    def add(self, values: Any, *, is_written: bool = False) -> None:
        """Know tensors from here on.

        Args:
            values: Tensors, in whatever holds some.
            is_written: Whether values of the batch were written into them.
        """
        for leaf in tree_leaves(values):
            if isinstance(leaf, Tensor):
                self._objects[id(leaf)] = weakref.ref(leaf)
                memory = memory_of(leaf) if is_written and unpacked(leaf)[0] is leaf else 0
                if memory:
                    self._written[memory] = StorageWeakRef(leaf.untyped_storage())

    def discard(self, value: Tensor) -> None:
        """Forget a tensor, but not what it shares memory with."""
        self._objects.pop(id(value), None)

    def forget_dead(self) -> None:
        """Forget those that are gone."""
        self._objects = {key: each for key, each in self._objects.items() if each() is not None}
        self._written = {key: each for key, each in self._written.items() if not each.expired()}
