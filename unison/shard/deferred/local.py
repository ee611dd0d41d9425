"""Part of a tensor's values, without making the whole tensor.

What works element by element needs no more elements than are asked for: fills with a constant or
a described draw, of the whole tensor or of a box of it, and arithmetic with numbers. `part_of`
turns the tape behind a tensor into a function of an element range, or says that it cannot.

[Note: exactly rounded] Only arithmetic that IEEE 754 rounds exactly is done here: the result of one
element then cannot depend on which other elements are computed beside it. `exp` or `erfinv` could,
by the vector loop and its scalar tail, so they are evaluated on the whole tensor (replay.py).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unison.rng import Box
from unison.shard.deferred.replay import Streams, evaluate, one_thread
from unison.shard.deferred.tape import Fill, Geometry, Op, Operand, Version

aten = torch.ops.aten

Part = Callable[[int, int], Tensor]  # (low, high) -> elements [low, high) of a storage, on the CPU

# Elements evaluated at a time: the working memory is a few times this. One thread is enough for so
# little arithmetic, and several would wait for each other longer than they compute.
CHUNK = 1 << 18
MAX_DEPTH = 50  # operations on top of each other; a loop over rows makes thousands

# Each with a tensor first and numbers after it; exactly rounded, whatever the dtype.
EXACT = {
    aten.abs.default, aten.abs_.default,
    aten.add.Tensor, aten.add_.Tensor, aten.add.Scalar, aten.add_.Scalar,
    aten.clamp.default, aten.clamp_.default, aten.clamp_min.default, aten.clamp_min_.default,
    aten.clamp_max.default, aten.clamp_max_.default,
    aten.div.Tensor, aten.div_.Tensor, aten.div.Scalar, aten.div_.Scalar,
    aten.mul.Tensor, aten.mul_.Tensor, aten.mul.Scalar, aten.mul_.Scalar,
    aten.neg.default, aten.neg_.default,
    aten.rsub.Scalar,
    aten.sub.Tensor, aten.sub_.Tensor, aten.sub.Scalar, aten.sub_.Scalar,
}  # fmt: skip
COPIES = {aten.clone.default, aten._to_copy.default}


def fill_part_(out: Tensor, operand: Operand, start: int, streams: Streams) -> None:
    """Fill `out` with elements [start, start + out.numel()) of an operand, in row-major order.

    Args:
        out: [num_elements], on any device; another dtype than the operand's gets one more rounding.
        operand: What to evaluate.
        start: The first element.
        streams: Where draws come from.
    """
    if out.numel() == 0:
        return
    geometry = operand.geometry
    part = part_of(operand.version, geometry.dtype, streams) if geometry.is_contiguous else None
    if part is None:
        values = evaluate(operand, streams).reshape(-1)
        out.copy_(values[start : start + out.numel()])
        return
    first = geometry.offset + start
    drawn = _one_draw(operand, first, first + out.numel())
    if drawn is not None and out.dtype == geometry.dtype:
        op, box = drawn
        streams.fill_(out, op, box)  # the same bits on every device
        return
    for low in range(0, out.numel(), CHUNK):
        high = min(low + CHUNK, out.numel())
        values = part(first + low, first + high)
        with one_thread():
            out[low:high].copy_(values)


def part_of(
    version: Version, dtype: torch.dtype, streams: Streams, depth: int = MAX_DEPTH
) -> Part | None:
    """Return what evaluates element ranges of a storage seen as `dtype`, or None if it cannot."""
    op = version.op
    if op is None:
        return lambda low, high: torch.zeros(high - low, dtype=dtype)
    if depth == 0:
        return None
    if isinstance(op.call, Fill):
        return _of_fill(op, dtype, streams, depth)
    if op.call is aten.copy_.default:
        return _of_copy(op, dtype, streams, depth)
    if op.call in COPIES or (op.call in EXACT and dtype.is_floating_point):
        is_in_place = op.call._schema.is_mutable  # type: ignore[union-attr]
        rule = _of_arithmetic_in_place if is_in_place else _of_arithmetic
        return rule(op, dtype, streams, depth)
    return None


@dataclass(frozen=True)
class Cut:
    """The elements of a region that lie in a range of its storage.

    Attributes:
        first: Row-major index, in the region, of the first element to make.
        last: One past the last.
        where: Their places in the range.
        keep: Which of the elements made lie in the range; all of them if None.
    """

    first: int
    last: int
    where: slice | Tensor
    keep: Tensor | None = None

    def is_all(self, num_elements: int) -> bool:
        """Whether a range of this length lies in the region."""
        return isinstance(self.where, slice) and self.where == slice(0, num_elements)

    def put(self, values: Tensor, into: Tensor) -> None:
        """Write the values of elements first ... last into a range's values."""
        into[self.where] = (values if self.keep is None else values[self.keep]).to(into.dtype)


