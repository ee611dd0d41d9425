"""The user's own operations between the loader and `backward`, written down as a program.

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
"""

import dis
import itertools
import operator
import sys
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import cache, lru_cache
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_leaves

from unison.privacy.dealing import packed, unpacked

# --- values that leave torch for Python -----------------------------------------------------------


OURS = __file__.rsplit("privacy", 1)[0]
NOT_THE_USERS = (torch.__path__[0], OURS)


class Position(NamedTuple):
    """The position of a Python frame.

    Attributes:
        frame: The identity of the frame, which is not kept.
        code: Its code.
        offset: Of the instruction that runs.
        line: Its line, for messages.
        is_users: Whether the code is the user's, and neither torch's nor ours.
    """

    frame: int
    code: CodeType
    offset: int
    line: str
    is_users: bool


def positions(frame: FrameType | None) -> tuple[Position, ...]:
    """Return the positions of all frames, outermost first.

    Args:
        frame: The innermost frame.
    """
    found = []
    while frame is not None:
        code = frame.f_code
        line = f"{code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno}"
        is_users = not code.co_filename.startswith(NOT_THE_USERS)
        found.append(Position(id(frame), code, frame.f_lasti, line, is_users))
        frame = frame.f_back
    return tuple(found[::-1])


def may_branch(read: Sequence[Position], backward: Sequence[Position]) -> bool:
    """Whether user code between a read and `backward` may depend on the truth of what was read.

    Args:
        read: Where all frames were when a value left torch.
        backward: Where they are when gradients are to flow.
    """
    common = 0
    for a, b in zip(read, backward, strict=False):
        if a.frame != b.frame or a.code is not b.code:
            break
        common += 1
        if a.offset != b.offset:  # it has run on: what it called then has returned since
            break
    # Functions that have returned since: to their ends.
    returned = (each for each in read[common:] if each.is_users)
    if any(_has_jump(each.code, each.offset, None) for each in returned):
        return True
    if not common:
        return True
    # Of all frames that both share, the innermost one alone has run on between them. Where that is
    # a loop of ours, as in unison.train, no code of the user's has.
    here, there = read[common - 1], backward[common - 1]
    if here.code.co_filename.startswith(OURS):
        return False
    return _has_jump(here.code, here.offset, there.offset)


@lru_cache(maxsize=256)
def _instructions(code: CodeType) -> dict[int, dis.Instruction]:
    return {each.offset: each for each in dis.get_instructions(code)}


@lru_cache(maxsize=256)
def _has_jump(code: CodeType, start: int, stop: int | None) -> bool:
    """Whether a conditional jump can be reached from an offset without passing another."""
    instructions = _instructions(code)
    order = sorted(instructions)
    # A frame that calls Python code stands in the inline cache behind the call, or at the call
    # itself where a debugger or Dynamo evaluates frames: it is the same instruction.
    start = order[bisect_right(order, start) - 1]
    stop = None if stop is None else order[bisect_right(order, stop) - 1]
    following = dict(itertools.pairwise(order))
    waiting, seen = [following.get(start)], set()
    while waiting:
        offset = waiting.pop()
        if offset is None or offset == stop or offset in seen:
            continue
        seen.add(offset)
        name, target = instructions[offset].opname, instructions[offset].argval
        if "JUMP" in name and "IF" in name:
            ways = [way for way in (target, following.get(offset)) if not _raises(code, way)]
            if len(ways) > 1:
                return True
            waiting.extend(ways)  # an assertion: whoever does not go on sends nothing back
            continue
        if name.startswith(("RETURN", "RERAISE", "RAISE")):
            continue
        if "JUMP" in name or name in ("FOR_ITER", "SEND"):
            waiting.append(target)
        if "JUMP" not in name:
            waiting.append(following.get(offset))
    return False


@lru_cache(maxsize=256)
def _raises(code: CodeType, start: int | None) -> bool:
    """Whether code ends in an exception from here on, whatever happens."""
    instructions = _instructions(code)
    for offset in sorted(instructions):
        if start is None or offset < start:
            continue
        name = instructions[offset].opname
        if name.startswith(("RAISE", "RERAISE")):
            return True
        if "JUMP" in name or name.startswith("RETURN") or name in ("FOR_ITER", "SEND"):
            return False
    return False


# --- the tape -------------------------------------------------------------------------------------


