"""`unison bench clipping`: the command; `clipping_view` prints its tables."""

import json
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from unison import config as settings
from unison.cli.train import complete_preset
from unison.errors import BadInput

if TYPE_CHECKING:
    from rich.console import Console

    from unison.verify import clipping_speed as speed

Device = StrEnum("Device", list(settings.DEVICES))
Dtype = StrEnum("Dtype", ["bf16", "float32"])
T = TypeVar("T")

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
    unison bench clipping                                   all modes, this machine's device
    unison bench clipping --modes auto --without-noise      the promises of auto alone
    unison bench clipping --batch-size 32 --lengths 512 --modes auto --memory-budgets 1.65,1.4,1.05
    unison bench clipping --peers --out clipping.json --plot clipping.png --time-limit 500
    """
    from rich.console import Console

    from unison.cli.clipping_view import show
    from unison.verify import check_writable, clipping_speed

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
        for name, remedy in clipping_speed.missing_peers().items():
            errors.print(f"{name} is left out: it cannot be imported; {remedy}", highlight=False)
    visits, left_out = _measure(experiment, errors, out)
    figures = _write(experiment, visits, left_out, out, is_finished=True)
    results = clipping_speed.results_of(experiment, visits)
    if as_json:
        typer.echo(json.dumps(figures))
    else:
        show(Console(), experiment, results)
    if plot is not None:
        clipping_speed.draw(experiment, results, plot, title=_title(experiment))
    _say_what_is_missing(visits, left_out)


def _experiment(device: str, given: dict[str, Any]) -> "speed.Experiment":
    """The experiment; an option that was not given takes the device's value."""
    import torch

    from unison.verify import clipping_speed

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    known = {name: value for name, value in given.items() if value is not None}
    return clipping_speed.Experiment(device=device, **(_DEFAULTS[device] | known))


def _listed(text: str | None, kind: Callable[[str], T], option: str) -> tuple[T, ...] | None:
    """The values of an option that takes several, with commas between them."""
    if text is None:
        return None
    try:
        return tuple(kind(word.strip()) for word in text.split(",") if word.strip())
    except ValueError:
        raise BadInput(f"{option} takes numbers with commas between them, found {text!r}") from None


def _measure(
    experiment: "speed.Experiment", errors: "Console", out: Path | None
) -> "tuple[list[speed.Visit], list[speed.Planned]]":
    """Make all visits, with a line for each, and the result file kept up to date."""
    from unison.verify import clipping_speed

    so_far: list[speed.Visit] = []
    with errors.status("") as status:

        def before(planned: "speed.Planned") -> None:
            status.update(str(planned))

        def after(visit: "speed.Visit") -> None:
            so_far.append(visit)
            errors.print(_line(visit), style="dim", highlight=False, soft_wrap=True)
            if visit.case.mode == clipping_speed.NO_DP:
                _write(experiment, so_far, [], out, is_finished=False)

        return clipping_speed.measure(experiment, before=before, after=after)


def _line(visit: "speed.Visit") -> str:
    """A visit in one line."""
    words = [f"T={visit.tokens}", f"round {visit.round + 1}", visit.case.name]
    for how, ms in (("eager", visit.eager_ms), ("graph", visit.graph_ms)):
        words += [] if ms is None else [f"{how} {ms:.2f} ms"]
    words += [] if visit.peak_bytes is None else [f"{visit.peak_bytes / 2**30:.2f} GiB"]
    words += [each for each in (visit.trouble, visit.graph_trouble) if each is not None]
    return "  ".join(words)


def _write(
    experiment: "speed.Experiment",
    visits: "Sequence[speed.Visit]",
    left_out: "Sequence[speed.Planned]",
    out: Path | None,
    *,
    is_finished: bool,
) -> dict[str, Any]:
    """The figures, also written to a file if there is one."""
    from unison.verify import clipping_speed, write_result

    figures = clipping_speed.figures_of(experiment, visits, left_out)
    figures["is_finished"] = is_finished
    if out is not None:
        write_result(out, "clipping", figures)
    return figures


def _title(experiment: "speed.Experiment") -> str:
    from unison.verify import hardware

    found = hardware()
    machine = (found["gpus"] if experiment.device == "cuda" else [found["cpu"]])[0]
    return (
        f"Private training steps: {experiment.preset}, {experiment.batch_size} rows, "
        f"{experiment.dtype}, {machine}"
    )


def _say_what_is_missing(
    visits: "Sequence[speed.Visit]", left_out: "Sequence[speed.Planned]"
) -> None:
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
