"""What is trained: whether it is still what was made private."""

from collections.abc import Sequence

from torch import nn

from unison.capture.names import Places
from unison.capture.parts import is_in_parts
from unison.errors import BadInput
from unison.privacy.owners.base import Owner


class Trained:
    """Looks at a module's parameters, once per pass, and refuses those that are others.

    Args:
        places: Where the parameters lie.
        owner: Who holds those that are trained.

    Attributes:
        last: The names of all places of what is trained, as of the last look at all; another tuple
            whenever parameters had changed: were not the same, or not alike.
    """

    def __init__(self, places: Places, owner: Owner) -> None:
        self._places = places
        self._private = _held_by(places, owner)
        self.last: tuple[str, ...] | None = None

    @property
    def modules(self) -> Sequence[nn.Module]:
        """All modules, as of the last look."""
        return self._places.held.modules

    def check(self, *, is_quick: bool = False) -> tuple[str, ...]:
        """Make sure that what is trained is what was made private, and return `last`.

        Args:
            is_quick: Whether a look at the parameters that were there the last time is enough for
                now: a pass that follows looks at all.

        Raises:
            BadInput: Naming a parameter.
        """
        if is_quick and self.last is not None and self._places.are_flags_kept():
            return self.last
        trained = self._places.trained()
        if trained is not self.last:
            self._refuse_others()
            self.last = trained
        return trained

    def _refuse_others(self) -> None:
        for place in self._places.last:
            name, parameter = place.name, place.parameter
            if parameter.requires_grad != (name in self._private):
                raise BadInput(
                    f"{name} was frozen or thawed since make_private; detach the engine and make "
                    "the module private again"
                )
            before = self._private.get(name)
            if before is not None and parameter is not before:
                raise BadInput(
                    f"{name} is another parameter than when make_private was called, and its "
                    "gradients would go to the one that the optimizer holds. Change the values in "
                    "place instead (parameter.data.copy_), or detach the engine and make the "
                    "module private again"
                )


def _held_by(places: Places, owner: Owner) -> dict[str, nn.Parameter | None]:
    """Return what an owner holds by name: the module's own parameter, or None if it has others."""
    own = {id(place.parameter) for place in places.now()}
    held: dict[str, nn.Parameter | None] = {}
    for each in owner.owned:
        # A DTensor and the whole of it take turns in a module.
        is_own = id(each.parameter) in own
        held[each.name] = None if is_in_parts(each.parameter) or not is_own else each.parameter
    return held
