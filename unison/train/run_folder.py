"""The folder of a run: config, environment, metrics, model and loss curve.

A run that fails leaves nothing behind: its folder is removed, and a run that it was to replace is
put back. One that has written a checkpoint is kept, to be resumed. A private one whose ledger
counts a step is kept too: what was spent stays spent. An interrupted run keeps what it wrote.
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
from unison.privacy import read_ledger
from unison.shard import MANIFEST_FILE

CONFIG_FILE = "config.json"
RESULT_FILE = "result.json"
LEDGER_FILE = "ledger.jsonl"
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
            _say_what_is_left(error, kept)
        raise
    finally:
        if replaced:
            shutil.rmtree(replaced.parent)


@contextmanager
def open_stopped_run(folder: Path) -> Iterator[Path]:
    """Go on in the folder of a run; a failure leaves it as it is."""
    try:
        yield folder
    except UnisonError as error:
        _say_what_is_left(error, folder)
        raise


def _keep_or_remove(folder: Path, *, is_name_free: bool) -> Path | None:
    """Remove a failed run unless it has something that must stay; returns where it is kept."""
    if not checkpoints_of(folder) and not num_counted_steps(folder):
        shutil.rmtree(folder)
        return None
    if is_name_free:
        return folder
    kept = Path(tempfile.mkdtemp(prefix=f"{folder.name}-unfinished-", dir=folder.parent))
    return folder.rename(kept)


def _say_what_is_left(error: UnisonError, folder: Path) -> None:
    """Add to an error how its run can go on, and where its privacy is counted."""
    facts = []
    if checkpoints_of(folder):
        facts.append(f"unison train --resume {folder} goes on from its checkpoint")
    counted = num_counted_steps(folder)
    if counted:
        facts.append(f"{folder / LEDGER_FILE} stays, and counts the {counted} steps it spent")
    if facts:
        error.args = (f"{error} ({'; '.join(facts)})", *error.args[1:])


def num_counted_steps(run: Path) -> int:
    """Steps that the ledger of a run counts; 0 where there is none."""
    path = run / LEDGER_FILE
    return read_ledger(path).num_intents if path.is_file() else 0


def checkpoints_of(run: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    found = (run / CHECKPOINTS_FOLDER).glob(f"step-*/{MANIFEST_FILE}")
    return sorted((path.parent for path in found), key=lambda path: int(path.name[5:]))


def write_json(path: Path, value: Any) -> None:
    """Write readable JSON."""
    path.write_text(json.dumps(value, indent=2) + "\n")
