"""What a run says at its start and end, to the folder and to the person."""

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

import unison
from unison.config import TrainConfig
from unison.errors import BadInput
from unison.models import ModelConfig
from unison.train.environment import describe_environment
from unison.train.regime import PrivacyResult
from unison.train.run_folder import CONFIG_FILE, LEDGER_FILE, RESULT_FILE, write_json
from unison.train.setup import Rows
from unison.train.world import World


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """What a run came to. Losses are in nats per token, before the first and after the last step.

    `train_loss_*` and `eval_loss_*` are both measured on fixed rows, with the same code.
    `unigram_entropy` is the loss of the best model that ignores context. `digest` is one hash of
    all parameters; with the ordered reducer it does not depend on the number of ranks. `steps` are
    those that were taken. `privacy` is what a private run applied and spent; its `train_loss_*` are
    None unless unsafe diagnostics were asked for.
    """

    folder: str
    preset: str
    parameters: int
    world_size: int
    shard: str
    reducer: str
    digest: str
    steps: int
    train_loss_before: float | None
    train_loss_after: float | None
    eval_loss_before: float
    eval_loss_after: float
    unigram_entropy: float
    tokens_per_second: float
    seconds: float
    privacy: PrivacyResult | None = None

    def published(self, config: TrainConfig) -> "TrainResult":
        """The same without what must not leave the terminal."""
        if self.privacy is None or config.output.unsafe_diagnostics:
            return self
        return replace(self, train_loss_before=None, train_loss_after=None)

    def to_fields(self) -> dict[str, Any]:
        """The result as values that JSON can hold; it has no number for infinity."""
        found = asdict(self)
        if self.privacy is not None and self.privacy.epsilon == math.inf:
            found["privacy"]["epsilon"] = "inf"
        return found


# Of private rows, what they come to beyond their number.
_COUNTS = ("num_tokens", "num_targets", "num_dropped_tokens", "num_documents")
_COUNTS += ("num_skipped_documents", "num_truncated_documents")


def write_start(
    folder: Path, config: TrainConfig, model_config: ModelConfig, rows: Rows, world: World
) -> None:
    """Write what the run is made of: config.json and environment.json."""
    settings = asdict(config)
    settings["model"] = asdict(model_config)
    settings["fingerprint"] = _fingerprint(config, world)
    settings["rows"] = summarize(rows, config)
    write_json(folder / CONFIG_FILE, settings)
    write_json(folder / "environment.json", describe_environment(world.size, world.device))


def summarize(rows: Rows, config: TrainConfig) -> dict[str, Any]:
    """The rows of a run in plain values; of private ones nothing that their content decides."""
    summary = {"train": rows.train.summary(), "eval": rows.eval.summary()}
    if config.mechanism.privacy is not None:
        for split in summary.values():
            for name in _COUNTS:
                del split[name]
    return summary


def _fingerprint(config: TrainConfig, world: World) -> dict[str, Any]:
    is_ordered = config.mechanism.reducer == "ordered"
    return unison.fingerprint(
        granule=config.mechanism.granule if is_ordered else None,
        device=world.device,
        is_compiled=config.mechanism.compile,
    )


