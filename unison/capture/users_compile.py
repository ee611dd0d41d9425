"""What the user has compiled: run as it was written where a capture looks on, and given back."""

import sys
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from unison.dynamo import ORIGINAL, DynamoBackend, backend_in
from unison.shard.unit import unit_of


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside of what `torch.compile(module)` returned; other modules are themselves.

    So is what was sharded after it was compiled: it holds the unit.
    """
    if type(module).__name__ != "OptimizedModule":  # importing it takes a second
        return module
    if unit_of(module) is not None:
        return module
    return module._modules["_orig_mod"]  # type: ignore[return-value]


def uncompile(module: nn.Module, undo: ExitStack) -> DynamoBackend | None:
    """Let a module and its parts run as they were written, whatever has been compiled of them.

    Args:
        module: The user's module.
        undo: Gives it back as it was, when it is closed.

    Returns:
        The user's backend; None if nothing was compiled.
    """
    found: list[DynamoBackend] = []
    for child in module.modules():
        unit, called = unit_of(child), vars(child).pop(COMPILED_CALL, None)
        if called is not None:
            undo.callback(setattr, child, COMPILED_CALL, called)
            found.append(backend_in(called if unit is None else unit.compiled or called))
        forward: Any = vars(child).get("forward") if unit is None else unit.forward
        own = getattr(forward, ORIGINAL, forward)
        if own is not forward:
            found.append(backend_in(forward))
        where, name = (child, "forward") if unit is None else (unit, "inner")
        if unit is not None or own is not forward:
            undo.callback(setattr, where, name, getattr(where, name))
            setattr(where, name, own)
    return found[0] if found else None


COMPILED_CALL = "_compiled_call_impl"  # of a module that was compiled in place


def is_compiled(attributes: Iterable[dict[str, Any]]) -> bool:
    """Whether any of some modules is compiled.

    Args:
        attributes: Each module's own.
    """
    return any(
        COMPILED_CALL in own
        or hasattr(own.get("forward"), ORIGINAL)
        or any(map(_is_compiled_wrapper, own["_modules"].values()))  # one may have come since
        for own in attributes
    )


def _is_compiled_wrapper(module: Any) -> bool:
    is_wrapper = type(module).__name__ == "OptimizedModule"
    return is_wrapper and hasattr(vars(module).get("forward"), ORIGINAL)


def backend_of_caller() -> DynamoBackend | None:
    """The backend of compiled code that the running call comes from, where it runs as Python.

    So it does in a private pass: Dynamo leaves code alone while a function mode looks on.
    """
    frame: Any = sys._getframe(1) if "torch._dynamo.eval_frame" in sys.modules else None
    while frame is not None:
        if frame.f_code.co_name == "compile_wrapper":
            callback = frame.f_locals.get("callback")
            if callback is not None:
                return torch._dynamo.eval_frame.innermost_backend(callback)
        frame = frame.f_back
    return None
