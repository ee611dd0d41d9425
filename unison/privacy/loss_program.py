"""A loss as a program that can be run again: what the tape holds, on other values.

`RecordLayout` says where the records of a batch lie in its tensors, `Program.replay` runs the
user's operations once more with other records in the place of some; how two runs are compared, and
whether code may have run differently, comes after it. What that is for stands in loss_check.py.
"""

import dis
import inspect
import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from unison.privacy.loss_tape import (
    EARLIER,
    OURS,
    Handling,
    LossRecorder,
    Operation,
    Position,
    SlotRef,
    leaves_in,
    mapped,
)
from unison.privacy.sampling import batch_mean, local_batch_mean, packed, unpacked
from unison.torch_internals import has_values, is_dtensor

# A number that one of these is given is a value, and no dimension or size.
ARITHMETIC = {"add", "sub", "rsub", "mul", "div", "divide", "true_divide", "floor_divide", "pow"}
ARITHMETIC |= {"__radd__", "__rsub__", "__rmul__", "__rdiv__", "__rtruediv__", "__rpow__", "where"}
ARITHMETIC |= {"truediv", "floordiv", "mod", "clamp", "clip", "maximum", "minimum", "addcmul"}
# They make truths of values, or of other truths.
TRUTHS = {"gt", "lt", "ge", "le", "eq", "ne", "__bool__", "any", "all", "logical_and"}
TRUTHS |= {"logical_or", "logical_not", "__and__", "__or__", "__invert__"}
SUBSTITUTES: dict[Any, Callable[..., Any]] = {batch_mean: local_batch_mean}  # not to run again
_DISPATCH = ("torch/overrides.py", "torch/_tensor.py")
SHAPE_FUNCTIONS = {"view", "reshape", "expand", "unflatten", "resize", "zeros", "ones", "empty"}

Gradients = dict[int, Tensor]  # of the module's outputs, by slot
Replay = tuple[Gradients, list[Tensor], dict[int, Any]]
"""Gradients of outputs; of terms (see `Program`), in order; and every result by slot."""


class RecordLayout(NamedTuple):
    """Where the records of a batch lie.

    Attributes:
        num_units: Records in all granules together, padding included.
        num_rows: Rows of tensors that have all rows of every record, one record's after the other.
        dim: The dimension that holds them, where a tensor's shape leaves a choice.
    """

    num_units: int
    num_rows: int
    dim: int


def first_units(layout: RecordLayout, num_units: int) -> RecordLayout:
    """Return the layout of the first records alone."""
    num_rows = num_units * layout.num_rows // layout.num_units
    return RecordLayout(num_units, num_rows, layout.dim)


