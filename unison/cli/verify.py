"""`unison verify`: the claims, two runs side by side, two traces, and models of your own."""

import json
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from unison import verify as checks
from unison.cli.account import for_json, plain_table
from unison.cli.options import documented
from unison.errors import BadInput
from unison.run_files import read_config, read_result
from unison.shard import fingerprint
from unison.train import result_table, run_on_local_ranks

verify = typer.Typer(
    name="verify",
    help="Check what unison promises: by itself, on runs and models of your own.",
)

FILE = {"metavar": "FILE"}


@verify.callback(invoke_without_command=True)
@documented(html=FILE)
def _claims(
    context: typer.Context,
    *,
    quick: bool = False,
    full: bool = False,
    as_json: bool = False,
    html: Path | None = None,
) -> None:
    """Try what unison promises, on this machine: the claims of docs/verify.md.

    A small model is trained as real processes on several numbers of ranks, in all the ways that
    must come to one result, and every quantity of every step is compared. The exit code is 1 if a
    claim fails.

    \b
    unison verify --quick
    unison verify --html claims.html
    unison verify diff a.trace b.trace
    unison verify model mymodule:build_model --data mymodule:batch
    unison verify runs runs/a runs/b

    Args:
        quick: 1 and 2 ranks, the main claims: under two minutes.
        full: 1, 2, 3, 4 and 8 ranks, and every clipping mode.
        as_json: Print one JSON object instead of tables.
        html: Write the figures as one page of HTML too.
    """
    if context.invoked_subcommand is not None:
        if quick or full or as_json or html:
            raise BadInput(
                f"put options after {context.invoked_subcommand!r}: unison verify "
                f"{context.invoked_subcommand} --help"
            )
        return
    if quick and full:
        raise BadInput("--quick and --full exclude each other")
    depth = "quick" if quick else "full" if full else "default"
    _try("unison verify", checks.claims(depth), None, None, as_json=as_json, html=html, what=depth)


def _try(
    title: str,
    tried: list[checks.Claim],
    subject: checks.Subject | None,
    folder: Path | None,
    *,
    as_json: bool,
    html: Path | None,
    what: str,
) -> None:
    """Train and compare, telling on the terminal what is going on, and then what came of it."""
    started, screen = time.perf_counter(), Console(stderr=True)
    temporary = tempfile.TemporaryDirectory(prefix="unison-verify-")
    with temporary, screen.status("starting") as status:

        def on_launch(size: int, count: int) -> None:
            ranks = f"{size} rank{'s' if size > 1 else ''}"
            status.update(f"{count} training{'s' if count > 1 else ''} on {ranks}")

        verdicts = checks.try_claims(
            tried,
            launch=run_on_local_ranks,
            folder=folder or Path(temporary.name),
            subject=subject,
            on_launch=on_launch,
        )
    seconds = time.perf_counter() - started
    failed, is_one = sum(not each.holds for each in verdicts), len(verdicts) == 1
    count = sum(each.num_runs for each in verdicts)
    if failed:
        some = f"{failed} of {len(verdicts)} claims {'fails' if failed == 1 else 'fail'}"
        summary = "the claim fails" if is_one else some
    else:
        claims_hold = "the claim holds" if is_one else f"all {len(verdicts)} claims hold"
        summary = f"{claims_hold}, on {count} training{'s' if count > 1 else ''}"
    about = {"what": what, "seconds": round(seconds, 1), **fingerprint()}
    about |= {"threads": 1}  # of each rank, whatever this process has
    for name in ("granule", "compiled"):  # each training has its own
        del about[name]
    rows = []
    for each in verdicts:
        largest = _apart(each.largest)
        if each.tolerance:
            largest += f" (≤ {each.tolerance:.0e})"
        ranks, said = ", ".join(map(str, each.num_ranks)), "holds" if each.holds else "fails"
        rows.append((each.claim, each.quantity, ranks, str(each.num_runs), largest, said))
    found = [asdict(each) | {"holds": each.holds} for each in verdicts]
    _tell(
        {"holds": not failed, "claims": found, "conditions": about},
        f"{seconds:.0f} s",
        as_json,
        html,
        on_page_only="compared",
        title=title,
        summary=summary,
        is_good=not failed,
        columns=("claim", "compared", "ranks", "trainings", "largest difference", "verdict"),
        rows=rows,
        faults=[fault for each in verdicts for fault in each.faults],
        about=about,
    )


def _apart(distance: float) -> str:
    return "0" if distance == 0 else f"{distance:.1e}"


