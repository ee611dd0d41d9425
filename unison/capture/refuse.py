"""What cannot be captured, refused before it runs."""

from collections.abc import Iterable

from torch import nn

from unison.errors import UnsupportedOperation


def refuse_compiled(modules: Iterable[tuple[str, nn.Module]]) -> None:
    """Make sure that no part of a module is compiled.

    A compiled graph does not ask tracked tensors.

    Args:
        modules: All parts, by name.

    Raises:
        UnsupportedOperation: Naming the part.
    """
    for name, child in modules:
        is_compiled = (
            type(child).__name__ == "OptimizedModule"  # importing its class takes a second
            or child._compiled_call_impl is not None
            or hasattr(child.forward, "_torchdynamo_orig_callable")
        )
        if is_compiled:
            raise UnsupportedOperation(
                f"module {name or type(child).__name__!r} is compiled, and what a compiled graph "
                "does to parameters is not seen; use the model as it was before torch.compile"
            )