def record_dim(layout: RecordLayout, value: Any) -> int | None:
    """The dimension of a tensor that holds the records; None if there is none."""
    if not isinstance(value, Tensor):
        return None
    parts = unpacked(value)
    shape, units = parts[0].shape, layout.num_units // len(parts)
    if units == 0 or parts[0].numel() == 0:
        return None
    dims = [dim for dim in (layout.dim, *range(len(shape))) if dim < len(shape)]
    for size in (units * layout.num_rows // layout.num_units, units):
        exact = [dim for dim in dims if shape[dim] == size]
        if exact:
            return exact[0]
    return 0 if len(shape) and shape[0] % units == 0 else None  # tokens are flattened into it


def by_record(layout: RecordLayout, value: Tensor) -> Tensor:
    """Return one line per record [units, elements]."""
    dim = record_dim(layout, value)
    assert dim is not None
    parts = unpacked(value)
    units = layout.num_units // len(parts)
    return torch.cat([whole(each).movedim(dim, 0).reshape(units, -1) for each in parts])


def all_by_record(
    layout: RecordLayout, values: Mapping[int, Tensor]
) -> Iterator[tuple[int, Tensor]]:
    """Yield the slot and the lines of each value that holds records."""
    for slot, value in values.items():
        if record_dim(layout, value) is not None:
            yield slot, by_record(layout, value)


def laid_out(layout: RecordLayout, value: Tensor, lines: Tensor) -> Tensor:
    """Return a value like another one, with the records of these lines."""
    dim = record_dim(layout, value)
    assert dim is not None
    parts = unpacked(value)
    made = []
    for each, own in zip(parts, lines.chunk(len(parts)), strict=True):
        shape = each.movedim(dim, 0).shape
        count = shape[0] * len(parts) * len(own) // layout.num_units
        rows = own.reshape(count, *shape[1:]).movedim(0, dim).contiguous()
        if is_dtensor(each):
            from torch.distributed.tensor import distribute_tensor  # a second to import

            mesh, placements = each.device_mesh, each.placements
            rows = distribute_tensor(rows, mesh, placements, src_data_rank=None)
        made.append(rows)
    return packed(value, made)


@dataclass(eq=False)
class Program:
    """A tape that has ended, with the loss that was sent back; it can be run on other values.

    Attributes:
        tape: The tape.
        loss: The slot of the loss.
        path: The operations that lead to it, by place, last first.
        gradient: What the user sent back in the place of 1, as the tape stores it.
        rows: Where records lie.
        outputs: Those of the module that take gradients, by slot.
        terms: Tensors on the way to the loss that take gradients and are not made of data.
        numbers: Python's numbers on the way to the loss.
        kind: The path that the user's code took: neither values nor batch sizes.
        draws: Random numbers that the last replay of the batch itself drew on the way to the loss,
            by place and number of the result; none through which gradients flow.
    """

    tape: LossRecorder
    loss: int
    path: dict[int, Operation]
    gradient: Any
    rows: RecordLayout
    outputs: dict[int, Tensor]
    terms: list[Tensor]
    numbers: list[float]
    kind: tuple
    draws: dict[Any, Tensor] = field(default_factory=dict)

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
        return self._may_be_size(number, operation)

    def _may_be_size(self, number: float, operation: Operation) -> bool:
        # A number that is written into the code is no size, though it may be as large.
        is_written = operation.name not in ARITHMETIC or number in operation.constants
        roots, sizes = self.tape.roots, {self.rows.num_rows, self.rows.num_units}
        asked = (roots[slot].shape for slot in self.tape.sized if slot in roots)
        return not is_written and any(not sizes.isdisjoint(shape) for shape in asked)

    def first_records(self, left: RecordLayout) -> dict[int, Tensor]:
        """The records that are left of every root, by slot; none where it stays as it is."""
        if left == self.rows:
            return {}
        roots = self.tape.roots
        return {
            slot: laid_out(self.rows, roots[slot], matrix[: left.num_units])
            for slot, matrix in all_by_record(self.rows, roots)
        }

    def beside(self) -> dict[Any, Tensor]:
        """What stands beside the batch on the way to the loss, and holds records: noise, weights.

        Constants that the user's code made, by identity, and random numbers, as `replay` takes
        them. Programs of one kind have the same, in the same order.
        """
        terms, found = set(map(id, self.terms)), dict[Any, Tensor]()
        for each in self.path.values():
            for leaf in each.leaves:
                if isinstance(leaf, Tensor) and id(leaf) not in terms:
                    found[id(leaf)] = leaf
        found |= self.draws
        return {
            key: value for key, value in found.items() if record_dim(self.rows, value) is not None
        }

    def first_draws(self, left: RecordLayout) -> dict[Any, Tensor]:
        """Random numbers of the records that are left: kernels draw others for fewer records."""
        cut = dict(self.draws)
        for key, matrix in all_by_record(self.rows, self.draws):
            cut[key] = laid_out(self.rows, self.draws[key], matrix[: left.num_units])
        return cut

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
        given: Mapping[Any, Tensor] | None = None,
        has_multiples: bool = False,
        draws_again: bool = False,
    ) -> Replay:
        """Run the program on other values.

        Args:
            values: What to put in the place of roots, by slot.
            left: The records that are left, if not all: the first ones.
            seed: Of torch's generators.
            is_double: Whether everything runs in float64.
            given: What to put in the place of constants, by identity, and of random numbers.
            has_multiples: Whether multiples of the number of records, and their inverses, are
                taken for what the user's code made of it: `x.shape[0] * 3`, `1 / len(x)`.
            draws_again: Whether operations draw the random numbers that they drew.
        """
        given = given or {}
        is_changed = values or given or seed or is_double or draws_again
        keeps_draws = not is_changed and left in (None, self.rows)
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
                if id(value) in given:
                    return convert(given[id(value)])
                # A constant with one entry per row, as the user made it for fewer of them.
                is_by_row = value.ndim in (1, 2) and value.shape[0] == rows.num_rows
                return convert(value[: left.num_rows] if is_by_row and left != rows else value)
            if is_double and isinstance(value, torch.dtype) and value.is_floating_point:
                return torch.float64
            return size(value, of)

        def size(value: Any, of: Operation | None) -> Any:
            if left != rows and of is not None and self.is_size(value, of):
                return left.num_rows if value == rows.num_rows else left.num_units
            if has_multiples and of is not None and self._may_be_size(value, of):
                power = multiple_of(value, rows.num_units)
                resized = value * (left.num_units / rows.num_units) ** power
                return round(resized) if isinstance(value, int) else resized
            return value

        def run(operation: Operation) -> Any:
            func = SUBSTITUTES.get(operation.func, operation.func)
            if is_double and operation.name in ("float", "half", "bfloat16"):
                func = Tensor.double
            own = operation.args, operation.kwargs
            args, kwargs = mapped(lambda leaf: argument(leaf, operation), own)
            with ExitStack() as stack:
                stack.enter_context(torch.set_grad_enabled(operation.is_grad_enabled))
                for device, dtype in zip(("cpu", "cuda"), operation.autocast, strict=True):
                    if dtype is not None and not is_double:
                        stack.enter_context(torch.autocast(device, dtype))
                return func(*args, **kwargs)

        held = [each.device for value in self.tape.roots.values() for each in unpacked(value)]
        devices = {each for each in held if each.type == "cuda"}
        # Not torch.manual_seed: where CUDA has not begun, it writes down where it was called.
        generators = [torch.default_generator]
        generators += [torch.cuda.default_generators[device.index] for device in devices]

        drawn_from = {g for each in self.tape.operations for g, _ in each.states}
        own = [(each, each.get_state()) for each in drawn_from.difference(generators)]
        generators += [each for each, _ in own]

        def states() -> list[bytes]:
            return [each.get_state().numpy().tobytes() for each in generators if keeps_draws]

        with torch.random.fork_rng(devices), torch.enable_grad(), ExitStack() as undo:
            for each, state in own:  # generators of the user's, which go on as they are
                undo.callback(each.set_state, state)
            for slot, root in self.tape.roots.items():
                value = values.get(slot, root)
                parts = [convert(each.detach()) for each in unpacked(value)]
                if slot in self.outputs:
                    parts = leaves[slot] = [each.clone().requires_grad_() for each in parts]
                env[slot] = packed(value, [each.clone() for each in parts])
            for place, operation in enumerate(self.tape.operations):
                for each in generators:  # so that what one draws moves no numbers of the next
                    each.manual_seed(seed * len(self.tape.operations) + place)
                for each, state in operation.states if draws_again else ():
                    each.set_state(state)
                before = states()
                is_write = operation.handling is Handling.WRITE
                drawn = [given.get((place, i)) for i in range(len(operation.outs))]
                try:
                    if all(isinstance(each, Tensor) for each in drawn) and drawn:
                        made = [convert(each.clone()) for each in drawn if each is not None]
                        for slot, value in zip(operation.outs, made, strict=True):
                            env[slot] = env[slot].copy_(value) if is_write else value
                        continue
                    result = run(operation)
                except Exception:
                    if self.loss in env and place not in self.path:
                        continue  # a metric, on values that it does not take
                    raise
                if not is_write:  # what that wrote to is there already
                    env.update(zip(operation.outs, tree_leaves(result), strict=True))
                if keeps_draws and place in self.path and states() != before:
                    found = [env[slot] for slot in operation.outs]
                    if all(isinstance(each, Tensor) and not each.requires_grad for each in found):
                        copies = [each.clone() for each in found]
                        self.draws |= {(place, i): each for i, each in enumerate(copies)}
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


