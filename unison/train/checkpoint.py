"""Checkpoints of a run, and how a run goes on from one.

A run with `checkpoint_every` writes RUN/checkpoints/step-000100 and so on, and keeps the last few.
They are copies of a moment between two steps, written by a thread while training goes on.
`unison train --resume RUN` goes on from the newest with the settings of RUN/config.json. Which rows
a step takes, the dropout masks and the learning rate are functions of the step, so that only the
parameters, the optimizer's state and the step itself need to be kept.

What K-FAC has learned is a further file of the checkpoint, whose tensors come back as they were, to
the order of their elements in memory: a product with a matrix that lies otherwise may have other
bits.
"""

import json
import math
import shutil
import time
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from unison import run_files, shard
from unison.config import MAX_LOCAL_RANKS, TrainConfig
from unison.errors import BadInput, UnisonError
from unison.privacy import LEDGER_FILE
from unison.schema import build, cut, differing, is_a, read_json, short
from unison.train.run_folder import COVERED, checkpoints_of, num_counted_steps, settle
from unison.train.world import GRACE_SECONDS, after_stop_signal

if TYPE_CHECKING:
    from unison.train.loop import Run

CURVATURE_FILE = "curvature.safetensors"  # of a checkpoint: what K-FAC has learned


@dataclass(kw_only=True)
class Progress:
    """How far a run has come, beside what its model and optimizer hold.

    Attributes:
        step: Optimizer steps taken.
        num_targets: Targets trained on.
        training_seconds: Time in training steps.
        seconds: Time in all.
        train_before: Loss on the fixed training rows before the first step; None where it must not
            be kept, since no ε covers it.
        eval_before: Loss on the held-out rows before the first step.
        eval_after: The last one measured.
        eval_step: The step that it was measured after.
    """

    step: int = 0
    num_targets: int = 0
    training_seconds: float = 0.0
    seconds: float = 0.0
    train_before: float | None = None
    eval_before: float = math.nan
    eval_after: float = math.nan
    eval_step: int = 0


def folder_of(run: "Run", step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return Path(run.config.output.folder) / run_files.CHECKPOINTS_FOLDER / f"step-{step:06d}"


def save_newest(run: "Run") -> None:
    """Begin a checkpoint of a run, after the last one is complete; every rank must call it.

    It is written while training goes on; `finish` waits for it.

    Args:
        run: Model, optimizer and schedule are kept, what draws its rows and K-FAC's state.
    """
    world = run.world
    finish(run)
    extra = Extra.of(run)
    files = {}
    if run.kfac is not None:
        curvature = run.kfac.state_dict()  # a copy, whole, on every rank
        if world.is_main:
            files[CURVATURE_FILE] = partial(run_files.write_state, state=curvature)
    if run.background is None and not run.config.execution.guard:
        # Not under a guard, which takes the thread's collectives for the program's.
        run.background = dist.new_group(backend="gloo")  # type: ignore[assignment]
    run.written = shard.save_checkpoint(
        folder_of(run, extra.progress.step),
        run.model,
        run.optimizer,
        extra=asdict(extra),
        files=files,
        background=run.background,
    )


def finish(run: "Run", *, within: float | None = None) -> None:
    """Wait until the last checkpoint is complete, and remove the oldest; every rank must call it.

    Args:
        run: The run.
        within: Seconds to wait without the other ranks, for a run that fails.

    Raises:
        UnisonError: On every rank, if it could not be written.
    """
    if run.written is None:
        return
    written, run.written = run.written, None
    if within is None:
        run.world.agree(written.result)
    else:
        wait([written], timeout=within)
    if run.world.is_main and written.done() and written.exception() is None:
        prune(Path(run.config.output.folder), run.config.output.keep_checkpoints)


def prune(root: Path, num_kept: int) -> None:
    """Remove the oldest checkpoints of a run, and what crashes have left of others."""
    for old in checkpoints_of(root)[:-num_kept]:
        # The manifest first: what is left if this is cut short is no checkpoint.
        (old / shard.MANIFEST_FILE).unlink()
        shutil.rmtree(old)
    for left in (root / run_files.CHECKPOINTS_FOLDER).glob("step-*"):
        if left.name[5:].isdecimal() and not (left / shard.MANIFEST_FILE).exists():
            shutil.rmtree(left)
    for left in (root / run_files.CHECKPOINTS_FOLDER).glob(f".*{shard.ALONE}*"):
        shutil.rmtree(left)


@contextmanager
def outlived(run: "Run") -> Iterator[None]:
    """Around the steps: where another rank is lost, write what this one holds, without any rank.

    The state is that of the last complete step, since no rank waits for another within an update.
    What several survivors have is the same, or of the step before.
    """
    if not run.is_whole:
        yield
        return
    try:
        # A third of what a launcher gives a process between SIGTERM and SIGKILL.
        with after_stop_signal(partial(_save_alone, run), seconds=GRACE_SECONDS / 3):
            yield
    except Exception as error:
        # Other errors that a user can mend come to all ranks alike: nobody is lost.
        if not isinstance(error, UnisonError) or isinstance(error, shard.RankLost):
            try:
                _save_alone(run)
            except Exception as failure:
                error.add_note(f"its last step could not be saved: {cut(str(failure))}")
        raise


def _save_alone(run: "Run") -> None:
    with run.update_lock:
        extra = run.boundary
        if extra is None:
            return
        extra = replace(extra, regime=run.regime.witnessed(extra.regime))
        folder = folder_of(run, extra.progress.step)
        shard.save_checkpoint(folder, run.model, run.optimizer, extra=asdict(extra), alone=True)


@dataclass(frozen=True, kw_only=True)
class Extra:
    """What a checkpoint of a run holds beside model and optimizer.

    Attributes:
        progress: How far the run had come.
        scheduler: The state of its learning rate.
        regime: That of what draws its rows, and the position in the ledger.
        figures: Metrics of the last step, which the rank that writes them may have been lost with.
    """

    progress: Progress
    scheduler: dict[str, Any]
    regime: dict[str, Any]
    figures: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, run: "Run", figures: Mapping[str, float] | None = None) -> "Extra":
        """What a run would go on from, were it to stop now."""
        progress = replace(run.progress, seconds=time.perf_counter() - run.started)
        figures = dict(figures or {})
        if run.is_guarded:
            progress.train_before = None
            figures = {name: value for name, value in figures.items() if name in COVERED}
        return cls(
            progress=progress,
            scheduler=run.scheduler.state_dict(),
            regime=run.regime.state_dict(),
            figures=figures,
        )


