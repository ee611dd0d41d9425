"""Data files of a checkpoint: safetensors, planned by torch.distributed.checkpoint.

torch's planners say who writes and who reads which elements. They plan with boxes, and a rank's
part of a parameter is a run of its elements in memory order, so each tensor is planned as one of
one dimension, of which a part is a box again. They give each part that several ranks hold to one
writer, and find out which parts of which chunks a rank must read when the world has another size
than the one that wrote. torch's own file reader unpickles its metadata, so that a checkpoint from
elsewhere could run code: writer and reader are ours.

Imported where it is used: importing torch.distributed.checkpoint takes most of a second.
"""

import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from unison.errors import BadInput, CheckpointFailed, UnisonError
from unison.shard.ranks import Ranks, buckets
from unison.shard.state.checkpoint import DataFile, FileChunk, Manifest, data_file
from unison.shard.state.entries import FlatPart

FILE_BYTES = 1 << 30  # of one data file, so that the host holds no more than that at a time

OnWritten = Callable[[dict[str, list[FileChunk]], dict[str, DataFile]], None]
"""Called on rank 0 with the chunks of each tensor and the size and hash of each file."""


def write_parts(
    folder: Path, parts: dict[str, FlatPart], ranks: Ranks, on_written: OnWritten
) -> None:
    """Write every rank's parts; a collective.

    Args:
        folder: Where to; it exists, for every rank.
        parts: What this rank holds. What several ranks hold is written by one.
        ranks: Who takes part.
        on_written: Called once all files are on the disk; its error is one of all ranks.
    """
    with _one_error(alone=ranks.group is None):
        dcp.save(
            parts,
            storage_writer=FileStorage(folder, ranks.rank, on_written=on_written),
            planner=FlatSavePlanner(),
            process_group=ranks.group,
            no_dist=ranks.group is None,
        )


def read_parts(folder: Path, parts: dict[str, FlatPart], manifest: Manifest, ranks: Ranks) -> None:
    """Fill every rank's parts in place; a collective."""
    with _one_error(alone=ranks.group is None):
        dcp.load(
            parts,
            storage_reader=FileStorage(folder, ranks.rank, manifest=manifest),
            planner=FlatLoadPlanner(),
            process_group=ranks.group,
            no_dist=ranks.group is None,
        )


@contextmanager
def _one_error(*, alone: bool) -> Iterator[None]:
    """Turn what torch raises on every rank, once any failed, into one of our errors."""
    try:
        with ExitStack() as stack:
            if alone:  # never in a thread: filters of warnings are the whole process's
                stack.enter_context(warnings.catch_warnings())
                # A world of one process is what was asked for, not an oversight.
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as failed:
        rank = min(failed.failures)
        error, _ = failed.failures[rank]
        if isinstance(error, UnisonError | KeyboardInterrupt):
            raise error from None
        if isinstance(error, OSError):
            raise CheckpointFailed(
                f"rank {rank} met {type(error).__name__}: {error}; a checkpoint needs a folder "
                "that every rank can reach, and room in it"
            ) from None
        raise RuntimeError(f"rank {rank} failed: {failed}") from error


class FlatSavePlanner(DefaultSavePlanner):
    """Plans to write flat parts; what several ranks hold is written by one of them."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        """One item per part that is not empty."""
        items = []
        for name, part in self.state_dict.items():
            if len(part.values):
                box, size = _box(part.start, len(part.values)), torch.Size([math.prod(part.shape)])
                properties = TensorProperties(dtype=part.values.dtype)
                data = TensorWriteData(chunk=box, properties=properties, size=size)
                index = MetadataIndex(name, box.offsets)
                items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """The elements to write."""
        return self.state_dict[index.fqn].values


def _box(start: int, length: int) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size([start]), torch.Size([length]))


class FlatLoadPlanner(DefaultLoadPlanner):
    """Plans to read, for each part, what overlaps it in the files."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator=False
    ) -> None:
        """Take the parts as they are; they have memory."""
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        """One item per overlap of a part and a chunk."""
        assert self.metadata is not None
        items: list[ReadItem] = []
        for name, part in self.state_dict.items():
            saved = self.metadata.state_dict_metadata[name]
            assert isinstance(saved, TensorStorageMetadata)
            if len(part.values):
                items += create_read_items_for_chunk_list(
                    name, saved, [_box(part.start, len(part.values))]
                )
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """The elements to write into."""
        return self.state_dict[index.fqn].values


