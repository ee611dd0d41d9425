"""The folder of a run: config, environment, metrics, model and loss curve.

A run that fails leaves nothing behind: its folder is removed, and a run that it was to replace is
put back. An interrupted run keeps what it wrote.
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
    is_run = folder.is_dir() and (folder / "config.json").is_file()
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
    except UnisonError:
        shutil.rmtree(folder)
        if replaced:
            replaced.rename(folder)
        raise
    finally:
        if replaced:
            shutil.rmtree(replaced.parent)


def write_json(path: Path, value: Any) -> None:
    """Write readable JSON."""
    path.write_text(json.dumps(value, indent=2) + "\n")
