"""The folder of a run: config, environment, metrics, model and loss curve.

A run that fails leaves nothing behind: its folder is removed, and a run that it was to replace is
put back; after a SIGKILL by the next command that names the folder. One that has written a
checkpoint is kept, to be resumed. A private one whose ledger counts a step is kept too: what was
spent stays spent. An interrupted run keeps what it wrote. One process at a time writes to a folder.

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
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from unison import run_files
from unison.errors import BadInput, UnisonError
from unison.privacy import LEDGER_FILE, read_ledger
from unison.schema import version_of
from unison.shard import MANIFEST_FILE, settle_checkpoints
from unison.train.world import may_start_again

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LOCK_FILE = ".lock"
# What a run that was killed may have written before it was one.
BEFORE_CONFIG = {
    LOCK_FILE,
    run_files.ENVIRONMENT_FILE,
    f".{run_files.ENVIRONMENT_FILE}.partial",
    f".{run_files.CONFIG_FILE}.partial",
}


def check_free(folder: Path, *, overwrite: bool) -> None:
    """Refuse a folder that is taken.

    Raises:
        BadInput: If something is there and may not be replaced, is not a run, or is written to.
    """
    try:
        folder = _real(folder)
        settle(folder)
        if not os.path.lexists(folder):
            parent = next(part for part in folder.absolute().parents if part.exists())
            if not (parent.is_dir() and os.access(parent, os.W_OK)):
                raise BadInput(
                    f"cannot create {folder}: {parent} is not a folder that can be written"
                )
            return
        if folder.is_dir() and not {path.name for path in folder.iterdir()} - BEFORE_CONFIG:
            return
        is_run = (folder / run_files.CONFIG_FILE).is_file()
    # A name that is too long, or has a NUL in it; a link to itself.
    except (OSError, ValueError, RuntimeError) as error:
        if isinstance(error, UnisonError):
            raise
        raise BadInput(f"cannot use {str(folder)!r} as --out: {error}") from None
    if not is_run:
        raise BadInput(f"{folder} exists and is not the folder of a run; choose another --out")
    if not overwrite:
        raise BadInput(
            f"{folder} holds a run already; choose another --out, or add --overwrite to replace it"
        )


def _real(folder: Path) -> Path:
    """The folder itself, where a link to one, `.` or `..` was named: links stay as they are.

    Raises:
        BadInput: If it is a link to itself.
    """
    try:
        is_by_another_name = folder.is_symlink() or folder.name in ("", "..")
        return folder.resolve() if is_by_another_name else folder
    except (OSError, RuntimeError) as error:
        raise BadInput(f"cannot use {str(folder)!r} as the folder of a run: {error}") from None


def _replaced_of(folder: Path) -> Path:
    """Where a run lies while the one that is to replace it goes on."""
    return folder.parent / f".{folder.name}.replaced"


def settle(folder: Path, *, within: float = 0.0) -> None:
    """Undo, or end, replacements that a killed process left; and see that no other goes on.

    Of the run by another, and of its checkpoints by those of the same step.

    Args:
        folder: The run.
        within: Seconds that another process has to let go of it.

    Raises:
        BadInput: If another process writes to the folder.
    """
    folder = _real(folder)
    replaced, deadline = _replaced_of(folder), time.monotonic() + within
    while folder.is_dir() and (folder / LOCK_FILE).is_file():
        try:
            with locked(folder):
                break
        except BadInput:
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.1)
    settle_checkpoints(folder / run_files.CHECKPOINTS_FOLDER)
    if not replaced.is_dir():
        return
    if (folder / run_files.RESULT_FILE).is_file():
        shutil.rmtree(replaced)
    elif not folder.exists() or _keep_or_remove(folder, is_name_free=True) is None:
        replaced.rename(folder)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder of a run as the only one who writes to it.

    The lock ends with its process, however that ends.

    Raises:
        BadInput: If another process holds it, or the folder cannot be written.
    """
    import fcntl  # not on every system that can import unison

    path = folder / LOCK_FILE
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        descriptor = os.open(path, flags, 0o644)
    except OSError as error:
        raise BadInput(f"cannot write to {folder}: {error.strerror}") from None

    def is_at_its_place() -> bool:
        return path.exists() and os.path.samestat(os.fstat(descriptor), path.stat())

    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not is_at_its_place():  # its last holder removed it since it was opened
                raise BlockingIOError
        except OSError as error:
            why = "another run is writing to it" if isinstance(error, BlockingIOError) else error
            raise BadInput(
                f"cannot write to {folder}: {why}; let that end first, or choose another --out"
            ) from None
        try:
            yield
        finally:
            if is_at_its_place():
                path.unlink()
    finally:
        os.close(descriptor)