def program_of(
    tape: LossRecorder, loss: int, path: dict[int, Operation], gradient: Any, rows: RecordLayout
) -> Program:
    """Return the program of a tape; see `Program`."""
    outputs = {slot: tape.roots[slot] for slot, edges in tape.edges.items() if edges}
    terms: dict[int, Tensor] = {}
    kinds: list[tuple] = []
    numbers: list[float] = []
    for each in path.values():
        numbers += numbers_of(each)
        kind: list[Any] = [each.name, len(each.outs), each.is_grad_enabled]
        for leaf in each.leaves:
            if isinstance(leaf, Tensor):
                kind.append((leaf.ndim, leaf.requires_grad))
                if leaf.requires_grad:
                    terms[id(leaf)] = leaf
            else:
                is_dim = isinstance(leaf, int) and -8 <= leaf <= 8  # or a truth
                is_dim &= each.name not in ARITHMETIC or isinstance(leaf, bool)
                is_told = is_dim or isinstance(leaf, str | torch.dtype)
                kind.append(leaf if is_told else type(leaf))
        kinds.append(tuple(kind))
    about = tuple(kinds), len(outputs), len(terms), len(tape.inputs)
    return Program(tape, loss, path, gradient, rows, outputs, list(terms.values()), numbers, about)


def scales_of(program: Program, *, of_host: bool = False) -> list[float]:
    """Numbers on the way to the loss, and those in tensors that are not made of data.

    Args:
        program: The program.
        of_host: Whether to wait for no GPU. Else what may hold one row is left out, too.
    """
    found = [
        leaf.item()
        for each in program.path.values()
        for leaf in each.leaves
        if type(leaf) is Tensor and leaf.numel() == 1 and has_values()
        if (leaf.is_cpu if of_host else leaf.ndim == 0)
    ]
    return [*program.numbers, *found]


