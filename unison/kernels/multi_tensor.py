"""Per-sample gradients of many parameters at once: squared, combined, and released with noise.

On CUDA each is a launch or two, however many parameters there are (multi_tensor_triton.py): most of
a model's hundreds of parameters are vectors, and a launch for each would cost more than the
arithmetic. A table on the device holds an address and a few numbers per tensor, and a map says for
every program which row of the table it serves. Elsewhere plain torch goes from one to the next.
"""

import math
import struct
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from unison.errors import UnsupportedOperation
from unison.kernels.available import has_triton
from unison.kernels.random import FLOATS_AT, ROUND_MAGIC, Recipe, bits_float, fill_rows

HALF, SINGLE, INTEGER, LONG = range(4)  # kinds of values
KINDS = {
    torch.bfloat16: HALF,
    torch.float32: SINGLE,
    torch.int32: INTEGER,
    torch.int64: LONG,
}

# --- tensors whose metadata is known --------------------------------------------------------------

ADDRESS = "<i8"  # int64, its lowest byte first
_shape_of, _dtype_of, _is_on_cuda = attrgetter("shape"), attrgetter("dtype"), attrgetter("is_cuda")


class TensorMeta(tuple):
    """Shapes, strides and dtypes of many tensors: equal for tensors that are alike.

    Args:
        values: The tensors.
    """

    __slots__ = ()

    def __new__(cls, values: Sequence[Tensor]) -> "TensorMeta":
        """Ask fact by fact, not tensor by tensor: no line of Python runs for each of hundreds."""
        shapes, strides = map(_shape_of, values), map(Tensor.stride, values)
        return super().__new__(cls, (*shapes, *strides, *map(_dtype_of, values)))


class TensorBatch(list[Tensor]):
    """Tensors whose metadata is known, so that kernels ask for their addresses only, and once.

    Args:
        values: The tensors.
        meta: Theirs, or that of tensors that are alike and on the same device.
        is_fast: Whether the kernels take them; see `is_fast`.
        addresses: Theirs, if they are known: `ADDRESS` one after the other.
    """

    def __init__(
        self,
        values: Iterable[Tensor],
        meta: TensorMeta,
        is_fast: bool,
        addresses: bytes | None = None,
    ) -> None:
        super().__init__(values)
        self.meta, self.is_fast = meta, is_fast
        self._addresses = addresses

    @property
    def addresses(self) -> bytes:
        """Return where they lie, as `ADDRESS` one after the other: a key, and a table's column."""
        if self._addresses is None:
            self._addresses = struct.pack(f"<{len(self)}q", *map(Tensor.data_ptr, self))
        return self._addresses


def as_batch(values: Sequence[Tensor]) -> TensorBatch:
    """Return tensors with their metadata, asked for unless it is known."""
    if isinstance(values, TensorBatch):
        return values
    return TensorBatch(values, TensorMeta(values), is_fast=False)


def is_fast(values: Sequence[Tensor]) -> bool:
    """Return whether the kernels take tensors: on CUDA, a dtype in KINDS, samples contiguous."""
    if isinstance(values, TensorBatch):
        return values.is_fast
    if not (values and has_triton() and _are_on_cuda(values)):
        return False
    return KINDS.keys() >= set(map(_dtype_of, values)) and all(map(is_dense, values))


def _are_on_cuda(values: Sequence[Tensor]) -> bool:
    return all(map(_is_on_cuda, values))


def is_dense(x: Tensor) -> bool:
    """Return whether each sample of x [samples, ...] lies in one piece of memory."""
    return x.is_contiguous() or (x.ndim == 2 and x.stride(1) == 1) or x[:1].is_contiguous()


# --- the operations -------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class NoiseDraw:
    """The noise of one step for many tensors.

    Attributes:
        recipes: Of each tensor, packed: int64 [tensors, RECIPE_LENGTH], on the tensors' device.
        starts: Each tensor's first element in its parameter.
    """

    recipes: Tensor
    starts: Sequence[int]


def squares(values: Sequence[Tensor]) -> Tensor:
    """Return Σ x² of every tensor [samples, ...] and sample: [tensors, samples], float64.

    On CUDA a tile is added in float32 (its roundings: `SQUARE_ROUNDINGS`), tiles in float64.
    """
    return _kernels().squares(values) if is_fast(values) else squares_reference(values)


