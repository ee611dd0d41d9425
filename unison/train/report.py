"""What a run says, to the folder and to the person: at its start, while it goes on, at its end.

While it goes on a person sees a bar on a terminal, plain lines elsewhere. Of a private run a
terminal also shows what no ε covers, and says so. Plain lines do not have it, because they end in
files, unless the user asks for unsafe diagnostics.
"""

import json
import math
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box, progress
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

import unison
from unison import run_files
from unison.config import TrainConfig
from unison.privacy import LEDGER_FILE
from unison.replay import RECORD_FILE
from unison.train.run_folder import describe_environment, write_json
from unison.train.step import settings_of

if TYPE_CHECKING:
    from unison.train.loop import Run


# Of private rows, what they come to beyond their number.
_COUNTS = ("num_tokens", "num_targets", "num_dropped_tokens", "num_documents")
_COUNTS += ("num_skipped_documents", "num_truncated_documents")


def write_start(folder: Path, run: "Run") -> None:
    """Write what a run is made of, or add a line where it went on, and on what."""
    config, world = run.config, run.world
    environment = describe_environment(world.size, world.device)
    if not (folder / run_files.CONFIG_FILE).is_file():
        settings = asdict(config)
        settings["model"] = asdict(run.model.config)
        settings["fingerprint"] = fingerprint(run)
        settings["rows"] = summarize(run)
        settings["launch"] = os.environ.get("TORCHELASTIC_RUN_ID")
        write_json(folder / run_files.ENVIRONMENT_FILE, environment)
        write_json(
            folder / run_files.CONFIG_FILE, settings
        )  # last: with it the folder is that of a run
        return
    line = {
        "step": run.progress.step,
        "command": config.output.command,
        "execution": asdict(config.execution),
        "environment": environment,
        "fingerprint": fingerprint(run),
    }
    with (folder / "resumptions.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def summarize(run: "Run") -> dict[str, Any]:
    """The rows of a run in plain values; of private ones nothing that their content decides."""
    summary = {}
    for name, rows in {"train": run.train_rows, "eval": run.eval_rows}.items():
        summary[name] = rows.summary()
        if run.config.mechanism.privacy is None:
            summary[name]["sha256"] = rows.digest()
        else:
            for count in _COUNTS:
                del summary[name][count]
    return summary


def fingerprint(run: "Run") -> dict[str, Any]:
    """What the bits of a run depend on besides its settings."""
    mechanism = run.config.mechanism
    return unison.fingerprint(
        granule=mechanism.granule if mechanism.reducer == "ordered" else None,
        device=run.world.device,
        is_compiled=mechanism.compile,
    )


def say_start(console: Console, run: "Run") -> None:
    """Say in a few lines what is about to happen, and where a run goes on."""
    config, mechanism, world = run.config, run.config.mechanism, run.world
    ranks = "1 rank" if world.size == 1 else f"{world.size} ranks"
    say(
        console,
        f"[bold]unison train[/]  {mechanism.preset}: {run.num_parameters:,} parameters, "
        f"{ranks} on {world.device.type}, shard {config.execution.shard}, "
        f"{mechanism.reducer} reducer",
        f"data {escape(mechanism.data)}: {run.train_rows.num_rows:,} rows of "
        f"{run.train_rows.row_length} tokens to train on, {run.eval_rows.num_rows:,} held out; "
        f"unigram entropy {run.unigram_entropy:.3f}",
        *run.regime.describe(),
    )
    is_told = console.is_terminal or config.output.unsafe_diagnostics
    if mechanism.privacy is not None and not is_told:
        say(
            console,
            "training loss, norms and clipped fractions are not covered by ε: a terminal shows "
            "them, files have them with --unsafe-diagnostics",
        )
    if mechanism.kfac is not None:
        kfac = settings_of(config)
        lengths = {"adam": "Adam's", "sgd": "the gradient's", "none": "their own"}
        say(
            console,
            f"K-FAC: damping {kfac.damping:g} ({kfac.damping_form}), {kfac.fisher} Fisher, factors "
            f"every {kfac.update_every} steps, more often in the first {kfac.burn_in}; steps of "
            f"{lengths[kfac.graft]} length, taken by SGD",
        )
    if not config.output.resume:
        return
    say(
        console,
        *map(escape, run.notes),
        f"going on after step {run.progress.step} of {mechanism.steps}",
    )
    changed = run.changed_conditions()
    if mechanism.reducer == "ordered" and changed:  # whether its bits can still be compared
        say(
            console,
            f"the digest will not be that of an uninterrupted run: {', '.join(changed)} changed",
        )


def say_end(console: Console, config: TrainConfig, result: run_files.TrainResult) -> None:
    """Show the losses before and after, what privacy cost, and where the run lies."""
    files = [
        run_files.CONFIG_FILE,
        run_files.ENVIRONMENT_FILE,
        run_files.METRICS_FILE,
        run_files.PARAMETERS_FILE,
        run_files.CURVE_FILE,
    ]
    files += [RECORD_FILE] if config.output.record else []
    # What no ε covers is for eyes: output that is no terminal may be kept.
    shown = result if console.is_terminal else result.published(config)
    console.print(result_table(shown, config.mechanism.steps))
    if result.privacy is not None:
        files.append(LEDGER_FILE)
        if result.privacy.budget_sentence:
            say(console, f"the budget ended the run: {result.privacy.budget_sentence}")
    say(
        console,
        f"{result.steps} steps in {result.seconds:.0f} s, {result.tokens_per_second:,.0f} tokens/s",
    )
    if result.reducer == "ordered":
        say(console, f"digest {result.digest[:16]}, the same on any number of ranks")
    say(console, f"run folder [bold]{escape(result.folder)}[/]: {', '.join(files)}")


def result_table(result: run_files.TrainResult, num_planned: int) -> Table:
    """What a run came to; of a private one with what it spent, in at most 80 columns."""
    privacy = result.privacy
    losses = {
        "eval loss": (result.eval_loss_before, result.eval_loss_after),
        "train loss": (result.train_loss_before, result.train_loss_after),
    }
    if privacy is None:
        table = Table(box=None, pad_edge=False)
        table.add_column("nats per token")
        table.add_column("before", justify="right")
        table.add_column("after", justify="right")
        for name in reversed(losses):
            table.add_row(name, *("" if x is None else f"{x:.4f}" for x in losses[name]))
        table.add_row("unigram entropy", f"{result.unigram_entropy:.4f}", "", style="dim")
        return table
    table = Table(box=box.ROUNDED, show_header=False)
    table.add_column(style="bold")
    table.add_column()
    notes = {"eval loss": "held-out records, not covered by ε", "train loss": "not covered by ε"}
    for name, (before, after) in losses.items():
        first = "–" if before is None else f"{before:.4f}"
        if after is not None:
            table.add_row(name, f"{first} → [bold]{after:.4f}[/]  [dim]{notes[name]}[/]")
    table.add_row("unigram entropy", f"{result.unigram_entropy:.4f}  [dim]held-out rows[/]")
    table.add_section()
    allowed = "" if privacy.target_epsilon is None else f", of {privacy.target_epsilon:g} allowed"
    said = f"{allowed}, by {privacy.accountant.upper()}"
    if privacy.epsilon == math.inf:
        table.add_row("ε spent", "[bold red]infinite[/]: the noise came from a seed")
        table.add_row("ε if secret", f"{privacy.epsilon_if_secret:.3f}{said}")
    else:
        table.add_row("ε spent", f"[bold green]{privacy.epsilon:.3f}[/]{said}")
    table.add_row("δ", f"{privacy.delta:g}")
    table.add_row("noise multiplier σ", f"{privacy.noise_multiplier:.4g}")
    table.add_row("clip norm C", f"{privacy.max_grad_norm:g}, {privacy.clip_rule}")
    if not privacy.is_secure:
        table.add_row("warning", "[bold red]seeded noise: nothing here is private[/]")
    table.add_section()
    steps = f"{result.steps} of {num_planned}"
    if privacy.num_counted > result.steps:
        steps += f"; {privacy.num_counted} counted, with those a crash repeated"
    table.add_row("steps", steps)
    table.add_row("batch", f"{privacy.batch_size} of {privacy.num_rows:,} rows, {privacy.sampling}")
    return table


def say(console: Console, *lines: str) -> None:
    """Print lines as they are, with rich's marks for bold and such."""
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)


