"""`unison account`: what a run has spent, and what a plan would spend, as tables and a picture."""

import json
import math
import warnings
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from unison import privacy
from unison.cli.options import documented, plain_values, spelling, was_given
from unison.errors import BadInput, UnsupportedOperation
from unison.train import chart

ACCOUNTANTS = ("pld", "rdp")
KINDS = ("poisson", "truncated", "shuffled")

_SAID = ("key_origin", "unit", "rows_per_sample", "sampling_source", "num_records")
_SAID += ("commitment", "committed_to", "device")
_RANGES = {
    "noise multiplier σ": "noise_multiplier",
    "count noise σ_b": "count_noise_multiplier",
    "effective z": "effective_noise_multiplier",
    "clip norm C": "max_grad_norm",
}
_NUM_POINTS = 8  # of a curve; an ε by PLD takes about a second
_BAR_WIDTH = 32

PANELS = {
    "A run": "ledger same_data",
    "A plan: two of --epsilon, --noise-multiplier and --steps give the third": """
        epsilon noise_multiplier steps accountant
    """,
    "How a plan draws its records": "sample_rate batch_size num_records sampling capacity",
    "Output": "plot as_json",
}
OF_PLANS = [name for panel in list(PANELS)[1:3] for name in PANELS[panel].split()]


@documented(
    panels=PANELS,
    choices={"accountant": ACCOUNTANTS, "sampling": KINDS},
    runs={"metavar": "[RUN]..."},
    ledger={"metavar": "FILE"},
    plot={"metavar": "FILE.png"},
)
def account(
    context: typer.Context,
    runs: list[Path] | None = None,
    *,
    delta: float,
    ledger: Path | None = None,
    same_data: bool = False,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    steps: int | None = None,
    accountant: str = "pld",
    sample_rate: float | None = None,
    batch_size: int | None = None,
    num_records: int | None = None,
    sampling: str = "poisson",
    capacity: int | None = None,
    plot: Path | None = None,
    as_json: bool = False,
) -> None:
    """Say what privacy a run has spent, or how much noise a plan needs.

    The ledger's chain of hashes is checked first; the exit code is 1 if lines were edited or
    removed, and 2 if the file is no ledger. ε comes from dp-accounting, by PLD and by RDP; both are
    upper bounds.

    \b
    unison account runs/notes --delta 1e-6
    unison account runs/tuning-* runs/notes --delta 1e-6
    unison account --epsilon 3 --delta 1e-6 --sample-rate 0.001 --steps 10000
    unison account --noise-multiplier 1 --delta 1e-6 --sample-rate 0.001 --steps 10000

    Args:
        runs: Ledgers, or folders of runs. What several have spent on one data set is added up: name
            every one that was trained on it, tuning included.
        delta: δ, below 1 / number of records.
        ledger: The same as naming one RUN.
        same_data: Add up runs that say they were trained on different data.
        epsilon: ε that may be spent.
        noise_multiplier: σ: the noise's standard deviation over the clip norm.
        steps: Number of optimizer steps.
        accountant: Which one must meet --epsilon.
        sample_rate: Probability of each record at each step.
        batch_size: With --num-records, instead of --sample-rate: their quotient.
        num_records: Size of the data set, if it is public.
        sampling: truncated: Poisson, at most --capacity records. shuffled: fixed batches in
            shuffled order, each epoch counted without amplification.
        capacity: Most records in a batch of truncated sampling.
        plot: Draw ε over the steps.
        as_json: Print one machine-readable object instead.
    """
    if plot is not None and plot.suffix.lower() != ".png":
        raise BadInput(f"--plot must name a .png file, found {plot}")
    with Console(stderr=True).status("asking dp-accounting"), _warnings_as_sentences():
        named = [*(runs or ()), *([] if ledger is None else [ledger])]
        if named:
            listed = ", ".join(spelling(name) for name in OF_PLANS if was_given(context, name))
            if listed:
                raise BadInput(f"a ledger says by itself what was applied; leave {listed} out")
            if len(named) > 1 and plot is not None:
                raise BadInput("--plot draws one run; leave it out, or name one")
            result = _account_runs(named, delta, plot is not None, same_data=same_data)
        else:
            result = _account_plan(SimpleNamespace(**plain_values(context)))
    if plot is not None:
        _draw(result, plot)
    if as_json:
        typer.echo(json.dumps(for_json(result), allow_nan=False))
    else:
        _show(Console(), result)
    problems = [
        (run["ledger"], problem)
        for run in result.get("runs", [result])
        for problem in run.get("problems", ())
    ]
    for path, problem in problems:
        typer.echo(f"unison: {path} is not as it was written: {problem}", err=True)
    if problems:
        raise typer.Exit(1)


