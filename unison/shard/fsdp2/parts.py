"""Per-granule values on their way through FSDP2's hooks.

FSDP2's hooks pass a module's inputs through an `autograd.Function` and put hooks on its outputs.
Both would meet the shell of a `PerGranule` and miss its parts. FSDP2 looks into tuples, so there
the parts travel in one, and each is handled as the plain tensor it is.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils._pytree import tree_map

from unison.shard.granules import PerGranule


class Parts(NamedTuple):
    """A `PerGranule` taken apart. FSDP2 copies named tuples element by element."""

    tensors: tuple[Tensor, ...]


def take_apart(value: Any) -> Any:
    """Replace every `PerGranule` in a nested value by its `Parts`."""
    return tree_map(
        lambda item: Parts(tuple(item.parts)) if isinstance(item, PerGranule) else item, value
    )


def put_together(value: Any) -> Any:
    """Undo `take_apart`."""
    return tree_map(
        lambda item: PerGranule.of(item.tensors) if isinstance(item, Parts) else item,
        value,
        is_leaf=lambda item: isinstance(item, Parts),
    )


def before_forward(hook: Callable) -> Callable:
    """Wrap FSDP2's hook before a forward pass."""

    def wrapped(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        return put_together(hook(module, *take_apart((args, kwargs))))

    return wrapped


def after_forward(hook: Callable) -> Callable:
    """Wrap FSDP2's hook after a forward pass."""

    def wrapped(module: nn.Module, args: tuple, output: Any) -> Any:
        return put_together(hook(module, take_apart(args), take_apart(output)))

    return wrapped
