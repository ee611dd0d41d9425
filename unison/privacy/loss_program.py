"""Recording the program of a user's loss, and running it again on other values."""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._pytree import tree_leaves

from unison.capture.parts import is_in_parts
from unison.errors import BadInput
from unison.modes import push_lowest, take_away
from unison.privacy.dealing import packed, unpacked
from unison.privacy.loss_tape import (
    Handling,
    LossTape,
    Operation,
    PublicNumber,
    SlotRef,
    handling_of,
    leaves_of,
    mapped,
    path_to,
    refs_of,
)

# --- recording ------------------------------------------------------------------------------------


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
        """Start recording: a batch is handed out."""
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
        """Stop recording once the last batch has gone backward: the loop was left."""
        self._is_left = True
        if self.is_judged:
            self.remove()
            self._is_over = True

    def suspend(self) -> None:
        """Pause recording while the module, or the optimizer, runs: it is checked elsewhere."""
        self._num_suspended += 1
        self._take_away()

    def resume(self) -> None:
        """Go on recording after `suspend`."""
        if self._num_suspended:
            self._num_suspended -= 1
            if not self._num_suspended and self.tape is not None and not self._is_over:
                self._put()

    def enter_module(self, args: tuple, kwargs: dict[str, Any]) -> None:
        """Note what the private module is called with, and pause."""
        if self.tape is not None and self.tape.is_open:
            self.tape.enter_module(args, kwargs)
        self.suspend()

    def leave_module(self, output: Any, *, is_trained: bool) -> None:
        """Go on recording, with the module's outputs (None if it raised)."""
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


# --- running again --------------------------------------------------------------------------------

# A number that one of these is given is a value, and no dimension or size.
ARITHMETIC = {"add", "sub", "rsub", "mul", "div", "divide", "true_divide", "floor_divide", "pow"}
ARITHMETIC |= {"__radd__", "__rsub__", "__rmul__", "__rdiv__", "__rtruediv__", "__rpow__", "where"}
ARITHMETIC |= {"truediv", "floordiv", "mod", "clamp", "clip", "maximum", "minimum", "addcmul"}
# They make truths of values, or of other truths.
TRUTHS = {"gt", "lt", "ge", "le", "eq", "ne", "__bool__", "any", "all", "logical_and"}
TRUTHS |= {"logical_or", "logical_not", "__and__", "__or__", "__invert__"}
SHAPE_FUNCTIONS = {"view", "reshape", "expand", "unflatten", "resize", "zeros", "ones", "empty"}

Gradients = dict[int, Tensor]


@dataclass(frozen=True)
class RecordLayout:
    """Where the records of a batch lie.

    Attributes:
        num_units: Records in all granules together, padding included.
        per_unit: Rows that belong to one record, one after the other, in tensors that have more
            than one.
        dim: The dimension that holds them, where a tensor's shape leaves a choice.
    """

    num_units: int
    per_unit: int
    dim: int

    @property
    def num_rows(self) -> int:
        """Rows of tensors that have all rows of every record."""
        return self.num_units * self.per_unit

    def dim_of(self, value: Any) -> int | None:
        """The dimension of a tensor that holds the records; None if there is none."""
        if not isinstance(value, Tensor):
            return None
        parts = unpacked(value)
        shape, units = parts[0].shape, self.num_units // len(parts)
        if units == 0 or parts[0].numel() == 0:
            return None
        dims = [dim for dim in (self.dim, *range(len(shape))) if dim < len(shape)]
        for size in (units * self.per_unit, units):
            exact = [dim for dim in dims if shape[dim] == size]
            if exact:
                return exact[0]
        return 0 if len(shape) and shape[0] % units == 0 else None  # tokens are flattened into it

    def matrix(self, value: Tensor) -> Tensor:
        """Return one line per record [units, elements]."""
        dim = self.dim_of(value)
        assert dim is not None
        parts = unpacked(value)
        units = self.num_units // len(parts)
        return torch.cat([whole(each).movedim(dim, 0).reshape(units, -1) for each in parts])

    def matrices(self, values: Mapping[int, Tensor]) -> Iterator[tuple[int, Tensor]]:
        """Yield the slot and the `matrix` of each value that holds records."""
        for slot, value in values.items():
            if self.dim_of(value) is not None:
                yield slot, self.matrix(value)

    def like(self, value: Tensor, matrix: Tensor) -> Tensor:
        """Return a value laid out like another one, with the records of a matrix."""
        dim = self.dim_of(value)
        assert dim is not None
        parts = unpacked(value)
        made = []
        for each, lines in zip(parts, matrix.chunk(len(parts)), strict=True):
            shape = each.movedim(dim, 0).shape
            count = shape[0] * len(parts) * len(lines) // self.num_units
            rows = lines.reshape(count, *shape[1:]).movedim(0, dim)
            made.append(_placed(rows.contiguous(), each))
        return packed(value, made)