def _tell(
    figures: Mapping[str, Any],
    note: str,
    as_json: bool,
    html: Path | None,
    on_page_only: str = "",
    **told: Any,
) -> None:
    """Print a table or JSON, write the page, and end with 1 if something is wrong.

    Args:
        figures: What to say as JSON.
        note: What else to say on a terminal.
        as_json: Whether to print JSON.
        html: The page.
        on_page_only: A column that is too wide for terminals.
        told: What is on the page; see `page`.
    """
    if html is not None:
        try:
            html.write_text(checks.page(**told))
        except OSError as error:
            raise BadInput(f"{html} cannot be written: {error.strerror}") from None
    if as_json:
        typer.echo(json.dumps(for_json(figures), allow_nan=False))
    else:
        screen, columns = Console(), told["columns"]
        shown = [place for place, name in enumerate(columns) if name != on_page_only]
        titles = [columns[place].removesuffix(" difference") for place in shown]
        table = plain_table(*titles, numbers=("step", "compared", "differing", "largest"))
        for row in told["rows"]:
            *cells, verdict = (escape(row[place]) for place in shown)
            style = "green" if verdict in ("holds", "equal") else "bold red"
            table.add_row(*cells, f"[{style}]{verdict}[/]")
        screen.print(table)
        for fault in told["faults"]:
            screen.print()
            screen.print(fault, style="red", highlight=False, markup=False)
        screen.print()
        style = "bold green" if told["is_good"] else "bold red"
        screen.print(told["summary"], style=style, highlight=False, markup=False)
        if note:
            screen.print(note, style="dim", highlight=False, markup=False)
    if not told["is_good"]:
        raise typer.Exit(1)


# ---- traces --------------------------------------------------------------------------------------


@verify.command()
@documented(
    first={"metavar": "A.trace"}, second={"metavar": "B.trace"}, tolerance={"min": 0.0}, html=FILE
)
def diff(
    first: Path,
    second: Path,
    *,
    tolerance: float = 0.0,
    as_json: bool = False,
    html: Path | None = None,
) -> None:
    """Compare two traces rung by rung, and say where the runs first part, and likely why.

    A trace is what `unison.verify.trace(file, model, optimizer)` writes around a training loop, and
    `unison replay --trace` of steps of a recorded run, on any machine and number of ranks. The exit
    code is 1 if the two differ.

    Args:
        first: The trace of a run.
        second: That of another.
        tolerance: How far quantities may be apart; 0 compares bits.
        as_json: Print one JSON object instead of tables.
        html: Write the figures as one page of HTML too.
    """
    found = checks.compare(first, second, tolerance=tolerance)
    left_out = ", ".join(found.left_out)
    told = {"is_equal": found.is_equal, "largest": found.largest, "verdict": found.verdict}
    rows = [
        (
            each["rung"],
            *(str(each[name]) for name in ("step", "num_compared", "num_differing")),
            _apart(each["largest"]),
            "differs" if each["num_differing"] else "equal",
        )
        for each in found.rungs
    ]
    _tell(
        asdict(found) | told,
        left_out and f"only in one of them: {left_out}",
        as_json,
        html,
        title=f"{first} and {second}",
        summary=found.verdict,
        is_good=found.is_equal,
        columns=("rung", "step", "compared", "differing", "largest difference", "verdict"),
        rows=rows,
        faults=(),
        about={
            "ranks": f"{found.num_ranks[0]} and {found.num_ranks[1]}",
            "different conditions": "; ".join(found.conditions) or "none",
            "only in one of them": left_out or "nothing",
        },
    )


# ---- models --------------------------------------------------------------------------------------


