"""What a run says at its start and end, to the folder and to the person."""

from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

import unison
from unison.config import TrainConfig
from unison.models import LanguageModel, ModelConfig, count_parameters
from unison.train.environment import describe_environment
from unison.train.run_folder import write_json
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
    settings["fingerprint"] = unison.fingerprint(
        granule=config.mechanism.granule if config.mechanism.reducer == "ordered" else None,
        device=world.device,
    )
    settings["rows"] = {"train": rows.train.summary(), "eval": rows.eval.summary()}
    write_json(folder / "config.json", settings)
    write_json(folder / "environment.json", describe_environment(world.size, world.device))


def say_start(
    console: Console, config: TrainConfig, model: LanguageModel, rows: Rows, world: World
) -> None:
    """Say in three lines what is about to happen."""
    mechanism = config.mechanism
    ranks = "1 rank" if world.size == 1 else f"{world.size} ranks"
    console.print(
        f"[bold]unison train[/]  {mechanism.preset}: {count_parameters(model):,} parameters, "
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