def combine(
    values: Sequence[Tensor],
    weights: Tensor,
    outs: Sequence[Tensor],
    *,
    add: bool = False,
    spacing: float = 1.0,
) -> None:
    """Write Σ_b w_b X_b of every tensor to its output, or add it.

    Args:
        values: X [samples, ...] of each.
        weights: [tensors, samples], float32. A sample of weight 0 is left out: it may hold NaN.
        outs: Contiguous, as many elements as one sample's X. The sum is made in float64 and rounded
            once, to their dtype: float32, float64, or int32 and int64, which count spacings.
        add: Whether to add to what is there.
        spacing: A power of two.
    """
    if is_fast(values):
        _kernels().release(values, weights, None, spacing, outs, add=add)
    else:
        combine_reference(values, weights, outs, add=add, spacing=spacing)


def release(
    values: Sequence[Tensor],
    weights: Tensor,
    noise: NoiseDraw | None,
    divisor: float,
    outs: Sequence[Tensor],
) -> None:
    """Combine in float64, round to the noise's grid, add the noise exactly, divide, and cast.

    Args:
        values: X [samples, ...] of each tensor; clipped sums are one sample of weight 1, or
            integers of which each is worth the weight.
        weights: [tensors, samples], float32.
        noise: What to add; nothing, if it is not given.
        divisor: A public constant.
        outs: Contiguous; their dtype is that of the result.
    """
    make = _kernels().release if is_fast(values) else release_reference
    make(values, weights, noise, divisor, outs)


def _kernels() -> Any:
    return import_module("unison.kernels.multi_tensor_triton")


# --- the reference, in plain torch ----------------------------------------------------------------


def squares_reference(values: Sequence[Tensor]) -> Tensor:
    """Return Σ x² of every tensor and sample: [tensors, samples], float64."""
    rows = [each.reshape(len(each), math.prod(each.shape[1:])) for each in values]
    return torch.stack([each.double().square().sum(1) for each in rows])


def combine_reference(
    values: Sequence[Tensor],
    weights: Tensor,
    outs: Sequence[Tensor],
    *,
    add: bool = False,
    spacing: float = 1.0,
) -> None:
    """See `combine`: one sample after the other, as the kernel does."""
    for each, row, out in zip(values, weights, outs, strict=True):
        total = torch.zeros_like(out, dtype=torch.float64)
        for x, weight in zip(each, row.double(), strict=False):  # the row may be longer: zeros
            total += weight * x.double().reshape(out.shape).masked_fill(weight == 0, 0.0)
        total /= spacing
        if not out.is_floating_point():
            total.round_()
        out.copy_(out + total if add else total)


def release_reference(
    values: Sequence[Tensor],
    weights: Tensor,
    noise: NoiseDraw | None,
    divisor: float,
    outs: Sequence[Tensor],
) -> None:
    """See `release`."""
    totals = [torch.empty_like(out, dtype=torch.float64) for out in outs]
    combine_reference(values, weights, totals)
    if noise is not None:
        for total, recipe, start in zip(totals, noise.recipes.cpu(), noise.starts, strict=True):
            drawn = torch.empty_like(total, dtype=torch.float32)
            fill_rows(drawn, Recipe.unpack(recipe), torch.tensor([start]), drawn.numel())
            spacing = bits_float(int(recipe[FLOATS_AT + 1]))
            on_grid = (total / spacing + ROUND_MAGIC - ROUND_MAGIC) * spacing
            total.copy_(on_grid + drawn.double())
    for total, out in zip(totals, outs, strict=True):
        made = total if out.dtype == torch.float64 else total.float()
        out.copy_(made * torch.tensor(1.0 / divisor, dtype=torch.float32))


# --- tables on the device -------------------------------------------------------------------------


