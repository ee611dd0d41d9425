"""Checkpoints of a run, and how a run goes on from one.

A run with `checkpoint_every` writes RUN/checkpoints/step-000100 and so on, and keeps the last few.
`unison train --resume RUN` goes on from the newest with the settings of RUN/config.json. Which rows
a step takes, the dropout masks and the learning rate are functions of the step, so that only the
parameters, the optimizer's state and the step itself need to be kept.

What K-FAC has learned lies in RUN/checkpoints/curvature-000100.safetensors. It is written before
the checkpoint, which holds its hash: a checkpoint that is there is complete. Its tensors come back
as they were, to the order of their elements in memory: a product with a matrix that lies otherwise
may have other bits.
"""

import hashlib
import json
import math
import os
import shutil
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from unison.config import Execution, Kfac, MechanismConfig, Output, Privacy, TrainConfig
from unison.errors import BadInput
from unison.shard import MANIFEST_FILE, CheckpointFailed, load_checkpoint, save_checkpoint
from unison.train.run_folder import (
    CHECKPOINTS_FOLDER,
    CONFIG_FILE,
    ENVIRONMENT_FILE,
    LEDGER_FILE,
    RESULT_FILE,
    checkpoints_of,
    num_counted_steps,
)

if TYPE_CHECKING:
    from unison.train.loop import Run

CURVATURE = "curvature"  # what the files of K-FAC's state begin with
_TENSOR = "__tensor__"  # marks the place of one in such a state


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
    """

    step: int = 0
    num_targets: int = 0
    training_seconds: float = 0.0
    seconds: float = 0.0
    train_before: float | None = None
    eval_before: float = math.nan
    eval_after: float = math.nan


def save_newest(run: "Run", progress: Progress) -> None:
    """Write a checkpoint of a run and remove the oldest ones; every rank must call it.

    Args:
        run: Model, optimizer and schedule are kept, what draws its rows and K-FAC's state.
        progress: How far it has come.
    """
    output, world, root = run.config.output, run.world, Path(run.config.output.folder)
    folder = root / CHECKPOINTS_FOLDER / f"step-{progress.step:06d}"
    extra: dict[str, Any] = {
        "progress": asdict(progress),
        "scheduler": run.scheduler.state_dict(),
        "regime": run.regime.state_dict(),
    }
    curvature = run.transform.state_dict()  # whole, on every rank
    if curvature is not None:
        write = partial(write_state, _curvature_of(folder), curvature)
        extra[CURVATURE], *_ = world.agree(write, when=world.is_main)
    save_checkpoint(folder, run.model, run.optimizer, extra=extra)
    if not world.is_main:
        return
    for old in checkpoints_of(root)[: -output.keep_checkpoints]:
        # The manifest first: what is left if this is cut short is no checkpoint.
        (old / MANIFEST_FILE).unlink()
        shutil.rmtree(old)
    kept = {_curvature_of(each) for each in checkpoints_of(root)}
    for file in folder.parent.glob(f"{CURVATURE}-*"):
        if file not in kept:
            file.unlink()


def load_newest(run: "Run") -> tuple[Progress, dict[str, Any], dict[str, Any] | None]:
    """Fill model, optimizer and schedule from a run's newest checkpoint; every rank must call it.

    Returns:
        How far the run had come, the state of what draws its rows, and that of K-FAC, if it has
        one.
    """
    folder = checkpoints_of(Path(run.config.output.folder))[-1]
    extra = load_checkpoint(folder, run.model, run.optimizer, verify=True)
    run.scheduler.load_state_dict(extra["scheduler"])
    curvature = None
    if CURVATURE in extra:
        check = partial(check_hash, _curvature_of(folder), extra[CURVATURE])
        run.world.agree(check, when=run.world.is_main)
        curvature = read_state(_curvature_of(folder))
    return Progress(**extra["progress"]), extra.get("regime", {}), curvature


def _curvature_of(checkpoint: Path) -> Path:
    """The file beside a checkpoint that holds the state of a preconditioner."""
    return checkpoint.with_name(f"{CURVATURE}-{checkpoint.name[5:]}.safetensors")


# ---- nested state in one file: safetensors, with the rest as JSON in their metadata --------------


def write_state(path: Path, state: Mapping[str, Any]) -> str:
    """Write a state of dictionaries, lists, plain values and tensors on the CPU.

    The file is on the disk, complete, when this returns.

    Returns:
        The file's hash.

    Raises:
        CheckpointFailed: If it could not be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    metadata = {"state": json.dumps(_taken_out(state, tensors))}
    part = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, part, metadata)
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.replace(path)
        return _hash(path)
    except (OSError, SafetensorError) as error:
        part.unlink(missing_ok=True)
        raise CheckpointFailed(f"{path} could not be written: {error}") from error


