"""Names of parameters as the model itself gives them."""

from collections.abc import Iterator
from typing import NamedTuple

from torch import nn

_WRAPPERS = {"module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


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
        prefix = "".join(f"{part}." for part in path.split(".") if part and part not in _WRAPPERS)
        for attribute, parameter in own.items():
            if parameter is not None:
                name = names.setdefault(id(parameter), prefix + attribute)
                yield Place(child, attribute, parameter, name)


def canonical_names(module: nn.Module) -> dict[int, str]:
    """The name of each parameter by its id: the first one of a tied one, without wrappers."""
    return {id(place.parameter): place.name for place in places(module)}
