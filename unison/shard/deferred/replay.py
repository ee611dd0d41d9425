"""Replay: the values behind an operand, by running its part of the tape for real.

[Note: where values are computed] All arithmetic is done on the CPU and with one thread, whichever
device the values are for: a GPU divides by a scalar as it multiplies by the reciprocal, its
transcendental functions have other last bits, and a CPU's vector loops have other last bits than
their scalar tails, which move with the number of threads. Random draws alone give the same bits
everywhere (`unison.rng`), and so may be made where they are needed (`fill_part_`).
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from unison.errors import UnsupportedOperation
from unison.rng import Box, Key, fill_
from unison.shard.deferred.tape import (
    FORMULAS,
    Buffer,
    Fill,
    Geometry,
    Op,
    Operand,
    RegisteredInit,
    UnknownValues,
    Version,
    describe,
    is_random,
    leaves,
    mapped,
    ops_behind,
    without_generator,
)


@dataclass(frozen=True)
class Streams:
    """Which random numbers each draw gets.

    Attributes:
        key: The root key.
        owners: For each operation that draws, the name of the first parameter or buffer whose value
            it is part of, and its number among the draws of that name.
    """

    key: Key
    owners: dict[Op, tuple[str, int]]

    @classmethod
    def of(cls, seed: int, named: Iterator[tuple[str, Version]]) -> "Streams":
        """Number the draws behind named versions, in the order given."""
        owners: dict[Op, tuple[str, int]] = {}
        for name, version in named:
            new = [op for op in ops_behind(version) if op.draws and op not in owners]
            owners.update({op: (name, number) for number, op in enumerate(new)})
        return cls(Key.from_seed(seed), owners)

    def fill_(self, out: Tensor, op: Op, box: Box | None = None) -> None:
        """Draw a box of the elements that a recorded fill gives its operand."""
        assert isinstance(op.call, Fill)
        name, number = self.owners.get(op, ("", 0))  # a constant has no stream
        fill_(out, op.call.init, self.key, name, box, number=number)


def evaluate(operand: Operand, streams: Streams | None) -> Tensor:
    """Return the values of an operand, as a tensor on the CPU.

    Args:
        operand: What to evaluate.
        streams: Where draws come from; None if there are none behind the operand.
    """
    storage = contents(operand.version, streams, at_least=operand)
    return operand.geometry.on(storage)


@torch.no_grad()
def contents(
    version: Version, streams: Streams | None, *, at_least: Operand
) -> torch.UntypedStorage:
    """Return a storage with the content of a version, large enough for an operand of it."""
    ops = ops_behind(version)
    refuse_unknown(ops)
    last_use = {buffer: index for index, op in enumerate(ops) for buffer, _ in _places(op)}
    real = _RealStorages(
        [*(place for op in ops for place in _places(op)), (version.buffer, at_least.geometry)]
    )
    for index, op in enumerate(ops):
        _run(op, real, streams)
        for buffer in {buffer for buffer, _ in _places(op)}:
            if last_use[buffer] == index and buffer is not version.buffer:
                real.free(buffer)
    return real.storage(version.buffer)


def refuse_unknown(ops: list[Op]) -> None:
    """Refuse operations that cannot be run again.

    Raises:
        UnsupportedOperation: With the operation and the remedy.
    """
    for op in ops:
        if isinstance(op.call, UnknownValues):
            raise UnsupportedOperation(
                f"it depends on {op.call}, whose values nobody knows; build that inside too"
            )
        if is_random(op.call):
            raise UnsupportedOperation(
                f"it depends on {op.call}, for which unison has no rule. Draw it from normal_, "
                "uniform_ or another basic distribution; or decorate the init function that uses "
                "it with unison.register_init; or load the values instead of drawing them"
            )


def _places(op: Op) -> Iterator[tuple[Buffer, Geometry]]:
    """Where the tensors of an operation lie."""
    yield from ((operand.version.buffer, operand.geometry) for operand in op.operands())
    yield from (place for place in op.fresh if place is not None)


class _RealStorages:
    """The memory that stands for recorded storages during one replay.

    Args:
        places: All tensors that will be asked for: a storage is as large as the largest needs.
    """

    def __init__(self, places: Iterable[tuple[Buffer, Geometry]]) -> None:
        self._storages: dict[Buffer, torch.UntypedStorage] = {}
        self._num_bytes: dict[Buffer, int] = {}
        for buffer, geometry in places:
            needed = geometry.end * geometry.dtype.itemsize
            self._num_bytes[buffer] = max(needed, self._num_bytes.get(buffer, 0))

    def storage(self, buffer: Buffer) -> torch.UntypedStorage:
        """Return the memory of a storage, zeros unless it was written."""
        if buffer not in self._storages:
            zeros = torch.zeros(self._num_bytes[buffer], dtype=torch.uint8)
            self._storages[buffer] = zeros.untyped_storage()
        return self._storages[buffer]

    def tensor(self, operand: Operand) -> Tensor:
        """Return the real tensor of an operand."""
        return operand.geometry.on(self.storage(operand.version.buffer))

    def adopt(self, place: tuple[Buffer, Geometry], result: Tensor) -> None:
        """Let the result of a call be the memory of a storage."""
        buffer, geometry = place
        made = result.untyped_storage()
        if Geometry.of(result) == geometry and made.nbytes() >= self._num_bytes[buffer]:
            self._storages[buffer] = made
        else:
            geometry.on(self.storage(buffer)).copy_(result)

    def free(self, buffer: Buffer) -> None:
        """Give the memory of a storage back."""
        self._storages.pop(buffer, None)


def _run(op: Op, real: _RealStorages, streams: Streams | None) -> None:
    args, kwargs = mapped(_real(real), op.args), mapped(_real(real), op.kwargs)
    if isinstance(op.call, Fill):
        (target,) = args
        if streams is None:
            target.fill_(op.call.init.value)  # type: ignore[union-attr]
        else:
            streams.fill_(target, op)
        return
    if isinstance(op.call, RegisteredInit):
        assert streams is not None
        with one_thread(op.default_dtype), _StreamDraws(streams, op):
            op.call.function(*args, **kwargs)
        return
    assert callable(op.call)
    with one_thread(op.default_dtype):
        result = op.call(*args, **kwargs)
    results = [leaf for leaf in leaves(result) if isinstance(leaf, Tensor)]
    for place, tensor in zip(op.fresh, results, strict=True):
        if place is not None:
            real.adopt(place, tensor)


def _real(real: _RealStorages) -> Callable[[Any], Any]:
    return lambda leaf: real.tensor(leaf) if isinstance(leaf, Operand) else leaf


@contextmanager
def one_thread(default_dtype: torch.dtype | None = None) -> Iterator[None]:
    """Compute with one thread, and with the default dtype that held when recording."""
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    try:
        torch.set_num_threads(1)
        torch.set_default_dtype(default_dtype or dtype)
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)


class _StreamDraws(TorchDispatchMode):
    """Lets torch's random operations draw from the streams of one registered call.

    Stream k of the call is the k-th draw it makes, so the values do not depend on torch's
    generators, and those are not used.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as for the recorder

    def __init__(self, streams: Streams, op: Op) -> None:
        super().__init__()
        name, number = streams.owners[op]
        self._key, self._name = streams.key.child("registered init", number), name
        self._num_draws = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not is_random(func):
            return func(*args, **kwargs)
        kwargs = without_generator(func, kwargs)
        if func in FORMULAS:
            with self:
                return FORMULAS[func](*args, **kwargs)
        init = describe(func, args, kwargs)
        if init is None:
            raise UnsupportedOperation(f"a registered init calls {func}, which has no rule")
        target = args[0] if func._schema.is_mutable else _result_of(func, args, kwargs)
        fill_(target, init, self._key, self._name, number=self._num_draws)
        self._num_draws += 1
        return target


