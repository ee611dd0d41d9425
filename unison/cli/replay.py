"""`unison replay`: a stretch of a recorded run taken again, or two records compared."""

import json
import os
import sys
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import typer

from unison.cli.options import documented
from unison.config import MAX_LOCAL_RANKS
from unison.errors import BadInput
from unison.replay import TREE_FILE, Parting, Record, compare_steps, first_difference
from unison.rng import PASSPHRASE
from unison.schema import cut, read_bytes
from unison.train import ReplayConfig, check_replay, run_on_local_ranks
from unison.train import replay as run_again

FILE = {"metavar": "FILE"}


@documented(
    steps={"metavar": "A:B"},
    nproc={"min": 1, "max": MAX_LOCAL_RANKS},
    against={"metavar": "RUN"},
    without={"metavar": "IDS"},
    trace=FILE,
    seal_key=FILE,
    passphrase_file=FILE,
    micro_batch_size={"min": 1},
)
def replay(
    context: typer.Context,
    run: Path,
    *,
    steps: str | None = None,
    nproc: int = 1,
    bisect: bool = False,
    against: Path | None = None,
    without: str | None = None,
    out: Path | None = None,
    trace: Path | None = None,
    seal_key: Path | None = None,
    passphrase_file: Path | None = None,
    device: str = "auto",
    micro_batch_size: int | None = None,
    as_json: bool = False,
) -> None:
    """Take a stretch of a recorded run again, on any number of ranks, and compare every step.

    It begins at the nearest checkpoint. Exit code 1 if a step differs from the record.

    \b
    unison train --reducer ordered --record --checkpoint-every 100 --nproc 8 --out runs/a
    unison replay runs/a --steps 400:420 --nproc 1
    unison replay runs/a --bisect
    unison replay runs/a --against runs/b
    unison replay runs/a --steps 411:412 --trace a.trace

    Args:
        run: The folder of a run of `unison train --record`.
        steps: The steps after step A up to step B; all by default.
        nproc: Ranks to start on this machine.
        bisect: Stop at the first step that differs, and name the unit.
        against: Compare with the record of another run instead, by a few look-ups in both.
        without: Rows of the training data to leave empty, such as 3,17, or a file that lists them:
            what training would have been. The model goes to --out; of a private run it gives these
            rows away (ε = ∞) and is not exported.
        out: New folder for the model --without.
        trace: Write down what the steps compute, for unison verify diff. Of a private run it holds
            what no ε covers.
        seal_key: The sealed key of a private run.
        passphrase_file: Holds its passphrase; UNISON_PASSPHRASE in the environment, or a prompt,
            otherwise.
        device: auto, cpu or cuda.
        micro_batch_size: Rows per forward pass; as in the run by default.
        as_json: Print one JSON object.
    """
    if against is not None:
        if steps or bisect or without or out or trace or seal_key:
            raise BadInput("--against compares two records and trains nothing; leave the rest out")
        parting, figures = _compare(run, against)
        looked, count = f"({figures['num_lookups']} look-ups)", figures["num_steps"]
        sentence = f"{run} and {against} agree in "
        sentence += f"{f'all {count} steps' if count != 1 else 'their step'} {looked}"
        if parting is not None:
            sentence = f"{run} and {against}: {parting.sentence} {looked}"
    else:
        given = {each.name: context.params[each.name] for each in fields(ReplayConfig)}
        if steps is not None:
            ends = steps.split(":")
            if len(ends) != 2 or not all(map(_is_count, ends)):
                raise BadInput(f"--steps takes A:B, such as 400:420, found {cut(repr(steps))}")
            given["steps"] = tuple(map(int, ends))
        given["without"] = _ids_of(without)
        values: Any = {n: str(v) if isinstance(v, Path) else v for n, v in given.items()}
        config = ReplayConfig(**values)
        check_replay(config, nproc)
        if seal_key is not None:
            ask_passphrase(config.passphrase_file)
        if nproc == 1:
            result = run_again(config)
        else:
            result = run_on_local_ranks(run_again, config, num_ranks=nproc)
        parting = result["parting"]
        told = None if parting is None else asdict(parting)
        figures = result | {"parting": told, "is_equal": parting is None}
        sentence = _say_replay(result)
        if out is not None:
            parting = None  # it is meant to differ
    if os.environ.get("RANK", "0") == "0":
        typer.echo(json.dumps(figures) if as_json else sentence)
    if parting is not None:
        raise typer.Exit(1)


def _say_replay(result: dict[str, Any]) -> str:
    begin, count, equal = result["steps"][0] + 1, result["num_compared"], result["num_equal"]
    ranks = "1 rank" if result["world_size"] == 1 else f"{result['world_size']} ranks"
    lines = [f"note: {each}" for each in result["notes"]]
    if count == 1:
        said = f"step {begin} {'is equal to the bit' if equal else 'differs'}"
    else:
        said = f"{equal} of {count} steps ({begin} to {begin + count - 1}) "
        said += f"{'is' if equal == 1 else 'are'} equal to the bit"
    lines.append(f"{said}, replayed on {ranks} from step {result['begins']}")
    if result["parting"] is not None:
        lines.append(result["parting"].sentence)
        if result["conditions"]:
            lines.append(f"it ran under other conditions: {', '.join(result['conditions'])}")
    mark = "ε = ∞: " if result["epsilon"] else ""
    if result["trace"] is not None:
        held = "; it holds norms and sums without noise" if mark else ""
        lines.append(f"{mark}the trace of the stretch is in {result['trace']}{held}")
    if result["out"] is not None:
        listed = ", ".join(map(str, result["without"]))
        lines.append(
            f"{mark}the model without rows {listed} is in {result['out']}; compared with the run's "
            "own it gives them away"
        )
    return "\n".join(lines)


def _compare(run: Path, other: Path) -> tuple[Parting | None, dict[str, Any]]:
    """Where two recorded runs part, and how many look-ups it took to find out."""
    with Record(run) as a, Record(other) as b:
        if a.units != b.units:
            raise BadInput(f"{run} and {other} trained models of different units")
        step, parting = first_difference(a, b), None
        if step is not None:
            parting = compare_steps(a.step(step), b.step(step), a.units)
            if parting is None:
                raise BadInput(
                    f"{TREE_FILE} of {run} or of {other} is damaged: their nodes differ at step "
                    f"{step}, where the lines do not"
                )
        return parting, {
            "runs": [str(run), str(other)],
            "num_steps": min(a.num_lines, b.num_lines) - 1,
            "num_lookups": a.num_lookups + b.num_lookups,
            "parting": None if parting is None else asdict(parting),
        }


def _ids_of(text: str | None) -> tuple[int, ...]:
    """Row numbers, written out or in a file."""
    if text is None:
        return ()
    found = text
    if not _is_count(text.replace(",", "")) and Path(text).is_file():
        found = read_bytes(Path(text)).decode(errors="replace")
    listed = found.replace(",", " ").split()
    if not listed or not all(map(_is_count, listed)):
        raise BadInput(
            f"--without takes row numbers, such as 3,17, or a file of them, found {cut(repr(text))}"
        )
    return tuple(sorted(set(map(int, listed))))


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 15


def ask_passphrase(file: str | None, *, is_new: bool = False) -> None:
    """Ask a person for the passphrase of a sealed key, if there is no other source of it.

    Ranks that are started find it in their environment.
    """
    if file is None and not os.environ.get(PASSPHRASE) and sys.stdin.isatty():
        os.environ[PASSPHRASE] = typer.prompt(
            "Passphrase of the sealed key", hide_input=True, confirmation_prompt=is_new, err=True
        )
