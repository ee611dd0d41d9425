"""The folder of a checkpoint: it appears when it is complete, and replaces another only then.

[Note: crash safety] Ranks write into `.NAME.partial` beside the folder. When every file and then
the manifest are on the disk, the old folder, if any, is renamed to `.NAME.replaced`, the new one
takes its name, and the old one is removed. A process that dies leaves either the old checkpoint,
the new one, or (between two renames) the old one under its second name, which `settle` gives its
first name back.
"""

import hashlib
import os
import shutil
from pathlib import Path

from unison.errors import BadInput
from unison.shard.state.manifest import MANIFEST_FILE


def partial_of(folder: Path) -> Path:
    """Where a checkpoint is written before it is complete."""
    return folder.with_name(f".{folder.name}.partial")


def _replaced_of(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.replaced")


def settle(folder: Path) -> None:
    """Undo, or end, a replacement that a crash cut short."""
    replaced = _replaced_of(folder)
    if not replaced.is_dir():
        return
    if folder.exists():
        shutil.rmtree(replaced)
    else:
        replaced.rename(folder)


def begin(folder: Path) -> Path:
    """Make the folder to write into; one that a crash left is removed.

    Raises:
        BadInput: If something that is not a checkpoint has the name.
    """
    if not folder.name:
        raise BadInput(f"expected the name of a folder to write, found {str(folder)!r}")
    settle(folder)
    is_empty = folder.is_dir() and not any(folder.iterdir())
    if folder.exists() and not is_empty and not (folder / MANIFEST_FILE).is_file():
        raise BadInput(f"{folder} exists and is not a checkpoint; choose another folder")
    partial = partial_of(folder)
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    return partial


def commit(folder: Path) -> None:
    """Give the complete folder its name."""
    partial, replaced = partial_of(folder), _replaced_of(folder)
    sync(partial)
    if folder.exists():
        folder.rename(replaced)
    partial.rename(folder)
    sync(folder.parent)
    if replaced.exists():
        shutil.rmtree(replaced)


def discard(folder: Path) -> None:
    """Remove what was written of a checkpoint that failed."""
    shutil.rmtree(partial_of(folder), ignore_errors=True)


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
