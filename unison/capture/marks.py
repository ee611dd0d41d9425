"""Marks that stay: tracked parameters, put in their places again in every pass.

[Note: marks that stay] To mark a parameter takes microseconds, and there are hundreds of them. So a
capture leaves its marks to the next one of the same module, which compares, for all parameters at
once, what a mark depends on: whether the parameter takes gradients, and where its values lie.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import attrgetter, eq
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from unison.capture.names import Place
from unison.capture.tracked import Tracked, refuse_gradient


class Marks:
    """The marks of a module's trained parameters, and their places.

    Args:
        placed: All places of all parameters.
        tracked: The marks, by the parameter's id.
    """

    def __init__(self, placed: Sequence[Place], tracked: dict[int, Tracked]) -> None:
        self.tracked = list(tracked.values())
        all_parameters = {id(each.parameter): each.parameter for each in placed}
        self._all = list(all_parameters.values())
        self._trained = [each for key, each in all_parameters.items() if key in tracked]
        self._facts = [list(each) for each in self._facts_now()]
        places: dict[nn.Module, dict[str, Tracked]] = {}
        for module, attribute, parameter, _ in placed:
            if id(parameter) in tracked:
                places.setdefault(module, {})[attribute] = tracked[id(parameter)]
        self._places = list(places.items())

    def put(self) -> bool:
        """Put the marks in their places, if nothing else is there and all is as it was."""
        for now, before in zip(self._facts_now(), self._facts, strict=True):
            if not all(map(eq, now, before)):
                return False
        places = [(module.__dict__, marks) for module, marks in self._places]
        if not all(attributes.keys().isdisjoint(marks) for attributes, marks in places):
            return False
        for attributes, marks in places:
            attributes.update(marks)
        return True

    def remove(self) -> None:
        """Give the places back to the parameters."""
        for module, marks in self._places:
            attributes = module.__dict__
            for attribute in marks:
                attributes.pop(attribute, None)

    def _facts_now(self) -> tuple[Iterator[Any], ...]:
        """Return all of parameters that marks depend on: who is trained, and `memory_of` each.

        Fact by fact, and not parameter by parameter: then no line of Python runs for each. One
        after the other: hundreds of shapes at once would call Python's garbage collector.
        """
        return (
            map(_is_trained, self._all),
            map(Tensor.data_ptr, self._trained),
            map(_shape_of, self._trained),
            map(Tensor.stride, self._trained),
            map(_dtype_of, self._trained),
        )


_is_trained, _shape_of = attrgetter("requires_grad"), attrgetter("shape")
_dtype_of = attrgetter("dtype")


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
        The marks; and all that it takes to put them there again, if they can stay.
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
