"""The application, and what its exit codes mean: 0 done, 2 the user can mend it, 1 a bug."""

import os
import shlex
import sys
from collections.abc import Callable

import typer

import unison
from unison.cli.account import account
from unison.cli.presets import presets
from unison.cli.train import train
from unison.cli.verify import verify
from unison.errors import BadInput, UnisonError

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
app.command(rich_help_panel="Verbs")(presets)
app.add_typer(verify, rich_help_panel="Verbs")


@app.command(
    hidden=True,
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def bench(context: typer.Context) -> None:
    """Benchmarks have a command of their own."""
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
    from unison.train import RankFailed

    try:
        command()
    except UnisonError as error:
        if os.environ.get("RANK", "0") == "0":  # all ranks met it; one says it
            print(f"unison: {error}", file=sys.stderr)
        sys.exit(2)
    except RankFailed as error:
        print(f"unison: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("unison: interrupted; what was written stays", file=sys.stderr)
        sys.exit(130)
