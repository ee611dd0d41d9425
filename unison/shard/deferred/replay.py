"""Replay: the values behind an operand, by running its part of the tape for real.

[Note: where values are computed] All arithmetic is done on the CPU and with one thread, whichever
device the values are for: a GPU divides by a scalar as it multiplies by the reciprocal, its
transcendental functions have other last bits, and a CPU's vector loops have other last bits than
their scalar tails, which move with the number of threads. Random draws alone give the same bits
everywhere (`unison.rng`), and so may be made where they are needed (local.py).
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
from unison.shard.deferred.draws import FORMULAS, describe, without_generator
from unison.shard.deferred.tape import (
    Buffer,
    Fill,
    Geometry,
    Op,
    Operand,
    Registered,
    Unknown,
    Version,
    is_random,
    leaves,
    mapped,
    ops_behind,
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
        if isinstance(op.call, Unknown):
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
    if isinstance(op.call, Registered):
        assert streams is not None
        with one_thread(op.default_dtype), _Redirected(streams, op):
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


class _Redirected(TorchDispatchMode):
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
