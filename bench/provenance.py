"""Where figures come from: command, date, commit, hardware and versions, beside them in one file.

Nothing in it names a person or a machine.
"""

import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from unison.errors import BadInput
from unison.schema import version_of
from unison.train.run_folder import cpu_model

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "numpy", "triton", "unison")


def command_line() -> str:
    """The command as typed, `python -m ...`, from the root of the source tree.

    Folders of this machine are left out: they mean nothing on another.
    """
    return shlex.join(map(_without_folders, ["python", *sys.orig_argv[1:]]))


def _without_folders(word: str) -> str:
    """Return a word with paths from the root of the source tree, and of other files their names.

    >>> _without_folders("--out=/somewhere/else/figures.json"), _without_folders("runs/a.json")
    ('--out=figures.json', 'runs/a.json')
    """
    option, is_option, path = word.rpartition("=")
    if not Path(path).is_absolute():
        return word
    is_inside = Path(path).is_relative_to(ROOT)
    found = str(Path(path).relative_to(ROOT)) if is_inside else Path(path).name
    return option + is_option + found


def check_writable(path: Path) -> None:
    """Refuse a result file that could not be written, before the work is done.

    Raises:
        BadInput: Naming what is in the way.
    """
    if path.is_dir():
        raise BadInput(f"expected the name of a file to write, found the folder {path}")
    folder = path.absolute().parent
    while not folder.exists():
        folder = folder.parent
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise BadInput(f"cannot write {path}: {folder} is not a folder that may be written to")


def write_result(path: Path, name: str, figures: Mapping[str, Any]) -> None:
    """Write figures, and all that is needed to judge and repeat them, as one JSON file.

    Args:
        path: Where to; missing folders are made.
        name: What was measured.
        figures: The results; values that JSON can hold.
    """
    result = {
        "name": name,
        "command": command_line(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **commit(),
        "hardware": hardware(),
        "versions": versions(),
        "figures": dict(figures),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    # NaN is no JSON: a figure that is not finite must be dealt with by its benchmark.
    path.write_text(json.dumps(result, indent=2, allow_nan=False) + "\n")


def commit() -> dict[str, Any]:
    """The commit of this source tree and whether the tree differs from it.

    Both are None where the tree has no history. A copy of the tree whose
    history is not this one's (on a GPU machine, say) takes the hash from the environment variable
    UNISON_COMMIT.
    """
    named = os.environ.get("UNISON_COMMIT")
    if named is not None:
        return {"commit": named, "dirty": None}
    # A copy of the tree may lie inside the repository of somebody else's project.
    is_ours = _git("ls-files", "--error-unmatch", str(Path(__file__).resolve())) is not None
    full = _git("rev-parse", "HEAD") if is_ours else None
    if full is None:
        return {"commit": None, "dirty": None}
    # A result file just written does not make the code that wrote it another one.
    changes = _git("status", "--porcelain", "--", ":/", ":(top,exclude)bench/results")
    return {"commit": full, "dirty": bool(changes)}


def _git(*arguments: str) -> str | None:
    command = ["git", "--no-optional-locks", *arguments]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def hardware() -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "cpu": cpu_model(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "torch_threads": torch.get_num_threads(),
        "cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "system": f"{platform.system()} {platform.machine()}",
    }


def versions() -> dict[str, str | None]:
    """The versions that figures depend on; None for a package that is not installed."""
    return {"python": platform.python_version()} | {name: version_of(name) for name in PACKAGES}
