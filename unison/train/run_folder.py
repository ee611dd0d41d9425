"""The folder of a run: config, environment, metrics, model and loss curve.

A run that fails leaves nothing behind: its folder is removed, and a run that it was to replace is
put back. One that has written a checkpoint is kept, to be resumed. An interrupted run keeps what it
wrote.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from unison.errors import BadInput, UnisonError
from unison.shard import MANIFEST_FILE

CONFIG_FILE = "config.json"
RESULT_FILE = "result.json"
CHECKPOINTS_FOLDER = "checkpoints"


def check_free(folder: Path, *, overwrite: bool) -> None:
    """Refuse a folder that is taken.

    Raises:
        BadInput: If something is there and may not be replaced, or is not a run.
    """
    if not os.path.lexists(folder):
        parent = next(part for part in [*folder.absolute().parents] if part.exists())
        if not (parent.is_dir() and os.access(parent, os.W_OK)):
            raise BadInput(f"cannot create {folder}: {parent} is not a folder that can be written")
        return
    is_empty_folder = folder.is_dir() and not any(folder.iterdir())
    is_run = folder.is_dir() and (folder / CONFIG_FILE).is_file()
    if is_empty_folder:
        return
    if not is_run:
        raise BadInput(f"{folder} exists and is not the folder of a run; choose another --out")
    if not overwrite:
        raise BadInput(
            f"{folder} holds a run already; choose another --out, or add --overwrite to replace it"
        )


@contextmanager
def open_run_folder(folder: Path, *, overwrite: bool) -> Iterator[Path]:
    """Create the folder for the duration of a run; see the module's text for what is left."""
    check_free(folder, overwrite=overwrite)
    folder.parent.mkdir(parents=True, exist_ok=True)
    replaced = None
    if folder.exists():
        replaced = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent)) / "run"
        folder.rename(replaced)
    folder.mkdir()
    try:
        yield folder
    except UnisonError as error:
        kept = _keep_or_remove(folder, is_name_free=replaced is None)
        if replaced:
            replaced.rename(folder)
        if kept:
            error.args = (f"{error} (unison train --resume {kept} goes on from its checkpoint)",)
        raise
    finally:
        if replaced:
            shutil.rmtree(replaced.parent)


def _keep_or_remove(folder: Path, *, is_name_free: bool) -> Path | None:
    """Remove a failed run unless it has a checkpoint; returns where it is kept."""
    if not checkpoints_of(folder):
        shutil.rmtree(folder)
        return None
    if is_name_free:
        return folder
    kept = Path(tempfile.mkdtemp(prefix=f"{folder.name}-unfinished-", dir=folder.parent))
    return folder.rename(kept)


def checkpoints_of(run: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    found = (run / CHECKPOINTS_FOLDER).glob(f"step-*/{MANIFEST_FILE}")
    return sorted((path.parent for path in found), key=lambda path: int(path.name[5:]))


def write_json(path: Path, value: Any) -> None:
    """Write readable JSON."""
    path.write_text(json.dumps(value, indent=2) + "\n")