def load_newest(
    run: "Run", *, at_most: int | None = None
) -> tuple[Extra, dict[str, Any] | None] | None:
    """Fill model, optimizer and schedule from a run's newest checkpoint; every rank must call it.

    One that is damaged is refused, in `run.notes`, and the one before it is taken.

    Args:
        run: Model, optimizer and schedule are filled.
        at_most: The last step that counts; None for any.

    Returns:
        What else it holds, and the state of K-FAC, if it has one; None if there is no checkpoint.

    Raises:
        BadInput: What is wrong with the newest, if no other can be used either.
    """
    refused: list[BadInput] = []
    # As one rank sees the folder: others may see it a moment later.
    root = Path(run.config.output.folder)
    for folder in reversed(run.world.on_main(partial(checkpoints_of, root))):
        if at_most is not None and int(folder.name[5:]) > at_most:
            continue
        try:
            found = _load(run, folder)
        except BadInput as error:
            refused.append(error)
            continue
        run.source = folder / shard.MANIFEST_FILE
        run.notes += [f"refused a checkpoint: {error}" for error in refused]
        return found
    if refused:
        raise refused[0]
    return None


def _load(run: "Run", folder: Path) -> tuple[Extra, dict[str, Any] | None]:
    source = folder / shard.MANIFEST_FILE
    # Before the model changes: every rank looks at the file itself.
    extra = run.world.agree(lambda: _extra_of(run, source))[run.world.rank]
    assert extra is not None
    shard.load_checkpoint(folder, run.model, run.optimizer, verify=True)
    run.scheduler.load_state_dict(extra.scheduler)
    if run.config.mechanism.kfac is None:
        return extra, None
    curvature: dict[str, Any] = {}
    run.world.agree(lambda: curvature.update(run_files.read_state(folder / CURVATURE_FILE)))
    return extra, curvature


def _extra_of(run: "Run", source: Path) -> Extra:
    manifest = shard.read_manifest(source.parent)
    extra = build(Extra, manifest.extra, source, field="extra")
    if run.config.mechanism.kfac is not None and CURVATURE_FILE not in manifest.files:
        raise BadInput(f"{source} lists no {CURVATURE_FILE}; a run with K-FAC needs it to go on")
    require_like(run.scheduler.state_dict(), extra.scheduler, source, "extra.scheduler")
    if not 0 < extra.progress.step <= run.config.mechanism.steps:
        raise BadInput(
            f"{source}: extra.progress.step must be one of the run's {run.config.mechanism.steps} "
            f"steps, found {extra.progress.step}"
        )
    return extra