def _result_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """An empty tensor like the one that a call would make, without making the call."""

    def to_meta(leaf: Any) -> Any:
        return leaf.to("meta") if isinstance(leaf, Tensor) else leaf

    made = func(*mapped(to_meta, args), **{**mapped(to_meta, kwargs), "device": "meta"})
    return torch.empty_like(made, device="cpu")


# ------------------------------------------------------------------------------------------------
# Part of a tensor's values, without making the whole tensor.
#
# What works element by element needs no more elements than are asked for: fills with a constant or
# a described draw, of the whole tensor or of a box of it, and arithmetic with numbers. `part_of`
# turns the tape behind a tensor into a function of an element range, or says that it cannot.
#
# [Note: exactly rounded] Only arithmetic that IEEE 754 rounds exactly is done here: the result of
# one element then cannot depend on which other elements are computed beside it. `exp` or `erfinv`
# could, by the vector loop and its scalar tail, so they are evaluated on the whole tensor
# (replay.py).

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
    is_exact = op.call in EXACT
    is_new = op.call in COPIES or (is_exact and not op.call._schema.is_mutable)  # type: ignore[union-attr]
    if is_exact and not (dtype.is_floating_point and _are_numbers(op.args[1:], op.kwargs)):
        return None
    if is_new:
        return _part_of_new(op, dtype, streams, depth)
    if not (is_exact or isinstance(op.call, Fill) or op.call is aten.copy_.default):
        return None
    target = op.args[0]
    if not isinstance(target, Operand) or target.geometry.dtype != dtype:
        return None
    region, before = Region.of(target.geometry), part_of(target.version, dtype, streams, depth - 1)
    written = None if is_exact else _written_part(op, streams, depth)
    if region is None or before is None or (written is None and not is_exact):
        return None

    def part(low: int, high: int) -> Tensor:
        overlap = region.cut(low, high)
        if isinstance(op.call, Fill) and overlap.is_all(high - low):
            return written(overlap.first, overlap.last)  # type: ignore[misc]
        values = before(low, high)
        if written is not None:
            overlap.put(written(overlap.first, overlap.last), values)
            return values
        with one_thread():
            changed = values[overlap.where]
            op.call(changed, *op.args[1:], **op.kwargs)  # type: ignore[operator]
            values[overlap.where] = changed
        return values

    return part


