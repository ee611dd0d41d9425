"""What a person sees while a run goes on: a bar on a terminal, plain lines elsewhere.

Of a private run a terminal also shows what no ε covers, and says so. Plain lines do not have it,
because they end in files, unless the user asks for unsafe diagnostics.
"""

import math
import time
from collections.abc import Iterable
from typing import Self

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from unison.train.regime import PrivacyFacts
from unison.train.step import StepResult


class ProgressView:
    """Shows steps as they finish. `console` None makes it silent, for the ranks other than 0.

    Args:
        console: Where to.
        num_steps: Steps of the run.
        log_every: Steps between two plain lines.
        first: Steps done before, by the run that this one goes on from.
        is_private: Whether there is an ε.
        tells_all: Whether plain lines may hold what no ε covers.
    """

    def __init__(
        self,
        console: Console | None,
        num_steps: int,
        log_every: int,
        *,
        first: int = 0,
        is_private: bool = False,
        tells_all: bool = False,
    ) -> None:
        self._console = console
        self._num_steps = num_steps
        self._log_every = log_every
        self._first = first
        self._is_private, self._tells_all = is_private, tells_all
        self._started = time.perf_counter()
        self._bar: _Bar | None = None
        if console is not None and console.is_terminal:
            self._bar = _Bar(
                BarColumn(bar_width=16),  # all of it fits 80 columns
                MofNCompleteColumn(),
                TextColumn("{task.fields[first]}"),
                TextColumn("eval {task.fields[eval_loss]}"),
                TextColumn("{task.fields[speed]} tokens/s"),
                TimeRemainingColumn(compact=True),
                TextColumn("left"),
                console=console,
            )
            name = "ε –" if is_private else "loss –"
            self._task = self._bar.add_task(
                "", total=num_steps, completed=first, first=name, eval_loss="–", speed="–"
            )

    def show_step(
        self, step: int, result: StepResult, speed: float, privacy: PrivacyFacts | None = None
    ) -> None:
        """Show that step `step` (counted from 1) is done, at `speed` tokens per second."""
        if self._bar is not None:
            first = f"loss {result.loss:.3f}"
            if privacy is not None:
                self._bar.below = _not_covered(result.loss, privacy)
                first = _epsilon_words(privacy)
            self._bar.update(self._task, completed=step, first=first, speed=f"{speed:,.0f}")
        elif self._console is not None and (step % self._log_every == 0 or step == self._num_steps):
            seconds = time.perf_counter() - self._started
            left = seconds / (step - self._first) * (self._num_steps - step)
            first = f"loss {result.loss:.4f}" if privacy is None else _epsilon_words(privacy)
            line = (
                f"step {step}/{self._num_steps}  {first}  {speed:,.0f} tokens/s  {left:.0f} s left"
            )
            if privacy is not None and self._tells_all:
                line += f"  {_not_covered(result.loss, privacy)}"
            self._say(line)

    def show_eval(self, step: int, loss: float) -> None:
        """Show an evaluation."""
        if self._bar is not None:
            self._bar.update(self._task, eval_loss=f"{loss:.3f}")
        else:
            self._say(f"step {step}/{self._num_steps}  eval loss {loss:.4f}")

    def show_compiling(self) -> None:
        """Show that the next step compiles the model first."""
        if self._bar is not None:
            self._bar.below = "compiling: the first step takes longer than the others"
        else:
            self._say("compiling: the first step takes longer than the others")

    def show_compiled(self, seconds: float) -> None:
        """Show how long the first step took."""
        if self._bar is not None:
            self._bar.below = f"the first step, with compiling, took {seconds:.0f} s"
        else:
            self._say(f"the first step, with compiling, took {seconds:.0f} s")

    def _say(self, line: str) -> None:
        if self._console is not None:
            self._console.print(line, highlight=False, soft_wrap=True)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()


class _Bar(Progress):
    """A progress bar with a line below it."""

    below = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        if self.below:
            yield Text(self.below, style="dim")


def _epsilon_words(privacy: PrivacyFacts) -> str:
    what = "ε" if privacy.is_secure else "seeded: ε if secret"
    return f"{what} {'=' if privacy.is_exact else '≤'} {privacy.epsilon:.3f}"


def _not_covered(loss: float, privacy: PrivacyFacts) -> str:
    median = "–" if math.isnan(privacy.median_norm) else f"{privacy.median_norm:.3g}"
    words = (
        f"not covered by ε: loss {loss:.3f}, clipped {privacy.clipped_fraction:.0%}, "
        f"median norm {median}"
    )
    return words + (f", {privacy.num_dropped} not finite" if privacy.num_dropped else "")