@dataclass(eq=False)
class Replay:
    """Results of one replay of a program.

    Attributes:
        grads: Of the module's outputs, by slot.
        terms: Of tensors that take gradients and are not on the tape, in order.
        env: Every result by slot.
    """

    grads: Gradients
    terms: list[Tensor]
    env: dict[int, Any]


class Program:
    """A tape that has ended, with the loss that was sent back.

    Args:
        tape: The tape.
        loss: Its slot.
        gradient: What the user sent back in the place of 1, as the tape stores it.
        substitutes: Functions that must not run again, each with what runs in its place.
    """

    def __init__(
        self,
        tape: LossTape,
        loss: int,
        gradient: Any,
        substitutes: Mapping[Callable[..., Any], Callable[..., Any]],
    ) -> None:
        self.tape, self.loss, self.gradient = tape, loss, gradient
        self._substitutes = substitutes
        self.path = dict(path_to(tape, loss))
        self.outputs = {slot: root for slot, root in tape.roots.items() if root.edges}
        self.is_granular = any(len(unpacked(root.value)) > 1 for root in tape.roots.values())
        self.terms = self._terms()

    def _terms(self) -> list[Tensor]:
        """Tensors on the way to the loss that take gradients and are not made of data."""
        found: dict[int, Tensor] = {}
        for operation in self.path.values():
            for leaf in leaves_of(operation):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    found[id(leaf)] = leaf
        return list(found.values())

    @property
    def kind(self) -> tuple:
        """The path that the user's code took."""
        names = tuple(
            (each.name, len(each.outs), each.is_grad_enabled, *map(_pattern, leaves_of(each)))
            for each in self.path.values()
        )
        return names, len(self.outputs), len(self.terms), len(self.tape.inputs)

    @property
    def numbers(self) -> list[float]:
        """Python's numbers on the way to the loss, but for those declared public."""
        return [leaf for leaf in self.all_numbers if not isinstance(leaf, PublicNumber)]

    @property
    def all_numbers(self) -> list[float]:
        """Python's numbers on the way to the loss."""
        return [leaf for each in self.path.values() for leaf in numbers_of(each)]

    def compared(self, slot: int) -> list[int]:
        """The slots of values that a truth was found from; of NaNs, whether they are."""
        makers = {out: each for each in self.tape.operations for out in each.outs}
        found, waiting = [], [slot]
        while waiting:
            maker = makers.get(waiting.pop())
            for ref in refs_of(maker) if maker is not None else ():
                made_by = makers.get(ref)
                if made_by is not None and made_by.name in TRUTHS:
                    waiting.append(ref)
                else:
                    found.append(ref)
        return found

    @property
    def devices(self) -> list[torch.device]:
        """Where its values lie, but for the CPU."""
        found = {each.device for root in self.tape.roots.values() for each in unpacked(root.value)}
        return [device for device in found if device.type == "cuda"]

    def real(self, loss: Tensor) -> Gradients:
        """Return the gradients of the outputs in the real graph, which is retained."""
        edges = [edge for root in self.outputs.values() for edge in root.edges]
        gradient = self.gradient if isinstance(self.gradient, Tensor) else None
        if isinstance(self.gradient, SlotRef):
            return {}  # it was made of data: the replay alone tells
        found = torch.autograd.grad(
            loss, edges, gradient, retain_graph=True, allow_unused=True, materialize_grads=False
        )
        grads, at = {}, iter(found)
        for slot, root in self.outputs.items():
            parts = unpacked(root.value)
            made = [_or_zeros(next(at), part) for part in parts]
            grads[slot] = packed(root.value, made)
        return grads

    def replay(
        self,
        values: Mapping[int, Tensor],
        *,
        seed: int = 0,
        is_double: bool = False,
        some: "Selection | None" = None,
    ) -> Replay:
        """Run the program on other values.

        Args:
            values: What to put in the place of roots, by slot.
            seed: Of torch's generators.
            is_double: Whether everything runs in float64.
            some: Which rows are left, if not all.
        """
        convert = _to_double if is_double else lambda value: value
        leaves: dict[int, list[Tensor]] = {}
        env: dict[int, Any] = {}
        terms = {id(each): convert(each.detach().clone()).requires_grad_() for each in self.terms}

        def argument(value: Any, of: Operation | None) -> Any:
            if isinstance(value, SlotRef):
                return env[value.slot]
            if isinstance(value, torch.Size):
                return torch.Size([argument(each, of) for each in value])
            if isinstance(value, Tensor):
                if id(value) in terms:
                    return terms[id(value)]
                return convert(value if some is None else some.constant(value))
            if is_double and isinstance(value, torch.dtype) and value.is_floating_point:
                return torch.float64
            return value if some is None or of is None else some.number(value, of)

        with torch.random.fork_rng(self.devices), torch.enable_grad():
            # Not torch.manual_seed: where CUDA has not begun, it writes down where it was called.
            torch.default_generator.manual_seed(seed)
            for device in self.devices:
                torch.cuda.default_generators[device.index].manual_seed(seed)
            for slot, root in self.tape.roots.items():
                value = values.get(slot, root.value)
                parts = [convert(each.detach()) for each in unpacked(value)]
                if slot in self.outputs:
                    leaves[slot] = [each.clone().requires_grad_() for each in parts]
                    env[slot] = packed(value, [each.clone() for each in leaves[slot]])
                else:
                    env[slot] = packed(value, [each.clone() for each in parts])
            for operation in self.tape.operations:
                try:
                    result = self._run(operation, argument, is_double)
                except Exception:
                    if self.loss in env and operation not in self.path.values():
                        continue  # a metric, on values that it does not take
                    raise
                if operation.handling is Handling.WRITE:
                    continue  # what it wrote to is there already
                for slot, leaf in zip(operation.outs, tree_leaves(result), strict=True):
                    env[slot] = leaf
            inputs = [*(each for some in leaves.values() for each in some), *terms.values()]
            found: Sequence[Tensor | None] = [None] * len(inputs)
            loss = env[self.loss]
            if isinstance(loss, Tensor) and loss.requires_grad and inputs:
                gradient = mapped(lambda leaf: argument(leaf, None), self.gradient)
                found = torch.autograd.grad(loss, inputs, gradient, allow_unused=True)
        made = [_or_zeros(grad, each) for grad, each in zip(found, inputs, strict=True)]
        at = iter(made)
        grads = {
            slot: packed(self.tape.roots[slot].value, [next(at) for _ in some])
            for slot, some in leaves.items()
        }
        return Replay(grads, list(at), env)

    def _run(
        self,
        operation: Operation,
        argument: Callable[[Any, Operation | None], Any],
        is_double: bool,
    ) -> Any:
        func = self._substitutes.get(operation.func, operation.func)
        args, kwargs = mapped(
            lambda leaf: argument(leaf, operation), (operation.args, operation.kwargs)
        )
        if is_double and operation.name in ("float", "half", "bfloat16"):
            func = Tensor.double
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(operation.is_grad_enabled))
            for device, dtype in zip(("cpu", "cuda"), operation.autocast, strict=True):
                if dtype is not None and not is_double:
                    stack.enter_context(torch.autocast(device, dtype))
            return func(*args, **kwargs)


