"""Names of parameters as the model itself gives them."""

from collections.abc import Iterator
from typing import NamedTuple

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