@contextmanager
def open_run_folder(folder: Path, *, overwrite: bool, resume: bool = False) -> Iterator[Path]:
    """Create the folder for the duration of a run; see the module's text for what is left.

    With `resume` a run goes on in its folder, and a failure leaves that as it is.
    """
    folder = _real(folder)
    replaced = _replaced_of(folder)
    with ExitStack() as stack:
        if not resume:
            check_free(folder, overwrite=overwrite)
            folder.parent.mkdir(parents=True, exist_ok=True)
            if folder.exists():
                stack.enter_context(locked(folder))
                if (folder / run_files.CONFIG_FILE).exists():
                    if replaced.exists():  # of a run that was killed, which has something to keep
                        _keep_or_remove(folder, is_name_free=False)
                    else:
                        folder.rename(replaced)
            if not folder.exists():
                try:
                    folder.mkdir()
                except FileExistsError:
                    raise BadInput(
                        f"another run has begun in {folder}; choose another --out"
                    ) from None
                stack.enter_context(locked(folder))
        try:
            yield folder
        except BaseException as error:  # Ctrl-C and a full disk too: what was replaced comes back
            kept = folder
            # Ranks that are started again go on; what they replace waits, as after a SIGKILL.
            is_over = not (replaced.exists() and may_start_again())
            if not resume and is_over and (replaced.exists() or isinstance(error, UnisonError)):
                kept = _keep_or_remove(folder, is_name_free=not replaced.exists())
                if replaced.exists():
                    replaced.rename(folder)
            # What is refused when a run goes on would be refused again.
            is_refused = resume and isinstance(error, BadInput)
            if kept and isinstance(error, UnisonError) and not is_refused:
                _say_what_is_left(error, kept)
            raise
        if replaced.exists():
            shutil.rmtree(replaced)


def _keep_or_remove(folder: Path, *, is_name_free: bool) -> Path | None:
    """Remove a failed run unless it has something that must stay; returns where it is kept."""
    if not checkpoints_of(folder) and not num_counted_steps(folder):
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        with suppress(OSError):  # a volume that is mounted there stays
            folder.rmdir()
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
    if (replaced := _replaced_of(folder)).exists():
        facts.append(f"the run that it was to replace lies in {replaced}")
    if facts:
        error.args = (f"{error} ({'; '.join(facts)})", *error.args[1:])


def num_counted_steps(run: Path) -> int:
    """Steps that the ledger of a run counts; 0 where there is none."""
    path = run / LEDGER_FILE
    return read_ledger(path).num_intents if path.is_file() else 0


def checkpoints_of(run: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    found = [
        path.parent for path in (run / run_files.CHECKPOINTS_FOLDER).glob(f"step-*/{MANIFEST_FILE}")
    ]
    own = [path for path in found if path.name[5:].isdecimal()]  # not a user's copy of one
    return sorted(own, key=lambda path: int(path.name[5:]))


def write_json(path: Path, value: Any) -> None:
    """Write readable JSON; the file is there when it is complete."""
    part = path.with_name(f".{path.name}.partial")
    part.write_text(json.dumps(value, indent=2) + "\n")
    part.replace(path)


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
    last: Mapping[str, float] | None = None,
    only: Collection[str] | None = None,
) -> Iterator[Callable[..., None]]:
    """Yield what appends numbers of a step to metrics.jsonl, and to TensorBoard.

    It is called as `record(step, **values)`; a line is on disk when it returns.

    Args:
        folder: The run.
        tensorboard: Whether to write TensorBoard events too, where that package is installed.
        after_step: The step that a resumed run goes on from; None for a new run.
        last: Numbers of that step, if they may not have been written.
        only: Names that may be written; None for all.
    """
    path = folder / run_files.METRICS_FILE
    kept = [] if after_step is None else run_files.read_metrics(folder, until=after_step)
    if last and not any(each["step"] == after_step and last.keys() <= each.keys() for each in kept):
        kept.append({"step": after_step, **last})
    part = path.with_suffix(".partial")
    part.write_text("".join(json.dumps(record) + "\n" for record in kept))
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
