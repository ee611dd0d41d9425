"""The folder of a run: config, environment, metrics, model and loss curve.

A run that fails leaves nothing behind: its folder is removed, and a run that it was to replace is
put back. One that has written a checkpoint is kept, to be resumed. A private one whose ledger
counts a step is kept too: what was spent stays spent. An interrupted run keeps what it wrote.

Metrics are one JSON object per line, with TensorBoard events beside them. A run that goes on from a
checkpoint forgets what it recorded after that, and goes on in the same files. The files of a
private run hold what is in `COVERED` and nothing else, unless the user asks for unsafe diagnostics.
"""

import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from unison.errors import BadInput, UnisonError
from unison.privacy import LEDGER_FILE, read_ledger
from unison.shard import MANIFEST_FILE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CONFIG_FILE = "config.json"
RESULT_FILE = "result.json"
METRICS_FILE = "metrics.jsonl"
CURVE_FILE = "loss.png"
ENVIRONMENT_FILE = "environment.json"
CHECKPOINTS_FOLDER = "checkpoints"


def check_free(folder: Path, *, overwrite: bool) -> None:
    """Refuse a folder that is taken.

    Raises:
        BadInput: If something is there and may not be replaced, or is not a run.
    """
    if not os.path.lexists(folder):
        parent = next(part for part in folder.absolute().parents if part.exists())
        if not (parent.is_dir() and os.access(parent, os.W_OK)):
            raise BadInput(f"cannot create {folder}: {parent} is not a folder that can be written")
        return
    if folder.is_dir() and not any(folder.iterdir()):
        return
    if not (folder / CONFIG_FILE).is_file():
        raise BadInput(f"{folder} exists and is not the folder of a run; choose another --out")
    if not overwrite:
        raise BadInput(
            f"{folder} holds a run already; choose another --out, or add --overwrite to replace it"
        )


@contextmanager
def open_run_folder(folder: Path, *, overwrite: bool, resume: bool = False) -> Iterator[Path]:
    """Create the folder for the duration of a run; see the module's text for what is left.

    With `resume` a run goes on in its folder, and a failure leaves that as it is.
    """
    replaced = None
    if not resume:
        check_free(folder, overwrite=overwrite)
        folder.parent.mkdir(parents=True, exist_ok=True)
        if folder.exists():
            replaced = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent)) / "run"
            folder.rename(replaced)
        folder.mkdir()
    try:
        yield folder
    except BaseException as error:  # Ctrl-C and a full disk too: what was to be replaced comes back
        kept = folder
        if not resume and (replaced or isinstance(error, UnisonError)):
            kept = _keep_or_remove(folder, is_name_free=replaced is None)
        if replaced:
            replaced.rename(folder)
        if kept and isinstance(error, UnisonError):
            _say_what_is_left(error, kept)
        raise
    finally:
        if replaced:
            shutil.rmtree(replaced.parent)


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
    found = [path.parent for path in (run / CHECKPOINTS_FOLDER).glob(f"step-*/{MANIFEST_FILE}")]
    own = [path for path in found if path.name[5:].isdecimal()]  # not a user's copy of one
    return sorted(own, key=lambda path: int(path.name[5:]))


def write_json(path: Path, value: Any) -> None:
    """Write readable JSON."""
    path.write_text(json.dumps(value, indent=2) + "\n")


# ---- metrics -------------------------------------------------------------------------------------

COVERED = frozenset(
    {
        "train/lr",
        "train/grad_norm",
        "eval/loss",
        "privacy/epsilon",
        "privacy/epsilon_if_secret",  # instead of it, where noise comes from a seed
    }
)
"""What the files of a private run may hold: what depends on the training rows through noisy
gradients only. `eval/loss` depends on held-out rows too, which are other records than the protected
ones. A speed is not here, since the time of a step tells how many rows it drew."""


