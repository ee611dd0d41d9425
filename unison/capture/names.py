"""Names of parameters as the model itself gives them."""

from collections.abc import Hashable, Iterator, Sequence
from itertools import chain
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


class Places:
    """The places of a module's parameters, looked up again only when something has changed.

    To walk through a module takes longer than to look whether each place still holds the same.

    Args:
        module: The model.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._found: list[Place] = []
        self.modules: list[tuple[str, nn.Module]] = []  # by name, as of the last look
        self.tracked: dict[int, Any] = {}  # what a capture keeps of them for the next one
        self.sites: dict[Hashable, Any] = {}  # likewise of their uses, by kind of pass
        self._held: list[int] = []

    def __iter__(self) -> Iterator[Place]:
        return iter(self.now())

    def now(self) -> list[Place]:
        """Return all places as they are now."""
        if not self._found or _held_by(self.modules) != self._held:
            self._found = list(places(self._module))
            self.modules = list(self._module.named_modules())
            self._held = _held_by(self.modules)
            self.tracked, self.sites = {}, {}
        return self._found

    def trained(self) -> tuple[str, ...]:
        """Return the names of all places whose parameters take gradients."""
        return tuple([name for _, _, parameter, name in self.now() if parameter.requires_grad])


def _held_by(modules: Sequence[tuple[str, nn.Module]]) -> list[int]:
    """Return who the children and parameters of modules are, in order.

    Whoever remembers it has to hold modules and parameters, so that no other takes over an address.
    """
    held: list[dict[str, Any]] = [module._modules for _, module in modules]
    held += [module._parameters for _, module in modules]
    parts = chain.from_iterable([each.values() for each in held])
    return [*map(len, held), *map(id, parts)]