def tile_map(numels: tuple[int, ...], size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the tensor of every tile (int32 [tiles]) and every tensor's first tile (int64 [n]).

    Args:
        numels: Elements of each tensor, those skipped before its first one included.
        size: Elements of a tile.
        device: Where the result lives.
    """
    found = cached_tile_map(numels, size, device)
    if _recording:  # the cache may forget it, and the graph has its address
        _recording[-1].hold(found)
    return found


@lru_cache(maxsize=64)
def cached_tile_map(
    numels: tuple[int, ...], size: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return what `tile_map` does, made once."""
    counts = torch.tensor([-(-numel // size) for numel in numels], dtype=torch.int64)
    first = counts.cumsum(0) - counts
    tensors = torch.repeat_interleave(torch.arange(len(numels), dtype=torch.int32), counts)
    return tensors.to(device), first.to(device)


class Tables:
    """Tables of a CUDA graph: made while it is recorded, filled once when it is complete.

    A copy from the host would be recorded with the host's address, which is soon another's. Nor may
    they lie in the graph's own memory, to which other parts of the graph write before and after.

    Args:
        device: Where the graph runs.
        capacity: Integers of all tables together.
    """

    def __init__(self, device: torch.device, capacity: int = 1 << 19) -> None:
        self._memory = torch.zeros(capacity, dtype=torch.int64, device=device)
        self._made: list[tuple[Tensor, Tensor]] = []
        self._held: list[tuple[Tensor, ...]] = []
        self._end = 0

    def make(self, table: Tensor) -> Tensor:
        """Return the place of a table that is filled later."""
        begin, self._end = self._end, self._end + -(-table.numel() // 16) * 16
        if self._end > len(self._memory):
            raise UnsupportedOperation(
                f"the tables of a CUDA graph take more than {len(self._memory):,} numbers: too "
                "many parameters for one graph"
            )
        place = self._memory[begin : begin + table.numel()].view(table.shape)
        self._made.append((place, table))
        return place

    def hold(self, tensors: tuple[Tensor, ...]) -> None:
        """Keep tensors that the graph reads alive as long as its tables."""
        self._held.append(tensors)

    def fill(self) -> None:
        """Fill all tables."""
        for place, table in self._made:
            place.copy_(table)


_recording: list[Tables] = []


@contextmanager
def tables_kept(tables: Tables) -> Iterator[None]:
    """Let tables be made for a CUDA graph that is recorded in this block."""
    _recording.append(tables)
    try:
        yield
    finally:
        _recording.pop()


def on_device(rows: Sequence[Any] | Tensor, device: torch.device) -> Tensor:
    """Return a table of integers on a device, without waiting for it."""
    table = rows if isinstance(rows, Tensor) else torch.tensor(rows, dtype=torch.int64)
    return _recording[-1].make(table) if _recording else to_device(table, device)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a copy of a host's tensor on a device, without waiting for it."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def empty_table(shape: Sequence[int], device: torch.device) -> Tensor:
    """Return a host's table of integers with nothing in it, which `to_device` copies at once."""
    return torch.empty(shape, dtype=torch.int64, pin_memory=device.type == "cuda")


class DeviceTableCache:
    """Tables that were copied to a device, for who needs the same ones again.

    To copy one takes the host as long as some launches. Allocators hand out the same addresses step
    after step, so that a table of addresses is mostly one of the last.

    Args:
        most: Tables that are kept.
    """

    def __init__(self, most: int = 8) -> None:
        self._most = most
        self._tables: dict[Hashable, Tensor] = {}

    def table(
        self, key: Hashable, device: torch.device, make: Callable[[torch.device], Tensor]
    ) -> Tensor:
        """Return a table on a device, which nobody writes to, without waiting for it.

        Args:
            key: Of all that is in the table.
            device: Where it lives.
            make: Makes it on the host, given where it is copied to; see `empty_table`.
        """
        # What is recorded does not run: a table in a graph's memory is no table for anyone else.
        # Nor may memory be pinned meanwhile.
        if _recording or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            return on_device(make(torch.device("cpu")), device)
        # On another stream nothing would wait for the copy.
        key = device, _stream_of(device), key
        found = self._tables.get(key)
        if found is None:
            if len(self._tables) >= self._most:
                del self._tables[next(iter(self._tables))]  # the oldest
            found = self._tables[key] = to_device(make(device), device)
        return found


def _stream_of(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch._C._cuda_getCurrentRawStream(index)
