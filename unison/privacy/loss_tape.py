"""Records the user's own operations between the loader and `backward` on a tape.

[Note: the loss is looked at] Clipping bounds what one row adds to the sum of gradients only if the
row's gradient depends on that row alone. The module is checked by running it; the loss is the
user's own code, which nobody can call again. So a torch function mode writes down each operation
that touches the batch or the module's outputs, from the moment the loader hands the batch out until
`loss.backward()`. What is written down can be run again on other values: see loss_check.py.

The tape holds the batch and the outputs, which are alive anyway, and *names* for everything made of
them: a slot per result, known by the identity of the tensor while it lives. It keeps no result
alive, so that recording costs microseconds per operation and no memory.

`float(loss)` returns a plain number that nobody can follow. Printing it is harmless; `if` it is
compared, other rows decide which loss is sent back, and the program that was written down looks as
if nothing had happened. So the bytecode that runs between the read and `backward` is looked at: if
it has no conditional jump, no truth of the value can matter.

Gradients that the user's own backward pass leaves at a copy of the model, and what torch.func
makes, cannot be run again: they are *hidden*. They are known by their memory, as is all that is
made of them, so that they neither enter a loss nor are written to what is trained or saved.
"""

import inspect
import itertools
import math
import numbers
import operator
import sys
import weakref
from collections.abc import Callable, Sequence
from enum import Enum, auto
from functools import cache, partial
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._pytree import tree_leaves

from unison.errors import BadInput
from unison.privacy.sampling import packed, unpacked
from unison.torch_internals import (
    GATHERED,
    FunctionMode,
    autocast_dtypes,
    graph_leaves,
    is_recording,
    push_lowest,
    take_away,
    taken_away,
    tell_no_more,
    tell_of_apply,
)

# --- values that leave torch for Python -----------------------------------------------------------


OURS = __file__.rsplit("privacy", 1)[0]
NOT_THE_USERS = (torch.__path__[0], OURS)

Position = tuple[int, CodeType, int, str | None]
"""A Python frame's identity, code, instruction, and line where the code is the user's."""


def positions(frame: FrameType | None) -> tuple[Position, ...]:
    """Return the positions of all frames, outermost first.

    Args:
        frame: The innermost frame.
    """
    found = []
    while frame is not None:
        found.append((id(frame), frame.f_code, frame.f_lasti, line_of(frame)))
        frame = frame.f_back
    return tuple(found[::-1])


def line_of(frame: FrameType) -> str | None:
    """Where a frame is, for messages; None in torch's code, and in ours."""
    file = frame.f_code.co_filename
    if file.startswith(NOT_THE_USERS):
        return None
    return f"{file.rsplit('/', 1)[-1]}:{frame.f_lineno}"


# --- operations -----------------------------------------------------------------------------------


class Handling(Enum):
    """What the recorder does with a torch function."""

    OPERATION = auto()  # it is written down
    QUESTION = auto()  # about shape, dtype, device: values stay where they are
    SIZE = auto()  # the same, and the answer may depend on values, where rows were selected
    READ = auto()  # values leave torch for Python, where nobody can follow them
    ITEM = auto()  # one value leaves torch, as a number that is still followed
    WRITE = auto()  # an operation that changes its first argument
    COLLECTIVE = auto()  # values of other ranks come in, where there are any
    BACKWARD = auto()


_SIZES = {"shape", "size", "numel", "__len__", "nelement"}
_QUESTIONS = {
    *("dim", "ndim", "dtype", "device", "requires_grad", "is_leaf", "grad_fn", "stride"),
    *("is_floating_point", "is_complex", "is_contiguous", "layout", "is_cuda", "is_cpu", "names"),
    *("is_sparse", "is_quantized", "is_meta", "is_nested", "data_ptr", "__repr__", "__format__"),
    *("__hash__", "register_hook", "retain_grad", "retains_grad", "_version", "get_device", "type"),
    *("element_size", "storage_offset", "output_nr", "untyped_storage", "itemsize", "nbytes"),
    *("is_pinned", "is_shared", "is_inference", "is_same_size", "result_type"),
    *("__reduce_ex__", "__dir__", "has_names", "is_conj", "is_neg", "is_signed", "_is_view"),
    *("is_xpu", "is_mps", "is_mkldnn", "is_xla", "is_ipu", "is_maia", "_base", "name"),
    "register_post_accumulate_grad_hook",
}
_READS = {"tolist", "numpy", "__array__", "__float__", "__int__", "__index__", "__complex__"}
_READS |= {"__dlpack__", "storage", "save"}
_BY_NAME = {"item": Handling.ITEM}
_BY_NAME |= dict.fromkeys(_READS, Handling.READ) | dict.fromkeys(_QUESTIONS, Handling.QUESTION)
_BY_NAME |= dict.fromkeys(_SIZES, Handling.SIZE)
_WRITES = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__"}
_WRITES |= {"__ifloordiv__", "__imod__", "__iand__", "__ior__", "__ixor__"}
_COLLECTIVES = (
    "torch.distributed.distributed_c10d",
    "torch._ops.c10d",
    "torch._ops._c10d_functional",
)