# ---- while it goes on ----------------------------------------------------------------------------


class ProgressView(progress.Progress):
    """Shows steps as they finish: a bar with a line below it on a terminal, else plain lines.

    Args:
        console: Where to; None is silent, for the ranks other than 0.
        config: The settings.
        first: Steps done before, by the run that this one goes on from.
    """

    _below = ""  # read while `Progress` is being made

    def __init__(self, console: Console | None, config: TrainConfig, *, first: int = 0) -> None:
        super().__init__(
            progress.BarColumn(bar_width=16),  # all of it fits 80 columns
            progress.MofNCompleteColumn(),
            progress.TextColumn("{task.fields[first]}"),
            progress.TextColumn("eval {task.fields[eval_loss]}"),
            progress.TextColumn("{task.fields[speed]} tokens/s"),
            progress.TimeRemainingColumn(compact=True),
            progress.TextColumn("left"),
            console=console,
            disable=console is None or not console.is_terminal,
        )
        self._is_silent, self._output, self._first = console is None, config.output, first
        self._num_steps, self._started = config.mechanism.steps, time.perf_counter()
        name = "loss –" if config.mechanism.privacy is None else "ε –"
        self._task = self.add_task(
            "", total=self._num_steps, completed=first, first=name, eval_loss="–", speed="–"
        )

    def get_renderables(self) -> Iterable[RenderableType]:
        """What is drawn: the bar, and the line below it."""
        yield from super().get_renderables()
        if self._below:
            yield Text(self._below, style="dim")

    def stop(self) -> None:
        """End the bar; where there is none, some versions of rich would print a line."""
        if not self.disable:
            super().stop()

    def show_step(
        self,
        step: int,
        loss: float,
        speed: float,
        privacy: Mapping[str, float] | None = None,
        epsilon: str = "",
    ) -> None:
        """Show that step `step` (counted from 1) is done, at `speed` tokens per second.

        Args:
            step: Its number.
            loss: Of its rows.
            speed: In all steps so far.
            privacy: In a private run, metrics that no ε covers.
            epsilon: And ε, in words.
        """
        if not self.disable:
            if privacy:
                self._below = _not_covered(loss, privacy)
            first = epsilon or f"loss {loss:.3f}"
            self.update(self._task, completed=step, first=first, speed=f"{speed:,.0f}")
        elif step % self._output.log_every == 0 or step == self._num_steps:
            seconds = time.perf_counter() - self._started
            left = seconds / (step - self._first) * (self._num_steps - step)
            line = f"step {step}/{self._num_steps}  {epsilon or f'loss {loss:.4f}'}  "
            line += f"{speed:,.0f} tokens/s  {left:.0f} s left"
            if privacy and self._output.unsafe_diagnostics:
                line += f"  {_not_covered(loss, privacy)}"
            self.note(line)

    def show_eval(self, step: int, loss: float) -> None:
        """Show an evaluation."""
        if self.disable:
            self.note(f"step {step}/{self._num_steps}  eval loss {loss:.4f}")
        else:
            self.update(self._task, eval_loss=f"{loss:.3f}")

    def note(self, text: str) -> None:
        """Show a remark: below the bar until the next one, or as a line."""
        if not self.disable:
            self._below = text
        elif not self._is_silent:
            say(self.console, text)


def _not_covered(loss: float, privacy: Mapping[str, float]) -> str:
    median, dropped = privacy["privacy/median_norm"], privacy["privacy/num_dropped"]
    words = (
        f"not covered by ε: loss {loss:.3f}, clipped {privacy['privacy/clipped_fraction']:.0%}, "
        f"median norm {'–' if math.isnan(median) else f'{median:.3g}'}"
    )
    return words + (f", {dropped} not finite" if dropped else "")
