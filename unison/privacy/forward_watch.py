"""Notes what a module's forward makes of the batch, so that what it leaves behind is known.

[Note: left behind] A module may keep what it computed: as an attribute, in a list that a hook
appends to, in a closure. Detached, it is a constant to the user's loss, though rows may meet in it.
So in the passes whose loss is checked again (1, 2, 4, 8, …) a function mode runs beside forward and
notes what is made of *values* of the batch. What is made of parameters, sizes and constants alone
(positions, causal masks) is none of it, and neither are buffers, which have a check of their own.

It is no dispatch mode: beside one, torch takes other kernels, which give other bits. What
torch.compile, torch.jit and numpy make in forward is not seen.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._pytree import tree_leaves

from unison.privacy.kept_values import KeptValues, memory_of
from unison.privacy.loss_tape import Handling, handling_of, leaves_in
from unison.torch_internals import take_away, tell_no_more, tell_of_apply

# They take shapes of what they are given, and no values.
_NEW = {
    *("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like"),
    *("randint_like", "new_zeros", "new_ones", "new_empty", "new_full", "new_empty_strided"),
    "new_tensor",
}
_OF_THE_FIRST = {"type_as", "to", "expand_as", "view_as", "reshape_as"}  # values, that is


class ForwardWatch(TorchFunctionMode):
    """Notes what is made of the values of a batch.

    Args:
        module: What runs.
        given: What it is given of the batch.
        kept: Where it is noted.
    """

    def __init__(self, module: nn.Module, given: Iterable[Tensor], kept: KeptValues) -> None:
        super().__init__()
        self._module, self._kept = module, kept
        self._given = {id(each): each for each in given}
        # Buffers are looked at by other means, and the batch itself is known.
        held = (*self._given.values(), *module.parameters(), *module.buffers())
        self._known = {memory_of(each) for each in held}
        self._is_applying = False

    @contextmanager
    def running(self) -> Iterator[None]:
        """Watch all that is done in this block."""
        tell_of_apply(self._applied)
        torch.overrides._push_mode(self)
        try:
            yield
        finally:
            take_away(self)
            tell_no_more(self._applied)
            for each in self._module.buffers():  # one that forward has put in the place of another
                self._kept.discard(each)
            self._given.clear()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        """Run a function, and note what it makes of the batch."""
        result = func(*args, **(kwargs or {}))
        if not torch.compiler.is_compiling():  # dynamo follows modes, and not what this one does
            handling, name = handling_of(func)
            if name not in _NEW:
                with torch._C.DisableTorchFunctionSubclass():
                    self._note(handling, name, args, kwargs or {}, result)
        return result

    def _is_made(self, value: Any) -> bool:
        return id(value) in self._given or value in self._kept

    def _note(
        self, handling: Handling, name: str, args: tuple, kwargs: dict[str, Any], result: Any
    ) -> None:
        if handling in (Handling.QUESTION, Handling.SIZE, Handling.BACKWARD):
            return
        given = [each for each in leaves_in((args, kwargs)) if isinstance(each, Tensor)]
        if not any(map(self._is_made, given[: 1 if name in _OF_THE_FIRST else None])):
            return
        is_write = handling is Handling.WRITE
        targets = args[:1] if is_write else kwargs.get("out")
        for each in leaves_in(targets):
            if isinstance(each, Tensor) and memory_of(each) not in self._known:
                self._kept.add(each, is_written=True)
        if targets is None:
            # A view of a constant, as broadcast_tensors gives beside others, is one.
            others = [each for each in given if not self._is_made(each)]
            constants = {memory_of(each) for each in others}
            for each in tree_leaves(result):
                if not isinstance(each, Tensor) or id(each) in self._given:
                    continue
                if not constants or memory_of(each) not in constants:
                    self._kept.add(each)

    def _applied(self, run: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Note what a custom `autograd.Function` makes, whoever else is told of it and runs it."""
        is_told = any(mode is self for mode in _get_current_function_mode_stack())
        if self._is_applying or not is_told:
            return NotImplemented
        self._is_applying = True
        try:
            result = run.func.__self__.apply(*args, **kwargs)  # type: ignore[attr-defined]
        finally:
            self._is_applying = False
        with torch._C.DisableTorchFunctionSubclass():
            self._note(Handling.OPERATION, run.__name__, args, kwargs, result)
        return result