@verify.command()
@documented(
    build={"metavar": "MODULE:FUNCTION"},
    data={"metavar": "ROWS"},
    loss={"metavar": "MODULE:FUNCTION"},
    shard={"help": f"One of {', '.join(checks.SHARDINGS)}."},
    steps={"min": 1},
    batch_size={"min": 1},
    granule={"min": 1},
    out={"metavar": "FOLDER"},
    html=FILE,
)
def model(
    context: typer.Context,
    build: str,
    *,
    data: str,
    loss: str | None = None,
    ranks: str = "1,2,4",
    private: bool = False,
    shard: str = "zero3",
    steps: int = 2,
    batch_size: int = 4,
    granule: int = 1,
    lr: float = 1e-3,
    out: Path | None = None,
    as_json: bool = False,
    html: Path | None = None,
) -> None:
    """Train a model of your own on several numbers of ranks, and compare every quantity.

    The model is built on every rank after torch.manual_seed, sharded, and trained for a few steps
    with the ordered reducer. What must be equal is compared rung by rung: where two numbers of
    ranks first part, the module or parameter is named. The exit code is 1 if they do.

    \b
    unison verify model mymodule:build_model --data mymodule:batch
    unison verify model mymodule:build_model --data rows.safetensors --private --ranks 1,4

    Args:
        build: Returns your torch.nn.Module.
        data: module:function that returns a batch as the model is called with (labels apart), or a
            .safetensors or .json file of rows by name.
        loss: Of (output, batch), returns one loss per row; the next token's by default.
        ranks: Numbers of ranks to try.
        private: Train privately too: norms, noise and all.
        shard: How the model lies on ranks.
        steps: Optimizer steps.
        batch_size: Rows per step.
        granule: Rows that are computed together.
        lr: Learning rate of AdamW.
        out: Keep the traces in this folder.
        as_json: Print one JSON object instead of tables.
        html: Write the figures as one page of HTML too.
    """
    sizes = _sizes(ranks)
    subject = checks.Subject(
        **{each.name: context.params[each.name] for each in fields(checks.Subject)}
    )
    subject.rows()  # what cannot be read is told before ranks are started
    subject.model(drops=True)
    trainings = ("plain", "private") if private else ("plain",)
    tried = [
        checks.Claim(
            name=f"{training} training of {build} does not depend on ranks",
            quantity="every rung, from initial to updated parameters",
            reference=(checks.Case(training=training, shard=shard), sizes[0]),
            runs=tuple((checks.Case(training=training, shard=shard), size) for size in sizes[1:]),
        )
        for training in trainings
    ]
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    title = f"unison verify model {build}"
    _try(title, tried, subject, out, as_json=as_json, html=html, what=build)


def _sizes(ranks: str) -> list[int]:
    try:
        sizes = [int(each) for each in ranks.split(",")]
    except ValueError:
        sizes = []
    if len(sizes) < 2 or min(sizes) < 1 or len(set(sizes)) < len(sizes):
        raise BadInput(
            f"--ranks must be two or more different numbers such as 1,2,4, found {ranks!r}"
        )
    return sizes


# ---- runs ----------------------------------------------------------------------------------------


@verify.command()
@documented()
def runs(first: Path, second: Path, *, as_json: bool = False) -> None:
    """Say whether two runs agree bit for bit, and if not, where they part.

    The runs must be one experiment: the same model, data, seed and optimisation. They may differ in
    the number of ranks, in sharding and in micro-batches. Of a private run, noise and sampling must
    come from a seed (--no-secure-noise): no other run has a secret key. Compared are all metrics of
    all steps, and every parameter. The exit code is 1 if runs with the ordered reducer differ.

    \b
    unison train --reducer ordered --nproc 2 --out runs/two
    unison train --reducer ordered --out runs/one
    unison verify runs runs/two runs/one

    Args:
        first: The folder of a run that has ended.
        second: That of another one.
        as_json: Print one JSON object instead of tables.
    """
    found = checks.compare_runs(first, second)
    if as_json:
        figures = asdict(found) | {"has_same_bits": found.has_same_bits, "verdict": found.verdict}
        typer.echo(json.dumps(figures))
    else:
        style = "bold green" if found.has_same_bits else "yellow"
        style = style if found.keeps_its_promise else "bold red"
        screen = Console()
        screen.print(_comparison_table(found))
        screen.print()
        screen.print(found.verdict, style=style, highlight=False, markup=False)
        screen.print()
        screen.print(result_table(read_result(first), read_config(first).mechanism.steps))
    if not found.keeps_its_promise:
        raise typer.Exit(1)


def _comparison_table(found: checks.RunComparison) -> Table:
    """Both runs in two columns, and how far they are apart."""
    table = plain_table("last value (of how many)")
    for folder in found.folders:
        table.add_column(escape(folder), justify="right", overflow="fold")
    table.add_column("difference", justify="right")
    table.add_row("ranks", *map(str, found.num_ranks), "")
    table.add_row("sharding", *found.shardings, "")
    for each in found.series:
        table.add_row(
            f"{each['name']} ({each['num_values']})",
            f"{each['first']:.9g}",
            f"{each['second']:.9g}",
            "0" if each["parts_at"] is None else f"{each['largest']:.1e}",
        )
    parameters = found.parameters
    table.add_row(
        f"{parameters['num_elements']:,} parameters",
        *(digest[:12] for digest in parameters["digests"]),
        "0" if found.has_same_parameters else f"{parameters['largest']:.1e}",
    )
    return table
