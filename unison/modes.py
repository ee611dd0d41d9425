"""Torch's function modes: one made of a function; and their stack, with one below all others."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack


class FunctionMode(TorchFunctionMode):
    """A function mode that lets a function stand in for each torch function of its block.

    Args:
        call: Called with the torch function, its arguments, and its keyword arguments.
    """

    def __init__(self, call: Callable[[Callable[..., Any], tuple, dict[str, Any]], Any]) -> None:
        super().__init__()
        self._call = call

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        """Let the function decide."""
        return self._call(func, args, kwargs or {})


def push_lowest(mode: TorchFunctionMode) -> None:
    """Put a mode below all others: `with torch.device(...)` takes what is on top as it ends.

    Only the default device wants to be lower.
    """
    default = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    with _cleared(lambda each: each is default):
        torch.overrides._push_mode(mode)


def take_away(mode: TorchFunctionMode) -> None:
    """Take a mode off the stack, wherever it is; nothing happens if it is not there."""
    if any(each is mode for each in _get_current_function_mode_stack()):
        with _cleared(lambda each: each is mode):
            torch.overrides._pop_mode()


@contextmanager
def pushed_lowest(mode: TorchFunctionMode) -> Iterator[None]:
    """Have a mode below all others for a block."""
    push_lowest(mode)
    try:
        yield
    finally:
        take_away(mode)


@contextmanager
def taken_away(mode: TorchFunctionMode) -> Iterator[None]:
    """Have a mode nowhere on the stack for a block."""
    if not any(each is mode for each in _get_current_function_mode_stack()):
        yield
        return
    take_away(mode)
    try:
        yield
    finally:
        push_lowest(mode)


@contextmanager
def _cleared(is_last: Callable[[Any], bool]) -> Iterator[None]:
    """Take modes off torch's stack for a block, down to one, which stays, and put them back."""
    above = []
    while (stack := _get_current_function_mode_stack()) and not is_last(stack[-1]):
        above.append(torch.overrides._pop_mode())
    try:
        yield
    finally:
        for mode in reversed(above):
            torch.overrides._push_mode(mode)