class Handling(Enum):
    """What the recorder does with a torch function."""

    OPERATION = auto()  # it is written down
    QUESTION = auto()  # about shape, dtype, device: values stay where they are
    SIZE = auto()  # the same, and the answer may depend on values, where rows were selected
    READ = auto()  # values leave torch for Python, where nobody can follow them
    ITEM = auto()  # one value leaves torch, as a number that is still followed
    WRITE = auto()  # an operation that changes its first argument
    BACKWARD = auto()


_SIZES = {"shape", "size", "numel", "__len__", "nelement"}
_QUESTIONS = {
    *("dim", "ndim", "dtype", "device", "requires_grad", "is_leaf", "grad_fn", "stride"),
    *("is_floating_point", "is_complex", "is_contiguous", "layout", "is_cuda", "is_cpu", "names"),
    *("is_sparse", "is_quantized", "is_meta", "is_nested", "data_ptr", "__repr__", "__format__"),
    *("__hash__", "register_hook", "retain_grad", "retains_grad", "_version", "get_device", "type"),
    *("element_size", "storage_offset", "output_nr", "untyped_storage", "itemsize", "nbytes"),
    *("is_pinned", "is_shared", "is_inference", "is_same_size", "result_type", "requires_grad_"),
    *("__reduce_ex__", "__dir__", "has_names", "is_conj", "is_neg", "is_signed", "_is_view"),
    *("is_xpu", "is_mps", "is_mkldnn", "is_xla", "is_ipu", "is_maia", "_base", "name"),
    "register_post_accumulate_grad_hook",
}
_READS = {"tolist", "numpy", "__array__", "__float__", "__int__", "__index__", "__complex__"}
_READS |= {"__dlpack__", "storage", "save"}
_WRITES = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__"}
_WRITES |= {"__ifloordiv__", "__imod__", "__iand__", "__ior__", "__ixor__"}


@cache
def handling_of(func: Any) -> tuple[Handling, str]:
    """Return what is done with a torch function, and its name."""
    name = getattr(func, "__name__", type(func).__name__)
    if name in ("__get__", "__set__", "__delete__"):  # a property: `x.shape`, `x.data = y`
        of, name = name, func.__self__.__name__
        if of != "__get__":
            return (Handling.WRITE if name == "data" else Handling.QUESTION), name
        if name == "grad":  # not to be taken for torch.autograd.grad
            return Handling.QUESTION, name
    if func is Tensor.backward:
        return Handling.BACKWARD, name
    if name in _SIZES:
        return Handling.SIZE, name
    if name in _QUESTIONS:
        return Handling.QUESTION, name
    if name in _READS:
        return Handling.READ, name
    if name == "item":
        return Handling.ITEM, name
    if name in _WRITES or (name.endswith("_") and not name.endswith("__")):
        return Handling.WRITE, name
    return Handling.OPERATION, name


class SlotRef(NamedTuple):
    """Stands for a result of the tape in the arguments of an operation."""

    slot: int


@dataclass(eq=False, slots=True)
class Operation:
    """One operation of the program.

    Attributes:
        func: A torch function, or an operator on numbers.
        handling: What kind it is.
        name: Its name, for messages.
        args: Its arguments, with a `SlotRef` for what the tape made.
        kwargs: Likewise.
        outs: The slot of each result.
        is_grad_enabled: Whether autograd was on.
        autocast: The dtype of autocast for CPU and CUDA, None where it was off.
        line: Where in the user's code it was called.
        constants: What that code has written into it, numbers among it.
    """

    func: Callable[..., Any]
    handling: Handling
    name: str
    args: tuple
    kwargs: dict[str, Any]
    outs: list[int]
    is_grad_enabled: bool
    autocast: tuple[torch.dtype | None, torch.dtype | None]
    line: str
    constants: tuple = ()

    def __str__(self) -> str:
        return f"{self.name} ({self.line})" if self.line else self.name


@dataclass(eq=False)
class TapeInput:
    """Where data enters the program: a tensor of the batch, or an output of the module.

    Attributes:
        value: The tensor, as it was handed to the user.
        is_output: Whether the module made it in a pass that is trained on.
        edges: Where its gradient arrives, one per granule; empty if it takes none.
    """

    value: Tensor
    is_output: bool
    edges: list[GradientEdge]


@dataclass(eq=False)
class MeanLabels:
    """Labels of a cross-entropy whose mean divides by how many of them count.

    Attributes:
        labels: What the loss was given.
        ignore_index: The label that does not count.
        num_classes: How many classes there are.
        weight: Of each class, by which the mean divides too.
        place: Number of the operation.
    """

    labels: Tensor
    ignore_index: int
    num_classes: int
    weight: Tensor | None
    place: int


