"""`unison account`: what a run has spent, and what a plan would spend."""

import json
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unison.errors import BadInput, UnsupportedOperation

if TYPE_CHECKING:
    from unison.privacy import LedgerFile, Sampling

ACCOUNTANTS = ("pld", "rdp")
Accountant = StrEnum("Accountant", list(ACCOUNTANTS))
Kind = StrEnum("Kind", ["poisson", "truncated", "shuffled"])

LEDGER_FILE = "ledger.jsonl"
_SAID = ("key_origin", "unit", "rows_per_sample", "sampling_source", "num_records")
_SAID += ("commitment", "committed_to", "device")
_NUM_POINTS = 8  # of a curve; an ε by PLD takes about a second


def _panel(panel: str, *names: str, **options: Any) -> Any:
    return typer.Option(*names, rich_help_panel=panel, **options)


_run = partial(_panel, "A run")
_plan = partial(_panel, "A plan: two of --epsilon, --noise-multiplier and --steps give the third")
_how = partial(_panel, "How a plan draws its records")
_out = partial(_panel, "Output")


def account(
    context: typer.Context,
    delta: Annotated[float, typer.Option("--delta", help="δ, below 1 / number of records.")],
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[RUN]...",
            help="Ledgers, or folders of runs. What several have spent on one data set is added "
            "up: name every one that was trained on it, tuning included.",
        ),
    ] = None,
    ledger: Annotated[
        Path | None, _run("--ledger", metavar="FILE", help="The same as naming one RUN.")
    ] = None,
    same_data: Annotated[
        bool,
        _run("--same-data", help="Add up runs that say they were trained on different data."),
    ] = False,
    epsilon: Annotated[float | None, _plan("--epsilon", help="ε that may be spent.")] = None,
    noise_multiplier: Annotated[
        float | None,
        _plan("--noise-multiplier", help="σ: the noise's standard deviation over the clip norm."),
    ] = None,
    steps: Annotated[int | None, _plan("--steps", help="Number of optimizer steps.")] = None,
    sample_rate: Annotated[
        float | None, _how("--sample-rate", help="Probability of each record at each step.")
    ] = None,
    batch_size: Annotated[
        int | None,
        _how("--batch-size", help="With --num-records, instead of --sample-rate: their quotient."),
    ] = None,
    num_records: Annotated[
        int | None, _how("--num-records", help="Size of the data set, if it is public.")
    ] = None,
    sampling: Annotated[
        Kind,
        _how(
            "--sampling",
            help="truncated: Poisson, at most --capacity records. shuffled: fixed batches in "
            "shuffled order, each epoch counted without amplification.",
        ),
    ] = Kind("poisson"),
    capacity: Annotated[
        int | None, _how("--capacity", help="Most records in a batch of truncated sampling.")
    ] = None,
    accountant: Annotated[
        Accountant, _plan("--accountant", help="Which one must meet --epsilon.")
    ] = Accountant("pld"),
    plot: Annotated[
        Path | None, _out("--plot", metavar="FILE.png", help="Draw ε over the steps.")
    ] = None,
    as_json: Annotated[
        bool, _out("--json", help="Print one machine-readable object instead.")
    ] = False,
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
    """
    from rich.console import Console

    from unison.cli.account_view import draw, show

    screen, errors = Console(), Console(stderr=True)
    if plot is not None and plot.suffix.lower() != ".png":
        raise BadInput(f"--plot must name a .png file, found {plot}")
    options = {
        "--epsilon": epsilon,
        "--noise-multiplier": noise_multiplier,
        "--steps": steps,
        "--sample-rate": sample_rate,
        "--batch-size": batch_size,
        "--num-records": num_records,
        "--capacity": capacity,
    }
    said = [name for name, value in options.items() if value is not None]
    said += [f"--{name}" for name in ("sampling", "accountant") if _was_said(context, name)]
    with errors.status("asking dp-accounting"), _warnings_as_sentences():
        named = [*(runs or ()), *([] if ledger is None else [ledger])]
        if named:
            if said:
                raise BadInput(
                    f"a ledger says by itself what was applied; leave {', '.join(said)} out"
                )
            if len(named) > 1 and plot is not None:
                raise BadInput("--plot draws one run; leave it out, or name one")
            result = _account_runs(named, delta, has_curve=plot is not None, same_data=same_data)
        else:
            way = _sampling(sampling, sample_rate, batch_size, num_records, capacity)
            result = _account_plan(
                _Plan(way, delta, str(accountant), epsilon, noise_multiplier, steps, num_records)
            )
            result["sampling"]["kind"] = str(sampling)
    if plot is not None:
        draw(result, plot)
    if as_json:
        typer.echo(json.dumps(_for_json(result), allow_nan=False))
    else:
        show(screen, result)
    problems = [
        (run["ledger"], problem)
        for run in result.get("runs", [result])
        for problem in run.get("problems", ())
    ]
    for path, problem in problems:
        typer.echo(f"unison: {path} is not as it was written: {problem}", err=True)
    if problems:
        raise typer.Exit(1)


def _was_said(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name not in ("DEFAULT", "DEFAULT_MAP")


@contextmanager
def _warnings_as_sentences() -> Iterator[None]:
    """Print each warning once, as one sentence and without a place in the code."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for message in dict.fromkeys(str(warning.message) for warning in caught):
        typer.echo(f"unison: warning: {message}", err=True)


