"""Data files of a checkpoint: safetensors, each written by one rank and read by whoever needs it.

A rank's part of a parameter is a run of its elements in memory order. What several ranks hold is
written by one of them; a reader takes the elements that it keeps out of whatever files they lie in,
so that the world may have another size than the one that wrote. torch.distributed.checkpoint knows
boxes only, and its file reader unpickles, so that a checkpoint from elsewhere could run code.
"""

import hashlib
import math
import os
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from unison.errors import BadInput, CheckpointFailed, UnisonError
from unison.shard.ranks import Ranks, agree, buckets, from_rank_0, gather_objects

T = TypeVar("T")

FILE_BYTES = 1 << 30  # of one data file, so that the host holds no more than that at a time

FlatPart = tuple[tuple[int, ...], int, Tensor]
"""The elements of a tensor that this rank holds, on their way into or out of files: the shape of
the whole, the first element held, and the elements [held], written in place when loading."""


@dataclass(frozen=True)
class FileChunk:
    """The elements [start, stop) of a tensor, in a file."""

    start: int
    stop: int
    file: str

    def key(self, name: str) -> str:
        """What the chunk is called in its file.

        >>> FileChunk(0, 256, "rank-0.safetensors").key("model/bias")
        'model/bias[0:256]'
        """
        return f"{name}[{self.start}:{self.stop}]"


@dataclass(frozen=True)
class SavedTensor:
    """A tensor of a checkpoint: its own shape, and where its elements lie."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[FileChunk, ...] = ()

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class DataFile:
    """A safetensors file of a checkpoint: its length and its hash."""

    bytes: int
    sha256: str


OnWritten = Callable[[dict[str, list[FileChunk]], dict[str, DataFile]], None]
"""Called on rank 0 with the chunks of each tensor and the size and hash of each file."""


def write_parts(
    folder: Path, parts: Mapping[str, FlatPart], ranks: Ranks, on_written: OnWritten
) -> None:
    """Write every rank's parts; a collective.

    Args:
        folder: Where to; it exists, for every rank.
        parts: What this rank holds. What several ranks hold is written by one.
        ranks: Who takes part.
        on_written: Called once all files are on the disk; its error is one of all ranks.
    """
    held = {
        (name, start): math.prod(shape) * values.itemsize
        for name, (shape, start, values) in parts.items()
        if len(values)
    }
    writers = _writers(gather_objects(ranks, held))
    own = [each for each in held if writers[each] == ranks.rank]
    written = _agreed(ranks, lambda: _write_own(folder, parts, own, ranks.rank))
    chunks: dict[str, list[FileChunk]] = defaultdict(list)
    files: dict[str, DataFile] = {}
    for name, chunk, file in (each for of_rank in written for each in of_rank):
        files[chunk.file] = file
        chunks[name].append(chunk)
    for each in chunks.values():
        each.sort(key=lambda chunk: chunk.start)
    from_rank_0(ranks, lambda: on_written(chunks, files))


def _writers(held: list[dict[tuple[str, int], int]]) -> dict[tuple[str, int], int]:
    """Which rank writes each part: of those that hold it, the one with least to write so far.

    Args:
        held: By rank, the bytes of the whole tensor of each (name, first element).
    """
    holders: dict[tuple[str, int], list[int]] = defaultdict(list)
    for rank, own in enumerate(held):
        for part in own:
            holders[part].append(rank)
    load = [0] * len(held)
    writers = {}
    for part, ranks in holders.items():
        writers[part] = min(ranks, key=load.__getitem__)
        load[writers[part]] += held[ranks[0]][part]
    return writers


def _write_own(
    folder: Path, parts: Mapping[str, FlatPart], own: list[tuple[str, int]], rank: int
) -> list[tuple[str, FileChunk, DataFile]]:
    """Write what is this rank's, some files after one another; returns what lies where."""
    written = []
    for index, names in enumerate(
        buckets((name for name, _ in own), lambda name: parts[name][2].nbytes, FILE_BYTES)
    ):
        file = f"rank-{rank}-{index}.safetensors"
        chunks, tensors = {}, {}
        for name in names:
            _, start, values = parts[name]
            chunks[name] = FileChunk(start, start + len(values), file)
            tensors[chunks[name].key(name)] = _on_host(values)
        made = _write(folder / file, tensors)
        written += [(name, chunk, made) for name, chunk in chunks.items()]
    return written


def read_parts(
    folder: Path, parts: Mapping[str, FlatPart], tensors: Mapping[str, SavedTensor], ranks: Ranks
) -> None:
    """Fill every rank's parts in place from these files, and read no other bytes; a collective."""
    _agreed(ranks, lambda: _read_own(folder, parts, tensors))


def _read_own(
    folder: Path, parts: Mapping[str, FlatPart], tensors: Mapping[str, SavedTensor]
) -> None:
    from safetensors import SafetensorError, safe_open

    wanted: dict[str, list[tuple[str, slice, Tensor]]] = defaultdict(list)  # by file
    for name, (_, start, values) in parts.items():
        for chunk in tensors[name].chunks:
            low, high = max(start, chunk.start), min(start + len(values), chunk.stop)
            if low < high:
                stored = slice(low - chunk.start, high - chunk.start)
                target = values[low - start : high - start]
                wanted[chunk.file].append((chunk.key(name), stored, target))
    for name, items in wanted.items():
        try:
            with safe_open(folder / name, framework="pt", device="cpu") as file:
                for key, stored, target in items:
                    target.copy_(file.get_slice(key)[stored])
        except SafetensorError as error:
            raise BadInput(f"{folder / name} is damaged: {error}") from None


def _agreed(ranks: Ranks, work: Callable[[], T]) -> list[T]:
    """As `agree`; an error of a file says what a checkpoint needs."""

    def told() -> T:
        try:
            return work()
        except (UnisonError, RuntimeError):
            raise
        except OSError as error:
            raise CheckpointFailed(
                f"rank {ranks.rank} met {type(error).__name__}: {error}; a checkpoint needs a "
                "folder that every rank can reach, and room in it"
            ) from None
        except Exception as error:
            raise RuntimeError(f"rank {ranks.rank} failed: {error!r}") from error

    return agree(ranks, told)


def _on_host(values: Tensor) -> Tensor:
    return values.detach().cpu().contiguous()


def _write(path: Path, tensors: dict[str, Tensor]) -> DataFile:
    """Write a file; it is on the disk, not only on its way there, when this returns."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path)
    except SafetensorError as error:  # what it makes of a full disk or a missing folder
        raise CheckpointFailed(f"could not write {path}: {error}") from None
    return data_file(path)


def sync(path: Path) -> None:
    """Have a file or a folder's list of names on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: Path) -> str:
    """The hash of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def data_file(path: Path) -> DataFile:
    """What a manifest says of a file, which is on the disk, not only on its way there, then."""
    sync(path)
    return DataFile(path.stat().st_size, sha256_of(path))
