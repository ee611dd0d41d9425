"""Parts of tensors to files and back, by torch.distributed.checkpoint with our planners and files.

This is the only place that calls its `save` and `load`. It is imported where it is used: importing
torch.distributed.checkpoint takes most of a second.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from unison.errors import UnisonError
from unison.shard.ranks import Ranks
from unison.shard.state.agree import CheckpointFailed, from_rank_0
from unison.shard.state.entries import FlatPart
from unison.shard.state.files import FileReader, FileWriter
from unison.shard.state.folder import begin, commit, discard, partial_of, sync
from unison.shard.state.manifest import (
    MANIFEST_FILE,
    Chunk,
    Manifest,
    SavedFile,
    SavedTensor,
    versions,
)
from unison.shard.state.planners import FlatLoadPlanner, FlatSavePlanner


def write_folder(
    folder: Path,
    parts: dict[str, FlatPart],
    tensors: dict[str, SavedTensor],
    ranks: Ranks,
    *,
    optimizer: dict[str, Any] | None,
    extra: dict[str, Any],
) -> None:
    """Write a checkpoint's folder, which appears when everything is on the disk; a collective.

    Args:
        folder: The checkpoint's, which every rank can reach by this name.
        parts: What this rank holds; see `write_parts`.
        tensors: All tensors of all ranks, without chunks.
        ranks: Who takes part.
        optimizer: The manifest's, as JSON can hold it.
        extra: Likewise.
    """

    def on_written(chunks: dict[str, list[Chunk]], files: dict[str, SavedFile]) -> None:
        manifest = Manifest(
            world_size=ranks.size,
            tensors={
                key: replace(each, chunks=tuple(chunks.get(key, ())))
                for key, each in tensors.items()
            },
            files=files,
            optimizer=optimizer,
            extra=extra,
            versions=versions(),
        )
        path = partial_of(folder) / MANIFEST_FILE
        path.write_text(manifest.to_json())
        sync(path)
        commit(folder)

    from_rank_0(ranks, lambda: begin(folder))
    try:
        write_parts(partial_of(folder), parts, ranks, on_written)
    except BaseException:
        if ranks.rank == 0:
            discard(folder)
        raise


def write_parts(
    folder: Path,
    parts: dict[str, FlatPart],
    ranks: Ranks,
    on_written: Callable[[dict[str, list[Chunk]], dict[str, SavedFile]], None],
) -> None:
    """Write every rank's parts; a collective.

    Args:
        folder: Where to; it exists, for every rank.
        parts: What this rank holds. What several ranks hold is written by one.
        ranks: Who takes part.
        on_written: Called on rank 0 with the chunks of each tensor and the files, once all are on
            the disk; its error is one of all ranks.
    """
    with _one_error():
        dcp.save(
            parts,
            storage_writer=FileWriter(folder, ranks.rank, on_written),
            planner=FlatSavePlanner(),
            process_group=ranks.group,
            no_dist=ranks.group is None,
        )


def read_parts(folder: Path, parts: dict[str, FlatPart], manifest: Manifest, ranks: Ranks) -> None:
    """Fill every rank's parts in place; a collective."""
    with _one_error():
        dcp.load(
            parts,
            storage_reader=FileReader(folder, manifest),
            planner=FlatLoadPlanner(),
            process_group=ranks.group,
            no_dist=ranks.group is None,
        )


@contextmanager
def _one_error() -> Iterator[None]:
    """Turn what torch raises on every rank, once any failed, into one of our errors."""
    try:
        with warnings.catch_warnings():
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
