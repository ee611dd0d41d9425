"""Names of parameters as the model itself gives them."""

from collections.abc import Iterator
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
        self._parts: list[tuple[list[nn.Module | None], list[nn.Parameter | None]]] = []

    def __iter__(self) -> Iterator[Place]:
        return iter(self.now())

    def now(self) -> list[Place]:
        """Return all places as they are now."""
        if not self._is_same():
            self._found = list(places(self._module))
            self.modules = list(self._module.named_modules())
            self._parts = [_parts_of(module) for _, module in self.modules]
            self.tracked = {}
        return self._found

    def _is_same(self) -> bool:
        if not self._found:
            return False
        for (_, module), (children, parameters) in zip(self.modules, self._parts, strict=True):
            now = _parts_of(module)
            if len(now[1]) != len(parameters) or now[0] != children:
                return False
            if any(a is not b for a, b in zip(now[1], parameters, strict=True)):
                return False
        return True


def _parts_of(module: nn.Module) -> tuple[list[nn.Module | None], list[nn.Parameter | None]]:
    return list(module._modules.values()), list(module._parameters.values())
