"""`unison bench`: measurements that anyone can repeat with one command."""

import json
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unison import config as settings
from unison.cli.clipping_bench import clipping
from unison.cli.private_parity import private_parity
from unison.cli.train import complete_preset

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from unison.verify import Experiment, Parity, Trained

bench = typer.Typer(
    name="bench",
    help="Measure what unison promises, side by side with what it is measured against.",
    no_args_is_help=True,
)

Reducer = StrEnum("Reducer", list(settings.REDUCERS))
MIB = 2**20
bench.command()(clipping)


@dataclass(frozen=True, kw_only=True)
class _Size:
    """How much of a preset is trained unless the options say otherwise."""

    num_layers: int | None = None
    steps: int = 3
    tokens: int = 32


# A model that is trained as it is, and the width of a large one with as many blocks as a small
# machine can hold eight times over.
_SIZES = {"small": _Size(steps=20, tokens=64), "gpt2-xl": _Size(num_layers=2, steps=2)}


@bench.command()
def parity(
    preset: Annotated[
        list[str] | None,
        typer.Option(
            "--preset",
            help="Which model (see `unison presets`); may be given several times. By default small "
            "and gpt2-xl, the latter with 2 blocks.",
            autocompletion=complete_preset,
        ),
    ] = None,
    num_layers: Annotated[
        int | None, typer.Option("--num-layers", help="Replace the number of blocks.")
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option("--steps", help="Optimizer steps; 20 for small, 2 for gpt2-xl, 3 else."),
    ] = None,
    batch_size: Annotated[
        int, typer.Option("--batch-size", help="Rows per step, over all ranks.")
    ] = 8,
    tokens: Annotated[
        int | None, typer.Option("--tokens", help="Tokens per row; 64 for small, 32 else.")
    ] = None,
    reducer: Annotated[
        Reducer,
        typer.Option("--reducer", help="ordered must give the same bits; fast need not."),
    ] = Reducer("ordered"),
    granule: Annotated[
        int, typer.Option("--granule", help="Rows per granule of the ordered reducer.")
    ] = 1,
    seed: Annotated[int, typer.Option("--seed", help="Seed of initial values and tokens.")] = 0,
    nproc: Annotated[
        int, typer.Option("--nproc", min=1, help="Ranks to compare with one process.")
    ] = 8,
    is_private: Annotated[
        bool,
        typer.Option(
            "--private",
            help="Train privately: Poisson sampling, clipping and noise, on 1, 2, 3, 4, ... ranks "
            "up to --nproc, 24 records of 32 tokens, with both reducers.",
        ),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE",
            help="Write the figures to a JSON file, with the "
            "command, the commit, the hardware and the versions.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the figures as one JSON object instead of tables.")
    ] = False,
) -> None:
    """Train on one process and on many ranks, and compare every loss and every parameter.

    One process builds the model as usual. The ranks build it without memory, shard it and fill
    their own parts. Then both train on the same batches, on the CPU, with one thread per rank.
    With the ordered reducer the exit code is 1 if any bit differs.

    \b
    unison bench parity                               both tables, a few minutes
    unison bench parity --preset small --nproc 3      any number of ranks
    unison bench parity --preset gpt2 --reducer fast --out fast.json
    unison bench parity --private                     a table per reducer, a few minutes
    """
    from rich.console import Console

    if is_private:
        if num_layers is not None or (preset and len(preset) > 1):
            raise typer.BadParameter("--private takes one --preset and no --num-layers")
        given = {
            "preset": preset[0] if preset else None,
            "steps": steps,
            "batch_size": batch_size,
            "tokens": tokens,
            "seed": seed,
        }
        private_parity(
            {name: value for name, value in given.items() if value is not None},
            nproc=nproc,
            out=out,
            as_json=as_json,
        )
        return

    from unison.train import run_on_local_ranks
    from unison.verify import check_writable, compare, write_result

    if out is not None:
        check_writable(out)
    experiments = [
        _experiment(
            name,
            num_layers=num_layers,
            steps=steps,
            tokens=tokens,
            batch_size=batch_size,
            reducer=reducer.value,
            granule=granule,
            seed=seed,
        )
        for name in preset or _SIZES
    ]
    screen, errors = Console(), Console(stderr=True)
    results = []
    for experiment in experiments:
        with errors.status(f"training {experiment.preset} on one process, then on {nproc} ranks"):
            results.append(compare(experiment, num_ranks=nproc, launch=run_on_local_ranks))
        if not as_json:
            show(screen, results[-1])
    figures = {result.experiment.preset: figures_of(result) for result in results}
    if as_json:
        typer.echo(json.dumps(figures))
    if out is not None:
        write_result(out, "parity", figures)
    broken = [result for result in results if not _keeps_its_promise(result)]
    for result in broken:
        typer.echo(f"unison: {_verdict(result)}", err=True)
    if broken:
        raise typer.Exit(1)


