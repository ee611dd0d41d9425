"""Recording the user's own operations: a torch function mode that feeds the tape of a pass."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._pytree import tree_leaves

from unison.errors import BadInput
from unison.modes import push_lowest, take_away
from unison.privacy.loss_tape import Handling, LossTape, handling_of


class LossRecorder(TorchFunctionMode):
    """Feeds the tape of the pass under way; one per engine.

    Args:
        judge: Called with the tape, the loss and what is sent back in the place of 1, before
            gradients flow; it raises if the loss couples rows.
    """

    def __init__(self, judge: Callable[[LossTape, Tensor, Any], None]) -> None:
        super().__init__()
        self._judge = judge
        self.tape: LossTape | None = None
        self.is_judged = False  # the loss of the pass under way
        self._count = 0
        self._is_on = False
        self._num_suspended = 0
        self._is_left = False
        self._is_over = False

    # --- when ------------------------------------------------------------------------------------

    def begin(self, batch: Any) -> None:
        """A batch is handed out: record from here on."""
        self.remove()
        before, self._count = self.tape, self._count + 1
        self.tape = LossTape(self._count, {} if before is None else before.survivors())
        self.tape.has_read = before is not None and before.has_read
        self.is_judged = False
        for leaf in tree_leaves(batch):
            if isinstance(leaf, Tensor):
                self.tape.add_root(leaf)
        self._num_suspended, self._is_left, self._is_over = 0, False, False
        self._put()

    def remove(self) -> None:
        """Stop recording: nothing of ours stays on torch's stack of modes."""
        self._take_away()
        self._num_suspended = 0
        if self.tape is not None:
            self.tape.close()

    def leave(self) -> None:
        """The loop over batches was left: stop recording, once the last one has gone backward."""
        self._is_left = True
        if self.is_judged:
            self.remove()
            self._is_over = True

    def suspend(self) -> None:
        """The module, or the optimizer, runs: what it does is checked elsewhere."""
        self._num_suspended += 1
        self._take_away()

    def resume(self) -> None:
        """It has run."""
        if self._num_suspended:
            self._num_suspended -= 1
            if not self._num_suspended and self.tape is not None and not self._is_over:
                self._put()

    def enter_module(self, args: tuple, kwargs: dict[str, Any]) -> None:
        """The private module is called: what it is given belongs to the program."""
        if self.tape is not None and self.tape.is_open:
            self.tape.enter_module(args, kwargs)
        self.suspend()

    def leave_module(self, output: Any, *, is_trained: bool) -> None:
        """It has returned, in a pass that is trained on or another one; None if it raised."""
        self.resume()
        if self.tape is not None and self.tape.is_open and output is not None:
            self.tape.leave_module(output, is_trained=is_trained)

    def _put(self) -> None:
        if not self._is_on:
            push_lowest(self)
            self._is_on = True
            _recording.append(self)
            if len(_recording) == 1:
                _change_torch()

    def _take_away(self) -> None:
        if not self._is_on:
            return
        self._is_on = False
        _recording.remove(self)
        if not _recording:
            _change_torch_back()
        if self.is_told():  # not inside of a function that it is told of: torch puts it back
            take_away(self)

    # --- what torch calls ------------------------------------------------------------------------

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        """Write an operation down, if it touches data."""
        kwargs = kwargs or {}
        handling, name = handling_of(func)
        tape = self.tape
        if name == "register_hook" and tape is not None and tape.slot_of(args[0]) is not None:
            tape.has_hooks = True
        if name == "__format__" and tape is not None and tape.slot_of(args[0]) is not None:
            tape.note_printed(args[0])
        if tape is None or self._is_over or handling is Handling.QUESTION:
            return func(*args, **kwargs)
        if handling is Handling.SIZE:
            slot = tape.slot_of(args[0])
            if slot is not None:
                tape.sized.add(slot)
            return func(*args, **kwargs)
        if handling is Handling.BACKWARD:
            return self._backward(*args, **kwargs)
        if not tape.touches(args, kwargs):
            return func(*args, **kwargs)
        return tape.call(func, handling, name, args, kwargs)

    def is_told(self) -> bool:
        """Whether torch would tell us of an operation now: not inside of one that we record."""
        return any(mode is self for mode in _get_current_function_mode_stack())

    def _backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        tape = self.tape
        assert tape is not None
        slot = tape.slot_of(loss)
        if tape.is_open and slot is not None and tape.reaches_output(slot):
            self._judge(tape, loss, args[0] if args else kwargs.get("gradient"))
            self.is_judged = True
            tape.close()
        Tensor.backward(loss, *args, **kwargs)
        # Torch puts a mode back that is taken away while it is told of a function.
        self._is_over = self.is_judged and self._is_left


_recording: list[LossRecorder] = []  # those that are on torch's stack of modes
_CustomFunction: Any = torch.autograd.function._SingleLevelFunction
_stances: list[Any] = []  # torch.compile's, while somebody records


def _change_torch() -> None:
    """Let torch tell recorders of what it tells no function mode of otherwise.

    For all recorders together, since several engines begin and end in any order.
    """
    _CustomFunction.apply = classmethod(_recorded_apply)
    if "torch._dynamo.eval_frame" in sys.modules:
        # A compiled criterion runs as it was written: what dynamo makes of it calls no torch
        # functions that could be written down.
        _stances.append(torch.compiler.set_stance("force_eager"))


def _change_torch_back() -> None:
    if sys.is_finalizing():  # a loop that was left with the program
        return
    del _CustomFunction.apply
    while _stances:
        _stances.pop().__exit__(None, None, None)


def _recorded_apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """`Function.apply`, of which torch tells no function mode.

    It lies between `Function` and its base in C++ while somebody records, so that it is found by a
    `MyFunction.apply` that was looked up long before, too.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        return super(_CustomFunction, cls).apply(*args, **kwargs)

    for recorder in _recording:
        tape = recorder.tape
        if tape is not None and recorder.is_told() and tape.touches(args, kwargs):
            with _without(recorder):
                return tape.call(run, Handling.OPERATION, cls.__name__, args, kwargs)
    return run(*args, **kwargs)


def stop_recording() -> None:
    """Take every recorder off torch's stack of modes: of loops that were left in the middle."""
    for recorder in list(_recording):
        recorder.remove()


@contextmanager
def _without(recorder: LossRecorder) -> Iterator[None]:
    """Take a recorder off torch's stack of modes for a block."""
    take_away(recorder)
    try:
        yield
    finally:
        push_lowest(recorder)


def refuse_unseen() -> None:
    """Raise for a gradient at the module's outputs whose loss nobody looked at."""
    raise BadInput(
        "a gradient reached the module's outputs from a loss that was not followed, so it is not "
        "known whether each row's gradient depends on that row alone. Call loss.backward() on a "
        "loss made by torch functions of the module's outputs and of the batch that the loader "
        "handed out; torch.autograd.backward, torch.jit, vmap and numpy cannot be followed"
    )
