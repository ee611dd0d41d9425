"""What cannot be captured, refused before it runs."""

from collections.abc import Iterable

from torch import nn

from unison.errors import UnsupportedOperation

_COMPILED = "_torchdynamo_orig_callable"  # of a function that torch.compile made


def refuse_compiled(modules: Iterable[tuple[str, nn.Module]]) -> None:
    """Make sure that no part of a module is compiled.

    A compiled graph does not ask tracked tensors.

    Args:
        modules: All parts, by name.

    Raises:
        UnsupportedOperation: Naming the part.
    """
    known: set[type] = set()
    for name, child in modules:
        kind = type(child)
        is_compiled = child._compiled_call_impl is not None
        if kind not in known:
            known.add(kind)
            is_compiled |= kind.__name__ == "OptimizedModule"  # importing it takes a second
            is_compiled |= hasattr(kind.forward, _COMPILED)
        if "forward" in child.__dict__:
            is_compiled |= hasattr(child.forward, _COMPILED)
        if is_compiled:
            raise UnsupportedOperation(
                f"module {name or type(child).__name__!r} is compiled, and what a compiled graph "
                "does to parameters is not seen; use the model as it was before torch.compile"
            )