@contextmanager
def _warnings_as_sentences() -> Iterator[None]:
    """Print each warning once, as one sentence and without a place in the code."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for message in dict.fromkeys(str(warning.message) for warning in caught):
        typer.echo(f"unison: warning: {message}", err=True)


def _sampling(given: SimpleNamespace) -> privacy.Sampling:
    """Return the sampling that the options describe."""
    rate, capacity = given.sample_rate, given.capacity
    size, records = given.batch_size, given.num_records
    if given.sampling == "shuffled":
        if rate is not None or capacity is not None:
            raise BadInput("shuffled batches have a fixed size; leave --sample-rate and --capacity")
        if size is None or records is None:
            raise BadInput("shuffled batches need --batch-size and --num-records")
        return privacy.Shuffled(batch_size=size, num_records=records)
    if rate is not None and size is not None:
        raise BadInput("--sample-rate and --batch-size say the same thing; give one of them")
    if rate is None:
        if size is None or records is None:
            raise BadInput(
                "name a RUN, or give --sample-rate (or --batch-size and --num-records) for a plan"
            )
        rate = size / records
    if given.sampling == "poisson":
        if capacity is not None:
            raise BadInput("--capacity needs --sampling truncated")
        return privacy.Poisson(rate=rate)
    if capacity is None or records is None:
        raise BadInput("truncated sampling needs --capacity and --num-records")
    return privacy.TruncatedPoisson(rate=rate, capacity=capacity, num_records=records)


# ---- figures -------------------------------------------------------------------------------------


def _account_plan(given: SimpleNamespace) -> dict[str, Any]:
    """Return the third of ε, σ and steps, and the curve that leads there."""
    sampling, delta, accountant = _sampling(given), given.delta, given.accountant
    common: Any = {"sampling": sampling, "num_records": given.num_records}
    target: Any = common | {"target_epsilon": given.epsilon, "target_delta": delta}
    target["accountant"] = accountant
    match (given.epsilon, given.noise_multiplier, given.steps):
        case (None, float(sigma), int(steps)):
            asked = "epsilon"
        case (float(), None, int(steps)):
            asked = "noise_multiplier"
            sigma = privacy.noise_multiplier_for(steps=steps, **target)
        case (float(), float(sigma), None):
            asked = "steps"
            steps = privacy.steps_for(noise_multiplier=sigma, **target)
        case _:
            raise BadInput("give exactly two of --epsilon, --noise-multiplier and --steps")
    if steps < 1 and asked != "steps":
        raise BadInput(f"--steps must be above 0, found {steps}")
    spent = partial(privacy.epsilon_for, noise_multiplier=sigma, delta=delta, **common)
    curve = _curve(steps, lambda n, name: spent(steps=n, accountant=name))
    return {
        "asked": asked,
        "sampling": asdict(sampling) | {"kind": given.sampling},
        "noise_multiplier": sigma,
        "steps": steps,
        "delta": delta,
        "accountant": accountant,
        "target_epsilon": given.epsilon,
        "epsilon": {name: curve[-1][name] if curve else 0.0 for name in ACCOUNTANTS},
        "curve": curve,
    }


def _account_runs(
    paths: list[Path], delta: float, has_curve: bool, *, same_data: bool
) -> dict[str, Any]:
    """What a ledger holds, or several on the same data together."""
    found = [_read(path) for path in paths]
    linked, unlinked = _link(found, same_data=same_data)
    spending = found[0].spending.copy()
    for each in found[1:]:
        spending.join(each.spending)
    why = (
        f"the noise of {spending.num_seeded:,} steps came from a seed, and whoever knows it can "
        "remove the noise"
    )
    result = {
        "delta": delta,
        "adjacency": spending.adjacency,
        "epsilon": {n: _or_none(privacy.epsilon_of, spending, delta, n) for n in ACCOUNTANTS},
        "epsilon_if_secret": {
            n: _or_none(privacy.epsilon_if_secret, spending, delta, n) for n in ACCOUNTANTS
        },
        "seeded": spending.num_seeded,
        "why_infinite": why if spending.num_seeded else None,
    }
    if len(found) > 1:
        runs = [_facts(each) for each in found]
        return {"runs": runs, "linked": linked, "unlinked": unlinked, **result}
    if has_curve:
        # Of seeded runs as well: infinity has no curve.
        result["curve"] = _curve(
            found[0].num_intents,
            lambda n, name: privacy.epsilon_if_secret(found[0].spending_after(n), delta, name),
        )
    return _facts(found[0]) | result


def _read(path: Path) -> privacy.LedgerFile:
    found = privacy.read_ledger(path / privacy.LEDGER_FILE if path.is_dir() else path)
    if found.malformed is not None:
        raise BadInput(f"{found.path} is no ledger: {found.malformed}")
    if not (found.sessions or found.problems):
        raise BadInput(f"{found.path} is no ledger yet: a crash cut its first line short")
    return found


def _link(found: list[privacy.LedgerFile], *, same_data: bool) -> tuple[list[list[str]], list[str]]:
    """Ledgers that commit to the same data set, in groups; and those that nothing links.

    Raises:
        BadInput: If one ledger is named twice, or some commit to different data.
    """
    twins: dict[str, privacy.LedgerFile] = {}
    committed: dict[str, Path] = {}  # the first ledger with each commitment
    groups: dict[str | None, list[str]] = {}
    for each in found:
        twin = twins.setdefault(each.head.sha256, each)
        if twin is not each:
            raise BadInput(
                f"{twin.path} and {each.path} are one ledger, which would count twice; name it once"
            )
        said = {session.commitment for session in each.sessions}
        for commitment in said:
            if commitment is not None:
                committed.setdefault(commitment, each.path)
        groups.setdefault(said.pop() if len(said) == 1 else None, []).append(str(each.path))
    if len(committed) > 1 and len(found) > 1 and not same_data:
        first, second, *_ = committed.values()
        raise BadInput(
            f"{first} and {second} commit to different data, and ε is of one data set; account for "
            "them apart, or add --same-data if a record may be in both"
        )
    unlinked = groups.pop(None, [])
    unlinked += [path for group in groups.values() if len(group) == 1 for path in group]
    return [group for group in groups.values() if len(group) > 1], unlinked


def _facts(found: privacy.LedgerFile) -> dict[str, Any]:
    def said(name: str) -> list[Any]:
        """What the sessions say, each once."""
        return list(dict.fromkeys(getattr(session, name) for session in found.sessions))

    samplings = {release.sampling: release for release in found.releases}
    ranges = {}
    for name in _RANGES.values():
        values = [getattr(release, name) for release in found.releases]
        values = [value for value in values if value is not None]
        ranges[name] = [min(values), max(values)] if values else None
    return {
        "ledger": str(found.path),
        "lines": found.head.num_lines,
        "sessions": len(found.sessions),
        "head": found.head.sha256,
        "committed": found.num_commits,
        "uncommitted": len(found.uncommitted),
        "torn": found.num_torn,
        "counted": found.num_intents,
        "sampling": [release.to_fields()["sampling"] for release in samplings.values()],
        **{name: said(name) for name in _SAID},
        **ranges,
        "problems": found.problems,
        "notes": found.notes,
    }


def _curve(num_steps: int, at: Callable[[int, str], float]) -> list[dict[str, Any]]:
    """ε on the way, by both accountants; None where one has no bound.

    Points are denser at the beginning, where ε rises fastest.
    """
    points = {-(-num_steps * k**2 // _NUM_POINTS**2) for k in range(1, _NUM_POINTS + 1)} - {0}
    curve = [  # the last one first: what cannot be counted is told of by the number that was given
        {"steps": point, **{name: _or_none(at, point, name) for name in ACCOUNTANTS}}
        for point in sorted(points, reverse=True)
    ]
    return curve[::-1]


def _or_none(function: Callable[..., float], *args: Any) -> float | None:
    try:
        return function(*args)
    except UnsupportedOperation:
        return None
    except BadInput:
        raise
    except (ValueError, ArithmeticError) as error:  # of dp-accounting, which takes any number
        raise BadInput(f"dp-accounting cannot count such numbers: {error}") from None


def for_json(value: Any) -> Any:
    """The value with infinity and NaN as words, which JSON has no numbers for."""
    if isinstance(value, dict):
        return {str(key): for_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [for_json(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


# ---- tables --------------------------------------------------------------------------------------


def _show(screen: Console, result: dict[str, Any]) -> None:
    """Print what was found as tables."""
    runs = result.get("runs", [result])
    table = plain_table("", "", padding=3)
    for name, value in _rows(result, runs):
        table.add_row(name, value)
    screen.print(table)
    for run in runs:
        of = f"{run['ledger']}: " if len(runs) > 1 else ""
        for note in run.get("notes", ()):
            screen.print(f"note: {of}{note}", style="yellow", highlight=False, markup=False)
    if any(run.get("problems") for run in runs):
        screen.print(
            "the ledger is not whole: this ε covers only the lines that are left",
            style="bold red",
            highlight=False,
        )
    if result.get("curve"):
        screen.print()
        screen.print(_curve_table(result["curve"]))


def _rows(result: dict[str, Any], runs: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """What a plan or a run comes to, or several runs together: titles and values."""
    asked = result.get("asked")
    if asked is None:
        for run in runs:
            state = "[bold red]edited or cut[/]" if run["problems"] else "[green]chain intact[/]"
            sessions = f"{run['sessions']} session{'s' * (run['sessions'] != 1)}"
            lines = f"{escape(run['ledger'])}: {run['lines']:,} lines"
            yield "ledger", f"{lines}, {sessions}, {state}"
            if len(runs) > 1:
                origin = _joined(run["key_origin"])
                yield "", f"{run['counted']:,} steps counted, key from {origin}"
            else:
                yield from _run_rows(run)
        for group in result.get("linked", ()):
            yield "on the same data", f"{escape(', '.join(group))}: their commitments say so"
        if unlinked := escape(", ".join(result.get("unlinked", ()))):
            yield "not linked", f"{unlinked}: added up because you named them together"
        yield "adjacency", result["adjacency"]
    else:
        marked = {asked: "[bold green]{}[/]"}
        steps, sigma = f"{result['steps']:,}", f"{result['noise_multiplier']:.6g}"
        yield "sampling", _sampling_words(result["sampling"])
        yield "steps", marked.get("steps", "{}").format(steps)
        yield "noise multiplier σ", marked.get("noise_multiplier", "{}").format(sigma)
    style = "bold" if asked is None else "bold green" if asked == "epsilon" else "none"
    for name, value in result["epsilon"].items():
        title = f"ε at δ = {result['delta']:g}, {name.upper()}"
        yield title, f"[{style}]{_epsilon_words(value)}[/]"
    if result.get("why_infinite"):
        yield "why", f"[bold red]{result['why_infinite']}[/]"
        for name, value in result["epsilon_if_secret"].items():
            yield f"ε if it were secret, {name.upper()}", _epsilon_words(value)
    if result.get("target_epsilon") is not None:
        yield f"target, {result['accountant'].upper()}", f"{result['target_epsilon']:g}"


def _joined(values: list[Any]) -> str:
    """What the sessions of a run say, if they say anything."""
    return escape(" and ".join(map(str, values))) or "unknown"


def _run_rows(run: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What the ledger of one run says."""
    yield "steps committed", f"{run['committed']:,}"
    uncommitted = run["uncommitted"]
    yield "intents without commit", f"{uncommitted:,}{', counted' if uncommitted else ''}"
    if run["torn"]:
        yield "lines cut short", f"{run['torn']:,}, counted"
    for sampling in run["sampling"]:
        yield "sampling", _sampling_words(sampling)
    yield "drawn by", _joined(run["sampling_source"])
    yield "key from", _joined(run["key_origin"])
    data = [f"{size:,} records" for size in run["num_records"] if size is not None]
    if any(run["commitment"]):
        known = ", ".join("none" if each is None else each[:16] for each in run["commitment"])
        covers = _joined([each for each in run["committed_to"] if each is not None])
        data.append(f"commitment {known} to the {covers}")
    else:
        data.append("no commitment")
    yield "data", ", ".join(data)
    units = [f"{number} rows of a batch" for number in run["rows_per_sample"] if number != 1]
    yield "unit of privacy", ", ".join([_joined(run["unit"]), *units])
    yield "device", _joined(run["device"])
    for title, name in _RANGES.items():
        is_news = name != "effective_noise_multiplier" or run[name] != run["noise_multiplier"]
        if run[name] is not None and is_news:
            low, high = run[name]
            yield title, f"{low:.6g}" if low == high else f"{low:.6g} to {high:.6g}"


