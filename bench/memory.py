"""Peak memory by what it is for: every tensor storage, counted while it lives.

[Note: what is counted] A storage counts with its bytes from the operation that made it (or from
the moment it is labelled, if it is older) until nothing refers to it any more. Views count once,
for the whole storage they keep alive. One that is resized in place counts with the size it has at
the moment: sharded parameters are gathered and freed that way. What an operation allocates inside
itself (a kernel's workspace, a backend's send queue) is no tensor and is not seen.

[Note: labels work backwards] What a storage is for is often known only later: a buffer made in a
backward pass turns out to be a gradient once it is some parameter's `.grad`. So the tracker writes
a plain log of (storage, bytes), and peaks are found by replaying it with all that is known at the
end: a storage belongs to its category from its first byte to its last.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_iter

from unison.errors import BadInput, UnsupportedOperation
from unison.shard import units_of


class Category(StrEnum):
    """What memory is for."""

    PARAMETERS = "parameters"  # what a rank always holds of them
    GRADIENTS = "gradients"  # of those parameters, as the optimizer reads them
    OPTIMIZER_STATE = "optimizer state"
    GATHERED = "gathered units"  # whole parameters that modules compute with
    GATHERING = "gather buffers"  # what all-gathers wrote and modules do not compute with
    COMMUNICATION = "communication buffers"  # whatever else a collective read or wrote
    ACTIVATIONS = "activations"  # whatever else a forward pass made
    TEMPORARIES = "temporaries"  # the rest: gradients of activations and of whole units, ...


MODEL_STATE = (
    Category.PARAMETERS,
    Category.GRADIENTS,
    Category.OPTIMIZER_STATE,
    Category.GATHERED,
    Category.GATHERING,
)
"""What holds parameters, their gradients or their optimizer state: whether a unit is gathered in
place or into a buffer from which it is copied makes no difference to the sum."""

Bytes = dict[Category, int]


class MemoryTracker(TorchDispatchMode):
    """Watches the tensor storages that are made in a `with` block; see the notes above.

    It sees what the process itself does, so on several ranks each has its own. Bits do not depend
    on it.

    >>> with MemoryTracker() as tracker:
    ...     kept = torch.zeros(1000)
    ...     for _ in range(3):
    ...         kept = kept + 1  # the old one dies once the new one is there
    >>> tracker.peak()[Category.TEMPORARIES]
    8000
    >>> tracker.label(Category.PARAMETERS, [kept])
    >>> tracker.peak([Category.PARAMETERS])[Category.PARAMETERS]
    4000
    """

    def __init__(self) -> None:
        super().__init__()
        self._log: list[tuple[int, int]] = []  # (number of the storage, its bytes from now on)
        self._born_as: list[Category] = []  # by number of the storage
        self._labels: dict[int, Category] = {}
        self._roles: dict[int, Category] = {}  # in collectives, where there is no label
        self._live: dict[int, tuple[int, weakref.ref]] = {}  # by address, which the dead give back
        self._sizes: list[int] = []
        self._birth = Category.TEMPORARIES
        self._resize: Callable[..., Any] | None = None

    def __enter__(self) -> "MemoryTracker":
        if self._resize is not None:
            raise BadInput("a MemoryTracker watches one `with` block; make another for this one")
        # No operation: the dispatcher does not see it.
        original = self._resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            if storage._cdata in self._live:
                self._note(storage)
            return result

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign]
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign,assignment]
        super().__exit__(*exception)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and note the storages of its results."""
        result = func(*args, **(kwargs or {}))
        for storage in storages_of(tree_iter(result)):
            self._note(storage)
        if func.namespace == "c10d":
            self._note_collective(func, args)
        return result

    @contextmanager
    def births_are(self, category: Category) -> Iterator[None]:
        """Count what is made in the block under a category, unless it gets a label."""
        before, self._birth = self._birth, category
        try:
            yield
        finally:
            self._birth = before

    def label(self, category: Category, tensors: Iterable[Tensor | None]) -> None:
        """Say what the memory of some tensors is for; the first label of a storage stays."""
        for storage in storages_of(tensors):
            self._labels.setdefault(self._note(storage), category)

    def label_training(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Label what model and optimizer hold; call it after `backward()` and after `step()`.

        Gathered units are found for `unison.fully_shard`. Label those of another library yourself.
        """
        parameters = list(model.parameters())
        self.label(Category.PARAMETERS, parameters)
        self.label(Category.GRADIENTS, (parameter.grad for parameter in parameters))
        self.label(Category.OPTIMIZER_STATE, tree_iter(list(optimizer.state.values())))
        # Last: where one rank holds everything, the whole parameters are the shard itself.
        fulls = (group.full for unit in units_of(model) for group in unit.groups)
        self.label(Category.GATHERED, fulls)

    def peak(self, of: Collection[Category] = tuple(Category)) -> Bytes:
        """The bytes of every category at the moment when those of `of` took most together."""
        return highest_moment(self._log, self._categories(), of)

    def _categories(self) -> list[Category]:
        return [
            self._labels.get(number) or self._roles.get(number) or born_as
            for number, born_as in enumerate(self._born_as)
        ]

    def _note_collective(self, func: Any, args: tuple) -> None:
        is_gather = "allgather" in func.__name__
        for place, value in enumerate(args):
            role = Category.GATHERING if is_gather and place == 0 else Category.COMMUNICATION
            for storage in storages_of(tree_iter(value)):
                self._roles.setdefault(self._note(storage), role)

    def _note(self, storage: torch.UntypedStorage) -> int:
        """Write a storage's size into the log if it is news; returns the storage's number."""
        address, size = storage._cdata, storage.nbytes()
        if address not in self._live:
            number = len(self._born_as)
            self._born_as.append(self._birth)
            self._sizes.append(0)

            def forget(_: weakref.ref) -> None:
                del self._live[address]
                self._log.append((number, 0))

            self._live[address] = number, weakref.ref(storage, forget)
        number, _ = self._live[address]
        if size != self._sizes[number]:
            self._sizes[number] = size
            self._log.append((number, size))
        return number


def storages_of(values: Iterable[Any]) -> Iterator[torch.UntypedStorage]:
    """The storages of the tensors among some values, those inside wrappers (DTensor) included.

    Raises:
        UnsupportedOperation: If a tensor is sparse and so has no one storage.
    """
    for value in values:
        if not isinstance(value, Tensor) or value.is_meta:
            continue
        if is_traceable_wrapper_subclass(value):
            names, _ = value.__tensor_flatten__()  # type: ignore[attr-defined]
            yield from storages_of(getattr(value, name) for name in names)
        elif value.layout is not torch.strided:
            raise UnsupportedOperation(
                f"cannot count the memory of a tensor of layout {value.layout}; make it dense"
            )
        else:
            yield value.untyped_storage()


def highest_moment(
    log: Iterable[tuple[int, int]], categories: Sequence[Category], of: Collection[Category]
) -> Bytes:
    """Replay a log of sizes and return every category's bytes when those of `of` peaked.

    >>> parameters, temporaries = Category.PARAMETERS, Category.TEMPORARIES
    >>> log = [(0, 10), (1, 5), (1, 0), (2, 3)]
    >>> peak = highest_moment(log, [parameters, temporaries, temporaries], [temporaries])
    >>> peak[parameters], peak[temporaries]
    (10, 5)

    Args:
        log: (number of a storage, its bytes from then on), in order of time.
        categories: Of each storage, by its number.
        of: Which categories to add up.
    """
    sizes: Counter[int] = Counter()
    now: Counter[Category] = Counter(dict.fromkeys(Category, 0))
    highest, peak = 0, dict(now)
    for number, size in log:
        category = categories[number]
        now[category] += size - sizes[number]
        sizes[number] = size
        if category in of and (together := sum(now[each] for each in of)) > highest:
            highest, peak = together, dict(now)
    return peak