class Selection:
    """Some records of a program: the first ones, as many as are wanted.

    Args:
        rows: All of them.
        num_left: How many records are left.
        is_size_read: Whether the user's code has asked how many rows there are.
    """

    def __init__(self, rows: RecordLayout, num_left: int, *, is_size_read: bool) -> None:
        self._rows, self._is_size_read = rows, is_size_read
        self.left = replace(rows, num_units=num_left)

    @property
    def is_all(self) -> bool:
        """Whether no record is left out."""
        return self.left == self._rows

    def values(self, tape: LossTape) -> dict[int, Tensor]:
        """The records that are left of every root; none where it stays as it is."""
        if self.is_all:
            return {}
        values = {slot: root.value for slot, root in tape.roots.items()}
        return {
            slot: self._rows.like(values[slot], matrix[: self.left.num_units])
            for slot, matrix in self._rows.matrices(values)
        }

    def constant(self, value: Tensor) -> Tensor:
        """A constant with one entry per row, as the user made it for fewer of them."""
        is_by_row = value.ndim in (1, 2) and value.shape[0] == self._rows.num_rows
        return value[: self.left.num_rows] if is_by_row and not self.is_all else value

    def number(self, value: Any, operation: Operation) -> Any:
        """A size that the user wrote into a shape, or computed with."""
        if type(value) is not int or value not in (self._rows.num_rows, self._rows.num_units):
            return value
        is_shape = operation.name in SHAPE_FUNCTIONS
        # A number that is written into the code is no size, though it may be as large.
        is_size = operation.name in ARITHMETIC and self._is_size_read
        if is_shape or (is_size and value not in operation.constants):
            is_rows = value == self._rows.num_rows
            return self.left.num_rows if is_rows else self.left.num_units
        return value