@contextmanager
def open_metrics(
    folder: Path,
    *,
    tensorboard: bool,
    after_step: int | None = None,
    only: Collection[str] | None = None,
) -> Iterator[Callable[..., None]]:
    """Yield what appends numbers of a step to metrics.jsonl, and to TensorBoard.

    It is called as `record(step, **values)`; a line is on disk when it returns.

    Args:
        folder: The run.
        tensorboard: Whether to write TensorBoard events too, where that package is installed.
        after_step: The step that a resumed run goes on from; None for a new run.
        only: Names that may be written; None for all.
    """
    path = folder / METRICS_FILE
    kept = "" if after_step is None else _lines_until(path, after_step)
    part = path.with_suffix(".partial")
    part.write_text(kept)
    part.replace(path)  # all or nothing
    # TensorBoard notes when each event was written, which tells how long a step took.
    walltime = None if only is None else time.time()
    with ExitStack() as stack:
        lines, events = stack.enter_context(path.open("a")), None
        if tensorboard and importlib.util.find_spec("tensorboard"):
            from torch.utils.tensorboard import SummaryWriter

            next_step = None if after_step is None else after_step + 1
            events = SummaryWriter(str(folder / "tensorboard"), purge_step=next_step)
            stack.callback(events.close)

        def record(step: int, **values: float) -> None:
            if only is not None:
                values = {name: value for name, value in values.items() if name in only}
            if not values:
                return
            lines.write(json.dumps({"step": step, **values}) + "\n")
            lines.flush()
            if events is not None:
                for name, value in values.items():
                    events.add_scalar(name, value, step, walltime=walltime)

        yield record


def _lines_until(path: Path, step: int) -> str:
    """The records of a run without those of later steps, and a last line that a crash cut off."""
    whole = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return "".join(line for line in whole if json.loads(line)["step"] <= step)


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Read the records of a run back."""
    return [json.loads(line) for line in (folder / METRICS_FILE).read_text().splitlines()]


# ---- pictures ------------------------------------------------------------------------------------


@contextmanager
def chart(path: Path, title: str, x: str, y: str) -> Iterator["Axes"]:
    """Draw into axes with these labels, and write a PNG file at the end."""
    # The object interface, not pyplot: no global state and no display needed.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    yield axes
    axes.set(xlabel=x, ylabel=y, title=title)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path)


def plot_losses(records: list[dict[str, Any]], path: Path, *, unigram_entropy: float) -> None:
    """Draw training loss, evaluation loss and the loss of the best model without context.

    Of a private run there may be no training loss to draw.
    """
    train = [(r["step"], r["train/loss"]) for r in records if "train/loss" in r]
    evals = [(r["step"], r["eval/loss"]) for r in records if "eval/loss" in r]
    with chart(path, "Loss", "step", "loss (nats per token)") as axes:
        axes.axhline(unigram_entropy, color="0.55", linestyle="--", linewidth=1)
        axes.annotate(
            f"unigram entropy {unigram_entropy:.2f}",
            (1, unigram_entropy),
            xycoords=("axes fraction", "data"),
            xytext=(-4, 4),
            textcoords="offset points",
            ha="right",
            color="0.4",
            fontsize=8,
        )
        if train:
            style: Any = {"color": "#4c78a8", "linewidth": 1, "label": "training, per step"}
            axes.plot(*zip(*train, strict=True), **style)
        style = {"color": "#e45756", "marker": "o", "markersize": 4, "label": "evaluation"}
        axes.plot(*zip(*evals, strict=True), **style)


# ---- the environment -----------------------------------------------------------------------------

PACKAGES = ("unison", "torch", "numpy", "numba", "triton", "transformers", "tokenizers")


def describe_environment(world_size: int, device: torch.device) -> dict[str, Any]:
    """Versions and hardware of this process; nothing that names a person or a machine."""
    return {
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := version_of(name))},
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads_per_rank": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "world_size": world_size,
        "device": device.type,
    }


def cpu_model() -> str:
    """The processor's own name."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def version_of(package: str) -> str | None:
    """The version of an installed package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
