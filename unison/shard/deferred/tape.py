"""The tape: what was done to tensors that have no memory, as data.

[Note: versions] Tensors are views of storages, and operations write into them. So the tape speaks
of *versions* of a storage's content: an operation that writes makes a new version, and names the
versions that it read. A version that nobody names any more is garbage, in Python's own sense: what
was overwritten is not kept, let alone evaluated.

Operations are numbered in the order they ran. Running the operations behind a version again in
that order, in place, on one real storage per recorded one, gives its content: whenever an
operation reads a version, the writes that made it have run and later ones have not.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from unison.errors import UnsupportedOperation
from unison.rng.inits import Bernoulli, Constant, Init, Integers, Normal, Shuffle, Uniform

VERSION = "_unison_version"  # on a storage without memory: the current version of its content

_serials = itertools.count()


@dataclass(frozen=True)
class Geometry:
    """How a tensor lies in its storage; stride and offset in elements."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> "Geometry":
        """Return the geometry of a tensor."""
        return cls(
            tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset())
        )

    @property
    def numel(self) -> int:
        """Number of elements."""
        return torch.Size(self.shape).numel()

    @property
    def end(self) -> int:
        """One past the last element of the storage that the tensor touches."""
        if self.numel == 0:
            return self.offset
        steps = zip(self.shape, self.stride, strict=True)
        return self.offset + 1 + sum((size - 1) * stride for size, stride in steps)

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie one after the other in row-major order."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return self.numel == 0
            expected *= size
        return True

    def covers(self, num_bytes: int) -> bool:
        """Whether the tensor touches every byte of a storage of this size, in whatever order."""
        expected = 1
        for stride, size in sorted(zip(self.stride, self.shape, strict=True)):
            if size != 1:
                if stride != expected:
                    return False
                expected *= size
        return self.offset == 0 and self.numel * self.dtype.itemsize >= num_bytes

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        """Return the tensor of this geometry on a storage."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.shape, self.stride)  # type: ignore[call-overload]


class Buffer:
    """The identity of a recorded storage."""

    __slots__ = ()


@dataclass(frozen=True, eq=False)
class Version:
    """The content of a storage after `op` wrote it; memory never written where `op` is None."""

    buffer: Buffer
    op: "Op | None"


@dataclass(frozen=True, eq=False)
class Operand:
    """A tensor as an operation saw it."""

    version: Version
    geometry: Geometry


@dataclass(frozen=True)
class Fill:
    """The operation that fills its operand with a described init."""

    init: Init

    def __str__(self) -> str:
        return str(self.init)


@dataclass(frozen=True)
class RegisteredInit:
    """The operation that calls a user's init function (see `register_init`) on its operand."""

    function: Callable[..., Any]

    def __str__(self) -> str:
        return getattr(self.function, "__qualname__", repr(self.function))


@dataclass(frozen=True)
class UnknownValues:
    """Stands for values that were never recorded, because their tensor was made elsewhere."""

    def __str__(self) -> str:
        return "a tensor made on the meta device outside unison.meta_init()"


@dataclass(eq=False)
class Op:
    """One operation.

    Attributes:
        call: An aten operation, or a `Fill`, `RegisteredInit` or `UnknownValues`.
        args: Its arguments, with an `Operand` for each tensor that has no memory. Tensors that have
            memory are kept as they were.
        kwargs: Likewise.
        fresh: One entry per tensor that the call returns: where it lies if it is a new one, None if
            it is an argument or a view of one.
        default_dtype: torch's default dtype when it ran; results of integer division depend on it.
        serial: Its place in the order of all operations.
    """

    call: Callable[..., Any] | Fill | RegisteredInit | UnknownValues
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    fresh: tuple[tuple[Buffer, Geometry] | None, ...] = ()
    default_dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    serial: int = field(default_factory=lambda: next(_serials))

    def operands(self) -> Iterator[Operand]:
        """Yield every operand among the arguments."""
        yield from (leaf for leaf in leaves((self.args, self.kwargs)) if isinstance(leaf, Operand))

    @property
    def draws(self) -> bool:
        """Whether the result depends on the seed."""
        if isinstance(self.call, Fill):
            return not isinstance(self.call.init, Constant)
        return isinstance(self.call, RegisteredInit) or is_random(self.call)


def is_random(call: object) -> bool:
    """Whether an aten operation draws from a generator."""
    return torch.Tag.nondeterministic_seeded in getattr(call, "tags", ())


def leaves(value: Any) -> Iterator[Any]:
    """Yield what nested lists, tuples and dictionaries hold."""
    if isinstance(value, list | tuple):
        for item in value:
            yield from leaves(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from leaves(item)
    else:
        yield value


def mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """Return nested lists, tuples and dictionaries with `change` applied to what they hold."""
    if isinstance(value, list | tuple):
        return type(value)(mapped(change, item) for item in value)
    if isinstance(value, dict):
        return {key: mapped(change, item) for key, item in value.items()}
    return change(value)


def has_no_memory(tensor: Tensor) -> bool:
    """Whether a tensor is on the meta device, whatever it says while recording."""
    with torch._C.DisableTorchFunction():
        return tensor.is_meta


def version_of(tensor: Tensor) -> Version | None:
    """Return the current version of a tensor's storage, if it is on a tape."""
    with torch._C.DisableTorchFunction():
        return getattr(tensor.untyped_storage(), VERSION, None)


def set_version(tensor: Tensor, version: Version) -> None:
    """Make `version` the current content of a tensor's storage."""
    # torch keeps the Python object of a storage, and what hangs on it, as long as the storage.
    setattr(tensor.untyped_storage(), VERSION, version)


def ops_behind(*versions: Version) -> list[Op]:
    """Return the operations that make the versions, in the order they ran."""
    found: set[Op] = set()
    waiting = [version.op for version in versions]
    while waiting:
        op = waiting.pop()
        if op is not None and op not in found:
            found.add(op)
            waiting += [operand.version.op for operand in op.operands()]
    return sorted(found, key=lambda op: op.serial)


def redrawn(version: Version, copies: dict[object, Any]) -> Version:
    """Return a version with the same history whose random draws are its own.

    Args:
        version: What to copy.
        copies: Operations and buffers copied so far. Tensors copied with one dictionary keep what
            they have in common.
    """

    def copy_buffer(buffer: Buffer) -> Buffer:
        return copies.setdefault(buffer, Buffer())

    def copy_version(old: Version) -> Version:
        return Version(copy_buffer(old.buffer), None if old.op is None else copies[old.op])

    def copy_leaf(leaf: Any) -> Any:
        if not isinstance(leaf, Operand):
            return leaf
        return Operand(copy_version(leaf.version), leaf.geometry)

    for op in ops_behind(version):
        if op not in copies:
            fresh = tuple(made and (copy_buffer(made[0]), made[1]) for made in op.fresh)
            args, kwargs = mapped(copy_leaf, op.args), mapped(copy_leaf, op.kwargs)
            copies[op] = Op(op.call, args, kwargs, fresh, op.default_dtype)
    return copy_version(version)


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


def _zero(*_: Any, **__: Any) -> Init:
    return Constant(value=0)


def _one(*_: Any, **__: Any) -> Init:
    return Constant(value=1)


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
    aten.zero_.default: _zero,
    aten.zeros.default: _zero,
    aten.zeros_like.default: _zero,
    aten.new_zeros.default: _zero,
    aten.ones.default: _one,
    aten.ones_like.default: _one,
    aten.new_ones.default: _one,
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
    rule = DESCRIBED.get(call)
    return None if rule is None else rule(*args, **kwargs)


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