def whole(value: Tensor) -> Tensor:
    """Return a DTensor's full tensor, any other as it is; detached."""
    value = value.detach()
    return value.full_tensor() if is_in_parts(value) else value  # type: ignore[attr-defined]


def _placed(value: Tensor, like: Any) -> Tensor:
    """Distribute a full tensor as another one is."""
    if not is_in_parts(like):
        return value
    from torch.distributed.tensor import distribute_tensor  # it takes a second to import

    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


def _pattern(value: Any) -> Any:
    """Reduce an argument to what tells paths apart: neither values nor batch sizes."""
    if isinstance(value, SlotRef):
        return SlotRef
    if isinstance(value, Tensor):
        return value.ndim, value.requires_grad
    if isinstance(value, int) and -8 <= value <= 8:  # a dimension, a truth
        return value
    return value if isinstance(value, str | torch.dtype) else type(value)


def numbers_of(operation: Operation) -> list[float]:
    """Python's numbers that an operation was given, but for its own default values."""
    defaults = _defaults_of(operation.func) if operation.kwargs else {}
    given = {
        name: value
        for name, value in operation.kwargs.items()
        if name not in defaults or defaults[name] != value
    }
    return [leaf for leaf in leaves_of(replace(operation, kwargs=given)) if is_number(leaf)]


@lru_cache
def _defaults_of(func: Callable[..., Any]) -> dict[str, Any]:
    try:
        parameters = inspect.signature(func).parameters.values()
    except (TypeError, ValueError):  # most functions of torch's are written in C++
        return {}
    return {each.name: each.default for each in parameters if is_number(each.default)}


def is_number(value: Any) -> bool:
    """Whether this is a number of Python's."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _or_zeros(grad: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like).detach() if grad is None else grad.detach()


def _to_double(value: Tensor) -> Tensor:
    parts = [each.double() if each.is_floating_point() else each for each in unpacked(value)]
    return packed(value, parts)
