"""Many tensors as one: which program of a launch works on which tile of which tensor.

A model has hundreds of parameters, most of them vectors. A launch for each would cost more than the
arithmetic, so the kernels here take all of them at once: a table on the device holds an address and
a few numbers per tensor, and a map says for every program which row of the table it serves.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from unison.errors import UnsupportedOperation

# Columns of the table, all int64.
VALUES, STRIDE, NUMEL, OUT, FIRST, KIND, SAMPLES = range(7)
WIDTH = 8
HALF, SINGLE, INTEGER, LONG = range(4)  # kinds of values

KINDS = {
    torch.bfloat16: HALF,
    torch.float32: SINGLE,
    torch.int32: INTEGER,
    torch.int64: LONG,
}


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
    if _recording:
        return _recording[-1].make(table)
    return sent(table, device)


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a copy of a host's tensor on a device, without waiting for it."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def to_send(shape: Sequence[int], device: torch.device) -> Tensor:
    """Return a host's table of integers with nothing in it, from which `sent` makes one copy."""
    return torch.empty(shape, dtype=torch.int64, pin_memory=device.type == "cuda")


class Sent:
    """Tables that were sent to a device, for who needs the same ones again.

    To send one takes the host as long as some launches. Allocators hand out the same addresses step
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
            make: Makes it on the host, given where it is sent to from there; see `to_send`.
        """
        # What is recorded does not run: a table in a graph's memory is no table for anyone else.
        # Nor may memory be pinned meanwhile.
        if _recording or _is_capturing(device):
            return on_device(make(_HOST), device)
        # On another stream nothing would wait for the copy.
        key = device, _stream_of(device), key
        found = self._tables.get(key)
        if found is None:
            if len(self._tables) >= self._most:
                del self._tables[next(iter(self._tables))]  # the oldest
            found = self._tables[key] = sent(make(device), device)
        return found


_HOST = torch.device("cpu")


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _stream_of(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch._C._cuda_getCurrentRawStream(index)
