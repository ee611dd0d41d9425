"""A stretch of a recorded run, taken again and compared step by step.

The stretch begins at the nearest checkpoint at or before it; the initial values are one, of step 0.
With the ordered reducer a step has the same bits on any number of ranks, so that one rank can check
what many did. Nothing is written to the run's folder, and its ledger is not touched: a replay
releases nothing that the run has not released.
"""

from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import unison
from unison.config import WHOLE_SHARDINGS, Execution, TrainConfig
from unison.errors import BadInput
from unison.models import save
from unison.replay import Parting, Record, StepRecord, compare_steps
from unison.run_files import COUNTERFACTUAL_FILE, read_config
from unison.shard import full_parameters
from unison.train.loop import Run, open_model, running_out_of_room, set_threads
from unison.train.run_folder import write_json
from unison.train.world import StopSignals, World, join_world
from unison.verify import trace


@dataclass(frozen=True, kw_only=True)
class ReplayConfig:
    """What to replay, and how.

    Attributes:
        run: The folder of a recorded run.
        steps: (a, b): the steps after step a up to step b; None for all that are recorded.
        bisect: Whether to stop at the first step that differs.
        without: Rows of the training data that are emptied.
        out: A new folder for the model of a replay without some rows.
        trace: A new file for a trace of the stretch, for `unison verify diff`.
        seal_key: The file with the run's sealed key.
        passphrase_file: A file with its passphrase.
        device: As in `Execution`.
        micro_batch_size: As in `Execution`; as in the run unless given.
    """

    run: str
    steps: tuple[int, int] | None = None
    bisect: bool = False
    without: tuple[int, ...] = ()
    out: str | None = None
    trace: str | None = None
    seal_key: str | None = None
    passphrase_file: str | None = None
    device: str = "auto"
    micro_batch_size: int | None = None

    def __post_init__(self) -> None:
        if bool(self.without) != (self.out is not None):
            raise BadInput(
                "--without and --out go together: a replay without some rows ends in another "
                "model, and every other replay writes nothing"
            )
        if self.without and self.steps is not None and self.steps[0] != 0:
            raise BadInput(
                f"--without begins with the initial values, found --steps {self.steps[0]}:"
                f"{self.steps[1]}: rows that took part before would still be in the checkpoint; "
                "leave --steps out, or begin with 0"
            )


def replay(config: ReplayConfig) -> dict[str, Any]:
    """Take a stretch of a run again on this process's rank; every rank of the world must call it.

    Returns:
        What it came to, the same on all ranks: `run`, the folder; `world_size`; `begins`, the step
        whose checkpoint it began with; `steps`, the stretch (a, b); `num_compared` and `num_equal`,
        steps of it that were compared, and are the same to the bit; `parting`, the first that is
        not; `conditions`, what the bits depend on besides the settings, and is not as it was;
        `digest`, one hash of all parameters at the end; `notes`, what a person should know of how
        it began; `without`, `out` and `trace` as asked for; and `epsilon`: `"inf"` of what gives
        rows of a private run away, which are a model without some of them, made with the same
        noise, and a trace, which holds norms and sums without noise.

    Raises:
        UnisonError: On every rank alike.
    """
    with join_world(config.device) as world, StopSignals(), running_out_of_room(world):
        # In a frame of its own, as a run is.
        return _replay_in(world, config)


def check_replay(config: ReplayConfig, num_ranks: int) -> tuple[TrainConfig, tuple[int, int]]:
    """Find what is wrong with a replay before any process is started.

    Returns:
        The run's settings, for a replay, and the stretch.

    Raises:
        BadInput: If the run cannot be replayed as asked for.
    """
    folder = Path(config.run)
    saved = read_config(folder)
    mechanism, privacy = saved.mechanism, saved.mechanism.privacy
    with Record(folder) as record:
        last = record.num_lines - 1
        first, stop = config.steps or (0, last)
        if not 0 <= first < stop <= last:
            raise BadInput(
                f"{folder} has a record of steps 0 to {last}, found --steps {first}:{stop}; a:b "
                "are the steps after step a up to step b"
            )
        keys = {record.step(step).key for step in range(first + 1, stop + 1)}
    if mechanism.reducer != "ordered":
        raise BadInput(
            f"{folder} was not trained with --reducer ordered: it has no bits to compare"
        )
    if privacy is None or not privacy.secure_noise:
        if config.seal_key is not None:
            raise BadInput(f"{folder} has no sealed key; leave --seal-key out")
    elif "lost" in keys:
        raise BadInput(
            f"noise and sampling of {folder} came from a secret key that died with its process: "
            "only a run whose owner kept the key (--seal-key) can be replayed"
        )
    elif config.seal_key is None:
        raise BadInput(
            f"noise and sampling of {folder} came from a key that its owner keeps; give the file: "
            "--seal-key FILE"
        )
    for option, path in {"--out": config.out, "--trace": config.trace}.items():
        if path is not None and Path(path).exists():
            raise BadInput(f"{path} is there already; choose another {option}")
    if config.trace is not None and not Path(config.trace).absolute().parent.is_dir():
        raise BadInput(f"{config.trace} cannot be written: its folder is not there")
    before = saved.execution
    execution = Execution(
        device=config.device,
        shard="full" if before.shard not in WHOLE_SHARDINGS else "ddp",
        micro_batch_size=config.micro_batch_size or before.micro_batch_size,
        clipping=before.clipping,
        owner_fraction=before.owner_fraction,
    )
    if execution.shard == "ddp" and num_ranks == 1:
        execution = replace(execution, shard="none")
    output = replace(
        saved.output,
        folder=str(folder),
        record=True,
        resume=False,
        overwrite=False,
        seal_key=config.seal_key,
        passphrase_file=config.passphrase_file,
        data_salt=None,
    )
    asked = TrainConfig(mechanism=mechanism, execution=execution, output=output)
    asked.check_parts()
    return asked, (first, stop)