def multiple_of(number: Any, size: int) -> int:
    """1 if a number is a multiple of a size, -1 if its inverse is one, 0 if neither."""
    if type(number) not in (int, float) or number == 0 or not math.isfinite(number):
        return 0
    for power in (1, -1):
        quotient = number**power / size
        if round(quotient) != 0 and math.isclose(quotient, round(quotient), rel_tol=1e-9):
            return power
    return 0


def is_explained(a: tuple[int, float], b: tuple[int, float]) -> bool:
    """Whether a number is the same in two passes, or the same multiple of their rows, or inverse.

    Args:
        a: The number of rows of a pass, and the number.
        b: Of the other.
    """
    (m, x), (n, y) = a, b
    return x == y or (
        bool(multiple_of(x, m) and multiple_of(y, n))
        and (math.isclose(x * n, y * m) or math.isclose(x * m, y * n))
    )


# Of a number of rows; 0 where it says nothing.
_LAWS: list[Callable[[int], float]] = [
    lambda n: n,
    lambda n: n**0.5,
    lambda n: n**1.5,
    lambda n: n**2,
    lambda n: n**3,
    lambda n: n + 1,
    lambda n: n - 1,
    math.log,
    math.log1p,
]


def is_function_of_size(history: Sequence[tuple[int, float]]) -> bool:
    """Whether a number seems to say how many rows there are, rather than which step it is.

    Python tells nobody what a number was made of. One of a schedule differs when a number of rows
    comes again; one that was made of it is the same, and was another in between.

    Args:
        history: Numbers of rows of some passes, and the number in each of them.
    """
    by_size: dict[int, float] = {}
    num_returns, last = 0, math.nan
    for size, number in history:
        num_returns += size in by_size and number != last
        if by_size.setdefault(size, number) != number:
            return False
        last = number
    by_size.pop(0, None)
    if num_returns >= 3 and len(set(by_size.values())) >= 3:
        return True
    for law, power in itertools.product(_LAWS, (1, -1)):
        of_law = {size: law(size) ** power for size in by_size if law(size)}
        if len(of_law) < 2:
            continue
        first = next(iter(of_law))
        ratios = {size: each / of_law[first] for size, each in of_law.items()}
        # A ratio of small numbers may be chance: then three sizes say it.
        is_plain = all(
            math.isclose(each, Fraction(each).limit_denominator(64), rel_tol=1e-9)
            for each in ratios.values()
        )
        if len(of_law) >= 2 + is_plain and all(
            math.isclose(by_size[size], by_size[first] * each, rel_tol=1e-9)
            for size, each in ratios.items()
        ):
            return True
    if len(by_size) < 4:
        return False
    for power in (1, -1):  # a + b·n, or a + b/n
        points = [(size**power, number) for size, number in by_size.items()]
        (x, y), (x1, y1) = points[0], points[-1]
        if all(math.isclose((b - y) * (x1 - x), (y1 - y) * (a - x)) for a, b in points):
            return True
    return False


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


# --- comparing replays ----------------------------------------------------------------------------

FLOAT64_TOLERANCE = 1e-9  # of a row's largest element
TOLERANCE = {torch.float32: 1e-4, torch.float16: 3e-2, torch.bfloat16: 3e-2}  # of the self-check
ROUNDING = 16  # units of the usual gradient's largest element