def _written_part(op: Op, streams: Streams, depth: int) -> Part | None:
    """What evaluates ranges of the elements that a fill or a copy writes, in row-major order."""
    target = op.args[0].geometry
    if isinstance(op.call, Fill):

        def drawn(first: int, last: int) -> Tensor:
            values = torch.empty(last - first, dtype=target.dtype)
            streams.fill_(values, op, Box.flat(first, last, target.numel))
            return values

        return drawn
    source = op.args[1]
    if not isinstance(source, Operand):
        return None
    if source.geometry.shape != target.shape or not source.geometry.is_contiguous:
        return None
    copied = part_of(source.version, source.geometry.dtype, streams, depth - 1)
    offset = source.geometry.offset
    return copied and (lambda first, last: copied(offset + first, offset + last))


@dataclass(frozen=True)
class Overlap:
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

    def cut(self, low: int, high: int) -> Overlap:
        """Return what lies in [low, high)."""
        begin = int(torch.searchsorted(self.starts, low - self.run, right=True))
        end = max(int(torch.searchsorted(self.starts, high)), begin)
        if end - begin <= 1:
            start = int(self.starts[begin]) if end > begin else low
            bottom, top = max(low, start), min(high, start + self.run) if end > begin else low
            first = begin * self.run + bottom - start
            return Overlap(first, first + top - bottom, slice(bottom - low, top - low))
        places = (self.starts[begin:end, None] + torch.arange(self.run)).view(-1)
        keep = (places >= low) & (places < high)
        return Overlap(begin * self.run, end * self.run, places[keep] - low, keep)


def _part_of_new(op: Op, dtype: torch.dtype, streams: Streams, depth: int) -> Part | None:
    """What evaluates ranges of a new tensor, made of one that lies in order."""
    source, made = op.args[0], op.fresh[0]
    if not isinstance(source, Operand) or made is None or not _are_numbers(op.args[1:], op.kwargs):
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
            return op.call(values, *op.args[1:], **op.kwargs)  # type: ignore[operator]

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