def _replay_in(world: World, asked: ReplayConfig) -> dict[str, Any]:
    with ExitStack() as stack:
        config, (first, stop) = world.on_main(partial(check_replay, asked, world.size))
        mechanism = config.mechanism
        set_threads(mechanism, stack)
        model, train_rows, eval_rows, entropy = open_model(config, world, stack)
        wrong = [each for each in asked.without if not 0 <= each < train_rows.num_rows]
        if wrong:
            raise BadInput(
                f"the run has rows 0 to {train_rows.num_rows - 1} to train on, found {wrong[0]} in "
                "--without"
            )
        rows = train_rows.emptied(asked.without)
        run = Run(config, model, rows, eval_rows, entropy, world, is_replay=True)
        stack.callback(run.parallel.release)
        curvature = run.prepare(at_most=-1 if asked.without else first)
        begins = run.progress.step
        if begins > first:
            raise BadInput(f"{run.source} is of step {begins}, which its folder's name is not")
        stack.enter_context(run.regime.attached())
        stack.enter_context(run.preconditioned(curvature))
        del curvature
        record = stack.enter_context(Record(Path(config.output.folder)))
        partings: dict[int, Parting | None] = {}  # of each step, on every rank alike

        def compare(found: StepRecord) -> None:
            partings[found.step] = compare_with(record, found)

        run.take_record = compare
        run.record_step(begins, {})
        with closing(run.regime.passes(range(begins, stop))) as passes:
            for step in range(begins + 1, stop + 1):
                if step == first + 1 and asked.trace is not None:
                    tracing = trace(
                        asked.trace,
                        run.parallel.module,
                        run.optimizer,
                        activations=not mechanism.compile,
                        first_step=step,
                    )
                    run.see_loss = stack.enter_context(tracing).loss
                figures, _ = run.advance(step, passes)
                run.record_step(step, figures)
                if asked.bisect and any(partings.values()):
                    break
        digest = unison.digest(model)
        compared = [parting for step, parting in partings.items() if step > first]
        parting = next(filter(None, partings.values()), None)
        result = {
            "run": asked.run,
            "world_size": world.size,
            "begins": begins,
            "steps": (first, stop),
            "num_compared": len(compared),
            "num_equal": compared.count(None),
            "parting": parting,
            "conditions": run.changed_conditions(),
            "digest": digest,
            "notes": run.notes,
            "without": asked.without,
            "out": asked.out,
            "trace": asked.trace,
            "epsilon": "inf" if mechanism.privacy and (asked.without or asked.trace) else None,
        }
        if asked.out is not None:
            out = Path(asked.out)
            parameters = {n: value.cpu() for n, value in full_parameters(model) if world.is_main}

            def write() -> None:
                out.mkdir(parents=True)
                # First: without it the folder would look like that of any other model.
                what = {
                    "of": asked.run,
                    "without": list(asked.without),
                    "steps": stop,
                    "digest": digest,
                    "epsilon": result["epsilon"],
                    "warning": "compared with the run's own model this gives away what is in the "
                    "rows that were left out; keep it with the data, and do not publish it",
                }
                write_json(out / COUNTERFACTUAL_FILE, what)
                save(model.config, parameters, out)

            world.on_main(write)
        return result


def compare_with(record: Record, found: StepRecord) -> Parting | None:
    """Say where a step of a replay parts from a run's record; None if it does not.

    Raises:
        BadInput: If it is that of a checkpoint, which is not of the run that is recorded.
    """
    expected = record.step(found.step)
    is_checkpoint = found.lr is None  # the parameters alone are known
    if is_checkpoint:
        expected = StepRecord(step=expected.step, units=expected.units)
    parting = compare_steps(expected, found, record.units)
    if is_checkpoint and parting is not None and found.step:
        raise BadInput(
            f"the checkpoint of step {found.step} does not hold the parameters of the record "
            f"({parting.unit}): one of the two is of another run"
        )
    return parting
