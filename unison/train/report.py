"""What a run says at its start and end, to the folder and to the person."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import unison
from unison.config import TrainConfig
from unison.models import ModelConfig
from unison.train.environment import describe_environment
from unison.train.run_folder import CONFIG_FILE, write_json
from unison.train.setup import Rows
from unison.train.world import World


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """What a run came to. Losses are in nats per token, before the first and after the last step.

    `train_loss_*` and `eval_loss_*` are both measured on fixed rows, with the same code.
    `unigram_entropy` is the loss of the best model that ignores context. `digest` is one hash of
    all parameters; with the ordered reducer it does not depend on the number of ranks.
    """

    folder: str
    preset: str
    parameters: int
    world_size: int
    shard: str
    reducer: str
    digest: str
    steps: int
    train_loss_before: float
    train_loss_after: float
    eval_loss_before: float
    eval_loss_after: float
    unigram_entropy: float
    tokens_per_second: float
    seconds: float


def write_start(
    folder: Path, config: TrainConfig, model_config: ModelConfig, rows: Rows, world: World
) -> None:
    """Write what the run is made of: config.json and environment.json."""
    settings = asdict(config)
    settings["model"] = asdict(model_config)
    settings["fingerprint"] = _fingerprint(config, world)
    settings["rows"] = summarize(rows)
    write_json(folder / CONFIG_FILE, settings)
    write_json(folder / "environment.json", describe_environment(world.size, world.device))


def summarize(rows: Rows) -> dict[str, Any]:
    """The rows of a run in plain values."""
    return {"train": rows.train.summary(), "eval": rows.eval.summary()}


def _fingerprint(config: TrainConfig, world: World) -> dict[str, Any]:
    is_ordered = config.mechanism.reducer == "ordered"
    return unison.fingerprint(
        granule=config.mechanism.granule if is_ordered else None, device=world.device
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
    """Say in three lines what is about to happen."""
    mechanism = config.mechanism
    ranks = "1 rank" if world.size == 1 else f"{world.size} ranks"
    console.print(
        f"[bold]unison train[/]  {mechanism.preset}: {num_parameters:,} parameters, "
        f"{ranks} on {world.device.type}, shard {config.execution.shard}, "
        f"{mechanism.reducer} reducer",
        highlight=False,
        soft_wrap=True,
    )
    console.print(
        f"data {mechanism.data}: {rows.train.num_rows:,} rows of {rows.train.row_length} tokens to "
        f"train on, {rows.eval.num_rows:,} held out; unigram entropy {rows.unigram_entropy:.3f}",
        highlight=False,
        soft_wrap=True,
    )


def say_end(console: Console, result: TrainResult) -> None:
    """Show the losses before and after, and where the run lies."""
    table = Table(box=None, pad_edge=False)
    for title in ("nats per token", "before", "after"):
        table.add_column(title, justify="left" if title.startswith("nats") else "right")
    for name, before, after in (
        ("train loss", result.train_loss_before, result.train_loss_after),
        ("eval loss", result.eval_loss_before, result.eval_loss_after),
    ):
        table.add_row(name, f"{before:.4f}", f"{after:.4f}")
    table.add_row("unigram entropy", f"{result.unigram_entropy:.4f}", "", style="dim")
    console.print(table)
    console.print(
        f"{result.steps} steps in {result.seconds:.0f} s, {result.tokens_per_second:,.0f} tokens/s",
        highlight=False,
        soft_wrap=True,
    )
    if result.reducer == "ordered":
        console.print(
            f"digest {result.digest[:16]}, the same on any number of ranks", highlight=False
        )
    console.print(
        f"run folder [bold]{result.folder}[/]: config.json, environment.json, metrics.jsonl, "
        f"model.safetensors, loss.png",
        highlight=False,
        soft_wrap=True,
    )
