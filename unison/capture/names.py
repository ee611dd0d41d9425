"""Names of parameters as the model itself gives them."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import chain, compress
from operator import is_
from typing import Any, NamedTuple

from torch import nn

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
        # What a capture keeps for the next one: marks by the parameter's id, all of them with
        # their places, who hears of them, and their uses by kind of pass.
        self.tracked: dict[int, Any] = {}
        self.marks: Any = None
        self.relay = Relay()
        self.sites: dict[Hashable, Any] = {}
        self._held: tuple[list[int], list] = [], []
        self._flags: list[bool] = []
        self._trained: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[Place]:
        return iter(self.now())

    def now(self) -> list[Place]:
        """Return all places as they are now."""
        if not self.last or not _is_held(self.modules, *self._held):
            self.last = list(places(self._module))
            self.modules = list(self._module.named_modules())
            self._held = _held_by(self.modules)
            self.tracked, self.sites, self.marks, self._flags = {}, {}, None, []
        return self.last

    def trained(self) -> tuple[str, ...]:
        """Return the names of all places whose parameters take gradients."""
        flags = [place.parameter.requires_grad for place in self.now()]
        if flags != self._flags:
            names = [place.name for place in self.last]
            self._flags, self._trained = flags, tuple(compress(names, flags))
        return self._trained


def _is_held(modules: Sequence[tuple[str, nn.Module]], lengths: list[int], parts: list) -> bool:
    """Whether children and parameters of modules are what `_held_by` returned."""
    held = _held(modules)
    return list(map(len, held)) == lengths and all(map(is_, _parts(held), parts))


def _held_by(modules: Sequence[tuple[str, nn.Module]]) -> tuple[list[int], list]:
    """Return how many children and parameters each module has, and who they are, in order."""
    held = _held(modules)
    return list(map(len, held)), list(_parts(held))


def _held(modules: Sequence[tuple[str, nn.Module]]) -> list[dict[str, Any]]:
    held: list[dict[str, Any]] = [module._modules for _, module in modules]
    return held + [module._parameters for _, module in modules]


def _parts(held: Sequence[dict[str, Any]]) -> Iterator[Any]:
    # One after the other: hundreds of views at once would call Python's garbage collector.
    return chain.from_iterable(each.values() for each in held if each)
