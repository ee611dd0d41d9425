"""`unison verify`: claims, checked."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from unison.verify import RunComparison

verify = typer.Typer(
    name="verify",
    help="Check what unison promises, on runs of your own.",
    no_args_is_help=True,
)


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
    from rich.console import Console

    from unison.train import read_result, result_table
    from unison.verify import compare_runs

    found = compare_runs(first, second)
    if as_json:
        figures = asdict(found) | {"has_same_bits": found.has_same_bits, "verdict": found.verdict}
        typer.echo(json.dumps(figures))
    else:
        screen = Console()
        screen.print(comparison_table(found))
        screen.print()
        style = "bold green" if found.has_same_bits else "yellow"
        screen.print(
            found.verdict,
            style=style if found.keeps_its_promise else "bold red",
            highlight=False,
        )
        screen.print()
        result, num_planned = read_result(first)
        screen.print(result_table(result, num_planned))
    if not found.keeps_its_promise:
        raise typer.Exit(1)


def comparison_table(found: "RunComparison") -> "Table":
    """Both runs in two columns, and how far they are apart."""
    from rich.table import Table

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