def _experiment(name: str, **options: Any) -> "Experiment":
    """The experiment with a preset; an option that was not given takes the preset's size."""
    from unison.verify import Experiment

    sizes = asdict(_SIZES.get(name, _Size()))
    given = {option: value for option, value in options.items() if value is not None}
    return Experiment(preset=name, **(sizes | given))


def _keeps_its_promise(result: "Parity") -> bool:
    return result.experiment.reducer != "ordered" or result.first_difference() is None


def _verdict(result: "Parity") -> str:
    """What the comparison came to, as one sentence."""
    name, num_ranks = result.experiment.preset, result.together.num_ranks
    apart = result.first_difference()
    if apart is None:
        return f"{name}: one process and {num_ranks} ranks agree in every bit"
    if result.experiment.reducer == "ordered":
        return f"{name}: one process and {num_ranks} ranks must agree in every bit, but {apart}"
    return (
        f"{name}: the largest relative difference of a loss is "
        f"{max(result.relative_differences):.1e}; the fast reducer promises no bits"
    )


def figures_of(result: "Parity") -> dict[str, Any]:
    """A comparison as values that JSON can hold."""
    return asdict(result) | {
        "loss_differences": result.loss_differences,
        "relative_differences": result.relative_differences,
        "has_same_bits": result.first_difference() is None,
        "model_state_bytes": {
            "alone": result.alone.model_state_bytes,
            "together": result.together.model_state_bytes,
        },
        "saving": result.saving,
        "verdict": _verdict(result),
    }


# ---- tables --------------------------------------------------------------------------------------


def show(screen: "Console", result: "Parity") -> None:
    """Print a comparison as tables."""
    experiment, model = result.experiment, result.experiment.model
    granule = f", granule {experiment.granule}" if experiment.reducer == "ordered" else ""
    screen.print()
    screen.print(
        f"[bold]{experiment.preset}[/]  {result.num_parameters:,} parameters, "
        f"{model.num_layers} blocks of width {model.d_model}, vocabulary {model.vocab_size:,}"
    )
    screen.print(
        f"{experiment.batch_size} rows of {experiment.tokens} tokens per step, AdamW, "
        f"{experiment.reducer} reducer{granule}, seed {experiment.seed}",
        style="dim",
    )
    for table in (_loss_table(result), _end_table(result), _memory_table(result)):
        screen.print()
        screen.print(table)
    screen.print()
    is_good = _keeps_its_promise(result)
    screen.print(_verdict(result), style="green" if is_good else "bold red", highlight=False)


def _table(*titles: str) -> "Table":
    """A table without lines: the first column to the left, the others to the right."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for number, title in enumerate(titles):
        table.add_column(title, justify="left" if number == 0 else "right", no_wrap=True)
    return table


def _loss_table(result: "Parity") -> "Table":
    table = _table("step", *_names(result), "difference", "relative")
    columns = (
        result.alone.losses,
        result.together.losses,
        result.loss_differences,
        result.relative_differences,
    )
    for step, (a, b, difference, relative) in enumerate(zip(*columns, strict=True), 1):
        table.add_row(
            str(step), f"{a:.10f}", f"{b:.10f}", _difference(difference), _difference(relative)
        )
    return table


def _end_table(result: "Parity") -> "Table":
    alone, together = result.alone, result.together
    largest = together.largest_difference
    assert largest is not None  # the ranks compare with one process
    table = _table("parameters", *_names(result), "difference")
    for title, a, b in (
        ("digest before training", alone.digest_before, together.digest_before),
        ("digest after training", alone.digest_after, together.digest_after),
    ):
        table.add_row(title, a[:16], b[:16], "none" if a == b else "differs")
    a, b = alone.parameter_sum, together.parameter_sum
    table.add_row("sum", f"{a:.9f}", f"{b:.9f}", _difference(abs(a - b)))
    table.add_row("largest difference", "", "", _difference(largest))
    return table


def _memory_table(result: "Parity") -> "Table":
    from unison.verify import MODEL_STATE

    alone, together = result.alone, result.together
    table = _table("memory per rank at its peak, MiB", *_names(result), "saving")
    for category in MODEL_STATE:
        a, b = alone.model_state[category], together.model_state[category]
        if a or b:
            table.add_row(f"  {category}", _mib(a), _mib(b), "")
    a, b = alone.model_state_bytes, together.model_state_bytes
    table.add_row("together", _mib(a), _mib(b), f"{result.saving:.2f}x", style="bold")
    a, b = sum(alone.memory.values()), sum(together.memory.values())
    table.add_row("with activations and buffers", _mib(a), _mib(b), f"{a / b:.2f}x")
    table.add_row("seconds", *(f"{side.seconds:.1f}" for side in (alone, together)), "")
    return table


def _names(result: "Parity") -> tuple[str, str]:
    def name(side: "Trained") -> str:
        return "1 rank" if side.num_ranks == 1 else f"{side.num_ranks} ranks"

    return "one process", name(result.together)


def _difference(value: float) -> str:
    """Zero as 0, and nothing else as 0: rounding would hide what the table is there to show."""
    return "0" if value == 0 else f"{value:.1e}"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:,.2f}"
