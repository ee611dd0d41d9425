"""The tape: what was done to tensors that have no memory, as data; and how to run it again.

[Note: versions] Tensors are views of storages, and operations write into them. So the tape speaks
of *versions* of a storage's content: an operation that writes makes a new version, and names the
versions that it read. A version that nobody names any more is garbage, in Python's own sense: what
was overwritten is not kept, let alone evaluated.

Operations are numbered in the order they ran. Running the operations behind a version again in
that order, in place, on one real storage per recorded one, gives its content: whenever an
operation reads a version, the writes that made it have run and later ones have not.

[Note: where values are computed] All arithmetic is done on the CPU and with one thread, whichever
device the values are for: a GPU divides by a scalar as it multiplies by the reciprocal, its
transcendental functions have other last bits, and a CPU's vector loops have other last bits than
their scalar tails, which move with the number of threads. Random draws alone give the same bits
everywhere (`unison.rng`), and so may be made where they are needed (`fill_part_`).
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map

from unison.errors import UnsupportedOperation
from unison.rng import Box, Key, fill_
from unison.rng.inits import Bernoulli, Constant, Init, Integers, Normal, Shuffle, Uniform
from unison.torch_internals import DispatchMode

VERSION = "_unison_version"  # on a storage without memory: the current version of its content

serials = itertools.count()  # of operations, in the order they ran


@dataclass(frozen=True)
class Operand:
    """A tensor as an operation saw it: how it lies in its storage, and what was there.

    Two are equal that lie alike, each in its own.

    Attributes:
        buffer: The identity of its storage.
        op: What wrote the storage last; None for memory never written.
        dtype: The tensor's own, like the rest.
        shape: Its sizes.
        stride: In elements, like the offset.
        offset: Of its first element.
    """

    buffer: object = field(compare=False)
    op: "Op | None" = field(compare=False)
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor, buffer: object = None, op: "Op | None" = None) -> "Operand":
        """Return what stands for a tensor."""
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        return cls(buffer, op, tensor.dtype, shape, stride, int(tensor.storage_offset()))

    @property
    def dims(self) -> list[tuple[int, int]]:
        """Size and stride of the dims that have a stride to speak of."""
        pairs = zip(self.shape, self.stride, strict=True)
        return [(size, stride) for size, stride in pairs if size != 1]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        """One past the last element of the storage that the tensor touches."""
        if self.numel == 0:
            return self.offset
        return self.offset + 1 + sum((size - 1) * stride for size, stride in self.dims)

    @property
    def is_ordered(self) -> bool:
        """Whether row-major order is the order in memory, with gaps or without."""
        return self.numel == 0 or _is_ordered(self.dims)

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie one after the other in row-major order."""
        return self.is_ordered and self.end - self.offset == self.numel

    def covers(self, num_bytes: int) -> bool:
        """Whether the tensor touches every byte of a storage of this size, in whatever order."""
        by_stride = sorted(self.dims, key=lambda dim: dim[1], reverse=True)
        is_dense = self.offset == 0 and self.end == self.numel and _is_ordered(by_stride)
        return is_dense and self.numel * self.dtype.itemsize >= num_bytes

    def overlap(self, low: int, high: int) -> tuple[int, int, slice | Tensor]:
        """Return which elements lie in [low, high) of the storage, and where in that range.

        The tensor must be ordered, so that they are a run [first, last) of its elements.
        """
        if self.is_contiguous:
            bottom, top = max(low, self.offset), min(high, self.end)
            if bottom >= top:
                return 0, 0, slice(0, 0)
            return bottom - self.offset, top - self.offset, slice(bottom - low, top - low)
        rest = torch.arange(low, high) - self.offset
        index, is_inside = torch.zeros_like(rest), rest >= 0
        for size, stride in self.dims:
            at = rest // stride
            is_inside &= at < size
            index, rest = index * size + at, rest % stride
        where = (is_inside & (rest == 0)).nonzero().view(-1)
        if len(where) == 0:
            return 0, 0, where
        return int(index[where[0]]), int(index[where[-1]]) + 1, where

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        """Return the tensor that lies so on a storage."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.shape, self.stride)  # type: ignore[call-overload]


def _is_ordered(dims: list[tuple[int, int]]) -> bool:
    """Whether each stride steps over all that lies within it."""
    span = 1
    for size, stride in reversed(dims):
        if stride < span:
            return False  # transposed, or overlapping
        span += (size - 1) * stride
    return True


@dataclass(eq=False)
class Op:
    """One operation.

    Attributes:
        call: An aten operation, an init that fills its operand, or a function of `register_init`.
            None makes values that nobody knows: their tensor was not made under `meta_init`.
        args: Its arguments, with an `Operand` for each tensor that has no memory. Tensors that have
            memory are kept as they were.
        kwargs: Likewise.
        fresh: One entry per tensor that the call returns: where it lies if it is a new one, None if
            it is an argument or a view of one.
        default_dtype: torch's default dtype when it ran; results of integer division depend on it.
        serial: Its place in the order of all operations.
    """

    call: OpOverload | Init | Callable[..., Any] | None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    fresh: tuple[Operand | None, ...] = ()
    default_dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    serial: int = field(default_factory=lambda: next(serials))

    def leaves(self, kind: type) -> list[Any]:
        """Return what of a type is among arguments and results."""
        found = tree_leaves((self.args, self.kwargs, self.fresh))
        return [leaf for leaf in found if isinstance(leaf, kind)]

    @property
    def is_registered(self) -> bool:
        """Whether it calls a function of `register_init`."""
        return callable(self.call) and not isinstance(self.call, OpOverload)

    @property
    def draws(self) -> bool:
        """Whether the result depends on the seed."""
        if isinstance(self.call, Init):
            return not isinstance(self.call, Constant)
        return self.is_registered or is_random(self.call)


def is_random(call: object) -> bool:
    """Whether an aten operation draws from a generator."""
    return torch.Tag.nondeterministic_seeded in getattr(call, "tags", ())


def has_no_memory(tensor: Tensor) -> bool:
    """Whether a tensor is on the meta device, whatever it says while recording."""
    with torch._C.DisableTorchFunction():
        return tensor.is_meta


def operand_of(tensor: Tensor) -> Operand | None:
    """Return a tensor with the current version of its storage, if that is on a tape."""
    with torch._C.DisableTorchFunction():
        version = getattr(tensor.untyped_storage(), VERSION, None)
        if version is None:
            return None
        return Operand.of(tensor, *version)


def set_version(tensor: Tensor, buffer: object, op: Op | None) -> None:
    """Let the content of a tensor's storage, known as `buffer`, be what `op` wrote."""
    # torch keeps the Python object of a storage, and what hangs on it, as long as the storage.
    setattr(tensor.untyped_storage(), VERSION, (buffer, op))


