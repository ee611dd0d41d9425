"""What cannot be captured, refused before it runs."""

from collections.abc import Iterable, Sequence
from itertools import repeat
from operator import contains
from typing import Any

from torch import nn

from unison.dynamo import ORIGINAL
from unison.errors import UnsupportedOperation

_CALLED = "_compiled_call_impl"  # of a module that was compiled in place


def may_be_compiled(parts: Iterable[nn.Module], attributes: Sequence[dict[str, Any]]) -> bool:
    """Whether `refuse_compiled` has anything to look for; a fraction of its time.

    Args:
        parts: All parts of a module.
        attributes: Each one's own.
    """
    return (
        any(map(contains, attributes, repeat("forward")))
        or any(map(contains, attributes, repeat(_CALLED)))
        or any(map(_is_compiled_class, set(map(type, parts))))
    )


def refuse_compiled(modules: Iterable[tuple[str, nn.Module]]) -> None:
    """Make sure that no part of a module is compiled.

    A compiled graph does not ask tracked tensors.

    Args:
        modules: All parts, by name.

    Raises:
        UnsupportedOperation: Naming the part.
    """
    known: dict[type, bool] = {}
    for name, child in modules:
        kind = type(child)
        if kind not in known:
            known[kind] = _is_compiled_class(kind)
        is_compiled = known[kind] or getattr(child, _CALLED) is not None
        if "forward" in child.__dict__:
            is_compiled |= hasattr(child.forward, ORIGINAL)
        if is_compiled:
            raise UnsupportedOperation(
                f"module {name or type(child).__name__!r} is compiled, and what a compiled graph "
                "does to parameters is not seen; use the model as it was before torch.compile: "
                "make_private(compile=True) compiles private passes"
            )


def _is_compiled_class(kind: type[nn.Module]) -> bool:
    own = getattr(kind, "forward", None)  # what torch.compile returns has one of each object
    return getattr(kind, _CALLED) is not None or hasattr(own, ORIGINAL)