@cache
def handling_of(func: Any) -> tuple[Handling, str]:
    """Return what is done with a torch function, and its name."""
    name = getattr(func, "__name__", type(func).__name__)
    if name in ("__get__", "__set__", "__delete__"):  # a property: `x.shape`, `x.data = y`
        of, name = name, func.__self__.__name__
        if of != "__get__":
            is_followed = name == "requires_grad"  # a replay may be asked for its derivatives
            other = Handling.OPERATION if is_followed else Handling.QUESTION
            return (Handling.WRITE if name == "data" else other), name
        if name == "grad":  # not to be taken for torch.autograd.grad
            return Handling.QUESTION, name
    if func is Tensor.backward or func is torch.autograd.backward:
        return Handling.BACKWARD, name
    if (getattr(func, "__module__", None) or "").startswith(_COLLECTIVES):
        is_silent = name in ("send", "isend", "barrier", "monitored_barrier")  # nothing comes in
        return (Handling.QUESTION if is_silent else Handling.COLLECTIVE), name
    if name in _BY_NAME:
        return _BY_NAME[name], name
    name = name.split(".")[0]  # torch.ops.aten.add_.Tensor
    if name in _WRITES or (name.endswith("_") and not name.endswith("__")):
        # It changes no values, and a replay may be asked for derivatives with respect to it.
        return (Handling.OPERATION if name == "requires_grad_" else Handling.WRITE), name
    return Handling.OPERATION, name


OTHER_ROWS = (  # what to do with rows that are not the loader's
    "Train on the batches of the loader that make_private returned for this module; for anything "
    "else call module.eval() or use torch.no_grad()"
)
EARLIER = -1  # the slot of what an earlier pass made of its data


class SlotRef(NamedTuple):
    """Stands for what was made of data in the arguments of an operation.

    Attributes:
        slot: Of the result.
        value: What it was, if an earlier pass made it; the tape keeps no others.
    """

    slot: int
    value: Any = None


class Operation(NamedTuple):
    """One operation of the tape.

    Attributes:
        func: A torch function, or an operator on numbers.
        handling: What kind it is.
        name: Its name, for messages.
        args: Its arguments, with a `SlotRef` for what the tape made.
        kwargs: Likewise.
        leaves: All leaves of both.
        refs: The slots among them.
        outs: The slot of each result.
        is_grad_enabled: Whether autograd was on.
        autocast: The dtype of autocast for CPU and CUDA, None where it was off.
        line: Where in the user's code it was called.
        constants: What that code has written into it, numbers among it.
        states: Generators that it drew from, as they were before.
    """

    func: Callable[..., Any]
    handling: Handling
    name: str
    args: tuple
    kwargs: dict[str, Any]
    leaves: list[Any]
    refs: list[int]
    outs: list[int]
    is_grad_enabled: bool = True
    autocast: Sequence[torch.dtype | None] = (None, None)
    line: str | None = None
    constants: tuple = ()
    states: Sequence[tuple[torch.Generator, Tensor]] = ()

    def __str__(self) -> str:
        return f"{self.name} ({self.line})" if self.line else self.name