def write_resumption(folder: Path, config: TrainConfig, step: int, world: World) -> None:
    """Add a line to resumptions.jsonl: where the run went on, and on what."""
    line = {
        "step": step,
        "command": config.output.command,
        "execution": asdict(config.execution),
        "environment": describe_environment(world.size, world.device),
        "fingerprint": _fingerprint(config, world),
    }
    with (folder / "resumptions.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def say_resumption(console: Console, config: TrainConfig, step: int, world: World) -> None:
    """Say where the run goes on, and whether its bits can still be compared."""
    console.print(f"going on after step {step} of {config.mechanism.steps}", highlight=False)
    folder = Path(config.output.folder)
    before = json.loads((folder / CONFIG_FILE).read_text())["fingerprint"]
    now = json.loads(json.dumps(_fingerprint(config, world)))
    changed = sorted(
        name for name in before.keys() | now.keys() if before.get(name) != now.get(name)
    )
    if config.mechanism.reducer == "ordered" and changed:
        console.print(
            f"the digest will not be that of an uninterrupted run: {', '.join(changed)} changed",
            highlight=False,
            soft_wrap=True,
        )


def say_start(
    console: Console, config: TrainConfig, num_parameters: int, rows: Rows, world: World
) -> None:
    """Say in a few lines what is about to happen."""
    mechanism = config.mechanism
    ranks = "1 rank" if world.size == 1 else f"{world.size} ranks"
    say(
        console,
        f"[bold]unison train[/]  {mechanism.preset}: {num_parameters:,} parameters, "
        f"{ranks} on {world.device.type}, shard {config.execution.shard}, "
        f"{mechanism.reducer} reducer",
    )
    say(
        console,
        f"data {mechanism.data}: {rows.train.num_rows:,} rows of {rows.train.row_length} tokens to "
        f"train on, {rows.eval.num_rows:,} held out; unigram entropy {rows.unigram_entropy:.3f}",
    )


def say_privacy(console: Console, config: TrainConfig, lines: Iterable[str]) -> None:
    """Say what is protected and how, and where to find what is not."""
    say(console, *lines)
    if not (console.is_terminal or config.output.unsafe_diagnostics):
        say(
            console,
            "training loss, norms and clipped fractions are not covered by ε: a terminal shows "
            "them, files have them with --unsafe-diagnostics",
        )


def say_end(console: Console, config: TrainConfig, result: TrainResult) -> None:
    """Show the losses before and after, what privacy cost, and where the run lies."""
    files = ["config.json", "environment.json", "metrics.jsonl", "model.safetensors", "loss.png"]
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
    say(console, f"run folder [bold]{result.folder}[/]: {', '.join(files)}")


def result_table(result: TrainResult, num_planned: int) -> Table:
    """What a run came to; of a private one with what it spent."""
    if result.privacy is None:
        return _loss_table(result)
    return _privacy_table(result, result.privacy, num_planned)


def read_result(folder: Path) -> tuple[TrainResult, int]:
    """Read what a run in a folder came to, and how many steps it had planned.

    Raises:
        BadInput: If another version of unison wrote it.
    """
    saved = json.loads((folder / RESULT_FILE).read_text())
    privacy = saved.pop("privacy", None)
    try:
        if privacy is not None:
            privacy = PrivacyResult(**privacy | {"epsilon": float(privacy["epsilon"])})
        result = TrainResult(**saved, privacy=privacy)
    except (TypeError, KeyError) as error:
        raise BadInput(
            f"{folder / RESULT_FILE} cannot be read by this unison ({error}); train again"
        ) from None
    return result, json.loads((folder / CONFIG_FILE).read_text())["mechanism"]["steps"]


def _loss_table(result: TrainResult) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("nats per token")
    table.add_column("before", justify="right")
    table.add_column("after", justify="right")
    for name, before, after in (
        ("train loss", result.train_loss_before, result.train_loss_after),
        ("eval loss", result.eval_loss_before, result.eval_loss_after),
    ):
        table.add_row(name, f"{before:.4f}", f"{after:.4f}")
    table.add_row("unigram entropy", f"{result.unigram_entropy:.4f}", "", style="dim")
    return table


def _privacy_table(result: TrainResult, privacy: PrivacyResult, num_planned: int) -> Table:
    """Everything that a private run came to, in one table of at most 80 columns."""
    table = Table(box=box.ROUNDED, show_header=False)
    table.add_column(style="bold")
    table.add_column()

    def add_loss(name: str, before: float | None, after: float | None, note: str) -> None:
        first = "–" if before is None else f"{before:.4f}"
        table.add_row(name, f"{first} → [bold]{after:.4f}[/]  [dim]{note}[/]")

    held_out = "held-out records, not covered by ε"
    add_loss("eval loss", result.eval_loss_before, result.eval_loss_after, held_out)
    if result.train_loss_after is not None:
        covered = "not covered by ε"
        add_loss("train loss", result.train_loss_before, result.train_loss_after, covered)
    table.add_row("unigram entropy", f"{result.unigram_entropy:.4f}  [dim]held-out rows[/]")
    table.add_section()
    allowed = "" if privacy.target_epsilon is None else f", of {privacy.target_epsilon:g} allowed"
    by = f"by {privacy.accountant.upper()}"
    if privacy.epsilon == math.inf:
        table.add_row("ε spent", "[bold red]infinite[/]: the noise came from a seed")
        table.add_row("ε if secret", f"{privacy.epsilon_if_secret:.3f}{allowed}, {by}")
    else:
        table.add_row("ε spent", f"[bold green]{privacy.epsilon:.3f}[/]{allowed}, {by}")
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