def check_hash(path: Path, expected: str) -> None:
    """Refuse a file that is not what `write_state` wrote.

    Raises:
        BadInput: If it is missing, or its hash is another than expected.
    """
    if not path.is_file():
        raise BadInput(f"{path} is missing; the checkpoint beside it cannot be used without it")
    if _hash(path) != expected:
        raise BadInput(
            f"{path} is not what was written: its hash differs; use an earlier checkpoint"
        )


def read_state(path: Path) -> dict[str, Any]:
    """Read what `write_state` wrote."""
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return _put_back(json.loads(file.metadata()["state"]), tensors)


def _taken_out(value: Any, tensors: dict[str, Tensor]) -> Any:
    """The value with a mark in the place of each tensor, which goes into `tensors`."""
    match value:
        case Tensor():
            name = str(len(tensors))
            tensors[name] = value.detach().contiguous()
            return {_TENSOR: name, "strides": list(value.stride())}
        case Mapping():
            return {key: _taken_out(each, tensors) for key, each in value.items()}
        case list():
            return [_taken_out(each, tensors) for each in value]
        case _:
            return value


def _put_back(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    match value:
        case dict() if _TENSOR in value:
            found = tensors[value[_TENSOR]]
            placed = torch.empty_strided(found.shape, value["strides"], dtype=found.dtype)
            return placed.copy_(found)
        case dict():
            return {key: _put_back(each, tensors) for key, each in value.items()}
        case list():
            return [_put_back(each, tensors) for each in value]
        case _:
            return value


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---- going on ------------------------------------------------------------------------------------


def check_resumable(run: Path) -> None:
    """Refuse a folder that has nothing to go on with.

    Raises:
        BadInput: If it is no run, is done, or has no checkpoint.
    """
    if not (run / CONFIG_FILE).is_file():
        raise BadInput(f"{run} is not the folder of a run; --resume takes one that stopped")
    if (run / RESULT_FILE).is_file():
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
    saved = _read_config(run)
    given = set(given) | ({"replicas"} if "shard" in given else set())  # it is a part of how
    before = _flat(saved.mechanism)
    after = _flat(asked.mechanism) | dict(parts or {})
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
    output["command"] = asked.output.command
    return TrainConfig(
        mechanism=saved.mechanism,
        execution=replace(saved.execution, **execution),
        output=replace(saved.output, **output),
    )


def _flat(mechanism: MechanismConfig) -> dict[str, Any]:
    """A mechanism's settings by name, those of its model and of its parts included."""
    settings = asdict(mechanism)
    privacy, kfac = settings.pop("privacy"), settings.pop("kfac")
    parts = {"private": privacy is not None, "kfac": kfac is not None}
    return settings | mechanism.overrides | parts | (privacy or {}) | (kfac or {})


def _read_config(run: Path) -> TrainConfig:
    try:
        content = json.loads((run / CONFIG_FILE).read_text())
        mechanism = dict(content["mechanism"])
        if mechanism.get("privacy") is not None:
            mechanism["privacy"] = Privacy(**mechanism["privacy"])
        if mechanism.get("kfac") is not None:
            mechanism["kfac"] = Kfac(**mechanism["kfac"])
        return TrainConfig(
            mechanism=MechanismConfig(**mechanism),
            execution=Execution(**content["execution"]),
            output=Output(**content["output"]),
        )
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise BadInput(
            f"{run / CONFIG_FILE} cannot be read by this unison: {type(error).__name__} {error}"
        ) from None


def check_same_rows(run: Path, rows: dict[str, Any]) -> None:
    """Refuse to go on with other data.

    Raises:
        BadInput: If the rows are not those the run began with.
    """
    before = json.loads((run / CONFIG_FILE).read_text()).get("rows")
    after = json.loads(json.dumps(rows))
    if before != after:
        raise BadInput(
            f"the data of the run in {run} has changed: its rows were {before}, now they are "
            f"{after}; put the old data back, or start a new run"
        )


def saved_world_size(run: Path) -> int:
    """How many ranks a run had when it began."""
    try:
        return int(json.loads((run / ENVIRONMENT_FILE).read_text())["world_size"])
    except (OSError, ValueError, KeyError, TypeError):
        return 1