def where_rows_meet(
    program: Program,
    base: dict[int, Any],
    other: dict[int, Any],
    kept: Tensor,
    rows: RecordLayout,
) -> str:
    """Name the operation where rows meet."""
    for operation in program.tape.operations:
        for slot in operation.outs:
            a, b = base.get(slot), other.get(slot)
            if not isinstance(a, Tensor) or not isinstance(b, Tensor) or a.shape != b.shape:
                continue
            is_by_row = record_dim(rows, a) is not None
            if is_by_row and rows_differ(a, b, kept, rows, FLOAT64_TOLERANCE) is not None:
                return f"rows meet in {operation}"
    for place in sorted(program.path):
        made = [base.get(slot) for slot in program.path[place].outs]
        has_tensor = any(isinstance(each, Tensor) for each in made)
        if has_tensor and all(record_dim(rows, each) is None for each in made):
            return f"rows meet in or after {program.path[place]}"
    return "see the loss"


def is_rounding(grads: Gradients, usual: Gradients) -> bool:
    """Whether gradients are no larger than what rounding leaves of usual ones."""

    def largest(value: Tensor) -> float:
        parts = (whole(each) for each in unpacked(value))
        return max((float(each.abs().max()) for each in parts if each.numel()), default=0.0)

    return all(
        largest(grad) <= ROUNDING * torch.finfo(usual[slot].dtype).eps * largest(usual[slot])
        for slot, grad in grads.items()
    )


def far_values(matrix: Tensor, generator: torch.Generator) -> Tensor:
    """Values far away, of a like kind: a probability stays one, a weight stays positive.

    Integers stay in their range: not all kernels check it.
    """
    flat = matrix.flatten()
    # Drawn where they are used, and in parts: logits have hundreds of millions of elements.
    own = torch.Generator(device=matrix.device)
    own.manual_seed(int(torch.randint(0, 1 << 62, (), generator=generator)))
    parts = flat.split(1 << 24) if len(flat) else ()
    low, high = 0.0, 1.0
    if matrix.dtype != torch.bool and parts:
        bounds = torch.stack([torch.stack(_finite(each).aminmax()) for each in parts])
        low, high = float(bounds[:, 0].min()), float(bounds[:, 1].max())
    far = [_far_part(each, flat, low, high, own) for each in parts]
    return torch.cat([flat[:0], *far]).view(matrix.shape)


def _finite(part: Tensor) -> Tensor:
    return part.nan_to_num(0.0, 0.0, 0.0)


def _far_part(part: Tensor, flat: Tensor, low: float, high: float, own: torch.Generator) -> Tensor:
    def uniform() -> Tensor:
        return torch.rand(part.shape, generator=own, device=part.device)

    if part.dtype == torch.bool:
        return uniform() < 0.5
    u = uniform()
    mixed = flat[torch.randint(0, len(flat), part.shape, generator=own, device=part.device)]
    if not part.is_floating_point():
        return torch.where(uniform() < 0.5, mixed, (u * (max(0, int(high)) + 1)).to(part.dtype))
    if low >= 0 and high <= 1:
        return u.to(part.dtype)
    largest = math.log10(torch.finfo(part.dtype).max) / 2  # its square is finite
    power = min(6.0, largest - math.log10(max(abs(low), abs(high), 1.0)))
    scale = 10 ** (power * u) if low < 0 else 10 ** (power * (u - 0.5))
    return (mixed * scale).to(part.dtype)


def rows_differ(
    a: Tensor, b: Any, kept: Tensor, rows: RecordLayout, tolerance: float
) -> int | None:
    """The first kept row in which two tensors differ; None if none does."""
    if record_dim(rows, a) is None:
        return None if is_equal(a, b, tolerance) else 0
    if not isinstance(b, Tensor) or record_dim(rows, b) is None:
        return 0
    kept = kept.to(unpacked(a)[0].device)
    x, y = by_record(rows, a)[kept], by_record(rows, b)[kept]
    if x.shape != y.shape:
        return 0
    is_same = (x == y) | ((x != x) & (y != y))
    if tolerance and x.is_floating_point():
        scale = torch.nan_to_num(x.abs(), posinf=0.0).amax(1, keepdim=True)
        is_same |= (x - y).abs() <= tolerance * scale
    is_wrong = ~is_same.all(1)
    if not bool(is_wrong.any()):
        return None
    return int(kept.nonzero().flatten()[is_wrong.nonzero().flatten()[0]])


