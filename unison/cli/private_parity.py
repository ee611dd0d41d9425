"""`unison bench parity --private`: the tables."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from unison.verify import PrivateExperiment, PrivatelyTrained

# What the reference note 000 reached at world size 1; at 2 its gradient norm was off by sqrt(2).
REFERENCE = {"loss": 3.9e-4, "gradient norm": 2.1e-3, "parameter norm": 9.6e-6}


def private_parity(
    settings: dict[str, Any], *, nproc: int, out: Path | None, as_json: bool
) -> None:
    """Train privately on one process and on ranks, with both reducers, and print the differences.

    Args:
        settings: Of the experiment, those that were given.
        nproc: Most ranks.
        out: Where the figures go, if anywhere.
        as_json: Whether to print one JSON object instead of tables.
    """
    from rich.console import Console

    from unison.train import run_on_local_ranks
    from unison.verify import (
        WORLD_SIZES,
        PrivateExperiment,
        check_writable,
        compare_privately,
        write_result,
    )

    if out is not None:
        check_writable(out)
    sizes = [size for size in WORLD_SIZES if size <= nproc]
    screen, errors = Console(), Console(stderr=True)
    figures, is_broken = {}, False
    for reducer in ("ordered", "fast"):
        experiment = PrivateExperiment(reducer=reducer, **settings)
        with errors.status(f"{reducer}: one process, then {sizes} ranks"):
            alone, *others = compare_privately(experiment, launch=run_on_local_ranks, sizes=sizes)
        figures[reducer] = {
            "experiment": asdict(experiment),
            "one process": asdict(alone),
            "ranks": {
                str(each.num_ranks): {
                    "differences": each.differences(alone),
                    "has_same_bits": each.has_same_bits(alone),
                }
                for each in others
            },
        }
        is_broken |= reducer == "ordered" and not all(each.has_same_bits(alone) for each in others)
        if not as_json:
            show(screen, experiment, alone, others)
    if as_json:
        typer.echo(json.dumps(figures))
    if out is not None:
        write_result(out, "parity-private", figures)
    if is_broken:
        typer.echo("unison: the ordered reducer must agree in every bit", err=True)
        raise typer.Exit(1)


def show(
    screen: "Console",
    experiment: "PrivateExperiment",
    alone: "PrivatelyTrained",
    others: "list[PrivatelyTrained]",
) -> None:
    """Print how far every number of ranks is from one process, in at most 80 columns."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    names = list(others[0].differences(alone))
    table.add_column("relative difference")
    for each in others:
        ranks = "1 rank" if each.num_ranks == 1 else f"{each.num_ranks} ranks"
        table.add_column(ranks, justify="right")
    table.add_column("note 000", justify="right", style="dim")
    for name in names:
        values = [each.differences(alone)[name] for each in others]
        cells = ["0" if value == 0 else f"{value:.1e}" for value in values]
        table.add_row(name, *cells, f"{REFERENCE[name]:.1e}" if name in REFERENCE else "")
    bits = ["yes" if each.has_same_bits(alone) else "no" for each in others]
    table.add_row("the same bits", *bits, "", style="bold")
    screen.print()
    screen.print(
        f"[bold]{experiment.preset}, private, {experiment.reducer} reducer[/]  "
        f"{experiment.steps} steps, {experiment.batch_size} of {experiment.num_records} records "
        f"of {experiment.tokens} tokens, σ {experiment.noise_multiplier:g}, "
        f"C {experiment.max_grad_norm:g}"
    )
    screen.print(table)
    screen.print(
        "The largest from one process, over all steps; of step 1, the clipped gradient before its "
        "noise. Note 000 is a reference at 1 rank; at 2 its gradient norm was off by √2.",
        style="dim",
    )