@dataclass(frozen=True)
class Region:
    """A box of a storage as rows: each `run` consecutive elements, from increasing `starts`."""

    starts: Tensor  # [num_rows], int64
    run: int

    @classmethod
    def of(cls, geometry: Geometry) -> "Region | None":
        """Return the region of a tensor, or None if its order is not that of its storage."""
        if geometry.numel == 0:
            return cls(torch.empty(0, dtype=torch.int64), 0)
        run, dims = 1, [
            (size, stride)
            for size, stride in zip(geometry.shape, geometry.stride, strict=True)
            if size != 1
        ]  # fmt: skip
        while dims and dims[-1][1] == run:
            run *= dims.pop()[0]
        starts, span = torch.tensor([geometry.offset]), run
        for size, stride in reversed(dims):
            if stride < span:
                return None  # transposed, or overlapping
            starts = (torch.arange(size)[:, None] * stride + starts).view(-1)
            span = (size - 1) * stride + span
        return cls(starts, run)

    def cut(self, low: int, high: int) -> Cut:
        """Return what lies in [low, high)."""
        begin = int(torch.searchsorted(self.starts, low - self.run, right=True))
        end = max(int(torch.searchsorted(self.starts, high)), begin)
        if end - begin <= 1:
            start = int(self.starts[begin]) if end > begin else low
            bottom, top = max(low, start), min(high, start + self.run) if end > begin else low
            first = begin * self.run + bottom - start
            return Cut(first, first + top - bottom, slice(bottom - low, top - low))
        places = (self.starts[begin:end, None] + torch.arange(self.run)).view(-1)
        keep = (places >= low) & (places < high)
        return Cut(begin * self.run, end * self.run, places[keep] - low, keep)


def _of_fill(op: Op, dtype: torch.dtype, streams: Streams, depth: int) -> Part | None:
    (target,) = op.args
    region = Region.of(target.geometry)
    before = part_of(target.version, dtype, streams, depth - 1)
    if region is None or before is None or target.geometry.dtype != dtype:
        return None

    def part(low: int, high: int) -> Tensor:
        cut = region.cut(low, high)
        drawn = torch.empty(cut.last - cut.first, dtype=dtype)
        streams.fill_(drawn, op, Box.flat(cut.first, cut.last, target.geometry.numel))
        if cut.is_all(high - low):
            return drawn
        values = before(low, high)
        cut.put(drawn, values)
        return values

    return part


def _of_copy(op: Op, dtype: torch.dtype, streams: Streams, depth: int) -> Part | None:
    target, source = op.args[:2]
    region = Region.of(target.geometry)
    if not isinstance(source, Operand) or region is None or target.geometry.dtype != dtype:
        return None
    if source.geometry.shape != target.geometry.shape or not source.geometry.is_contiguous:
        return None
    before = part_of(target.version, dtype, streams, depth - 1)
    copied = part_of(source.version, source.geometry.dtype, streams, depth - 1)
    if before is None or copied is None:
        return None
    offset = source.geometry.offset

    def part(low: int, high: int) -> Tensor:
        cut = region.cut(low, high)
        values = before(low, high)
        cut.put(copied(offset + cut.first, offset + cut.last), values)
        return values

    return part


def _of_arithmetic(op: Op, dtype: torch.dtype, streams: Streams, depth: int) -> Part | None:
    """A new tensor, made of one that lies in order."""
    source, numbers = op.args[0], op.args[1:]
    made = op.fresh[0]
    if not isinstance(source, Operand) or made is None or not _are_numbers(numbers, op.kwargs):
        return None
    if not (source.geometry.is_contiguous and made[1].is_contiguous and made[1].dtype == dtype):
        return None
    before = part_of(source.version, source.geometry.dtype, streams, depth - 1)
    if before is None or not (op.call in COPIES or source.geometry.dtype.is_floating_point):
        return None
    offset = source.geometry.offset

    def part(low: int, high: int) -> Tensor:
        values = before(offset + low, offset + high)
        if op.call in COPIES:
            return values.to(dtype)
        with one_thread():
            return op.call(values, *numbers, **op.kwargs)  # type: ignore[operator]

    return part


def _of_arithmetic_in_place(
    op: Op, dtype: torch.dtype, streams: Streams, depth: int
) -> Part | None:
    target, numbers = op.args[0], op.args[1:]
    if not isinstance(target, Operand) or not _are_numbers(numbers, op.kwargs):
        return None
    region = Region.of(target.geometry)
    before = part_of(target.version, dtype, streams, depth - 1)
    if region is None or before is None or target.geometry.dtype != dtype:
        return None

    def part(low: int, high: int) -> Tensor:
        values = before(low, high)
        where = region.cut(low, high).where
        with one_thread():
            changed = values[where]
            op.call(changed, *numbers, **op.kwargs)  # type: ignore[operator]
            if isinstance(where, Tensor):  # a slice is a view, changed in place
                values[where] = changed
        return values

    return part


def _are_numbers(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call takes plain numbers beside its tensor, and nothing that scales one of them.

    `add` and `sub` with alpha fuse a product and a sum in vector loops and round twice in tails.
    """
    is_plain = all(value is None or isinstance(value, int | float) for value in args)
    return is_plain and "alpha" not in kwargs and "rounding_mode" not in kwargs


def _one_draw(operand: Operand, low: int, high: int) -> tuple[Op, Box] | None:
    """The fill that alone makes elements [low, high) of an operand's storage, and which of its."""
    op = operand.version.op
    if op is None or not isinstance(op.call, Fill):
        return None
    target = op.args[0].geometry
    start, stop = target.offset, target.offset + target.numel
    if not (target.is_contiguous and target.dtype == operand.geometry.dtype):
        return None
    if not (start <= low and high <= stop):
        return None
    return op, Box.flat(low - start, high - start, target.numel)