def require_like(own: Any, found: Any, source: object, field: str) -> None:
    """Require a state read from JSON to have the names and types of one of this process.

    Raises:
        BadInput: Naming the field that has not.
    """
    match own:
        case dict():
            if not is_a(found, dict) or found.keys() != own.keys():
                raise BadInput(f"{source}: {field} must have {list(own)}, found {short(found)}")
            for name, each in own.items():
                require_like(each, found[name], source, f"{field}.{name}")
        case list() | tuple():
            if not is_a(found, list) or len(found) != len(own):
                raise BadInput(f"{source}: {field} must be {len(own)} long, found {short(found)}")
            for index, (each, other) in enumerate(zip(own, found, strict=True)):
                require_like(each, other, source, f"{field}[{index}]")
        case None if found is None:
            pass
        case _:
            build(type(own), found, source, field=field)


# ---- going on ------------------------------------------------------------------------------------


def check_resumable(run: Path) -> None:
    """Refuse a folder that has nothing to go on with.

    Raises:
        BadInput: If it is no run, is done, or has no checkpoint.
    """
    settle(run)
    if not (run / run_files.CONFIG_FILE).is_file():
        raise BadInput(f"{run} is not the folder of a run; --resume takes one that stopped")
    if (run / run_files.RESULT_FILE).is_file():
        raise BadInput(f"the run in {run} is complete; start a new one with another --out")
    if not checkpoints_of(run):
        remedy = "start it again with --overwrite"
        if num_counted_steps(run):
            remedy = f"start it with another --out, since {LEDGER_FILE} there counts what it spent"
        raise BadInput(
            f"the run in {run} has no complete checkpoint; {remedy}, and --checkpoint-every to "
            "have some"
        )


def resumed_config(
    run: Path,
    asked: TrainConfig,
    given: Collection[str],
    parts: Mapping[str, Any] | None = None,
) -> TrainConfig:
    """The settings to go on with: the saved ones, and what may differ as asked.

    Args:
        run: The folder of the run.
        asked: Settings from the command line, defaults where nothing was said.
        given: Names of the fields, and of the model's overrides, that were said.
        parts: What was said of the mechanism's parts: `private`, `kfac`, and fields of both.

    Raises:
        BadInput: If the mechanism would change, naming every setting that differs.
    """
    check_resumable(run)
    saved = run_files.read_config(run)
    given = set(given) | ({"replicas"} if "shard" in given else set())  # it is a part of how
    before = saved.mechanism.by_name()
    after = asked.mechanism.by_name() | dict(parts or {})
    given |= set(parts or {})
    changes = [
        f"{name} from {before.get(name)!r} to {after[name]!r}"
        for name in sorted(given)
        if name in after and before.get(name) != after[name]
    ]
    if changes:
        raise BadInput(
            f"the run in {run} goes on with its own settings, which cannot change: "
            f"{', '.join(changes)}; leave these options out, or start a new run"
        )
    execution, output = (
        {name: value for name, value in vars(group).items() if name in given}
        for group in (asked.execution, asked.output)
    )
    output |= {"folder": str(run), "overwrite": False, "resume": True}
    # A kept key is the run's again only if it is asked for.
    output = {"seal_key": None, "passphrase_file": None} | output
    output["command"] = asked.output.command
    return TrainConfig(
        mechanism=saved.mechanism,
        execution=replace(saved.execution, **execution),
        output=replace(saved.output, **output),
    )


def check_same_rows(run: Path, rows: dict[str, Any]) -> None:
    """Refuse to go on with other data.

    Raises:
        BadInput: If the rows are not those the run began with, naming what differs.
    """
    before, after = run_files.read_config(run).rows, json.loads(json.dumps(rows))
    for split, found in after.items():
        known = build(
            dict[str, Any], before.get(split), run / run_files.CONFIG_FILE, field=f"rows.{split}"
        )
        found = {"sha256": None} | found
        known = {"sha256": found["sha256"]} | known  # an older unison wrote no hash
        changes = [
            f"{name} was {short(known.get(name))}, now it is {short(found.get(name))}"
            for name in differing(known, found)
        ]
        if changes:
            raise BadInput(
                f"the data of the run in {run} has changed ({split} rows: {', '.join(changes)}); "
                "put the old data back, or start a new run"
            )


def saved_world_size(run: Path) -> int:
    """How many ranks a run had when it began; 1 where it does not say."""
    path = run / run_files.ENVIRONMENT_FILE
    if not path.is_file():
        return 1
    size = build(dict[str, Any], read_json(path), path).get("world_size")
    if not (is_a(size, int) and 1 <= size <= MAX_LOCAL_RANKS):
        raise BadInput(
            f"{path}: world_size must be a number of ranks, found {short(size)}; give --nproc"
        )
    return size