def _sampling(
    kind: Kind,
    rate: float | None,
    batch_size: int | None,
    num_records: int | None,
    capacity: int | None,
) -> "Sampling":
    """The sampling that the options describe."""
    from unison.privacy import Poisson, Shuffled, TruncatedPoisson

    if kind == "shuffled":
        if rate is not None or capacity is not None:
            raise BadInput("shuffled batches have a fixed size; leave --sample-rate and --capacity")
        if batch_size is None or num_records is None:
            raise BadInput("shuffled batches need --batch-size and --num-records")
        return Shuffled(batch_size=batch_size, num_records=num_records)
    if rate is not None and batch_size is not None:
        raise BadInput("--sample-rate and --batch-size say the same thing; give one of them")
    if rate is None:
        if batch_size is None or num_records is None:
            raise BadInput(
                "name a RUN, or give --sample-rate (or --batch-size and --num-records) for a plan"
            )
        rate = batch_size / num_records
    if kind == "poisson":
        if capacity is not None:
            raise BadInput("--capacity needs --sampling truncated")
        return Poisson(rate=rate)
    if capacity is None or num_records is None:
        raise BadInput("truncated sampling needs --capacity and --num-records")
    return TruncatedPoisson(rate=rate, capacity=capacity, num_records=num_records)


# ---- figures -------------------------------------------------------------------------------------


@dataclass
class _Plan:
    sampling: "Sampling"
    delta: float
    accountant: str
    epsilon: float | None
    noise_multiplier: float | None
    steps: int | None
    num_records: int | None


def _account_plan(plan: _Plan) -> dict[str, Any]:
    """The third of ε, σ and steps, and the curve that leads there."""
    from unison.privacy import epsilon_for, noise_multiplier_for, steps_for

    common: Any = {"sampling": plan.sampling, "num_records": plan.num_records}
    target: Any = {
        **common,
        "target_epsilon": plan.epsilon,
        "target_delta": plan.delta,
        "accountant": plan.accountant,
    }
    match (plan.epsilon, plan.noise_multiplier, plan.steps):
        case (None, float(sigma), int(steps)):
            asked = "epsilon"
        case (float(), None, int(steps)):
            asked = "noise_multiplier"
            sigma = noise_multiplier_for(steps=steps, **target)
        case (float(), float(sigma), None):
            asked = "steps"
            steps = steps_for(noise_multiplier=sigma, **target)
        case _:
            raise BadInput("give exactly two of --epsilon, --noise-multiplier and --steps")
    if steps < 1 and asked != "steps":
        raise BadInput(f"--steps must be above 0, found {steps}")
    curve = _curve(
        steps,
        lambda n, name: epsilon_for(
            noise_multiplier=sigma, delta=plan.delta, steps=n, accountant=name, **common
        ),
    )
    return {
        "asked": asked,
        "sampling": asdict(plan.sampling),
        "noise_multiplier": sigma,
        "steps": steps,
        "delta": plan.delta,
        "accountant": plan.accountant,
        "target_epsilon": plan.epsilon,
        "epsilon": {name: curve[-1][name] if curve else 0.0 for name in ACCOUNTANTS},
        "curve": curve,
    }


