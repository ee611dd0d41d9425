"""`unison presets`: the models that can be named, with their sizes."""

import json
import time
from typing import Annotated

import typer


def presets(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one machine-readable object instead.")
    ] = False,
) -> None:
    """List the model presets with their shapes and parameter counts.

    Every one of them is really built, on the meta device, which takes no memory.
    """
    from rich.console import Console
    from rich.table import Table

    from unison.models import PRESETS, build, count_parameters

    table = Table(box=None, pad_edge=False)
    for title in ("preset", "family", "layers", "width", "heads", "vocab", "context"):
        table.add_column(title, justify="left" if title in ("preset", "family") else "right")
    table.add_column("parameters", justify="right")
    counts = {}
    started = time.perf_counter()
    for name, config in PRESETS.items():
        counts[name] = count_parameters(build(name, device="meta"))
        sizes = (
            config.num_layers,
            config.d_model,
            config.num_heads,
            config.vocab_size,
            config.context_length,
            counts[name],
        )
        table.add_row(name, config.family, *(f"{size:,}" for size in sizes))
    seconds = time.perf_counter() - started
    if as_json:
        typer.echo(json.dumps({"parameters": counts}))
    else:
        console = Console()
        console.print(table)
        console.print(f"all built on the meta device in {seconds:.1f} s", style="dim")
