"""Names of parameters as the model itself gives them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any, NamedTuple

from torch import nn

from unison.capture.facts import TensorFacts
from unison.names import canonical_name


class Place(NamedTuple):
    """Where a parameter lies; a tied one lies in several places."""

    module: nn.Module
    attribute: str
    parameter: nn.Parameter
    name: str  # canonical: the first one of a tied parameter, without wrappers


def places(module: nn.Module) -> Iterator[Place]:
    """All places of all parameters, in the order of `named_parameters()`."""
    names: dict[int, str] = {}
    for path, child in module.named_modules():
        own = child._parameters
        if not own:
            continue
        prefix = f"{path}." if path else ""
        for attribute, parameter in own.items():
            if parameter is not None:
                name = names.setdefault(id(parameter), canonical_name(prefix + attribute))
                yield Place(child, attribute, parameter, name)


class Relay:
    """Hears of operations on marks that stay, and tells the capture of the pass under way.

    Attributes:
        call: That capture's own.
    """

    __slots__ = ("call",)

    call: Callable[..., Any]


class Places:
    """The places of a module's parameters, looked up again only when something has changed.

    To walk through a module takes longer than to look whether each place still holds the same.

    Args:
        module: The model.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.last: list[Place] = []  # as of the last look
        self.modules: list[tuple[str, nn.Module]] = []  # by name, likewise
        self.recurrent: list[tuple[str, nn.Module]] = []  # those of them that are
        self.held = Held([])  # by all of them, likewise
        # What a capture keeps for the next one: marks by the parameter's id, all of them with
        # their places, and who hears of them.
        self.tracked: dict[int, Any] = {}
        self.marks: Any = None
        self.relay = Relay()
        self._facts: TensorFacts | None = None  # of those that take gradients
        self._own: list[nn.Parameter] = []  # those
        self._frozen: list[nn.Parameter] = []  # and the others
        self._trained: tuple[str, ...] = ()

    def forget(self) -> None:
        """Let go of all that is kept for the next capture; it is looked up again then."""
        self.last, self.modules, self.recurrent, self.held = [], [], [], Held([])
        self.tracked, self.marks, self.relay = {}, None, Relay()
        self._facts, self._own, self._frozen, self._trained = None, [], [], ()

    def __iter__(self) -> Iterator[Place]:
        return iter(self.now())

    def now(self) -> list[Place]:
        """Return all places as they are now."""
        if not self.last or not self.held.is_as_before():
            self.last = list(places(self._module))
            self.modules = list(self._module.named_modules())
            self.recurrent = [each for each in self.modules if isinstance(each[1], nn.RNNBase)]
            self.held = Held([module for _, module in self.modules])
            self.tracked, self.marks, self._facts = {}, None, None
        return self.last

    def trained(self) -> tuple[str, ...]:
        """Return the names of all places whose parameters take gradients.

        It is the same tuple as long as nothing changes. Marks are kept only as long as these
        parameters keep their shapes, strides, dtypes and devices, too.
        """
        self.now()
        facts = self._facts
        if facts is None or any(map(_is_trained, self._frozen)) or not facts.hold_for(self._own):
            each_once = {id(place.parameter): place.parameter for place in self.last}.values()
            self._own = [each for each in each_once if each.requires_grad]
            self._frozen = [each for each in each_once if not each.requires_grad]
            self._facts, self.marks = TensorFacts(self._own), None
            self._trained = tuple(each.name for each in self.last if each.parameter.requires_grad)
        return self._trained

    def are_flags_kept(self) -> bool:
        """Whether parameters take gradients as they did when `trained` was called last.

        Of those that were there then: this is a fraction of that call.
        """
        if self._facts is None or any(map(_is_trained, self._frozen)):
            return False
        return all(map(_is_trained, self._own))


_is_trained = attrgetter("requires_grad")


class Held:
    """What modules hold, as of when this was made: their children and their parameters.

    It is compared over all modules, fact by fact, and not module by module: then no line of Python
    runs for each.

    Args:
        modules: The modules.

    Attributes:
        modules: The same.
        attributes: Each one's own.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = modules
        self.attributes: list[dict[str, Any]] = [vars(each) for each in modules]
        self._children: list[Any] = [each._modules for each in modules]
        self._parameters: list[Any] = [each._parameters for each in modules]
        both = self._children + self._parameters
        self._empty = [each for each in both if not each]
        self._full = [each for each in both if each]
        self._lengths = list(map(len, self._full))
        self._values = [_values_of(each) for each in self._full]
        self._parts = list(chain.from_iterable(self._values))
        # A class may answer for its modules; then nothing but a walk tells.
        found = [each.get(name) for name in _HELD for each in self.attributes]
        self._can_tell = all(map(is_, found, both))

    def is_as_before(self) -> bool:
        """Whether the modules hold the same."""
        # An attribute of a module takes twice as long as an entry of the dictionary it lies in.
        return (
            self._can_tell
            and all(map(is_, map(vars, self.modules), self.attributes))
            and all(map(is_, map(_children_of, self.attributes), self._children))
            and all(map(is_, map(_parameters_of, self.attributes), self._parameters))
            and not any(self._empty)
            and list(map(len, self._full)) == self._lengths
            and all(map(is_, chain.from_iterable(self._values), self._parts))
        )


_HELD = ("_modules", "_parameters")
_children_of, _parameters_of = map(itemgetter, _HELD)


def _values_of(held: Any) -> Iterable[Any]:
    """Return values as they are whenever one looks; scripted modules hand out copies of theirs."""
    return held.values() if isinstance(held, dict) else _Values(held)


class _Values:
    """The values of what is like a dictionary, asked for whenever one looks."""

    def __init__(self, held: Any) -> None:
        self._held = held

    def __iter__(self) -> Iterator[Any]:
        return iter(self._held.values())