class TapeEvent(NamedTuple):
    """Something that happened to data besides operations.

    Attributes:
        kind: "read" (values left torch), "item" (one value was read or printed, and is followed as
            far as Python's arithmetic goes), "branch" (Python was told a truth), "state" (what an
            earlier step made came back).
        text: What it was.
        place: How many operations there were before it.
        slot: Of the truth that Python was told.
        value: That truth, or the value that was read.
        where: Where the user's code was.
    """

    kind: str
    text: str
    place: int
    slot: int = -1
    value: float = 0.0
    where: tuple[Position, ...] = ()


class LossTape:
    """The program of one pass.

    Args:
        number: Of the pass, counting from 1.
        earlier: Tensors that earlier passes made of their data, by identity.
    """

    def __init__(self, number: int, earlier: dict[int, "weakref.ref[Tensor]"]) -> None:
        self.number, self.earlier = number, earlier
        self.operations: list[Operation] = []
        self.roots: dict[int, TapeInput] = {}
        self.events: list[TapeEvent] = []
        self.sized: set[int] = set()  # slots whose size was asked for
        self.targets: list[MeanLabels] = []
        self.inputs: set[int] = set()  # slots that the module was given
        self.unknown_inputs: list[Tensor] = []  # tensors that it was given and nobody followed
        self.is_open = True
        self.has_read = False  # values left torch, nobody knows where to
        self.has_hooks = False  # users' own, which may change gradients on their way
        self._num_slots = 0
        self.memory: dict[int, int] = {}  # where the values of a slot lie
        self._slots: dict[int, tuple[weakref.ref[Tensor], int]] = {}

    # --- who is who ------------------------------------------------------------------------------

    def slot_of(self, value: Any) -> int | None:
        """The slot of a tensor or number that this tape made; None for others."""
        if isinstance(value, Tensor):
            found = self._slots.get(id(value))
            return found[1] if found is not None and found[0]() is value else None
        if isinstance(value, FollowedNumber):
            return value.slot if value.pass_number == self.number else None
        return None

    def is_earlier(self, value: Any) -> bool:
        """Whether an earlier pass made a value of its data."""
        if isinstance(value, Tensor):
            found = self.earlier.get(id(value))
            return found is not None and found() is value and self.slot_of(value) is None
        return isinstance(value, FollowedNumber) and value.pass_number != self.number

    def name(self, value: Tensor) -> int:
        """Return a new slot for a tensor."""
        slot = self._new_slot()
        self._slots[id(value)] = weakref.ref(value), slot
        self.memory[slot] = _memory_of(value)
        return slot

    def survivors(self) -> dict[int, "weakref.ref[Tensor]"]:
        """Tensors of this pass and earlier ones that are still alive, by identity."""
        alive = {key: ref for key, ref in self.earlier.items() if ref() is not None}
        alive.update((key, ref) for key, (ref, _) in self._slots.items() if ref() is not None)
        return alive

    def add_root(self, value: Tensor, *, is_output: bool = False) -> None:
        """Register a tensor of the batch, or an output of the module."""
        if self.slot_of(value) is not None:
            return
        edges = []
        if is_output and value.requires_grad:
            edges = [get_gradient_edge(each) for each in unpacked(value)]
        self.roots[self.name(value)] = TapeInput(value, is_output, edges)

    def close(self) -> None:
        """Stop recording and release the batch; slots stay known."""
        self.is_open = False
        self.operations, self.targets, self.unknown_inputs = [], [], []
        self.roots = {}

    # --- operations ------------------------------------------------------------------------------

    def touches(self, *values: Any) -> bool:
        """Whether any of these is made of data."""
        return any(
            self.slot_of(leaf) is not None or self.is_earlier(leaf) for leaf in leaves_in(values)
        )

    def stored(self, value: Any) -> Any:
        """An argument as the tape keeps it."""

        def stored_leaf(leaf: Any) -> Any:
            slot = self.slot_of(leaf)
            if slot is not None:
                return SlotRef(slot)
            if self.is_earlier(leaf):
                self._note("state", "what an earlier step made of its data")
            return leaf

        return mapped(stored_leaf, value)

    def call(
        self, func: Callable[..., Any], handling: Handling, name: str, args: tuple, kwargs: dict
    ) -> Any:
        """Run an operation that touches data, and write it down if the program is not over."""
        if handling is Handling.READ:
            self.has_read = True
        if not self.is_open:
            result = func(*_plain(args), **_plain(kwargs))
            return result if handling is Handling.READ else self._marked(result)
        if handling is Handling.WRITE or kwargs.get("out") is not None:
            self._before_write(kwargs.get("out", args[0] if args else None))
        stored = self.stored(args), self.stored(kwargs)
        result = func(*_plain(args), **_plain(kwargs))
        if handling is Handling.READ:
            self._note("read", name, where=positions(sys._getframe(1)))
            return result
        if func in _MEANS:
            self._note_target(*args, **kwargs)
        operation = Operation(
            func,
            handling,
            name,
            *stored,
            [],
            torch.is_grad_enabled(),
            (_autocast("cpu"), _autocast("cuda")),
            *_line(),
        )
        self.operations.append(operation)
        if handling is Handling.WRITE:
            slot = self.slot_of(args[0])
            if slot is not None:
                operation.outs.append(slot)
            return result
        if isinstance(result, Tensor):  # the usual case
            operation.outs.append(self._slot_for(result))
            return result
        if isinstance(result, bool):
            slot = self._new_slot()
            operation.outs.append(slot)
            where = positions(sys._getframe(1))
            self._note("branch", name, slot=slot, value=result, where=where)
            return result
        if isinstance(result, int | float):
            slot = self._new_slot()
            operation.outs.append(slot)
            if handling is Handling.ITEM:
                self._note("item", name, value=float(result))
            return _followed(result, self.number, slot, weakref.ref(self))
        for leaf in tree_leaves(result):
            is_tensor = isinstance(leaf, Tensor)
            operation.outs.append(self._slot_for(leaf) if is_tensor else self._new_slot())
        return result

    def _note(self, kind: str, text: str, **details: Any) -> None:
        self.events.append(TapeEvent(kind, text, len(self.operations), **details))

    def _marked(self, result: Any) -> Any:
        """Register results that were made of data after the program was over."""
        if isinstance(result, int | float) and not isinstance(result, bool):
            return _followed(result, self.number, -1, weakref.ref(self))
        for leaf in [result] if isinstance(result, Tensor) else tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._slot_for(leaf)
        return result

    def _slot_for(self, value: Tensor) -> int:
        """The slot of a result; an operation in place returns what it was given."""
        slot = self.slot_of(value)
        return self.name(value) if slot is None else slot

    def _new_slot(self) -> int:
        slot, self._num_slots = self._num_slots, self._num_slots + 1
        return slot

    def _before_write(self, target: Any) -> None:
        """Copy roots before they are overwritten; register a constant that data is written into."""
        if not isinstance(target, Tensor):
            return
        memory = _memory_of(target)
        for root in self.roots.values():
            if _memory_of(root.value) == memory:
                copies = [each.detach().clone() for each in unpacked(root.value)]
                root.value = packed(root.value, copies)
        if self.slot_of(target) is None and not self.is_earlier(target):
            before = target.detach().clone()
            slot = self.name(target)
            kind = Handling.OPERATION
            self.operations.append(
                Operation(torch.clone, kind, "clone", (before,), {}, [slot], True, _NO_CAST, "")
            )

    def _note_target(
        self,
        input: Tensor,  # noqa: A002
        target: Tensor,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> None:
        if reduction == "mean" and not target.is_floating_point():
            num_classes = input.shape[min(1, input.ndim - 1)]
            place = len(self.operations)
            self.targets.append(MeanLabels(target, ignore_index, num_classes, weight, place))

    def note_printed(self, value: Tensor) -> None:
        """Remember one value that becomes text, which may be read again."""
        if self.is_open and value.numel() == 1 and len(unpacked(value)) == 1:
            self._note("item", "format", value=float(value.detach()))

    def reaches_output(self, slot: int) -> bool:
        """Whether a result was made of an output that is trained on."""
        outputs = {slot for slot, root in self.roots.items() if root.edges}
        if slot in outputs:
            return True
        path = path_to(self, slot)
        return any(not outputs.isdisjoint(refs_of(operation)) for _, operation in path)

    # --- the module ------------------------------------------------------------------------------

    def enter_module(self, args: Any, kwargs: Any) -> None:
        """Note what the module is given."""
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):
                slot = self.slot_of(leaf)
                if slot is not None:
                    self.inputs.add(slot)
                else:
                    self.unknown_inputs.append(leaf)

    def leave_module(self, output: Any, *, is_trained: bool) -> None:
        """Register the module's outputs."""
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor):
                self.add_root(leaf, is_output=is_trained)