def mapped(make: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to each leaf of an argument, in tuples, lists, dicts and slices.

    Not `tree_map`: it takes named tuples and shapes apart, and no slice.
    """
    kind = type(value)
    if kind is dict:
        return dict(zip(value, mapped(make, list(value.values())), strict=True))
    if kind is slice:
        return slice(*mapped(make, [value.start, value.stop, value.step]))
    if kind not in _NESTED:
        return make(value)
    return kind([mapped(make, each) if type(each) in _NESTED else make(each) for each in value])


_NESTED = {tuple, list, dict, slice}


def leaves_in(value: Any) -> list[Any]:
    """All leaves of an argument, as `mapped` finds them."""
    found: list[Any] = []
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if type(each) is slice:
            waiting += [each.step, each.stop, each.start]
        elif type(each) in _NESTED:
            waiting += reversed(each.values() if type(each) is dict else each)
        else:
            found.append(each)
    return found


# --- the recorder ---------------------------------------------------------------------------------


class LossRecorder(TorchFunctionMode):
    """Writes down what is done with the data of the pass under way; one per engine.

    Args:
        judge: Called with the recorder, the loss, the path to it and what is sent back in the place
            of 1, before gradients flow; it raises if the loss couples rows, and returns whether it
            has terms that do not depend on data.
        before_write: Called before values of records are written to a tensor that held none; it
            raises if that is saved with a model.
        before_grad: Called with the tensors whose gradients torch.autograd.grad is asked for; it
            raises if they are trained privately.

    Attributes:
        number: Of the pass, counting from 1.
        is_judged: Whether the loss of the pass was judged.
        has_terms: Whether it has terms that do not depend on data.
        is_open: Whether the tape is being written.
        operations: What the user's code did.
        roots: Where data enters, by slot: a tensor of the batch, or one that is made of texts and
            numbers in it; or an output of the module, as it was handed to the user.
        edges: Where the gradients of the module's outputs arrive, by slot, one per granule; empty
            if it takes none.
        batch: Slots of the batch; empty if it is not made of tensors alone.
        has_numbers: Whether the batch has numbers of Python's, which nobody follows.
        reads: Values that left torch: by which function, before which operation, and where.
        items: Values that were read or printed, and are followed as far as Python's arithmetic
            goes.
        branches: Truths that Python was told: by which function, slot, truth, and where.
        targets: Labels of a cross-entropy whose mean divides by how many of them count: operation,
            labels, the label that does not count, number of classes, weights of classes.
        sized: Slots whose size was asked for.
        inputs: Slots that the module was given for the outputs that the loss is made of.
        unknown_inputs: Tensors that it was given and nobody followed.
        memory: Where the values of a slot lie.
        hidden: Memory of what was made of data and is not on the tape, in this pass or before.
        kept: Tensors by id that the module's forward made of data, and what was made of them, as
            far as it was watched (`unison.privacy.inputs`), in this pass or before.
        kept_memory: Where such values were written, by memory.
        has_read: Whether values have left torch in this pass or before, nobody knows where to.
        has_hooks: Whether users have put hooks of their own, which may change gradients.
    """

    def __init__(
        self,
        judge: Callable[..., bool],
        before_write: Callable[[Tensor], None],
        before_grad: Callable[[list[Any]], None],
    ) -> None:
        super().__init__()
        self._judge, self._before_outside_write = judge, before_write
        self._before_grad = before_grad
        self.number, self.has_read = 0, False
        self.is_judged = self.is_open = self.has_terms = False
        self._is_on = self._is_left = self._is_over = False
        self._num_suspended = 0
        self._given: set[int] = set()  # slots, in the call under way
        self._slots: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._earlier: dict[int, weakref.ref[Tensor]] = {}
        self.hidden: dict[int, StorageWeakRef] = {}  # by memory
        self.kept: dict[int, weakref.ref[Tensor]] = {}
        self.kept_memory: dict[int, StorageWeakRef] = {}

    # --- when ------------------------------------------------------------------------------------

    def begin(self, batch: Any) -> None:
        """Start recording: a batch is handed out."""
        self.remove()
        self._given = set()
        for key, (ref, _) in self._slots.items():
            self._earlier[key] = ref
        self._earlier = {key: ref for key, ref in self._earlier.items() if ref() is not None}
        self.hidden = {key: ref for key, ref in self.hidden.items() if not ref.expired()}
        self.kept = {key: ref for key, ref in self.kept.items() if ref() is not None}
        self.kept_memory = {key: ref for key, ref in self.kept_memory.items() if not ref.expired()}
        self._slots = {}
        self._next_slot = itertools.count()
        self.number += 1
        self.operations: list[Operation] = []
        self.roots: dict[int, Tensor] = {}
        self.edges: dict[int, list[GradientEdge]] = {}
        self.reads: list[tuple[str, int, tuple[Position, ...]]] = []
        self.items: list[float] = []
        self.branches: list[tuple[str, int, bool, tuple[Position, ...]]] = []
        self.targets: list[tuple[int, Tensor, int, int, Tensor | None]] = []
        self.sized: set[int] = set()
        self.inputs: set[int] = set()
        self._given_for: dict[int, set[int]] = {}  # by slot of an output
        self.unknown_inputs: list[Tensor] = []
        self.memory: dict[int, int] = {}
        self.is_open = True
        self.is_judged = self.has_terms = self.has_hooks = False
        self._num_suspended = 0
        self._is_left = self._is_over = False
        leaves = tree_leaves(batch)
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                self.roots[self._slot_for(leaf)] = leaf
        # What is made of texts, or of what else is no tensor, is not known as the batch's.
        self.batch = set(self.roots) if len(self.roots) == len(leaves) else set()
        self.has_numbers = any(isinstance(leaf, numbers.Number) for leaf in leaves)
        self._switch(is_on=True)

    def remove(self) -> None:
        """Stop recording: nothing of ours stays on torch's stack of modes."""
        self._switch(is_on=False)
        self._num_suspended = 0
        self._close()

    def _close(self) -> None:
        """End the tape and release the batch; slots stay known."""
        self.is_open = False
        self.operations, self.targets, self.unknown_inputs = [], [], []
        self.roots, self.edges = {}, {}

    def leave(self) -> None:
        """Stop recording once the last batch has gone backward: the loop was left."""
        self._is_left = True
        if self.is_judged:
            self.remove()
            self._is_over = True

    def suspend(self, given: Any = ()) -> None:
        """Pause recording while the module, or the optimizer, runs: it is checked elsewhere.

        One that does not record is not paused: `resume` must not put it back between batches.

        Args:
            given: What the private module is called with.
        """
        for leaf in tree_leaves(given) if self.is_open else ():
            if isinstance(leaf, Tensor):
                slot = self.slot_of(leaf)
                if slot is None or slot == EARLIER:
                    self.unknown_inputs.append(leaf)
                else:
                    self._given.add(slot)
        self._num_suspended += self._is_on or self._num_suspended > 0
        self._switch(is_on=False)

    def resume(self, output: Any = (), *, is_trained: bool = False) -> None:
        """Go on recording after `suspend`.

        Args:
            output: What the private module returned.
            is_trained: Whether gradients of it become private ones.
        """
        if self._num_suspended:
            self._num_suspended -= 1
            if not self._num_suspended and not self._is_over:
                self._switch(is_on=True)
        given, self._given = self._given, set()
        for leaf in tree_leaves(output) if self.is_open else ():
            if isinstance(leaf, Tensor) and self.slot_of(leaf) in (None, EARLIER):
                slot = self._slot_for(leaf)
                self._given_for[slot] = given
                self.roots[slot] = leaf
                if is_trained:
                    parts = unpacked(leaf) if leaf.requires_grad else ()
                    self.edges[slot] = [get_gradient_edge(each) for each in parts]

    def _switch(self, *, is_on: bool) -> None:
        """Put this recorder onto torch's stack of modes, or take it off.

        While any recorder is there, torch tells them of what it tells no function mode of
        otherwise: for all together, since several engines begin and end in any order.
        """
        if is_on == self._is_on or (is_on and not self.number):
            return
        if sys is None or sys.is_finalizing():
            return  # a loop was left with the program, and torch is gone
        self._is_on = is_on
        if is_on:
            push_lowest(self)
            _recording.append(self)
        else:
            _recording.remove(self)
            take_away(self)  # inside of a function that it is told of, torch puts it back
        if len(_recording) != is_on:
            return
        if is_on:  # the first one comes
            tell_of_apply(_recorded_apply)
            if "torch._dynamo.eval_frame" in sys.modules:
                # A compiled criterion runs as it was written: what dynamo makes of it calls no
                # torch functions that could be written down.
                _stances.append(torch.compiler.set_stance("force_eager"))
        else:  # the last one goes
            tell_no_more(_recorded_apply)
            while _stances:
                _stances.pop().__exit__(None, None, None)

    # --- what torch calls ------------------------------------------------------------------------

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        """Write an operation down, if it touches data."""
        kwargs = kwargs or {}
        handling, name = handling_of(func)
        if self._is_over:
            return func(*args, **kwargs)
        if handling is Handling.BACKWARD:
            return self._backward(func, *args, **kwargs)
        if handling is not Handling.QUESTION and handling is not Handling.SIZE:
            return self.call(func, handling, name, args, kwargs)
        if handling is Handling.SIZE or name in ("register_hook", "__format__"):
            value, slot = args[0], self.slot_of(args[0])
            if name == "__format__":
                is_number = value.numel() == len(unpacked(value)) == 1
                if is_number and (slot is not None or self.is_kept(value)):
                    for each in {self, *_recording}:  # text may be read again
                        if each.is_open:
                            each.items.append(float(value.detach()))
            elif slot is not None and slot != EARLIER:
                if handling is Handling.SIZE:
                    self.sized.add(slot)
                else:
                    self.has_hooks = True
        result = func(*args, **kwargs)
        if name == "grad" and id(args[0]) in self._slots and self.slot_of(args[0]) is not None:
            self.hide(result)  # of an output that retains it
        return result

    def _backward(self, func: Callable[..., None], loss: Any, *args: Any, **kwargs: Any) -> None:
        """Send a loss back; one that leads to the private module is judged before."""
        slot = self.slot_of(loss)
        is_loss = False
        if self.is_open and slot is not None and slot != EARLIER and func is Tensor.backward:
            made_of, memory = {slot}, {self.memory[slot]}
            path: dict[int, Operation] = {}
            for place, operation in reversed(list(enumerate(self.operations))):
                # What is written in place is seen through all tensors that share its memory.
                is_write = operation.handling is Handling.WRITE
                # A sum over ranks of `loss.detach()` changes what is printed, and no gradient.
                is_write = is_write and (bool(path) or operation.func is not from_other_ranks)
                is_seen = is_write and any(self.memory[out] in memory for out in operation.outs)
                if is_seen or not made_of.isdisjoint(operation.outs):
                    path[place] = operation
                    made_of.update(operation.refs)
                    memory.update(self.memory[ref] for ref in operation.refs if ref in self.memory)
            # What it was given for outputs that the loss does not use is no concern of the loss.
            calls = (given for out, given in self._given_for.items() if out in made_of)
            self.inputs = set().union(*calls)
            if any(edges and slot in made_of for slot, edges in self.edges.items()):
                gradient = args[0] if args else kwargs.get("gradient")
                self.has_terms = self._judge(self, loss, path, mapped(self._stored, gradient))
                self.is_judged = is_loss = True
                self._close()
        func(loss, *args, **kwargs)
        if not is_loss and (slot is not None or func is not Tensor.backward or self.hidden):
            self._hide_gradients([each for each in leaves_in(loss) if isinstance(each, Tensor)])
        # Torch puts a mode back that is taken away while it is told of a function.
        self._is_over = self.is_judged and self._is_left

    # --- operations ------------------------------------------------------------------------------

    def slot_of(self, value: Any) -> int | None:
        """The slot of a tensor or number of this pass, or `EARLIER`; None if not made of data."""
        if isinstance(value, _NUMBERS):
            is_own = value.recorder() is self and value.pass_number == self.number
            return value.slot if is_own else EARLIER
        found = self._slots.get(id(value))
        if found is not None and found[0]() is value:
            return found[1]
        earlier = self._earlier.get(id(value))
        return EARLIER if earlier is not None and earlier() is value else None

    def _slot_for(self, value: Any) -> int:
        """The slot of a result; an operation in place returns what it was given."""
        slot = self.slot_of(value)
        if slot is None or slot == EARLIER:
            slot = next(self._next_slot)
            if isinstance(value, Tensor):
                self._slots[id(value)] = weakref.ref(value), slot
                self.memory[slot] = memory_of(value)
        return slot

    def _stored(self, leaf: Any) -> Any:
        """Return what the tape keeps of an argument: of what sharding frees soon, a copy."""
        slot = self.slot_of(leaf) if isinstance(leaf, _FOLLOWED) else None
        if slot is None:
            if not getattr(leaf, GATHERED, False):
                return leaf
            with torch._C.DisableTorchFunctionSubclass():
                return leaf.detach().clone().requires_grad_(leaf.requires_grad)
        return SlotRef(slot, leaf) if slot == EARLIER else SlotRef(slot)

    def call(
        self, func: Callable[..., Any], handling: Handling, name: str, args: tuple, kwargs: dict
    ) -> Any:
        """Run a function; if it touches data, write it down unless the tape has ended."""
        given = leaves_in((args, kwargs))
        # What torch.func wraps cannot be written down.
        is_inside = torch._C._are_functorch_transforms_active()
        is_hidden = (self.hidden or is_inside) and self.meets_hidden(given)
        is_followed = any(
            self.slot_of(leaf) is not None for leaf in given if isinstance(leaf, _FOLLOWED)
        )
        if handling is Handling.COLLECTIVE and dist.get_world_size() > 1:
            if not (is_followed or is_hidden or any(map(self.is_kept, given))):
                return func(*args, **kwargs)
            written = _written(func, args, kwargs)
            self._before_write(written)
            result = func(*args, **kwargs)
            self._note_other_ranks(name, [*leaves_in(written), *tree_leaves(result)])
            return result
        if is_hidden and (is_inside or not is_followed):
            return self._call_hidden(func, handling, name, args, kwargs, self.hide)
        if not is_followed:
            if self.is_open and not self.batch and name in _MADE_OF_PYTHON:
                made = func(*args, **kwargs)
                if not made.requires_grad:
                    self.roots[self._slot_for(made)] = made
                return made
            if not (self.kept or self.kept_memory) or not any(map(self.is_kept, given)):
                return func(*args, **kwargs)
            keep = partial(self.keep, is_written=handling is Handling.WRITE)
            return self._call_hidden(func, handling, name, args, kwargs, keep)
        if func is torch.autograd.grad:
            self._before_grad(leaves_in(args[1:2] or kwargs["inputs"]))
        if handling is Handling.WRITE or kwargs.get("out") is not None:
            self._before_write(kwargs.get("out", args[0] if args else None))
        stored: tuple[tuple, dict[str, Any]] = mapped(self._stored, (args, kwargs))
        if any(isinstance(leaf, (*_NUMBERS, PublicNumber)) for leaf in given):
            # Another engine's recorder that torch asks after this one needs to see the marks.
            stack = _get_current_function_mode_stack()
            if self in stack or not any(isinstance(each, LossRecorder) for each in stack):
                args, kwargs = mapped(_plain, (args, kwargs))
        before = [(each, each.get_state()) for each in _generators_of(given)]
        result = func(*args, **kwargs)
        if is_hidden:
            self.hide(args[0] if handling is Handling.WRITE else result)
        if handling is Handling.READ:
            _refuse_scheduler()
            self._note_read(name)
            return result
        is_number = isinstance(result, int | float)  # a truth is one, too
        if not self.is_open:
            if is_number:
                return result if isinstance(result, bool) else _followed(result, self, EARLIER)
            for leaf in leaves_in(args[0]) if handling is Handling.WRITE else tree_leaves(result):
                if isinstance(leaf, Tensor):
                    self._slot_for(leaf)
            return result
        if handling is Handling.WRITE:
            slots = [self.slot_of(leaf) for leaf in leaves_in(args[0])]
            outs = [slot for slot in slots if slot is not None and slot != EARLIER]
        else:
            outs = [self._slot_for(leaf) for leaf in tree_leaves(result)]
        if func in _MEANS and kwargs["reduction"] == "mean" and not args[1].is_floating_point():
            num_classes = args[0].shape[min(1, args[0].ndim - 1)]
            about = kwargs["ignore_index"], num_classes, kwargs["weight"]
            self.targets.append((len(self.operations), args[1], *about))
        frame, leaves = _users_frame(), leaves_in(stored)
        line = line_of(frame)
        operation = Operation(
            func,
            handling,
            name,
            *stored,
            leaves,
            [leaf.slot for leaf in leaves if type(leaf) is SlotRef],
            outs,
            torch.is_grad_enabled(),
            autocast_dtypes(),
            line,
            () if line is None else frame.f_code.co_consts,
            [
                (each, state)
                for each, state in before
                if each.get_state().numpy().tobytes() != state.numpy().tobytes()
            ],
        )
        self.operations.append(operation)
        if isinstance(result, bool):
            self.branches.append((name, outs[0], result, positions(sys._getframe(1))))
        elif is_number:
            if handling is Handling.ITEM:
                self.items.append(float(result))
            return _followed(result, self, outs[0])
        return result

    def _note_other_ranks(self, name: str, made: list[Any]) -> None:
        """Write down that tensors hold values of other ranks, which no replay can make again."""
        made = [each for each in made if isinstance(each, Tensor)]
        if self.is_open:
            self._before_write(made)  # results are constants until then
        outs = [self._slot_for(each) for each in made]
        if self.is_open:
            stored, line = list(map(self._stored, made)), line_of(_users_frame())
            args = from_other_ranks, Handling.WRITE, name, (stored,), {}, stored, outs, outs
            self.operations.append(Operation(*args, line=line))

    def _note_read(self, name: str) -> None:
        """Let all recorders know that values left torch: nobody knows whose loss they come into."""
        where = positions(sys._getframe(2))
        for each in {self, *_recording}:
            each.has_read = True
            if each.is_open:
                each.reads.append((name, len(each.operations), where))

    def _before_write(self, targets: Any) -> None:
        """Copy roots before they are overwritten; register constants that data is written into."""
        for target in leaves_in(targets):
            if not isinstance(target, Tensor):
                continue
            if self.slot_of(target) in (None, EARLIER):
                self._before_outside_write(target)
            if not self.is_open:
                continue
            memory = memory_of(target)
            for slot, value in self.roots.items():
                if memory_of(value) == memory:
                    copies = [each.detach().clone() for each in unpacked(value)]
                    self.roots[slot] = packed(value, copies)
            if self.slot_of(target) is None:
                before = target.detach().clone()
                if self.is_kept(target):
                    self.keep(before)
                outs = [self._slot_for(target)]
                self.operations.append(
                    Operation(
                        torch.clone, Handling.OPERATION, "clone", (before,), {}, [before], [], outs
                    )
                )

    def is_made_of_rows(self, value: Tensor) -> bool:
        """Whether a tensor was made of data, in this pass or before, however it was found out."""
        return self.slot_of(value) is not None or self.is_kept(value) or self.meets_hidden([value])

    # --- what forward made, and no tape has ------------------------------------------------------

    def is_kept(self, value: Any) -> bool:
        """Whether a value is what forward made, or lies where that was written."""
        if not isinstance(value, Tensor):
            return False
        found = self.kept.get(id(value))
        if found is not None and found() is value:
            return True
        written = self.kept_memory.get(memory_of(value)) if self.kept_memory else None
        return written is not None and not written.expired()

    def keep(self, values: Any, *, is_written: bool = False) -> None:
        """Know from here on what forward made, and keep none of it alive.

        Args:
            values: Tensors, in whatever holds some.
            is_written: Whether values of the batch were written into them.
        """
        for leaf in tree_leaves(values):
            if isinstance(leaf, Tensor):
                self.kept[id(leaf)] = weakref.ref(leaf)
                memory = memory_of(leaf) if is_written and unpacked(leaf)[0] is leaf else 0
                if memory:
                    self.kept_memory[memory] = StorageWeakRef(leaf.untyped_storage())

    # --- what cannot be run again ----------------------------------------------------------------

    def meets_hidden(self, given: Sequence[Any]) -> bool:
        """Whether any of these values was made of data in a way that is not on the tape."""
        is_inside = torch._C._are_functorch_transforms_active()
        for leaf in given:
            if isinstance(leaf, Tensor):
                own = innermost(leaf)
                if is_inside and not (self.slot_of(leaf) is None is self.slot_of(own)):
                    return True
                ref = self.hidden.get(memory_of(own))
                if ref is not None and not ref.expired():
                    return True
        return False

    def hide(self, made: Any) -> None:
        """Know values by their memory from here on."""
        for leaf in tree_leaves(made):
            for part in unpacked(innermost(leaf)) if isinstance(leaf, Tensor) else ():
                memory = memory_of(part)
                if memory:
                    self.hidden[memory] = StorageWeakRef(part.untyped_storage())

    def _hide_gradients(self, losses: Sequence[Tensor]) -> None:
        """Hide what a backward pass of the user's own left at leaves, if it came from data."""
        known = [self.slot_of(each) for each in losses]
        if not any(each is not None for each in known) and not self.meets_hidden(losses):
            return
        for leaf in graph_leaves(losses):
            self.hide(leaf.grad)

    def _call_hidden(
        self,
        func: Callable[..., Any],
        handling: Handling,
        name: str,
        args: tuple,
        kwargs: dict,
        remember: Callable[[Any], None],
    ) -> Any:
        """Run a function of hidden or kept values alone, of which the tape learns nothing."""
        targets = args[0] if handling is Handling.WRITE else kwargs.get("out")
        for target in leaves_in(targets):
            if isinstance(target, Tensor):
                self._before_outside_write(innermost(target))
        args, kwargs = mapped(_plain, (args, kwargs))
        result = func(*args, **kwargs)
        if handling is Handling.READ:  # Python takes float() of no float of ours
            self.has_read = True
            if remember != self.hide:  # gradients of another model are often looked at
                self._note_read(name)
            return result
        if isinstance(result, int | float) and not isinstance(result, bool):
            return _followed(result, self, EARLIER)
        remember(targets if handling is Handling.WRITE else result)
        return result


def _generators_of(leaves: Sequence[Any]) -> list[torch.Generator]:
    """Return what an operation on these may draw from; nothing while a CUDA graph is recorded."""
    devices = {each.device for each in leaves if isinstance(each, Tensor) and each.is_cuda}
    if devices and is_recording():  # their states cannot be read then
        return []
    found = [torch.default_generator]
    found += [torch.cuda.default_generators[device.index] for device in devices]
    return found + [each for each in leaves if isinstance(each, torch.Generator)]


def _users_frame() -> FrameType:
    """The innermost frame of the user's own code."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(NOT_THE_USERS):
        frame = frame.f_back
    return frame


def _written(func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """The arguments of a collective that take values of other ranks; a functional one has none."""
    try:
        given = inspect.signature(func).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        return ()
    return given.get("gather_list") if "gather_list" in given else next(iter(given.values()), ())


_others = itertools.count()


def from_other_ranks(made: list[Tensor]) -> None:
    """Stand for a collective on the tape: other values whenever it is run."""
    for each in made:
        each.detach().fill_(next(_others) % 128)


def innermost(value: Tensor) -> Tensor:
    """What torch.func's wrappers hold, or the values of a sparse tensor."""
    while is_functorch_wrapped_tensor(value):
        value = get_unwrapped(value)
    return value._values() if value.layout is torch.sparse_coo else value


_MEANS = {F.cross_entropy, F.nll_loss}
# Where a batch has more than tensors, what these make of texts or of Python's numbers may be rows.
_MADE_OF_PYTHON = {"tensor", "as_tensor", "asarray"}

_recording: list[LossRecorder] = []  # those that are on torch's stack of modes
_stances: list[Any] = []  # torch.compile's, while somebody records


def _recorded_apply(run: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """Write a custom `autograd.Function` down, for who records what goes in."""
    for recorder in _recording:
        # Not inside of an operation that it records.
        is_told = any(mode is recorder for mode in _get_current_function_mode_stack())
        leaves = leaves_in((args, kwargs)) if is_told else ()
        if any(recorder.slot_of(leaf) is not None for leaf in leaves):
            met: list[str] = []

            def noted(func: Any, args: tuple, kwargs: dict[str, Any], met: list[str] = met) -> Any:
                handling, name = handling_of(func)
                if handling is Handling.COLLECTIVE and dist.get_world_size() > 1:
                    met.append(name)
                return func(*args, **kwargs)

            with taken_away(recorder), FunctionMode(noted):
                made = recorder.call(run, Handling.OPERATION, run.__name__, args, kwargs)
            if met:
                recorder._note_other_ranks(run.__name__, tree_leaves(made))
            return made
    return NotImplemented


def refuse_unseen() -> None:
    """Raise for a gradient at the module's outputs whose loss nobody looked at."""
    raise BadInput(
        "a gradient reached the module's outputs from a loss that was not followed, so it is not "
        "known whether each row's gradient depends on that row alone. Call loss.backward() on a "
        "loss made by torch functions of the module's outputs and of the batch that the loader "
        "handed out; torch.autograd.backward, torch.jit, vmap and numpy cannot be followed"
    )


# --- numbers --------------------------------------------------------------------------------------


def _two(func: Callable[[Any, Any], Any], is_swapped: bool) -> Callable[[Any, Any], Any]:
    def run(self: Any, other: Any) -> Any:
        args = (other, self) if is_swapped else (self, other)
        if not isinstance(other, int | float):
            return NotImplemented
        recorder = self.recorder()
        if recorder is not None and recorder.number == self.pass_number:
            return recorder.call(func, Handling.OPERATION, func.__name__, args, {})
        made = func(*map(_plain, args))
        if not isinstance(made, float):
            return made
        made = _Float(made)
        vars(made).update(vars(self), slot=EARLIER)
        return made

    return run


def _one(func: Callable[..., Any]) -> Callable[..., Any]:
    def run(self: Any, *args: Any) -> Any:
        recorder = self.recorder()
        if recorder is not None and recorder.number == self.pass_number:
            return recorder.call(func, Handling.OPERATION, func.__name__, (self, *args), {})
        made = func(_plain(self), *args)
        made = (_Float if isinstance(made, float) else _Int)(made)
        vars(made).update(vars(self), slot=EARLIER)
        return made

    return run


def _as_float(self: Any) -> float:
    _refuse_scheduler()
    return float(_plain(self))


def _refuse_scheduler() -> None:
    """Refuse a scheduler that asks values of private batches for the learning rate."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(3):  # torch's own, and those of a mode
        if frame is not None and frame.f_globals.get("__name__") == "torch.optim.lr_scheduler":
            raise BadInput(
                f"{type(frame.f_locals.get('self')).__name__} was given a number that was read "
                "from private batches, which no noise covers, and the learning rate would tell of "
                "it; use a schedule, or unison.public(value) if it is public"
            )
        frame = frame and frame.f_back


def _number_type(base: type) -> Any:
    """A Python number read from data; arithmetic with it is still on the tape.

    It has `pass_number`, `slot` and a weak reference to its `recorder`.
    """
    names = ("add", "sub", "mul", "truediv", "floordiv", "pow", "mod")
    methods: dict[str, Any] = {"__reduce__": lambda self: (base, (base(self),))}
    for name in (*names, "lt", "le", "gt", "ge", "eq", "ne"):
        methods[f"__{name}__"] = _two(getattr(operator, name), is_swapped=False)
    for name in names:
        methods[f"__r{name}__"] = _two(getattr(operator, name), is_swapped=True)
    for func in (operator.neg, operator.pos, abs, round, math.floor, math.ceil, math.trunc):
        methods[f"__{func.__name__}__"] = _one(func)
    methods["__hash__"] = base.__hash__
    methods["__float__"] = _as_float
    return type(base.__name__, (base,), methods)


_Float, _Int = _number_type(float), _number_type(int)
_NUMBERS = (_Float, _Int)
_FOLLOWED = (Tensor, *_NUMBERS)


def _followed(value: float, recorder: LossRecorder, slot: int) -> Any:
    made = (_Float if isinstance(value, float) else _Int)(value)
    made.pass_number, made.slot, made.recorder = recorder.number, slot, weakref.ref(recorder)
    return made


class PublicNumber(float):
    """A number that the user declares not to depend on single records."""


def public(value: float) -> float:
    """Declare a number that enters the loss public: it does not depend on single records.

    unison refuses a Python number that was read from the batch, or from outputs, and comes back
    into the loss: another record could have changed it. A number that was made public by other
    means, such as a statistic with noise of its own that is accounted for, or a schedule that only
    looks as if it came from data, is declared with this function.

    Args:
        value: The number.
    """
    return PublicNumber(float(value))


def is_public(value: Any) -> bool:
    """Whether a number was declared public."""
    return isinstance(value, PublicNumber)


def _plain(leaf: Any) -> Any:
    """An argument as torch gets it: a number without our mark."""
    kind = type(leaf)
    if kind is _Float or kind is PublicNumber:
        return float.__float__(leaf)
    return int(leaf) if kind is _Int else leaf


def memory_of(value: Tensor) -> int:
    """Where the memory of a tensor begins, which views of it share; the first granule's."""
    first = unpacked(value)[0]
    try:
        return first.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # sparse tensors have several
        return id(first)
