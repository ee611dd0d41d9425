"""What a person sees while a run goes on: a bar on a terminal, plain lines elsewhere."""

import time
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)


class ProgressView:
    """Shows steps as they finish. `console` None makes it silent, for the ranks other than 0."""

    def __init__(
        self, console: Console | None, num_steps: int, log_every: int, *, first: int = 0
    ) -> None:
        self._console = console
        self._num_steps = num_steps
        self._log_every = log_every
        self._first = first  # steps done before, by the run that this one goes on from
        self._started = time.perf_counter()
        self._bar: Progress | None = None
        if console is not None and console.is_terminal:
            self._bar = Progress(
                BarColumn(bar_width=16),  # all of it fits 80 columns
                MofNCompleteColumn(),
                TextColumn("loss {task.fields[loss]}"),
                TextColumn("eval {task.fields[eval_loss]}"),
                TextColumn("{task.fields[speed]} tokens/s"),
                TimeRemainingColumn(compact=True),
                TextColumn("left"),
                console=console,
            )
            self._task = self._bar.add_task(
                "", total=num_steps, completed=first, loss="–", eval_loss="–", speed="–"
            )

    def show_step(self, step: int, loss: float, tokens_per_second: float) -> None:
        """Show that step `step` (counted from 1) is done."""
        if self._bar is not None:
            self._bar.update(
                self._task, completed=step, loss=f"{loss:.3f}", speed=f"{tokens_per_second:,.0f}"
            )
        elif self._console is not None and (step % self._log_every == 0 or step == self._num_steps):
            seconds = time.perf_counter() - self._started
            left = seconds / (step - self._first) * (self._num_steps - step)
            self._say(
                f"step {step}/{self._num_steps}  loss {loss:.4f}  "
                f"{tokens_per_second:,.0f} tokens/s  {left:.0f} s left"
            )

    def show_eval(self, step: int, loss: float) -> None:
        """Show an evaluation."""
        if self._bar is not None:
            self._bar.update(self._task, eval_loss=f"{loss:.3f}")
        else:
            self._say(f"step {step}/{self._num_steps}  eval loss {loss:.4f}")

    def _say(self, line: str) -> None:
        if self._console is not None:
            self._console.print(line, highlight=False)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
