"""Where the samples lie in the output of each operation that touches a parameter.

[Note: two sizes] A dimension's size does not tell whether it holds samples: with as many tokens as
samples, position ids `[T]` look like a batch. So the axes are *learned*: the model runs once more
with another number of samples, and the dimension whose size has changed is the one. An output that
has not changed at all does not depend on the batch: it is made of parameters alone.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from unison.capture.parts import local
from unison.capture.tracked import Tracked
from unison.errors import BadInput, UnsupportedOperation
from unison.ops import Layout
from unison.torch_internals import is_dtensor

NO_AXIS = None  # made of parameters alone
Axis = int | None
Axes = tuple[Axis, tuple[Axis, ...]]  # of the output, of each tensor argument


class Call(NamedTuple):
    """An operation that touches parameters: function, names and shapes.

    The first three are its *kind*: the call without sizes.

    Attributes:
        func: The torch function.
        names: The parameters it touches.
        ndims: Of its tensor arguments, parameters among them.
        shapes: Likewise.
        batch: The number of samples.
    """

    func: Callable[..., Any]
    names: tuple[str, ...]
    ndims: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    batch: int

    def __str__(self) -> str:
        name = getattr(self.func, "__name__", str(self.func))
        return f"{name}({', '.join(self.names)})"


KIND = slice(3)  # of a call


class Seen(NamedTuple):
    """A call with its output.

    Attributes:
        call: The call.
        output: The shape of what came out.
        digest: A few numbers made of its values; None where parameters are all that went in.
    """

    call: Call
    output: tuple[int, ...]
    digest: Tensor | None = None


def see(call: Call, output: Any, inputs: Iterable[Any]) -> Seen:
    """Note a call with its output, or with the first tensor of it."""
    items = output if isinstance(output, list | tuple) else [output]
    found = next(item for item in items if isinstance(item, Tensor)).detach()
    digest = None
    if any(isinstance(value, Tensor) and type(value) is not Tracked for value in inputs):
        first = local(found)
        first = (torch.view_as_real(first.resolve_conj()) if first.is_complex() else first).double()
        digest = torch.stack([first.sum(), first.square().sum()])
        if is_dtensor(found):
            dist.all_reduce(digest, group=found.device_mesh.get_group())
    return Seen(call, tuple(found.shape), digest)


@dataclass
class AxisTable:
    """The dimension of the samples by kind of call, or by call where kinds differ.

    Attributes:
        by_kind: The calls of each kind that were seen, with their axes.
        is_traced: Whether rows lie where values put them, so that samples are followed through
            every pass: see [Note: the sample of every row]. The table then only knows of what is
            made without the batch, such as one class token for every sample.
        rows_per_sample: By kind of call, where every batch must have as many rows per sample as the
            one that was learned from; None where it need not.
        is_of_graph: Whether it is asked for calls of a graph. Dynamo looks into functions that are
            written in Python, and calls what they call: `nn.RMSNorm` is `F.rms_norm` to one and
            `torch.rms_norm` to the other. So a function that was not seen is looked up by
            parameters and shapes.
    """

    by_kind: dict[tuple, dict[Call, Axes]] = field(default_factory=dict)
    is_traced: bool = False
    rows_per_sample: dict[tuple, set[Fraction]] | None = None
    is_of_graph: bool = False


def axes_of(table: AxisTable, call: Call) -> Axes | None:
    """The dimensions that hold the samples in the output and in each tensor argument.

    None if the call was not seen when the axes were learned.
    """
    seen = table.by_kind.get(call[KIND], {})
    if call in seen:
        return seen[call]
    ways = set(seen.values())
    if len(ways) > 1:
        ways = {axes for each, axes in seen.items() if resembles(call, each, axes)}
    if not ways and table.is_of_graph:
        ways = {
            axes
            for kind, calls in table.by_kind.items()
            for each, axes in calls.items()
            if kind[1:] == call[KIND][1:] and resembles(call, each, axes)
        }
    return ways.pop() if len(ways) == 1 else None


def layout_of(table: AxisTable, call: Call, axes: Axes | None, output: Tensor) -> Layout:
    """Where samples lie in what came out of a call.

    Args:
        table: What was learned.
        call: The call.
        axes: What `axes_of` says of it.
        output: What came out.

    Raises:
        UnsupportedOperation: If the call was not seen when the axes were learned, or samples
            have not as many rows as they had: then they need not have as many each.
    """
    if axes is None:
        refuse_unseen(call)
    axis = axes[0]
    assert axis is not None
    expected = (table.rows_per_sample or {}).get(call[KIND])
    num_rows = output.shape[axis]
    if expected is not None and Fraction(num_rows, max(call.batch, 1)) not in expected:
        raise UnsupportedOperation(
            f"{call} has {num_rows} rows for {call.batch} samples, and had "
            f"{', '.join(map(str, sorted(expected)))} per sample when it was learned where "
            "samples lie: the number of rows depends on Python's reading of values. Select "
            "rows with a mask or with indices that are tensors, whose samples are followed"
        )
    return Layout(call.batch, axis)


def learn_common(
    table: AxisTable, many: list[Seen], fewer: list[Seen], sizes: tuple[int, int]
) -> None:
    """As `learn_calls`, of the calls that both passes have made, as far as they tell anything."""
    by_kind: dict[tuple, list[Seen]] = {}
    for seen in fewer:
        by_kind.setdefault(seen.call[KIND], []).append(seen)
    kinds = [seen.call[KIND] for seen in many]
    for first in many:
        second = by_kind.get(first.call[KIND], [])
        if len(second) != kinds.count(first.call[KIND]):
            continue  # another path
        try:
            learn_calls(table, [first], [second[0]], sizes)
        except UnsupportedOperation:
            by_kind[first.call[KIND]] = []  # what is not known is asked the trace
        else:
            kinds.remove(first.call[KIND])
            del second[0]


def learn_calls(
    table: AxisTable, many: list[Seen], fewer: list[Seen], sizes: tuple[int, int]
) -> int:
    """Compare two passes over different numbers of samples, `sizes`.

    Returns:
        How many calls were new.

    Raises:
        UnsupportedOperation: If the passes did not make the same calls, or samples have no
            place of their own.
    """
    if [seen.call[KIND] for seen in many] != [seen.call[KIND] for seen in fewer]:
        raise UnsupportedOperation(
            "the model does other operations for another number of samples; write its forward "
            "so that it does not depend on the size of the batch"
        )
    num_new = 0
    for first, second in zip(many, fewer, strict=True):
        call = first.call
        arguments = tuple(
            _changed(a, b, call) for a, b in zip(call.shapes, second.call.shapes, strict=True)
        )
        found = _samples(first, second, sizes), arguments
        if table.rows_per_sample is not None and found[0] is not None:
            ratio = Fraction(first.output[found[0]], sizes[0])
            table.rows_per_sample.setdefault(call[KIND], set()).add(ratio)
        num_new += axes_of(table, call) is None
        if table.by_kind.setdefault(call[KIND], {}).setdefault(call, found) != found:
            raise UnsupportedOperation(
                f"{call} is called twice with the same shapes {call.shapes}, but with samples "
                "in different dimensions; learn from a batch with another number of samples"
            )
    return num_new


def refuse_unseen(call: Call) -> NoReturn:
    """Raise for a call of which nothing was learned."""
    raise UnsupportedOperation(
        f"{call} was not seen when it was learned where samples lie: the model takes another path "
        "for this batch. Where a schedule changes what the model does, call engine.detach() and "
        "make_private again: the same engine counts on"
    )


def resembles(call: Call, seen: Call, axes: Axes) -> bool:
    """Whether two calls differ in nothing but the number of samples."""
    for axis, now, then in zip(axes[1], call.shapes, seen.shapes, strict=True):
        for dim, (a, b) in enumerate(zip(now, then, strict=True)):
            if (a * seen.batch != b * call.batch) if dim == axis else a != b:
                return False
    return True


def _samples(first: Seen, second: Seen, sizes: tuple[int, int]) -> Axis:
    """The dimension of the samples, as many rows for each."""
    axis = _changed(first.output, second.output, first.call)
    one, other = first.digest, second.digest
    if (
        axis is NO_AXIS
        and one is not None
        and other is not None
        and not torch.allclose(one, other, rtol=1e-6, atol=0.0, equal_nan=True)
    ):
        raise UnsupportedOperation(
            f"{first.call} has no place for samples, and yet changes with them: a sum or a mean "
            "over the batch went in, so that one sample's gradient depends on the others"
        )
    if axis is not None and first.output[axis] * sizes[1] != second.output[axis] * sizes[0]:
        raise UnsupportedOperation(
            f"{first.call}: dimension {axis} has {first.output[axis]} rows for {sizes[0]} samples "
            f"and {second.output[axis]} for {sizes[1]}, so that samples do not have as many each; "
            "write the operation so that all samples have the same number of rows"
        )
    return axis


def _changed(first: tuple[int, ...], second: tuple[int, ...], call: Call) -> Axis:
    """The one dimension in which two shapes differ."""
    if len(first) != len(second):
        raise UnsupportedOperation(f"{call} has other dimensions for another number of samples")
    dims = [dim for dim, (a, b) in enumerate(zip(first, second, strict=True)) if a != b]
    if len(dims) > 1:
        raise UnsupportedOperation(
            f"{call}: dimensions {dims} both change with the number of samples, so that samples "
            "mix; a sample must have a place of its own"
        )
    return dims[0] if dims else NO_AXIS


def batch_size_of(batch: Any) -> int:
    """Return the number of samples: the common size of the tensors' first dimension.

    Raises:
        BadInput: If the tensors do not agree.
    """
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    sizes = {leaf.shape[0] if leaf.ndim else None for leaf in tensors}
    if len(sizes) != 1 or None in sizes:
        raise BadInput(
            "expected a batch of tensors with one sample per row of dimension 0, found sizes "
            f"{sorted(map(str, sizes))}"
        )
    return sizes.pop()  # type: ignore[return-value]