def ops_behind(operand: Operand) -> list[Op]:
    """Return the operations that make an operand's storage, in the order they ran."""
    found: set[Op] = set()
    waiting = [operand.op]
    while waiting:
        op = waiting.pop()
        if op is not None and op not in found:
            found.add(op)
            waiting += [each.op for each in op.leaves(Operand)]
    return sorted(found, key=lambda op: op.serial)


# ------------------------------------------------------------------------------------------------
# What aten's fills and draws mean, as descriptions of `unison.rng.inits`.
#
# An operation that fills a tensor element by element, with one number or from a distribution, has
# a description and can be evaluated for any part of the tensor. A draw that is a formula of such
# draws is written as that formula. What is in neither table has no rule: it is recorded, and
# refused only if a parameter needs it.

aten = torch.ops.aten

# Operations that make a tensor and leave its memory as it was.
MAKES_BLANK = {
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_permuted.default,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}


def _constant(value: Any) -> Init | None:
    return None if isinstance(value, complex) else Constant(value=value)


def _whole_numbers(tensor: Tensor) -> Integers:
    """The range of `Tensor.random_()`: whole numbers that the dtype holds exactly."""
    if tensor.dtype.is_floating_point:
        # eps is the spacing of numbers at 1, so 2 / eps is the first gap: 2^24 for float32.
        return Integers(low=0, high=int(2 / torch.finfo(tensor.dtype).eps) + 1)
    if tensor.dtype == torch.bool:
        return Integers(low=0, high=2)
    highest = torch.iinfo(tensor.dtype).max
    return Integers(low=0, high=highest if tensor.dtype == torch.int64 else highest + 1)


