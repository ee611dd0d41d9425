"""Metrics of a run: one JSON object per line, and TensorBoard events beside it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

METRICS_FILE = "metrics.jsonl"


class Metrics:
    """Appends records of a step to metrics.jsonl, and its numbers to TensorBoard."""

    def __init__(self, folder: Path, *, tensorboard: bool) -> None:
        self._lines = (folder / METRICS_FILE).open("w")
        self._events = _open_tensorboard(folder / "tensorboard") if tensorboard else None

    def write(self, step: int, **values: float) -> None:
        """Record some numbers of one step; a line is on disk when this returns."""
        self._lines.write(json.dumps({"step": step, **values}) + "\n")
        self._lines.flush()
        if self._events:
            for name, value in values.items():
                self._events.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close both."""
        self._lines.close()
        if self._events:
            self._events.close()


@contextmanager
def open_metrics(folder: Path, *, tensorboard: bool) -> Iterator[Metrics]:
    """Open a run's metrics and close them at the end."""
    metrics = Metrics(folder, tensorboard=tensorboard)
    try:
        yield metrics
    finally:
        metrics.close()


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Read the records of a run back."""
    return [json.loads(line) for line in (folder / METRICS_FILE).read_text().splitlines()]


def has_tensorboard() -> bool:
    """Whether the tensorboard package is installed."""
    from importlib.util import find_spec

    return find_spec("tensorboard") is not None


def _open_tensorboard(folder: Path):
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder))