def _sampling_words(fields: dict[str, Any]) -> str:
    if fields["kind"] == "shuffled":
        sizes = f"{fields['batch_size']:,} of {fields['num_records']:,}"
        return f"shuffled, batches of {sizes} records, no amplification"
    said = f"Poisson, q = {fields['rate']:.6g}"
    if fields["kind"] == "truncated":
        said += f", at most {fields['capacity']:,} of {fields['num_records']:,} records"
    return said


def _epsilon_words(value: float | None) -> str:
    if value is None:
        return "no bound for this sampling"
    return "infinite" if value == math.inf else f"{value:.4f}"


def plain_table(*titles: str, numbers: Container[str] = (), padding: int = 2) -> Table:
    """Return a table without lines, in which columns of numbers stand on the right."""
    table = Table(box=None, pad_edge=False, padding=(0, padding, 0, 0), show_header=any(titles))
    for title in titles:
        table.add_column(title, justify="right" if title in numbers else "left")
    return table


def _curve_table(curve: list[dict[str, Any]]) -> Table:
    """The curve as a table with bars, by PLD."""
    numbers = ("steps", "ε by PLD", "ε by RDP")
    table = plain_table(*numbers, "", numbers=numbers, padding=3)
    largest = max((point["pld"] for point in curve if point["pld"] < math.inf), default=0)
    for point in curve:
        is_drawn = largest > 0 and point["pld"] < math.inf
        length = point["pld"] / largest * _BAR_WIDTH if is_drawn else 0
        bar = "█" * int(length) + ("▌" if length % 1 >= 0.5 else "")
        words = (
            "–" if point[name] is None else _epsilon_words(point[name]) for name in ACCOUNTANTS
        )
        table.add_row(f"{point['steps']:,}", *words, f"[cyan]{bar}[/]")
    return table


# ---- the picture ---------------------------------------------------------------------------------


def _draw(result: dict[str, Any], path: Path) -> None:
    """Draw ε over the steps into a PNG file."""
    seeded = ", if the seed were secret" if result.get("why_infinite") else ""
    labels = ("Privacy spent", "steps", f"ε at δ = {result['delta']:g}{seeded}")
    target = result.get("target_epsilon")
    try:
        with chart(path, *labels) as axes:
            for name, color in (("rdp", "0.6"), ("pld", "#4c78a8")):
                points = [
                    (point["steps"], point[name])
                    for point in result["curve"]
                    if point[name] is not None and point[name] < math.inf
                ]
                if points:
                    label = f"{name.upper()}: {points[-1][1]:.3f}"
                    style: Any = {"color": color, "marker": "o", "markersize": 3, "label": label}
                    axes.plot(*zip(*points, strict=True), **style)
            if target is not None:
                style = {"color": "#e45756", "linestyle": "--", "linewidth": 1}
                axes.axhline(target, label=f"ε = {target:g}", **style)
            axes.set_xlim(left=0)
            axes.set_ylim(bottom=0)
    except OSError as error:
        raise BadInput(f"cannot write {path}: {error.strerror}") from None
