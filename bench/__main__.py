"""`python -m bench`: measurements that anyone can repeat with one command.

The other benchmarks are modules of their own: `python -m bench.NAME`.
"""

import typer

from bench.clipping_speed.command import clipping
from bench.parity import parity_command
from unison.cli import run

app = typer.Typer(
    name="python -m bench",
    help="Measure what unison promises, side by side with what it is measured against.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("parity")(parity_command)
app.command()(clipping)


def main() -> None:
    """Run the command line of the benchmarks; exit codes are those of `unison`."""
    run(app)


if __name__ == "__main__":
    main()
