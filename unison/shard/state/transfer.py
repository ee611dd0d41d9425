"""Parts of tensors to files and back, by torch.distributed.checkpoint with our planners and files.

This is the only place that calls its `save` and `load`. It is imported where it is used: importing
torch.distributed.checkpoint takes most of a second.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from unison.errors import UnisonError
from unison.shard.ranks import Ranks
from unison.shard.state.agree import CheckpointFailed
from unison.shard.state.entries import FlatPart
from unison.shard.state.files import FileReader, FileWriter
from unison.shard.state.manifest import Chunk, Manifest, SavedFile
from unison.shard.state.planners import FlatLoadPlanner, FlatSavePlanner


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
