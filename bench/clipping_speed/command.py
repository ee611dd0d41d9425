"""`python -m bench clipping`: the command and its tables."""

import json
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
import typer
from rich.console import Console
from rich.table import Table

import bench.clipping_speed as speed
from bench.provenance import check_writable, hardware, write_result
from unison import config as settings
from unison.cli.train import complete_preset
from unison.errors import BadInput

Device = StrEnum("Device", list(settings.DEVICES))
Dtype = StrEnum("Dtype", ["bf16", "float32"])
T = TypeVar("T")
_NONE = "–"

# Unless the options say otherwise: the shape of the promises, or what a CPU can do.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "cuda": {
        "preset": "gpt2-large",
        "lengths": (512, 1024, 2048, 4096, 8192),
        "dtype": "bf16",
        "has_graphs": True,
        "steps": 10,
    },
    "cpu": {"preset": "tiny", "lengths": (64, 128, 256), "dtype": "float32", "steps": 3},
}


def clipping(
    preset: Annotated[
        str | None,
        typer.Option(
            "--preset",
            help="Which model (see `unison presets`); its context is each length in turn. "
            "gpt2-large on CUDA, tiny on a CPU.",
            autocompletion=complete_preset,
        ),
    ] = None,
    num_layers: Annotated[
        int | None, typer.Option("--num-layers", help="Replace the number of blocks.")
    ] = None,
    batch_size: Annotated[int, typer.Option("--batch-size", help="Rows per step.")] = 4,
    lengths: Annotated[
        str | None,
        typer.Option(
            "--lengths",
            metavar="T,T,...",
            help="Tokens per row. 512,1024,2048,4096,8192 on CUDA, 64,128,256 on a CPU.",
        ),
    ] = None,
    modes: Annotated[
        str | None,
        typer.Option(
            "--modes",
            metavar="MODE,MODE,...",
            help="Ways to clip: grad_materialize, ghost, ghost_bk, flash_fuse, flash_fuse_bk, "
            "recompute_bk, auto. All by default. no_dp, the baseline, is always measured.",
        ),
    ] = None,
    device: Annotated[
        Device, typer.Option("--device", help="auto takes CUDA where there is some.")
    ] = Device("auto"),
    dtype: Annotated[
        Dtype | None,
        typer.Option(
            "--dtype",
            help="Of parameters and activations; norms, sums and noise are float32 or finer. "
            "bf16 on CUDA, float32 on a CPU.",
        ),
    ] = None,
    graph: Annotated[
        bool | None,
        typer.Option(
            "--graph/--no-graph",
            help="Time CUDA graphs too, of the baseline and of modes that take one pass. On CUDA "
            "they are, by default.",
        ),
    ] = None,
    noise_multiplier: Annotated[
        float, typer.Option("--noise-multiplier", help="σ of the private steps.")
    ] = 1.0,
    without_noise: Annotated[
        bool, typer.Option("--without-noise", help="Measure every mode without noise too.")
    ] = False,
    memory_budgets: Annotated[
        str | None,
        typer.Option(
            "--memory-budgets",
            metavar="X,X,...",
            help="Measure auto also with these bounds on memory, as multiples of the non-private "
            "peak: with 1.4 clipping may hold 0.4 times that peak.",
        ),
    ] = None,
    rounds: Annotated[
        int,
        typer.Option("--rounds", help="How often every case gets its turn, in rotating order."),
    ] = 2,
    steps: Annotated[
        int | None,
        typer.Option("--steps", help="Steps timed in one go, per turn; 10 on CUDA, 3 on a CPU."),
    ] = None,
    peers: Annotated[
        bool,
        typer.Option(
            "--peers",
            help="Measure Opacus (hooks and ghost) and FastDP too, where they can be imported. "
            "They need a preset of the gpt2 family.",
        ),
    ] = False,
    time_limit: Annotated[
        float | None,
        typer.Option(
            "--time-limit",
            metavar="SECONDS",
            help="Begin no measurement after so many seconds, and say what was left out.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE",
            help="Write the figures to a JSON file, with the command, the commit, the hardware and "
            "the versions. It is kept up to date while the benchmark runs.",
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot", metavar="FILE.png", help="Draw the ratios over the length into a picture."
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the figures as one JSON object instead of tables.")
    ] = False,
) -> None:
    """Time private training steps beside ordinary ones: every clipping mode at every length.

    A step is forward, backward, clipping, secure noise and AdamW, on shuffled batches of random
    tokens. Every case is built, warmed up, timed over a block of steps and freed, between two
    measurements of the same training without privacy; ratios are to the mean of those two. What
    does not fit into memory, or cannot be done, is a row that says so. The exit code is 1 if a mode
    failed for any other reason.

    \b
    python -m bench clipping                                   all modes, this machine's device
    python -m bench clipping --modes auto --without-noise      the promises of auto alone
    python -m bench clipping --batch-size 32 --lengths 512 --modes auto --memory-budgets 1.65,1.4
    python -m bench clipping --peers --out clipping.json --plot clipping.png --time-limit 500
    """
    for file in (out, plot):
        if file is not None:
            check_writable(file)
    given = {
        "preset": preset,
        "num_layers": num_layers,
        "batch_size": batch_size,
        "lengths": _listed(lengths, int, "--lengths"),
        "modes": _listed(modes, str, "--modes"),
        "dtype": dtype and dtype.value,
        "has_graphs": graph,
        "noise_multipliers": tuple(dict.fromkeys([noise_multiplier, 0.0][: 1 + without_noise])),
        "memory_budgets": _listed(memory_budgets, float, "--memory-budgets"),
        "has_peers": peers,
        "rounds": rounds,
        "steps": steps,
        "time_limit": time_limit,
    }
    experiment = _experiment(device.value, given)
    errors = Console(stderr=True)
    if peers:
        for name, remedy in speed.missing_peers().items():
            errors.print(f"{name} is left out: it cannot be imported; {remedy}", highlight=False)
    visits, left_out = _measure(experiment, errors, out)
    figures = _write(experiment, visits, left_out, out, is_finished=True)
    results = speed.results_of(experiment, visits)
    if as_json:
        typer.echo(json.dumps(figures))
    else:
        show(Console(), experiment, results)
    if plot is not None:
        speed.draw(experiment, results, plot, title=_title(experiment))
    _say_what_is_missing(visits, left_out)


def _experiment(device: str, given: dict[str, Any]) -> speed.Experiment:
    """The experiment; an option that was not given takes the device's value."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    known = {name: value for name, value in given.items() if value is not None}
    return speed.Experiment(device=device, **(_DEFAULTS[device] | known))


def _listed(text: str | None, kind: Callable[[str], T], option: str) -> tuple[T, ...] | None:
    """The values of an option that takes several, with commas between them."""
    if text is None:
        return None
    try:
        return tuple(kind(word.strip()) for word in text.split(",") if word.strip())
    except ValueError:
        raise BadInput(f"{option} takes numbers with commas between them, found {text!r}") from None


def _measure(
    experiment: speed.Experiment, errors: Console, out: Path | None
) -> "tuple[list[speed.Visit], list[speed.Planned]]":
    """Make all visits, with a line for each, and the result file kept up to date."""
    so_far: list[speed.Visit] = []
    with errors.status("") as status:

        def before(planned: speed.Planned) -> None:
            status.update(str(planned))

        def after(visit: speed.Visit) -> None:
            so_far.append(visit)
            errors.print(_line(visit), style="dim", highlight=False, soft_wrap=True)
            if visit.case.mode == speed.NO_DP:
                _write(experiment, so_far, [], out, is_finished=False)

        return speed.measure(experiment, before=before, after=after)


def _line(visit: speed.Visit) -> str:
    """A visit in one line."""
    words = [f"T={visit.tokens}", f"round {visit.round + 1}", visit.case.name]
    for how, ms in (("eager", visit.eager_ms), ("graph", visit.graph_ms)):
        words += [] if ms is None else [f"{how} {ms:.2f} ms"]
    words += [] if visit.peak_bytes is None else [f"{visit.peak_bytes / 2**30:.2f} GiB"]
    words += [each for each in (visit.trouble, visit.graph_trouble) if each is not None]
    return "  ".join(words)


def _write(
    experiment: speed.Experiment,
    visits: Sequence[speed.Visit],
    left_out: Sequence[speed.Planned],
    out: Path | None,
    *,
    is_finished: bool,
) -> dict[str, Any]:
    """The figures, also written to a file if there is one."""
    figures = speed.figures_of(experiment, visits, left_out)
    figures["is_finished"] = is_finished
    if out is not None:
        write_result(out, "clipping", figures)
    return figures


def _title(experiment: speed.Experiment) -> str:
    found = hardware()
    machine = (found["gpus"] if experiment.device == "cuda" else [found["cpu"]])[0]
    return (
        f"Private training steps: {experiment.preset}, {experiment.batch_size} rows, "
        f"{experiment.dtype}, {machine}"
    )


def _say_what_is_missing(visits: Sequence[speed.Visit], left_out: Sequence[speed.Planned]) -> None:
    """Name what there was no time for; leave with code 1 if a mode has a bug."""
    if left_out:
        names = "; ".join(map(str, left_out[:6]))
        more = f"; and {len(left_out) - 6} more" if len(left_out) > 6 else ""
        typer.echo(f"unison: the time is used up; left out: {names}{more}", err=True)
    broken = [each for each in visits if each.is_bug and not each.case.is_peer]
    for each in broken:
        reason = each.trouble or each.graph_trouble
        typer.echo(f"unison: {each.case.name} at {each.tokens} tokens failed: {reason}", err=True)
    if broken:
        raise typer.Exit(1)


# ---- tables --------------------------------------------------------------------------------------


def show(screen: Console, experiment: speed.Experiment, results: list[speed.AtLength]) -> None:
    """Print a table per length, and what is to be said of it."""
    model = experiment.config(max(experiment.lengths))
    screen.print()
    screen.print(
        f"[bold]{experiment.preset}[/]  {model.num_layers} blocks of width {model.d_model}, "
        f"vocabulary {model.vocab_size:,}, {experiment.batch_size} rows, {experiment.dtype}, "
        f"{experiment.device}"
    )
    screen.print(
        f"A step is forward, backward, clipping, noise (σ {experiment.noise_multipliers[0]:g}) and "
        f"AdamW; medians of {experiment.rounds} × {experiment.steps} steps. Ratios are to the "
        "non-private steps timed before and after. * is the fastest private mode.",
        style="dim",
        highlight=False,
    )
    for each in results:
        screen.print()
        screen.print(f"[bold]{each.tokens:,} tokens[/]{_spread(each)}", highlight=False)
        screen.print(_length_table(experiment, each))
        for text, style in _remarks(each):
            screen.print(text, style=style, highlight=False)


def _spread(each: speed.AtLength) -> str:
    """How far the baselines of this length are apart."""
    words = [
        f"{how} baselines {timing.low - 1:+.1%} to {timing.high - 1:+.1%}"
        for how, timing in (("eager", each.rows[0].eager), ("graph", each.rows[0].graph))
        if timing is not None and timing.low is not None and timing.high is not None
    ]
    return f"  [dim]{', '.join(words)}[/]" if words else ""


def _length_table(experiment: speed.Experiment, each: speed.AtLength) -> Table:
    unit, num_bytes = ("GiB", 2**30) if experiment.device == "cuda" else ("MiB", 2**20)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("mode", no_wrap=True)
    timed = ["eager", "graph"] if experiment.has_graphs else ["eager"]
    titles = [title for how in timed for title in (f"{how} ms", "ratio")]
    for title in [*titles, f"peak {unit}", "ratio"]:
        table.add_column(title, justify="right", no_wrap=True)
    fastest = {(v.how, v.fastest, v.noise_multiplier) for v in each.verdicts}
    for row in each.rows:
        cells = []
        for how in timed:
            timing = row.eager if how == "eager" else row.graph
            key = (how, row.case.mode, row.case.noise_multiplier)
            is_fastest = row.case.is_mode and row.case.budget is None and key in fastest
            cells += _cells(timing, row.trouble or row.graph_trouble, is_fastest)
        peak = _NONE if row.peak_bytes is None else f"{row.peak_bytes / num_bytes:,.2f}"
        peak_ratio = _NONE if row.peak_ratio is None else f"{row.peak_ratio:.2f} "
        table.add_row(row.case.name, *cells, peak, peak_ratio, style=_style(row))
    return table


def _cells(timing: speed.Timing | None, trouble: str | None, is_fastest: bool) -> list[str]:
    """A time and its ratio; the star has a column's last character to itself."""
    if timing is None:
        return [trouble if trouble == "out of memory" else _NONE, ""]
    if timing.ratio is None:
        return [f"{timing.ms:,.2f}", _NONE]
    ratio = f"{timing.ratio:.3f}"
    return [f"{timing.ms:,.2f}", f"[bold green]{ratio}*[/]" if is_fastest else f"{ratio} "]


def _style(row: speed.Row) -> str | None:
    if row.case.is_peer:
        return "dim"
    return None if row.case.is_mode else "bold"


def _remarks(each: speed.AtLength) -> Iterator[tuple[str, str]]:
    """What is to be said below a table, and in which style."""
    for verdict in each.verdicts:
        yield _verdict(verdict), "green" if verdict.is_within is not False else "yellow"
    for row in each.rows:
        budget, found = row.case.budget, row.peak_ratio
        if budget is not None and found is not None and found > budget:
            yield f"{row.case.name}: over its budget, {found:.3f}×", "yellow"
        if row.own_ratio is not None and row.own_ratio != 1:
            yield f"{row.case.name}: {row.own_ratio:.2f}× its own model without privacy", "dim"
    for what, names in _troubles(each).items():
        yield f"{', '.join(names)}: {what}", "dim"


def _verdict(verdict: speed.Verdict) -> str:
    noise = "" if verdict.noise_multiplier else " without noise"
    text = f"{verdict.how}{noise}: fastest is {verdict.fastest}, {verdict.ratio:.3f}×"
    if verdict.excess is None:
        return text
    word = "within" if verdict.is_within else "not within"
    return f"{text}; auto is {word} 2 % of it ({verdict.excess:+.1%})"


def _troubles(each: speed.AtLength) -> dict[str, list[str]]:
    """The cases that have no figures, by the reason; memory is said in the table."""
    found: dict[str, list[str]] = {}
    for row in each.rows:
        if row.trouble is not None and row.trouble != "out of memory":
            found.setdefault(row.trouble, []).append(row.case.name)
        if row.graph_trouble is not None:
            found.setdefault(f"no graph, {row.graph_trouble}", []).append(row.case.name)
    return found