def _memory_of(value: Tensor) -> int:
    """Where the memory of a tensor begins, which views of it share; the first granule's."""
    first = unpacked(value)[0]
    try:
        return first.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # sparse tensors have several
        return id(first)


_NO_CAST = (None, None)
_MEANS = {F.cross_entropy, F.nll_loss}


def _autocast(device_type: str) -> torch.dtype | None:
    if not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def _line() -> tuple[str, tuple]:
    """The line of the user's code that runs now, for messages, and the code's constants."""
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(NOT_THE_USERS):
            return f"{file.rsplit('/', 1)[-1]}:{frame.f_lineno}", frame.f_code.co_consts
        frame = frame.f_back
    return "", ()


# --- numbers -----------------------------------------------------------------------------------


class FollowedNumber:
    """A Python number read from data; arithmetic with it is still on the tape."""

    pass_number: int
    slot: int
    recorder: "weakref.ref[LossTape]"


def _two(func: Callable[[Any, Any], Any], is_swapped: bool) -> Callable[[Any, Any], Any]:
    def run(self: Any, other: Any) -> Any:
        args = (other, self) if is_swapped else (self, other)
        if not isinstance(other, int | float):
            return NotImplemented
        tape = self.recorder()
        if tape is None:
            made = func(*_plain(args))
            is_float = isinstance(made, float)
            return _followed(made, self.pass_number, -1, self.recorder) if is_float else made
        return tape.call(func, Handling.OPERATION, func.__name__, args, {})

    return run


