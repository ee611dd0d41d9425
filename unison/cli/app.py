"""The application, and what its exit codes mean: 0 done, 2 the user can mend it, 1 a bug.

A run that a signal stopped ends with 128 and the signal's number, as shells have it.
"""

import json
import os
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

import unison
from unison.cli.account import account
from unison.cli.finetune import export, finetune, generate
from unison.cli.plan import plan
from unison.cli.replay import replay
from unison.cli.train import train
from unison.errors import BadInput, OutOfRoom, Stopped, UnisonError
from unison.models import PRESETS, build, count_parameters
from unison.run_files import read_config, read_result
from unison.schema import cut
from unison.train import RankFailed, result_table
from unison.verify import RunComparison, compare_runs

app = typer.Typer(
    name="unison",
    help="Many GPUs, one result: sharded, private and second-order training in PyTorch.",
    no_args_is_help=True,
    # A bug shows Python's own traceback. The pretty one can print local variables, which may hold
    # private rows or keys.
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
verify = typer.Typer(
    name="verify",
    help="Check what unison promises, on runs of your own.",
    no_args_is_help=True,
)
app.command(rich_help_panel="Verbs")(train)
app.command(rich_help_panel="Verbs")(account)
for verb in (finetune, generate, export, plan, replay):
    app.command(rich_help_panel="Verbs")(verb)


@app.command(rich_help_panel="Verbs")
def presets(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one machine-readable object instead.")
    ] = False,
) -> None:
    """List the model presets with their shapes and parameter counts.

    Every one of them is really built, on the meta device, which takes no memory.
    """
    table = Table(box=None, pad_edge=False)
    for title in ("preset", "family", "layers", "width", "heads", "vocab", "context"):
        table.add_column(title, justify="left" if title in ("preset", "family") else "right")
    table.add_column("parameters", justify="right")
    counts = {}
    started = time.perf_counter()
    for name, config in PRESETS.items():
        counts[name] = count_parameters(build(name, device="meta"))
        sizes = (config.num_layers, config.d_model, config.num_heads, config.vocab_size)
        sizes += (config.context_length, counts[name])
        table.add_row(name, config.family, *(f"{size:,}" for size in sizes))
    seconds = time.perf_counter() - started
    if as_json:
        typer.echo(json.dumps({"parameters": counts}))
    else:
        console = Console()
        console.print(table)
        console.print(f"all built on the meta device in {seconds:.1f} s", style="dim")


app.add_typer(verify, rich_help_panel="Verbs")


@verify.callback()
def _group() -> None:
    """Keep `verify` a group of commands while it holds only one."""


@verify.command()
def runs(
    first: Annotated[Path, typer.Argument(help="The folder of a run that has ended.")],
    second: Annotated[Path, typer.Argument(help="That of another one.")],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of tables.")
    ] = False,
) -> None:
    """Say whether two runs agree bit for bit, and if not, where they part.

    The runs must be one experiment: the same model, data, seed and optimisation. They may differ in
    the number of ranks, in sharding and in micro-batches. Of a private run, noise and sampling must
    come from a seed (--no-secure-noise): no other run has a secret key. Compared are all metrics of
    all steps, and every parameter. The exit code is 1 if runs with the ordered reducer differ.

    \b
    unison train --reducer ordered --nproc 2 --out runs/two
    unison train --reducer ordered --out runs/one
    unison verify runs runs/two runs/one
    """
    found = compare_runs(first, second)
    if as_json:
        figures = asdict(found) | {"has_same_bits": found.has_same_bits, "verdict": found.verdict}
        typer.echo(json.dumps(figures))
    else:
        style = "bold green" if found.has_same_bits else "yellow"
        style = style if found.keeps_its_promise else "bold red"
        screen = Console()
        screen.print(_comparison_table(found))
        screen.print()
        screen.print(found.verdict, style=style, highlight=False)
        screen.print()
        screen.print(result_table(read_result(first), read_config(first).mechanism.steps))
    if not found.keeps_its_promise:
        raise typer.Exit(1)


def _comparison_table(found: RunComparison) -> Table:
    """Both runs in two columns, and how far they are apart."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("last value (of how many)")
    for folder in found.folders:
        table.add_column(folder, justify="right", overflow="fold")
    table.add_column("difference", justify="right")
    table.add_row("ranks", *map(str, found.num_ranks), "")
    table.add_row("sharding", *found.shardings, "")
    for each in found.series:
        table.add_row(
            f"{each.name} ({each.num_values})",
            f"{each.first:.9g}",
            f"{each.second:.9g}",
            "0" if each.parts_at is None else f"{each.largest:.1e}",
        )
    parameters = found.parameters
    table.add_row(
        f"{parameters.num_elements:,} parameters",
        *(digest[:12] for digest in parameters.digests),
        "0" if parameters.is_none else f"{parameters.largest:.1e}",
    )
    return table


@app.command(
    hidden=True,
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def bench(context: typer.Context) -> None:
    """Say where the benchmarks have gone."""
    command = shlex.join(["python", "-m", "bench", *context.args])
    raise BadInput(f"benchmarks are no part of the package; in a checkout of unison, run {command}")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"unison {unison.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(
        False, "--version", callback=_show_version, is_eager=True, help="Print the version."
    ),
) -> None:
    pass


def main() -> None:
    """Run the command line of unison."""
    run(app)


def run(command: Callable[[], object]) -> None:
    """Run a command line; an error that a user can mend is one sentence and exit code 2."""
    try:
        command()
    except UnisonError as error:
        # All ranks met it, and one says it; memory may have been too little for any one alone.
        if os.environ.get("RANK", "0") == "0" or isinstance(error, OutOfRoom):
            print(f"unison: {error}", file=sys.stderr)
        sys.exit(128 + error.number if isinstance(error, Stopped) else 2)
    except OSError as error:
        if error.filename is None:
            raise
        # A name that is too long, a folder that may not be read: the user's, wherever it is met.
        print(f"unison: {cut(repr(str(error.filename)))}: {error.strerror}", file=sys.stderr)
        sys.exit(2)
    except RankFailed as error:
        print(f"unison: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("unison: interrupted; what was written stays", file=sys.stderr)
        sys.exit(130)