# How to read an aten operation's arguments; the result is what fills the tensor that it writes or
# makes. None where a particular call has no description.
DESCRIBED: dict[Any, Callable[..., Init | None]] = {
    **dict.fromkeys(
        (aten.zero_.default, aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default),
        lambda *_, **__: Constant(value=0),
    ),
    **dict.fromkeys(
        (aten.ones.default, aten.ones_like.default, aten.new_ones.default),
        lambda *_, **__: Constant(value=1),
    ),
    aten.fill_.Scalar: lambda tensor, value: _constant(value),
    aten.full.default: lambda size, value, **_: _constant(value),
    aten.full_like.default: lambda tensor, value, **_: _constant(value),
    aten.new_full.default: lambda tensor, size, value, **_: _constant(value),
    aten.scalar_tensor.default: lambda value, **_: _constant(value),
    aten.normal_.default: lambda tensor, mean=0.0, std=1.0: Normal(mean=mean, std=std),
    aten.normal.float_float: lambda mean, std, size, **_: Normal(mean=mean, std=std),
    aten.randn.default: lambda size, **_: Normal(std=1.0),
    aten.randn_like.default: lambda tensor, **_: Normal(std=1.0),
    aten.uniform_.default: lambda tensor, low=0.0, high=1.0: Uniform(low=low, high=high),
    aten.rand.default: lambda size, **_: Uniform(low=0.0, high=1.0),
    aten.rand_like.default: lambda tensor, **_: Uniform(low=0.0, high=1.0),
    aten.bernoulli_.float: lambda tensor, p=0.5: Bernoulli(probability=p),
    aten.bernoulli.p: lambda tensor, p: Bernoulli(probability=p),
    aten.randint.default: lambda high, size, **_: Integers(low=0, high=high),
    aten.randint.low: lambda low, high, size, **_: Integers(low=low, high=high),
    aten.randint_like.default: lambda tensor, high, **_: Integers(low=0, high=high),
    aten.randint_like.low_dtype: lambda tensor, low, high, **_: Integers(low=low, high=high),
    aten.random_.default: _whole_numbers,
    aten.random_.to: lambda tensor, high: Integers(low=0, high=high),
    getattr(aten.random_, "from"): lambda tensor, low, high: (
        None if high is None else Integers(low=low, high=high)
    ),
    aten.randperm.default: lambda size, **_: Shuffle(size=size),
}


def _normal_around(mean: Tensor | float, std: Tensor | float) -> Tensor:
    shapes = [value.shape for value in (mean, std) if isinstance(value, Tensor)]
    dtype = next(value.dtype for value in (mean, std) if isinstance(value, Tensor))
    return torch.randn(torch.broadcast_shapes(*shapes), dtype=dtype) * std + mean


def _bernoulli_from(tensor: Tensor, probability: Tensor) -> Tensor:
    return tensor.copy_(torch.rand(tensor.shape, dtype=torch.float64) < probability)


def _exponential(tensor: Tensor, rate: float = 1.0) -> Tensor:
    unit = torch.rand(tensor.shape, dtype=torch.float64)
    return tensor.copy_(torch.log1p(-unit) / -rate)


def _log_normal(tensor: Tensor, mean: float = 1.0, std: float = 2.0) -> Tensor:
    return tensor.copy_((torch.randn(tensor.shape, dtype=torch.float64) * std + mean).exp())


# Draws that are formulas of described ones.
FORMULAS: dict[Any, Callable[..., Tensor]] = {
    aten.normal.Tensor_float: lambda mean, std=1.0: _normal_around(mean, std),
    aten.normal.float_Tensor: _normal_around,
    aten.normal.Tensor_Tensor: _normal_around,
    aten.bernoulli.default: lambda tensor: _bernoulli_from(torch.empty_like(tensor), tensor),
    aten.bernoulli.Tensor: lambda tensor, p: _bernoulli_from(torch.empty_like(tensor), p),
    aten.bernoulli_.Tensor: _bernoulli_from,
    aten.exponential_.default: _exponential,
    aten.log_normal_.default: _log_normal,
}


