"""Gradients in the optimizer's hands: those that were clipped and noised, and no others."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from operator import attrgetter, call, is_
from typing import NamedTuple
from weakref import ref

from torch import Tensor, nn

from unison.errors import BadInput
from unison.parallel import ShardedParam


class Released:
    """Gradients of what this rank owns, made when they are asked for: all at once, or in pairs.

    Args:
        make: Returns what the rank owns, and the gradient of each.
    """

    def __init__(self, make: Callable[[], tuple[Sequence[ShardedParam], Sequence[Tensor]]]) -> None:
        self.make = make

    def __iter__(self) -> Iterator[tuple[ShardedParam, Tensor]]:
        return zip(*self.make(), strict=True)


class _Places(NamedTuple):
    """Where gradients go, by column: mostly they are those of the step before.

    Attributes:
        owned: Whose gradients.
        names: Of each.
        parameters: Of each.
        are_apart: Whether no parameter is there twice.
    """

    owned: Sequence[ShardedParam]
    names: Sequence[str]
    parameters: Sequence[nn.Parameter]
    are_apart: bool

    @classmethod
    def of(cls, owned: Sequence[ShardedParam]) -> "_Places":
        parameters = [each.parameter for each in owned]
        are_apart = len(set(map(id, parameters))) == len(parameters)
        return cls(owned, [each.name for each in owned], parameters, are_apart)


class GivenGradients:
    """Puts private gradients where the optimizer finds them, and knows them again.

    It does not hold them: a user who sets gradients to None between steps gets their memory back.
    """

    def __init__(self) -> None:
        # Torch's own weak references are for those who keep what they get; here it is compared.
        self._given: dict[str, ref[Tensor]] = {}
        self._places = _Places.of(())

    def give(self, gradients: Iterable[tuple[ShardedParam, Tensor]]) -> None:
        """Put gradients where the optimizer finds them.

        As torch does: added to what is there, whose own noise was drawn and counted.

        Args:
            gradients: As `ShardedParam.as_gradient` returns them.
        """
        given, pairs = self._given, gradients
        if isinstance(gradients, Released):
            all_owned, made = gradients.make()
            if self._give_all(all_owned, made):
                return
            pairs = zip(all_owned, made, strict=True)
        for owned, gradient in pairs:
            parameter = owned.parameter
            before = parameter.grad
            if before is None:
                parameter.grad = gradient
                given[owned.name] = ref(gradient)
            else:
                self._require_own(owned.name, before)
                before.add_(gradient)

    def _give_all(self, owned: Sequence[ShardedParam], made: Sequence[Tensor]) -> bool:
        """Put gradients where there are none; if there is one, leave all and return False."""
        if self._places.owned is not owned:
            self._places = _Places.of(owned)
        _, names, parameters, are_apart = self._places
        # Question by question, and not gradient by gradient: no line of Python runs for each.
        if not (are_apart and all(map(is_, map(_gradient_of, parameters), repeat(None)))):
            return False
        self._given.update(zip(names, map(ref, made), strict=True))
        for parameter, gradient in zip(parameters, made, strict=True):
            parameter.grad = gradient
        return True

    def check(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Require every gradient to be one that was given.

        Raises:
            BadInput: Naming the parameter whose gradient is another.
        """
        find = self._given.get
        given = map(call, map(find, parameters, repeat(_nothing)))
        if all(map(is_, given, map(_gradient_of, parameters.values()))):
            return
        for name, parameter in parameters.items():
            gradient = parameter.grad
            if gradient is None:
                continue
            given = find(name)
            if given is None or given() is not gradient:
                self._require_own(name, gradient)

    def _require_own(self, name: str, gradient: Tensor) -> None:
        given = self._given.get(name)
        if given is None or gradient is not given():
            raise BadInput(
                f"{name}.grad is not what the privacy engine put there; a gradient that was not "
                "clipped and noised must not be trained on. Change gradients in place only, and "
                "after the last physical batch"
            )


_gradient_of = attrgetter("grad")


def _nothing() -> None:
    """What there is of a gradient that was never given."""
