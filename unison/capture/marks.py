"""Marks that stay: tracked parameters, put in their places again in every pass.

[Note: marks that stay] To mark a parameter takes microseconds, and there are hundreds of them. So a
capture leaves its marks to the next one of the same module. What a mark depends on is compared for
all parameters at once: by `Places` whether they take gradients, and how their values lie; here,
where.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import repeat
from operator import contains, setitem
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from unison.capture.names import Place
from unison.capture.tracked import Tracked, refuse_gradient, refuse_gradients


class Marks:
    """The marks of a module's trained parameters, and their places.

    Args:
        placed: All places of all parameters.
        tracked: The marks, by the parameter's id.
    """

    def __init__(self, placed: Sequence[Place], tracked: dict[int, Tracked]) -> None:
        own = [each for each in placed if id(each.parameter) in tracked]
        self._parameters = list({id(each.parameter): each.parameter for each in own}.values())
        self._addresses = list(map(Tensor.data_ptr, self._parameters))
        # Flat, and not module by module: then no line of Python runs for each.
        self._where = [each.module.__dict__ for each in own]
        self._names = [each.attribute for each in own]
        self._marks = [tracked[id(each.parameter)] for each in own]
        self._unguarded = list(tracked.values())

    def put(self) -> bool:
        """Put the marks in their places, if nothing else is there and all is as it was.

        `Places` has looked at all but the addresses, and would have dropped the marks.
        """
        if list(map(Tensor.data_ptr, self._parameters)) != self._addresses:
            return False
        if any(map(contains, self._where, self._names)):
            return False
        if self._unguarded:  # guards take longer than to look once, as after the first pass
            refuse_gradients(self._unguarded)
            for each in self._unguarded:
                each.guard()
            self._unguarded = []
        _run(map(setitem, self._where, self._names, self._marks))
        return True

    def remove(self) -> None:
        """Give the places back to the parameters."""
        _run(map(dict.pop, self._where, self._names, repeat(None)))


def _run(calls: Iterator[Any]) -> None:
    deque(calls, maxlen=0)


@contextmanager
def marked(
    placed: Sequence[Place], mark: Callable[[Tensor, str], Tracked], *, is_guarded: bool
) -> Iterator[tuple[Collection[Tracked], Marks | None]]:
    """Put a mark in all places of every trained parameter for this block.

    Args:
        placed: All places of all parameters.
        mark: Marks a tensor of a name.
        is_guarded: As in `Capture.installed`.

    Returns:
        The marks, which have no guard; and all that it takes to put them there again, if they can
        stay.
    """
    tracked: dict[int, Tracked] = {}
    hidden: list[tuple[dict[str, Any], str, Any]] = []
    guards: list[RemovableHandle] = []
    try:
        for module, attribute, parameter, name in placed:
            if not parameter.requires_grad:
                continue
            attributes = module.__dict__
            # What another context put in the parameter's place is what is computed with.
            before = attributes.get(attribute)
            if id(parameter) not in tracked:
                tracked[id(parameter)] = mark(parameter if before is None else before, name)
                if is_guarded:
                    guards.append(parameter.register_hook(partial(refuse_gradient, name)))
            hidden.append((attributes, attribute, before))
            attributes[attribute] = tracked[id(parameter)]
        can_stay = all(before is None for _, _, before in hidden)
        can_stay = can_stay and all(each.memory is not None for each in tracked.values())
        yield tracked.values(), Marks(placed, tracked) if can_stay else None
    finally:
        for attributes, attribute, before in hidden:
            if before is None:
                attributes.pop(attribute, None)
            else:
                attributes[attribute] = before
        for guard in guards:
            guard.remove()
