"""Metrics of a run: one JSON object per line, and TensorBoard events beside it.

A run that goes on from a checkpoint forgets what it recorded after that, and goes on in the same
files. The files of a private run hold what is in `COVERED` and nothing else, unless the user asks
for unsafe diagnostics.
"""

import json
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

METRICS_FILE = "metrics.jsonl"

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


class Metrics:
    """Appends records of a step to metrics.jsonl, and its numbers to TensorBoard."""

    def __init__(
        self,
        folder: Path,
        *,
        tensorboard: bool,
        after_step: int | None = None,
        only: Collection[str] | None = None,
    ) -> None:
        if after_step is None:
            (folder / METRICS_FILE).write_text("")
        else:
            _keep_until(folder, after_step)
        self._lines = (folder / METRICS_FILE).open("a")
        self._only = only
        # TensorBoard notes when each event was written, which tells how long a step took.
        self._time = None if only is None else time.time()
        next_step = None if after_step is None else after_step + 1
        self._events = _open_tensorboard(folder / "tensorboard", next_step) if tensorboard else None

    def write(self, step: int, **values: float) -> None:
        """Record some numbers of one step; a line is on disk when this returns."""
        if self._only is not None:
            values = {name: value for name, value in values.items() if name in self._only}
        if not values:
            return
        self._lines.write(json.dumps({"step": step, **values}) + "\n")
        self._lines.flush()
        if self._events:
            for name, value in values.items():
                self._events.add_scalar(name, value, step, walltime=self._time)

    def close(self) -> None:
        """Flush and close both."""
        self._lines.close()
        if self._events:
            self._events.close()


@contextmanager
def open_metrics(
    folder: Path,
    *,
    tensorboard: bool,
    after_step: int | None = None,
    only: Collection[str] | None = None,
) -> Iterator[Metrics]:
    """Open a run's metrics and close them at the end.

    Args:
        folder: The run.
        tensorboard: Whether to write TensorBoard events too.
        after_step: The step that a resumed run goes on from; None for a new run.
        only: Names that may be written; None for all.
    """
    metrics = Metrics(folder, tensorboard=tensorboard, after_step=after_step, only=only)
    try:
        yield metrics
    finally:
        metrics.close()


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Read the records of a run back."""
    return [json.loads(line) for line in (folder / METRICS_FILE).read_text().splitlines()]


def _keep_until(folder: Path, step: int) -> None:
    """Drop records of later steps, and a last line that a crash cut off; all or nothing."""
    path = folder / METRICS_FILE
    whole = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    kept = [line for line in whole if json.loads(line)["step"] <= step]
    part = path.with_suffix(".partial")
    part.write_text("".join(kept))
    part.replace(path)


def has_tensorboard() -> bool:
    """Whether the tensorboard package is installed."""
    from importlib.util import find_spec

    return find_spec("tensorboard") is not None


def _open_tensorboard(folder: Path, next_step: int | None):
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder), purge_step=next_step)
