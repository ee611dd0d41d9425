"""The application, and what its exit codes mean: 0 done, 2 the user can mend it, 1 a bug.

A run that a signal stopped ends with 128 and the signal's number, as shells have it.
"""

import json
import os
import shlex
import sys
import time
from collections.abc import Callable

import typer
from rich.console import Console
from rich.table import Table

import unison
from unison.cli.account import account
from unison.cli.finetune import export, finetune, generate
from unison.cli.options import documented
from unison.cli.plan import plan
from unison.cli.replay import replay
from unison.cli.train import train
from unison.cli.verify import verify
from unison.errors import BadInput, OutOfRoom, Stopped, UnisonError
from unison.models import PRESETS, build, count_parameters
from unison.schema import cut
from unison.train import RankFailed

app = typer.Typer(
    name="unison",
    help="Many GPUs, one result: sharded, private and second-order training in PyTorch.",
    no_args_is_help=True,
    # A bug shows Python's own traceback. The pretty one can print local variables, which may hold
    # private rows or keys.
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(rich_help_panel="Verbs")(train)
app.command(rich_help_panel="Verbs")(account)
for verb in (finetune, generate, export, plan, replay):
    app.command(rich_help_panel="Verbs")(verb)


@app.command(rich_help_panel="Verbs")
@documented()
def presets(*, as_json: bool = False) -> None:
    """List the model presets with their shapes and parameter counts.

    Every one of them is really built, on the meta device, which takes no memory.

    Args:
        as_json: Print one machine-readable object instead.
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
@documented(version={"callback": _show_version, "is_eager": True})
def _options(*, version: bool = False) -> None:
    """Name the application's own options.

    Args:
        version: Print the version.
    """


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