def is_same(a: Any, b: Any) -> bool:
    """Whether two results of an operation are the same; NaN is."""
    if isinstance(a, Tensor):
        return is_equal(a, b)
    return a == b or (a != a and b != b)


def is_equal(a: Tensor, b: Any, tolerance: float = 0.0) -> bool:
    """Whether two tensors are equal, up to a part of the largest element; NaN is equal to NaN."""
    if not isinstance(b, Tensor) or a.shape != b.shape:
        return False
    for x, y in zip(map(whole, unpacked(a)), map(whole, unpacked(b)), strict=True):
        is_same = (x == y) | ((x != x) & (y != y))
        if tolerance and x.is_floating_point() and x.numel():
            is_same |= (x - y).abs() <= tolerance * x.abs().max()
        if not bool(is_same.all()):
            return False
    return True


def is_close(a: Tensor, b: Tensor, least: float = 1e-9) -> bool:
    """Whether two tensors differ by what rounding in their dtype may do."""
    tolerance = max(least, TOLERANCE.get(b.dtype, 1e-9))
    # In parts: logits in float64 would take four times the memory that they do.
    parts = [whole(each).reshape(-1).split(1 << 22) for each in (a, b)]
    largest = [
        torch.nan_to_num(each.double().abs(), posinf=0.0).max() for each in parts[1] if len(each)
    ]
    scale = float(torch.stack(largest).max()) if largest else 0.0
    return all(
        torch.allclose(x.double(), y.double(), tolerance, tolerance * scale, equal_nan=True)
        for x, y in zip(*parts, strict=True)
    )


# --- conditions in the user's code ----------------------------------------------------------------


def may_branch(read: Sequence[Position], backward: Sequence[Position]) -> bool:
    """Whether user code between a read and `backward` may depend on the truth of what was read.

    Args:
        read: Where all frames were when a value left torch.
        backward: Where they are when gradients are to flow.
    """
    common = 0
    for (frame, code, offset, _), then in zip(read, backward, strict=False):
        if frame != then[0] or code is not then[1]:
            break
        common += 1
        if offset != then[2]:  # it has run on: what it called then has returned since
            break
    # Functions of the user's that have returned since: to their ends.
    for _, code, offset, line in read[common:]:
        if line is not None and _has_jump(code, offset, None):
            return True
    if not common:
        return True
    # Of all frames that both share, the innermost one alone has run on between them. Where that is
    # a loop of ours, as in unison.train, no code of the user's has.
    _, code, offset, _ = read[common - 1]
    if code.co_filename.startswith(OURS):
        return False
    return _has_jump(code, offset, backward[common - 1][2])


def is_assertion(read: Sequence[Position], backward: Sequence[Position]) -> bool:
    """Whether the truth of what was read decides about an exception alone, which nobody catches.

    Whoever does not go on sends nothing back. Arguments are those of `may_branch`.
    """
    common = sum(then[:2] == now[:2] for then, now in zip(read, backward, strict=False))
    asking = [each for each in read[max(0, common - 1) :] if not _is_dispatch(each[1])]
    if not asking or any(_is_covered(code, offset) for _, code, offset, _ in asking):
        return False
    _, code, offset, _ = asking[-1]
    order = sorted(_instructions(code))
    for at, following in itertools.pairwise(order[bisect_right(order, offset) - 1 :]):
        instruction = _instructions(code)[at]
        if "JUMP" in instruction.opname and "IF" in instruction.opname:
            return _raises(code, instruction.argval) or _raises(code, following)
        if instruction.opname not in ("TO_BOOL", "UNARY_NOT", "NOP", "CACHE"):
            return False  # the truth is kept
    return False


def _is_dispatch(code: CodeType) -> bool:
    """Whether code stands between a call of torch and what is called."""
    return code.co_filename.startswith(OURS) or code.co_filename.endswith(_DISPATCH)


@lru_cache(maxsize=256)
def _is_covered(code: CodeType, offset: int) -> bool:
    """Whether something is done about an exception there: `except`, `finally`, or a `with`."""
    entries = dis.Bytecode(code).exception_entries  # type: ignore[attr-defined]
    return any(each.start <= offset <= each.end for each in entries)


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