def describe(call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Init | None:
    """Return the init that an aten operation fills its tensor with, or None if it is no fill."""
    return DESCRIBED[call](*args, **kwargs) if call in DESCRIBED else None


def without_generator(call: object, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return keyword arguments without an unset generator.

    Raises:
        UnsupportedOperation: A generator was given.
    """
    if kwargs.get("generator") is not None:
        raise UnsupportedOperation(
            f"{call} was given a generator. Initial values are drawn later, by "
            "unison.materialize(module, seed=...), as a function of the seed and the parameter's "
            "name. Leave generator= out; for other values, give materialize another seed"
        )
    return {name: value for name, value in kwargs.items() if name != "generator"}


# ------------------------------------------------------------------------------------------------
# Replay: the values behind an operand, by running its part of the tape for real.

Streams = dict[Op, tuple[Key, str, int]]
"""For each operation that draws: the root key, the name of the first parameter or buffer whose
value it is part of, and its number among the draws of that name."""


def number_draws(seed: int, named: Iterable[tuple[str, Operand]]) -> Streams:
    """Return the streams of the draws behind named operands, numbered in the order given."""
    key, streams = Key.from_seed(seed), {}
    for name, operand in named:
        new = [op for op in ops_behind(operand) if op.draws and op not in streams]
        streams |= {op: (key, name, number) for number, op in enumerate(new)}
    return streams


def draw_(out: Tensor, op: Op, streams: Streams, box: Box | None = None) -> None:
    """Fill `out` with a box of the elements that a recorded init gives its operand."""
    assert isinstance(op.call, Init)
    if isinstance(op.call, Constant):
        out.fill_(op.call.value)
    else:
        key, name, number = streams[op]
        fill_(out, op.call, key, name, box, number=number)


@torch.no_grad()
def evaluate(operand: Operand, streams: Streams) -> Tensor:
    """Return the values of an operand, as a tensor on the CPU.

    Its storage has all that the tape knows of the recorded one.

    Args:
        operand: What to evaluate.
        streams: Where draws come from; empty if there are none behind the operand.
    """
    ops = ops_behind(operand)
    refuse_unknown(ops)
    num_bytes: dict[object, int] = defaultdict(int)
    last_use: dict[object, Op | None] = {}
    uses = [(op, each) for op in ops for each in op.leaves(Operand)]
    for user, each in [*uses, (None, operand)]:
        needed = each.end * each.dtype.itemsize
        num_bytes[each.buffer] = max(num_bytes[each.buffer], needed)
        last_use[each.buffer] = user
    storages: dict[object, torch.UntypedStorage] = {}

    def real(leaf: Any) -> Any:
        """The tensor of an operand; memory is zero unless it was written."""
        if not isinstance(leaf, Operand):
            return leaf
        if leaf.buffer not in storages:
            zeros = torch.zeros(num_bytes[leaf.buffer], dtype=torch.uint8)
            storages[leaf.buffer] = zeros.untyped_storage()
        return leaf.on(storages[leaf.buffer])

    for op in ops:
        args, kwargs = tree_map(real, (op.args, op.kwargs))
        if isinstance(op.call, Init):
            draw_(args[0], op, streams)
        else:
            assert callable(op.call)
            draws = drawing_from(*streams[op]) if op.is_registered else nullcontext()
            with one_thread(op.default_dtype), draws:
                result = op.call(*args, **kwargs)
            results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
            for made, tensor in zip(op.fresh, results, strict=False):
                if made is None:
                    continue
                storage = tensor.untyped_storage()
                is_large = storage.nbytes() >= num_bytes[made.buffer]
                if Operand.of(tensor) == made and is_large:
                    storages[made.buffer] = storage
                else:
                    real(made).copy_(tensor)
        for buffer in {each.buffer for each in op.leaves(Operand)}:
            if last_use[buffer] is op:
                storages.pop(buffer, None)
    return real(operand)


def refuse_unknown(ops: list[Op]) -> None:
    """Refuse operations that cannot be run again.

    Raises:
        UnsupportedOperation: With the operation and the remedy.
    """
    for op in ops:
        if op.call is None:
            raise UnsupportedOperation(
                "it depends on a tensor made on the meta device outside unison.meta_init(), whose "
                "values nobody knows; build that inside too"
            )
        if is_random(op.call):
            raise UnsupportedOperation(
                f"it depends on {op.call}, for which unison has no rule. Draw it from normal_, "
                "uniform_ or another basic distribution; or decorate the init function that uses "
                "it with unison.register_init; or load the values instead of drawing them"
            )


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


def drawing_from(key: Key, name: str, number: int) -> DispatchMode:
    """Let torch's random operations draw from the streams of one registered call.

    Stream k of the call is the k-th draw it makes, so the values do not depend on torch's
    generators, and those are not used.
    """
    key, numbers = key.child("registered init", number), itertools.count()

    def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not is_random(func):
            return func(*args, **kwargs)
        kwargs = without_generator(func, kwargs)
        if func in FORMULAS:
            with mode:
                return FORMULAS[func](*args, **kwargs)
        init = describe(func, args, kwargs)
        if init is None:
            raise UnsupportedOperation(f"a registered init calls {func}, which has no rule")
        if func._schema.is_mutable:
            target = args[0]
        else:  # an empty tensor like the one that the call would make
            on_meta = tree_map(lambda x: x.to("meta") if isinstance(x, Tensor) else x, args)
            target = torch.empty_like(func(*on_meta, **{**kwargs, "device": "meta"}), device="cpu")
        fill_(target, init, key, name, number=next(numbers))
        return target

    mode = DispatchMode(run)
    return mode


# ------------------------------------------------------------------------------------------------
# Part of a tensor's values, without making the whole tensor.
#
# What works element by element needs no more elements than are asked for: fills with a constant or
# a described draw, of the whole tensor or of a box of it, and arithmetic with numbers. `part_of`
# turns the tape behind a tensor into a function of an element range, or says that it cannot.
#
# [Note: exactly rounded] Only arithmetic that IEEE 754 rounds exactly is done here: the result of
# one element then cannot depend on which other elements are computed beside it. `exp` or `erfinv`
# could, by the vector loop and its scalar tail, so they are evaluated on the whole tensor.

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
    length, op = out.numel(), operand.op
    if length == 0:
        return
    part = part_of(op, operand.dtype, streams) if operand.is_contiguous else None
    if part is None:
        out.copy_(evaluate(operand, streams).reshape(-1)[start : start + length])
        return
    begin = operand.offset + start
    if op is not None and isinstance(op.call, Init) and out.dtype == operand.dtype:
        target = op.args[0]
        if target.is_contiguous:
            first, last, _ = target.overlap(begin, begin + length)
            if last - first == length:  # one draw, which has the same bits on every device
                draw_(out, op, streams, Box.flat(first, last, target.numel))
                return
    for low in range(0, length, CHUNK):
        high = min(low + CHUNK, length)
        values = part(begin + low, begin + high)
        with one_thread():
            out[low:high].copy_(values)


def part_of(
    op: Op | None, dtype: torch.dtype, streams: Streams, depth: int = MAX_DEPTH
) -> Part | None:
    """Return what evaluates element ranges of a storage that `op` wrote, seen as `dtype`.

    None if it cannot be evaluated in ranges.
    """
    if op is None:
        return lambda low, high: torch.zeros(high - low, dtype=dtype)
    is_exact, is_copy, is_fill = op.call in EXACT, op.call in COPIES, isinstance(op.call, Init)
    if depth == 0 or not (is_exact or is_copy or is_fill or op.call is aten.copy_.default):
        return None
    target, others = op.args[0], op.args[1:]
    if not isinstance(target, Operand):
        return None
    call, kwargs = op.call, op.kwargs
    has_floats = dtype.is_floating_point and target.dtype.is_floating_point
    # `add` and `sub` with alpha fuse a product and a sum in vector loops and round twice in tails.
    are_numbers = all(value is None or isinstance(value, int | float) for value in others)
    are_numbers = are_numbers and not {"alpha", "rounding_mode"} & kwargs.keys()
    if (is_exact and not (has_floats and are_numbers)) or (is_copy and not are_numbers):
        return None
    before = part_of(target.op, target.dtype, streams, depth - 1)
    if before is None:
        return None
    if is_copy or not (is_fill or call._schema.is_mutable):  # type: ignore[union-attr]
        made = op.fresh[0]
        is_in_order = made is not None and made.is_contiguous and target.is_contiguous
        if made is None or not is_in_order or made.dtype != dtype:
            return None

        def new_part(low: int, high: int) -> Tensor:
            values = before(target.offset + low, target.offset + high)
            if is_copy:
                return values.to(dtype)
            with one_thread():
                return call(values, *others, **kwargs)  # type: ignore[operator]

        return new_part
    if target.dtype != dtype or not target.is_ordered:
        return None
    if is_fill:

        def written(first: int, last: int) -> Tensor:
            values = torch.empty(last - first, dtype=dtype)
            draw_(values, op, streams, Box.flat(first, last, target.numel))
            return values

    elif not is_exact:
        source = others[0]
        if not isinstance(source, Operand) or not source.is_contiguous:
            return None
        copied = part_of(source.op, source.dtype, streams, depth - 1)
        if copied is None or source.shape != target.shape:
            return None

        def written(first: int, last: int) -> Tensor:
            return copied(source.offset + first, source.offset + last).to(dtype)

    def part(low: int, high: int) -> Tensor:
        first, last, where = target.overlap(low, high)
        if is_fill and last - first == high - low:
            return written(first, last)
        values = before(low, high)
        if not is_exact:
            values[where] = written(first, last)
            return values
        with one_thread():
            values[where] = call(values[where], *others, **kwargs)  # type: ignore[operator]
        return values

    return part