def _account_runs(
    paths: list[Path], delta: float, *, has_curve: bool, same_data: bool
) -> dict[str, Any]:
    """What a ledger holds, or several on the same data together."""
    from unison.privacy import epsilon_if_secret, epsilon_of

    found = [_read(path) for path in paths]
    linked, unlinked = _link(found, same_data=same_data)
    spending = found[0].spending.copy()
    for each in found[1:]:
        spending.join(each.spending)
    result = {
        "delta": delta,
        "adjacency": spending.adjacency,
        "epsilon": {n: _or_none(epsilon_of, spending, delta, n) for n in ACCOUNTANTS},
        "epsilon_if_secret": {
            n: _or_none(epsilon_if_secret, spending, delta, n) for n in ACCOUNTANTS
        },
        "seeded": spending.num_seeded,
        "why_infinite": None,
    }
    if spending.num_seeded:
        result["why_infinite"] = (
            f"the noise of {spending.num_seeded:,} steps came from a seed, and whoever knows it "
            "can remove the noise"
        )
    if len(found) > 1:
        runs = [_facts(each) for each in found]
        return {"runs": runs, "linked": linked, "unlinked": unlinked, **result}
    if has_curve:
        # Of seeded runs as well: infinity has no curve.
        result["curve"] = _curve(
            found[0].num_intents,
            lambda n, name: epsilon_if_secret(found[0].spending_after(n), delta, name),
        )
    return _facts(found[0]) | result


def _read(path: Path) -> "LedgerFile":
    from unison.privacy import read_ledger

    found = read_ledger(path / LEDGER_FILE if path.is_dir() else path)
    if found.malformed is not None:
        raise BadInput(f"{found.path} is no ledger: {found.malformed}")
    if not (found.sessions or found.problems):
        raise BadInput(f"{found.path} is no ledger yet: a crash cut its first line short")
    return found


def _link(found: list["LedgerFile"], *, same_data: bool) -> tuple[list[list[str]], list[str]]:
    """Ledgers that commit to the same data set, in groups; and those that nothing links.

    Raises:
        BadInput: If one ledger is named twice, or some commit to different data.
    """
    twins: dict[str, LedgerFile] = {}
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


def _facts(found: "LedgerFile") -> dict[str, Any]:
    def said(name: str) -> list[Any]:
        """What the sessions say, each once."""
        return list(dict.fromkeys(getattr(session, name) for session in found.sessions))

    samplings = {release.sampling: release for release in found.releases}
    ranges = {}
    for name in (
        "noise_multiplier",
        "count_noise_multiplier",
        "effective_noise_multiplier",
        "max_grad_norm",
    ):
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
    parts = (((k + 1) / _NUM_POINTS) ** 2 for k in range(_NUM_POINTS))
    points = sorted({math.ceil(num_steps * part) for part in parts} - {0})
    return [
        {"steps": point, **{name: _or_none(at, point, name) for name in ACCOUNTANTS}}
        for point in points
    ]


def _or_none(function: Callable[..., float], *args: Any) -> float | None:
    try:
        return function(*args)
    except UnsupportedOperation:
        return None
    except BadInput:
        raise
    except (ValueError, ArithmeticError) as error:  # of dp-accounting, which takes any number
        raise BadInput(f"dp-accounting cannot count such numbers: {error}") from None


def _for_json(value: Any) -> Any:
    """The value with infinity as a word, which JSON has no number for."""
    if isinstance(value, dict):
        return {str(key): _for_json(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_for_json(each) for each in value]
    return "inf" if value == math.inf else value