class FileStorage(StorageWriter, StorageReader):
    """The safetensors files of a checkpoint: one rank writes its chunks, or reads what it needs.

    Args:
        folder: Where the files are; it exists.
        rank: This rank, for the names of the files that it writes.
        on_written: Called when every rank has written.
        manifest: What the checkpoint holds, to read it.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        *,
        on_written: OnWritten | None = None,
        manifest: Manifest | None = None,
    ) -> None:
        self._folder, self._rank, self._on_written = folder, rank, on_written
        self._tensors = {} if manifest is None else manifest.tensors
        self._chunks = {
            MetadataIndex(name, [chunk.start]): chunk
            for name, tensor in self._tensors.items()
            for chunk in tensor.chunks
        }

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing is kept between checkpoints."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up."""

    def set_up_storage_reader(
        self, metadata: Any, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Nothing to set up."""

    def prepare_local_plan(self, plan: Any) -> Any:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: Any) -> Any:
        """The plans as they are."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Never chosen by name."""
        return False

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items, some files after one another."""
        results = []
        for index, items in enumerate(buckets(plan.items, _num_bytes, FILE_BYTES)):
            name = f"rank-{self._rank}-{index}.safetensors"
            chunks: dict[MetadataIndex, FileChunk] = {}
            tensors: dict[str, Tensor] = {}
            for item in items:
                assert item.tensor_data is not None
                (start,), (length,) = item.tensor_data.chunk.offsets, item.tensor_data.chunk.sizes
                chunk = chunks[item.index] = FileChunk(start, start + length, name)
                tensors[chunk.key(item.index.fqn)] = _on_host(planner, item)
            file = _write(self._folder / name, tensors)
            results += [WriteResult(where, 0, (chunk, file)) for where, chunk in chunks.items()]
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Hand over what all ranks wrote."""
        chunks: dict[str, list[FileChunk]] = defaultdict(list)
        files: dict[str, DataFile] = {}
        for result in (each for of_rank in results for each in of_rank):
            chunk, file = result.storage_data
            files[chunk.file] = file
            chunks[result.index.fqn].append(chunk)
        assert self._on_written is not None
        self._on_written(
            {name: sorted(each, key=lambda c: c.start) for name, each in chunks.items()}, files
        )

    def read_metadata(self) -> Metadata:
        """The manifest in the words of torch's planners."""
        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(dtype=tensor.dtype),
                    torch.Size([tensor.numel]),
                    [_box(chunk.start, chunk.stop - chunk.start) for chunk in tensor.chunks],
                )
                for name, tensor in self._tensors.items()
            }
        )

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items and no other bytes, file by file."""
        from safetensors import SafetensorError, safe_open

        by_file: dict[str, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            by_file[self._chunks[item.storage_index].file].append(item)
        for name, items in by_file.items():
            try:
                with safe_open(self._folder / name, framework="pt", device="cpu") as file:
                    for item in items:
                        chunk = self._chunks[item.storage_index]
                        (start,), (length,) = item.storage_offsets, item.lengths
                        stored = file.get_slice(chunk.key(item.storage_index.fqn))
                        target = planner.resolve_tensor(item)
                        target.copy_(stored[start : start + length])
                        planner.commit_tensor(item, target)
            except SafetensorError as error:
                raise BadInput(f"{self._folder / name} is damaged: {error}") from None
        future: Future[None] = Future()
        future.set_result(None)
        return future


def _num_bytes(item: WriteItem) -> int:
    assert item.tensor_data is not None
    return item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize


def _on_host(planner: SavePlanner, item: WriteItem) -> Tensor:
    value = planner.resolve_data(item)
    assert isinstance(value, Tensor)
    return value.detach().cpu().contiguous()


def _write(path: Path, tensors: dict[str, Tensor]) -> DataFile:
    """Write a file; it is on the disk, not only on its way there, when this returns."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path)
    except SafetensorError as error:  # what it makes of a full disk or a missing folder
        raise CheckpointFailed(f"could not write {path}: {error}") from None
    return data_file(path)