def _number_type(base: type) -> type:
    names = ("add", "sub", "mul", "truediv", "floordiv", "pow", "mod")
    methods: dict[str, Any] = {"__reduce__": lambda self: (base, (base(self),))}
    for name in (*names, "lt", "le", "gt", "ge", "eq", "ne"):
        methods[f"__{name}__"] = _two(getattr(operator, name), is_swapped=False)
    for name in names:
        methods[f"__r{name}__"] = _two(getattr(operator, name), is_swapped=True)
    methods["__hash__"] = base.__hash__
    return type(base.__name__, (base, FollowedNumber), methods)


_Float, _Int = _number_type(float), _number_type(int)


def _followed(value: float, number: int, slot: int, tape: "Callable[[], LossTape | None]") -> Any:
    made: Any = (_Float if isinstance(value, float) else _Int)(value)
    made.pass_number, made.slot, made.recorder = number, slot, tape
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


def _plain(value: Any) -> Any:
    """Arguments as torch gets them: numbers without our mark."""

    def plain_leaf(leaf: Any) -> Any:
        kind = type(leaf)
        if kind is _Float or kind is PublicNumber:
            return float(leaf)
        return int(leaf) if kind is _Int else leaf

    return mapped(plain_leaf, value)


# --- paths --------------------------------------------------------------------------------------


def path_to(tape: LossTape, slot: int) -> Iterator[tuple[int, Operation]]:
    """Yield the operations that lead to a slot, last first, with their places."""
    needed, memory = {slot}, {tape.memory.get(slot)}
    for place in reversed(range(len(tape.operations))):
        operation = tape.operations[place]
        # What is written in place is seen through all tensors that share its memory.
        is_write = operation.handling is Handling.WRITE
        is_seen = is_write and any(tape.memory[out] in memory for out in operation.outs)
        if needed.isdisjoint(operation.outs) and not is_seen:
            continue
        refs = refs_of(operation)
        needed.update(refs)
        memory.update(tape.memory[ref] for ref in refs if ref in tape.memory)
        yield place, operation


def refs_of(operation: Operation) -> list[int]:
    """The slots that an operation was given."""
    return [leaf.slot for leaf in leaves_of(operation) if isinstance(leaf, SlotRef)]


def leaves_of(operation: Operation) -> list[Any]:
    """All leaves of an operation's arguments."""
    return leaves_in((operation.args, operation.kwargs))


def leaves_in(value: Any) -> list[Any]:
    """All leaves of an argument."""
    found: list[Any] = []
    mapped(found.append, value)
    return found


def mapped(make: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to each leaf of an argument, in tuples, lists, dicts and slices.

    Not `tree_map`: it takes named tuples and shapes apart, and no slice.
    """
    kind = type(value)
    if kind is tuple or kind is list:
        return kind([mapped(make, each) for each in value])
    if kind is dict:
        return {key: mapped(make, each) for key, each in value.items()}
    if kind is slice:
        return slice(*(mapped(make, each) for each in (value.start, value.stop, value.step)))
    return make(value)
