"""A loss as a program that can be run again: what the tape holds, on other values.

`RecordLayout` says where the records of a batch lie in its tensors, `Program.replay` runs the
user's operations once more with other records in the place of some. What that is for stands in
loss_check.py.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from unison.privacy.loss_tape import (
    EARLIER,
    Handling,
    LossRecorder,
    Operation,
    SlotRef,
    leaves_in,
    mapped,
)
from unison.privacy.sampling import packed, unpacked
from unison.torch_internals import is_dtensor

# A number that one of these is given is a value, and no dimension or size.
ARITHMETIC = {"add", "sub", "rsub", "mul", "div", "divide", "true_divide", "floor_divide", "pow"}
ARITHMETIC |= {"__radd__", "__rsub__", "__rmul__", "__rdiv__", "__rtruediv__", "__rpow__", "where"}
ARITHMETIC |= {"truediv", "floordiv", "mod", "clamp", "clip", "maximum", "minimum", "addcmul"}
# They make truths of values, or of other truths.
TRUTHS = {"gt", "lt", "ge", "le", "eq", "ne", "__bool__", "any", "all", "logical_and"}
TRUTHS |= {"logical_or", "logical_not", "__and__", "__or__", "__invert__"}
SHAPE_FUNCTIONS = {"view", "reshape", "expand", "unflatten", "resize", "zeros", "ones", "empty"}

Gradients = dict[int, Tensor]  # of the module's outputs, by slot
Replay = tuple[Gradients, list[Tensor], dict[int, Any]]
"""Gradients of outputs; of terms (see `Program`), in order; and every result by slot."""


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
            rows = lines.reshape(count, *shape[1:]).movedim(0, dim).contiguous()
            if is_dtensor(each):
                from torch.distributed.tensor import distribute_tensor  # a second to import

                mesh, placements = each.device_mesh, each.placements
                rows = distribute_tensor(rows, mesh, placements, src_data_rank=None)
            made.append(rows)
        return packed(value, made)


class Program:
    """A tape that has ended, with the loss that was sent back; it can be run on other values.

    Args:
        tape: The tape.
        loss: The slot of the loss.
        path: The operations that lead to it, by place, last first.
        gradient: What the user sent back in the place of 1, as the tape stores it.
        rows: Where records lie.
        substitutes: Functions that must not run again, each with what runs in its place.

    Attributes:
        terms: Tensors on the way to the loss that take gradients and are not made of data.
        numbers: Python's numbers on the way to the loss.
        kind: The path that the user's code took: neither values nor batch sizes.
    """

    def __init__(
        self,
        tape: LossRecorder,
        loss: int,
        path: dict[int, Operation],
        gradient: Any,
        rows: RecordLayout,
        substitutes: Mapping[Callable[..., Any], Callable[..., Any]],
    ) -> None:
        self.tape, self.loss, self.path, self.gradient = tape, loss, path, gradient
        self.rows, self._substitutes = rows, substitutes
        self.outputs = {slot: tape.roots[slot] for slot, edges in tape.edges.items() if edges}
        self.is_granular = any(len(unpacked(value)) > 1 for value in tape.roots.values())
        terms: dict[int, Tensor] = {}
        kinds: list[tuple] = []
        self.numbers: list[float] = []
        for each in path.values():
            self.numbers += numbers_of(each)
            kind: list[Any] = [each.name, len(each.outs), each.is_grad_enabled]
            for leaf in each.leaves:
                if isinstance(leaf, Tensor):
                    kind.append((leaf.ndim, leaf.requires_grad))
                    if leaf.requires_grad:
                        terms[id(leaf)] = leaf
                else:
                    is_dim = isinstance(leaf, int) and -8 <= leaf <= 8  # or a truth
                    is_told = is_dim or isinstance(leaf, str | torch.dtype)
                    kind.append(leaf if is_told else type(leaf))
            kinds.append(tuple(kind))
        self.terms = list(terms.values())
        self.kind = tuple(kinds), len(self.outputs), len(self.terms), len(tape.inputs)

    def compared(self, slot: int) -> list[int]:
        """The slots of values that a truth was found from; of NaNs, whether they are."""
        makers = {out: each for each in self.tape.operations for out in each.outs}
        found, waiting = [], [slot]
        while waiting:
            maker = makers.get(waiting.pop())
            for ref in maker.refs if maker is not None else ():
                made_by = makers.get(ref)
                is_truth = made_by is not None and made_by.name in TRUTHS
                (waiting if is_truth else found).append(ref)
        return found

    def is_size(self, number: Any, operation: Operation) -> bool:
        """Whether a number is a size that the user wrote into a shape, or computed with."""
        sizes = {self.rows.num_rows, self.rows.num_units}
        if type(number) is not int or number not in sizes:
            return False
        if operation.name in SHAPE_FUNCTIONS:
            return True
        # A number that is written into the code is no size, though it may be as large.
        is_written = operation.name not in ARITHMETIC or number in operation.constants
        roots = self.tape.roots
        asked = (roots[slot].shape for slot in self.tape.sized if slot in roots)
        return not is_written and any(not sizes.isdisjoint(shape) for shape in asked)

    def first_records(self, left: RecordLayout) -> dict[int, Tensor]:
        """The records that are left of every root, by slot; none where it stays as it is."""
        if left == self.rows:
            return {}
        roots = self.tape.roots
        return {
            slot: self.rows.like(roots[slot], matrix[: left.num_units])
            for slot, matrix in self.rows.matrices(roots)
        }

    def real(self, loss: Tensor) -> Gradients:
        """Return the gradients of the outputs in the real graph, which is retained."""
        if isinstance(self.gradient, SlotRef):
            return {}  # it was made of data: the replay alone tells
        edges = [edge for slot in self.outputs for edge in self.tape.edges[slot]]
        gradient = self.gradient if isinstance(self.gradient, Tensor) else None
        found = iter(
            torch.autograd.grad(
                loss, edges, gradient, retain_graph=True, allow_unused=True, materialize_grads=False
            )
        )
        return {
            slot: packed(value, [_or_zeros(next(found), part) for part in unpacked(value)])
            for slot, value in self.outputs.items()
        }

    def replay(
        self,
        values: Mapping[int, Tensor],
        left: RecordLayout | None = None,
        *,
        seed: int = 0,
        is_double: bool = False,
    ) -> Replay:
        """Run the program on other values.

        Args:
            values: What to put in the place of roots, by slot.
            left: The records that are left, if not all: the first ones.
            seed: Of torch's generators.
            is_double: Whether everything runs in float64.
        """
        rows, left = self.rows, left or self.rows
        convert = _to_double if is_double else lambda value: value
        leaves: dict[int, list[Tensor]] = {}
        env: dict[int, Any] = {}
        terms = {id(each): convert(each.detach().clone()).requires_grad_() for each in self.terms}

        def argument(value: Any, of: Operation | None) -> Any:
            if type(value) is SlotRef:
                return value.value if value.slot == EARLIER else env[value.slot]
            if isinstance(value, torch.Size):
                return torch.Size([size(each, of) for each in value])
            if isinstance(value, Tensor):
                if id(value) in terms:
                    return terms[id(value)]
                # A constant with one entry per row, as the user made it for fewer of them.
                is_by_row = value.ndim in (1, 2) and value.shape[0] == rows.num_rows
                return convert(value[: left.num_rows] if is_by_row and left != rows else value)
            if is_double and isinstance(value, torch.dtype) and value.is_floating_point:
                return torch.float64
            return size(value, of)

        def size(value: Any, of: Operation | None) -> Any:
            if left != rows and of is not None and self.is_size(value, of):
                return left.num_rows if value == rows.num_rows else left.num_units
            return value

        def run(operation: Operation) -> Any:
            func = self._substitutes.get(operation.func, operation.func)
            if is_double and operation.name in ("float", "half", "bfloat16"):
                func = Tensor.double
            given = operation.args, operation.kwargs
            args, kwargs = mapped(lambda leaf: argument(leaf, operation), given)
            with ExitStack() as stack:
                stack.enter_context(torch.set_grad_enabled(operation.is_grad_enabled))
                for device, dtype in zip(("cpu", "cuda"), operation.autocast, strict=True):
                    if dtype is not None and not is_double:
                        stack.enter_context(torch.autocast(device, dtype))
                return func(*args, **kwargs)

        held = [each.device for value in self.tape.roots.values() for each in unpacked(value)]
        devices = {each for each in held if each.type == "cuda"}
        with torch.random.fork_rng(devices), torch.enable_grad():
            # Not torch.manual_seed: where CUDA has not begun, it writes down where it was called.
            torch.default_generator.manual_seed(seed)
            for device in devices:
                torch.cuda.default_generators[device.index].manual_seed(seed)
            for slot, root in self.tape.roots.items():
                value = values.get(slot, root)
                parts = [convert(each.detach()) for each in unpacked(value)]
                if slot in self.outputs:
                    parts = leaves[slot] = [each.clone().requires_grad_() for each in parts]
                env[slot] = packed(value, [each.clone() for each in parts])
            for place, operation in enumerate(self.tape.operations):
                try:
                    result = run(operation)
                except Exception:
                    if self.loss in env and place not in self.path:
                        continue  # a metric, on values that it does not take
                    raise
                if operation.handling is not Handling.WRITE:  # what that wrote to is there already
                    env.update(zip(operation.outs, tree_leaves(result), strict=True))
            inputs = [*(each for some in leaves.values() for each in some), *terms.values()]
            found: Sequence[Tensor | None] = [None] * len(inputs)
            loss = env[self.loss]
            if isinstance(loss, Tensor) and loss.requires_grad and inputs:
                gradient = mapped(lambda leaf: argument(leaf, None), self.gradient)
                found = torch.autograd.grad(loss, inputs, gradient, allow_unused=True)
        at = iter([_or_zeros(grad, each) for grad, each in zip(found, inputs, strict=True)])
        grads = {
            slot: packed(self.tape.roots[slot], [next(at) for _ in some])
            for slot, some in leaves.items()
        }
        return grads, list(at), env


def numbers_of(operation: Operation) -> list[float]:
    """Python's numbers that an operation was given, but for its own default values."""
    leaves = operation.leaves
    if operation.kwargs:
        defaults, given = _defaults_of(operation.func), dict(operation.kwargs)
        for name, value in operation.kwargs.items():
            if name in defaults and defaults[name] == value:
                del given[name]
        leaves = leaves_in((operation.args, given))
    return [leaf for leaf in leaves if isinstance(leaf, int | float) and type(leaf) is not bool]


@lru_cache
def _defaults_of(func: Callable[..., Any]) -> dict[str, Any]:
    try:
        parameters = inspect.signature(func).parameters.values()
    except (TypeError, ValueError):  # most functions of torch's are written in C++
        return {}
    return {each.name: each.default for each in parameters if type(each.default) in (int, float)}


def whole(value: Tensor) -> Tensor:
    """Return a DTensor's full tensor, any other as it is; detached."""
    value = value.detach()
    return value.full_tensor() if is_dtensor(value) else value  # type: ignore[attr-defined]


def _or_zeros(grad: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like).detach() if grad is None else grad.detach()


def _to_double(value: Tensor) -> Tensor:
    parts = [each.double() if each.is_floating_point() else each for each in unpacked(value)]
    return packed(value, parts)
