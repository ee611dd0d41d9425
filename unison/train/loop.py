"""A training run from settings to result."""

import errno
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor
from torch.distributed import ProcessGroup

import unison
from unison import run_files
from unison.config import WHOLE_SHARDINGS, MechanismConfig, TrainConfig
from unison.data import (
    RowDataset,
    Tokenizer,
    build_rows,
    open_corpus,
    open_tokenizer,
    unigram_entropy,
)
from unison.errors import BadInput, OutOfRoom, UnisonError
from unison.models import LanguageModel, ModelConfig, build, count_parameters, preset, save
from unison.privacy import BudgetSpent
from unison.replay import StepRecord, StepRecorder, open_record
from unison.rng import Key
from unison.schema import cut, differing
from unison.shard import find_blocks, full_parameters
from unison.train import checkpoint, report, run_folder
from unison.train.regime import PrivateRegime, Regime
from unison.train.report import ProgressView
from unison.train.run_folder import open_metrics, plot_losses
from unison.train.step import (
    Batch,
    joined,
    make_optimizer,
    make_schedule,
    mean_loss,
    settings_of,
    to_device,
    train_step,
)
from unison.train.world import (
    GRACE_SECONDS,
    Parallel,
    StopSignals,
    World,
    is_same_launch,
    join_world,
    was_launched,
)

EVAL_ROWS_PER_PASS = 16
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EIO}
MOST_EXACT = 1024  # outputs for which `unison.KFAC` goes through all labels


def train(config: TrainConfig, *, on_stderr: bool = False) -> run_files.TrainResult:
    """Run a training run on this process's rank; every rank of the world must call it.

    Args:
        config: The settings.
        on_stderr: Whether progress goes to the error stream, leaving standard output to the
            caller's own result.

    Raises:
        UnisonError: On every rank alike, with nothing left on disk but checkpoints, and the ledger
            of a private run.
    """
    with (
        join_world(config.execution.device) as world,
        # Until ranks have met, a signal ends them as any process.
        StopSignals(is_alone=world.size == 1) as signals,
        running_out_of_room(world),
    ):
        # In a frame of its own: models and units hold process groups, and must go before the ranks
        # part.
        return _train_in(replace(world, signals=signals), config, on_stderr=on_stderr)


@contextmanager
def running_out_of_room(world: World) -> Iterator[None]:
    """Turn what the machine runs out of, memory or disk, into one sentence."""
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        # torch has no type of its own for a CPU's memory.
        is_memory = isinstance(error, MemoryError | torch.OutOfMemoryError)
        is_memory |= type(error) is RuntimeError and "not enough memory" in str(error)
        is_disk = isinstance(error, OSError) and error.errno in NO_ROOM
        if isinstance(error, UnisonError) or not (is_memory or is_disk):
            raise
        if is_disk:
            raise OutOfRoom(
                f"a file could not be written: {error}; what was complete stays"
            ) from error
        raise OutOfRoom(
            f"rank {world.rank} ran out of memory on {world.device}: {cut(str(error))}; lower "
            "--micro-batch-size or --row-length, or take more ranks with --shard full"
        ) from error


def _train_in(world: World, config: TrainConfig, *, on_stderr: bool) -> run_files.TrainResult:
    mechanism, output, folder = config.mechanism, config.output, Path(config.output.folder)
    with ExitStack() as stack:
        config.check_parts()
        set_threads(mechanism, stack)
        if config.execution.guard:
            stack.enter_context(unison.guard())

        def check_folder() -> tuple[bool, run_files.TrainResult | None]:
            """Whether the run goes on; and its result, if it was started again after its end."""
            goes_on = output.resume
            if goes_on:
                checkpoint.check_resumable(folder)
            elif was_launched() and (folder / run_files.CONFIG_FILE).is_file():
                # Ranks that this launch started before may be about to end.
                is_ours = is_same_launch(run_files.read_config(folder).launch)
                run_folder.settle(folder, within=GRACE_SECONDS if is_ours else 0.0)
                saved = run_files.read_config(folder)
                goes_on = is_same_launch(saved.launch)
                if goes_on and saved.mechanism != mechanism:
                    raise BadInput(
                        f"{folder} holds a run of this launch with other settings; choose another "
                        "--out, or another --rdzv-id for torchrun"
                    )
                if goes_on and (folder / run_files.RESULT_FILE).is_file():
                    return True, run_files.read_result(folder)
            if goes_on:
                stack.enter_context(run_folder.locked(folder))  # before its checkpoint is read
            else:
                run_folder.check_free(folder, overwrite=output.overwrite)
            return goes_on, None

        goes_on, done = world.on_main(check_folder)
        if done is not None:
            return done
        if goes_on:
            output = replace(output, resume=True, overwrite=False)
            config = replace(config, output=output)
        model, train_rows, eval_rows, entropy = open_model(config, world, stack)
        run = Run(config, model, train_rows, eval_rows, entropy, world)
        stack.callback(run.parallel.release)
        curvature = run.prepare()

        # Only now is anything written: whatever was wrong with the input has been said.
        console = Console(stderr=on_stderr) if world.is_main else None
        opened = run_folder.open_run_folder(
            folder, overwrite=output.overwrite, resume=output.resume
        )
        world.on_main(partial(stack.enter_context, opened))
        stack.enter_context(running_out_of_room(world))  # inside: a failed run says what is left

        def begin() -> None:
            report.write_start(folder, run)
            metrics = open_metrics(
                folder,
                tensorboard=output.tensorboard,
                after_step=run.progress.step or None,
                last=run.figures,
                only=run_folder.COVERED if run.is_guarded else None,
            )

            def heard(write: Callable[..., None]) -> Callable[..., None]:
                def record(*args: Any, **values: Any) -> None:
                    try:
                        write(*args, **values)
                    except OSError as error:  # of one rank; all hear of it when the step is over
                        run.failure = error

                return record

            run.record = heard(stack.enter_context(metrics))
            if run.recorder is not None:
                digests = open_record(
                    folder, run.recorder.units, after_step=run.progress.step or None
                )
                run.take_record = heard(stack.enter_context(digests))

        # A new run is one before its ledger begins; one whose ledger is refused does not go on.
        world.agree(begin, when=world.is_main and not output.resume)
        stack.enter_context(run.regime.attached())
        stack.enter_context(run.preconditioned(curvature))
        del curvature  # it is as large as the model
        world.agree(begin, when=world.is_main and output.resume)
        if console is not None:
            report.say_start(console, run)
        stack.enter_context(checkpoint.outlived(run))
        with ProgressView(console, config, first=run.progress.step) as run.view:
            result = run.train()
        # Every rank takes part in the gathering; one keeps what comes of it.
        parameters = {name: value.cpu() for name, value in full_parameters(model) if world.is_main}

        def end() -> None:
            run.raise_failure()
            save(model.config, parameters, folder)
            plot_losses(
                run_files.read_metrics(folder),
                folder / run_files.CURVE_FILE,
                unigram_entropy=run.unigram_entropy,
            )
            run_folder.write_json(
                folder / run_files.RESULT_FILE, result.published(config).to_fields()
            )

        world.on_main(end)
    if console is not None:
        report.say_end(console, config, result)
    return result.published(config)


class Run:
    """One model being trained, seen from one rank.

    Args:
        config: The settings.
        model: Built without memory.
        train_rows: What it is trained on.
        eval_rows: What is held out.
        unigram_entropy: The loss of the best model that ignores context. In a private run that of
            the held-out rows: of the others it would be a figure that no ε covers.
        world: The ranks.
        is_replay: Whether steps of a run are taken again.

    Attributes:
        signals: Those that ask it to stop.
        progress: How far it has come.
        kfac: Preconditions its gradients, within `preconditioned`.
        view: Shows steps to a person.
        record: Writes numbers of a step to the run's metrics; on the main rank.
        recorder: Makes digests of every step; None unless the run keeps them.
        take_record: Takes what the recorder made of a step.
        see_loss: Sees the loss of each pass, and returns it: a tracer's.
        is_replay: Whether steps are taken again to look at them: nothing is written to the folder.
        notes: What a person should know of how it goes on.
        source: The checkpoint that it goes on from.
        failure: What kept this rank from writing.
        written: The checkpoint that is being written.
        background: The ranks' connections for that; None until the first one, and under a guard.
        saved_at: When the last checkpoint was written, or the run began.
        is_whole: Whether this rank is one of several that hold all state each.
        boundary: What the run would go on from, as of its last complete step, where this rank alone
            could write it; None unless `is_whole`, and during an update.
        update_lock: Held while what an update would change is read beside the steps.
        figures: Metrics of the last step, where they may not have been written yet.
        started: When it did, as if it had never stopped.
    """

    def __init__(
        self,
        config: TrainConfig,
        model: LanguageModel,
        train_rows: RowDataset,
        eval_rows: RowDataset,
        unigram_entropy: float,
        world: World,
        *,
        is_replay: bool = False,
    ) -> None:
        mechanism, execution = config.mechanism, config.execution
        self.config, self.model, self.world = config, model, world
        self.signals = world.signals or StopSignals()
        self.train_rows, self.eval_rows = train_rows, eval_rows
        self.unigram_entropy = unigram_entropy
        self.num_parameters = count_parameters(model)  # before a rank keeps only its part
        self.parallel = Parallel(
            model,
            execution.shard,
            reducer=mechanism.reducer,
            world_size=world.size,
            replicas=execution.replicas,
            device=world.device,
            fill=partial(unison.materialize, model, seed=mechanism.seed, device=world.device),
            sums_gradients=mechanism.privacy is None,
        )
        if mechanism.compile and mechanism.privacy is None:
            for block in find_blocks(model):
                block.compile()
        self.optimizer = make_optimizer(model, mechanism)
        self.scheduler = make_schedule(self.optimizer, mechanism)
        self.kfac: unison.KFAC | None = None
        self.key = Key.from_seed(mechanism.seed)
        self.cast = nullcontext
        if mechanism.precision == "bf16":
            self.cast = partial(torch.autocast, world.device.type, dtype=torch.bfloat16)
        self.progress = checkpoint.Progress()
        self.notes: list[str] = []
        self.source: Path | None = None
        self.failure: OSError | None = None
        self.written: Future[None] | None = None
        self.background: ProcessGroup | None = None
        self.saved_at = time.monotonic()
        self.boundary: checkpoint.Extra | None = None
        self.update_lock = threading.Lock()
        self.figures: Mapping[str, float] = {}
        self.started = time.perf_counter()
        # Of a GPU a rank does not know, when another is lost, whether a sum that it waits for is
        # one. K-FAC's state lies on several ranks.
        self.is_whole = (
            world.size > 1
            and execution.shard in WHOLE_SHARDINGS
            and world.device.type == "cpu"
            and mechanism.kfac is None
        )
        self.optimizer.register_step_pre_hook(self._leave_boundary)
        self.view = ProgressView(None, config)
        self.record: Callable[..., None] = lambda step, **values: None
        self.recorder = None
        if config.output.record:
            self.recorder = StepRecorder(model, world.rank, world.size, world.sum)
        self.take_record: Callable[[StepRecord], None] = lambda record: None
        self.see_loss: Callable[[Tensor], Tensor] = lambda share: share
        self.is_replay = is_replay
        # Whether files must not hold what no ε covers.
        self.is_guarded = mechanism.privacy is not None and not config.output.unsafe_diagnostics
        self.regime = Regime(self) if mechanism.privacy is None else PrivateRegime(self)

    def prepare(self, at_most: int | None = None) -> dict[str, Any] | None:
        """Settle what the steps apply; a run that goes on goes back to its newest checkpoint.

        Args:
            at_most: The last step that may be gone back to; None for any.

        Returns:
            What K-FAC had learned there.
        """
        state, curvature = None, None
        if self.config.output.resume or self.is_replay:
            folder = Path(self.config.output.folder)
            self.world.on_main(lambda: checkpoint.check_same_rows(folder, report.summarize(self)))
            found = checkpoint.load_newest(self, at_most=at_most)
            if found is not None:
                extra, curvature = found
                self.progress, state = extra.progress, extra.regime
                self.figures = extra.figures
        self.regime.prepare(state)
        return curvature

    @contextmanager
    def preconditioned(self, state: Mapping[str, Any] | None) -> Iterator[None]:
        """Let K-FAC, if the run has it, watch the model's passes; `state` is a checkpoint's."""
        if self.config.mechanism.kfac is None:
            yield
            return
        self.kfac = unison.KFAC(self.parallel.module, settings_of(self.config), self.optimizer)
        try:
            if state is not None:
                self.kfac.load_state_dict(state)
                del state  # it is as large as the model
            yield
        finally:
            self.kfac.detach()
            self.kfac = None  # see Parallel.module

    def train(self) -> run_files.TrainResult:
        """Train for all steps, or all that are left."""
        mechanism, output, progress = self.config.mechanism, self.config.output, self.progress
        self.started = time.perf_counter() - progress.seconds
        if progress.step == 0:
            self.record_step(0, {})
            progress.eval_before = self.evaluate(self.eval_rows)
            progress.train_before = self.evaluate(self.train_rows)
            progress.eval_after = progress.eval_before
            figures = {"eval/loss": progress.eval_before, "eval/train_loss": progress.train_before}
            self.record(0, **figures)
            self.view.show_eval(0, progress.eval_before)
        elif self._is_eval_due() and progress.eval_step < progress.step:
            self.evaluate_held_out()  # ranks were lost before they had

        # Closed here rather than whenever it is collected: its end forgets the current plan, which
        # may then be that of another run in this process.
        with closing(self.regime.passes(range(progress.step, mechanism.steps))) as passes:
            self.world.agree(lambda: None)  # of a signal that came since they last did
            self.signals.is_stepping = True
            try:
                budget_sentence = self.take_steps(passes)
            except BaseException as error:  # which one rank may have met alone
                checkpoint.finish(
                    self, within=GRACE_SECONDS if isinstance(error, UnisonError) else 5
                )
                raise
        checkpoint.finish(self)
        self.evaluate_held_out()
        train_after = self.evaluate(self.train_rows)
        self.record(progress.step, **{"eval/train_loss": train_after})
        return run_files.TrainResult(
            folder=output.folder,
            preset=mechanism.preset,
            parameters=self.num_parameters,
            world_size=self.world.size,
            shard=self.config.execution.shard,
            reducer=mechanism.reducer,
            digest=unison.digest(self.model),
            steps=progress.step,
            train_loss_before=progress.train_before,
            train_loss_after=train_after,
            eval_loss_before=progress.eval_before,
            eval_loss_after=progress.eval_after,
            unigram_entropy=self.unigram_entropy,
            tokens_per_second=progress.num_targets / max(progress.training_seconds, 1e-9),
            seconds=time.perf_counter() - self.started,
            privacy=self.regime.result(budget_sentence),
        )

    def take_steps(self, passes: Iterator[Batch]) -> str | None:
        """Take the steps that are left, with evaluations and checkpoints in between.

        Args:
            passes: This rank's passes of all of them.

        Returns:
            The reason, if a privacy budget did not allow all of them.
        """
        mechanism, output, progress = self.config.mechanism, self.config.output, self.progress
        first = progress.step + 1
        for step in range(first, mechanism.steps + 1):
            compiles = mechanism.compile and step == first
            began = time.perf_counter()
            if compiles:
                self.view.note("compiling: the first step takes longer than the others")
            try:
                self.take_step(step, passes)
            except BudgetSpent as refusal:  # raised before anything of the step is applied
                return (
                    f"step {step} would have spent ε = {refusal.would_spend:.4f}; the steps before "
                    f"it spent {refusal.spent:.4f}"
                )
            if compiles:
                seconds = time.perf_counter() - began
                self.view.note(f"the first step, with compiling, took {seconds:.0f} s")
            # Whether the last checkpoint is as long ago as it may be, by the main rank's clock.
            most, age = output.checkpoint_seconds, time.monotonic() - self.saved_at
            is_time = bool(most) and self.world.is_main and age >= most
            number, is_time, has_failed = self.world.largest(
                self.signals.number, is_time, self.failure is not None
            )
            if has_failed:
                self.world.agree(self.raise_failure)
            if self.recorder is not None:  # its digests are in the file
                self._set_boundary()
            if step == mechanism.steps:  # it is evaluated by the caller, and ends in the model
                break
            if self._is_eval_due():
                self.evaluate_held_out()
            if (
                number
                or is_time
                or (output.checkpoint_every and step % output.checkpoint_every == 0)
            ):
                checkpoint.save_newest(self)
                self.saved_at = time.monotonic()
            if number:
                checkpoint.finish(self)
                raise self.signals.stopped(f"after step {step} of {mechanism.steps}", number)
        return None

    def _is_eval_due(self) -> bool:
        """Whether held-out rows are looked at after the step at hand."""
        every, step = self.config.output.eval_every, self.progress.step
        return bool(every) and step % every == 0 and step < self.config.mechanism.steps

    def _set_boundary(self) -> None:
        """Note what this rank could go on from: a step is complete."""
        if self.is_whole:
            self.boundary = checkpoint.Extra.of(self, self.figures)

    def _leave_boundary(self, *_: object) -> None:
        """Note that an update begins, when nobody reads what it changes."""
        with self.update_lock:
            self.boundary = None

    def raise_failure(self) -> None:
        """Raise what kept this rank from writing, if anything did."""
        if self.failure is not None:
            raise self.failure

    def advance(self, step: int, passes: Iterator[Batch]) -> tuple[dict[str, float], int]:
        """Take one step; see `train_step` for what is returned."""
        found = train_step(
            self.parallel,
            self.optimizer,
            self.scheduler,
            self.passes_of_step(passes),
            step=step,
            key=self.key,
            objective=self.regime.objective,
            kfac=self.kfac,
            cast=self.cast,
            clip_norm=self.config.mechanism.clip_norm,
            see_loss=self.see_loss,
        )
        self.progress.step = step
        return found

    def record_step(self, step: int, figures: Mapping[str, float]) -> None:
        """Make the digests of a step, in a run that keeps them; every rank must call it."""
        if self.recorder is None:
            return
        rows, units = self.recorder.take()
        found: dict[str, Any] = {}
        if figures:  # not of initial values or a checkpoint
            found = {"lr": figures["train/lr"], "grad_norm": figures["train/grad_norm"]}
            found |= self.regime.recorded(step, rows, figures["train/loss"])
        self.take_record(StepRecord(step=step, units=units, **found))

    def take_step(self, step: int, passes: Iterator[Batch]) -> None:
        """Take one step, and record and show what came of it."""
        progress, started = self.progress, time.perf_counter()
        figures, num_targets = self.advance(step, passes)
        self.figures = figures
        seconds = time.perf_counter() - started
        progress.num_targets += num_targets
        progress.training_seconds += seconds
        if self.recorder is None:  # else when the step's digests are in the file
            self._set_boundary()
        self.record_step(step, figures)
        metrics, epsilon = self.regime.facts(step)
        speed = {"train/tokens_per_second": num_targets / seconds}
        self.record(step, **figures, **speed, **metrics)
        mean_speed = progress.num_targets / progress.training_seconds
        self.view.show_step(step, figures["train/loss"], mean_speed, metrics, epsilon)

    def changed_conditions(self) -> list[str]:
        """What bits depend on besides the settings, and is not as it was when the run began."""
        before = run_files.read_config(Path(self.config.output.folder)).fingerprint
        now = json.loads(json.dumps(report.fingerprint(self)))
        return differing(before, now)

    def evaluate_held_out(self) -> None:
        """Measure, record and show the loss on the held-out rows."""
        progress = self.progress
        progress.eval_after = self.evaluate(self.eval_rows)
        progress.eval_step = progress.step
        self.record(progress.step, **{"eval/loss": progress.eval_after})
        self.view.show_eval(progress.step, progress.eval_after)
        if self.boundary is not None:
            self._set_boundary()

    def passes_of_step(self, passes: Iterator[Batch]) -> Iterator[Batch]:
        """This rank's passes of the next logical batch, up to the one that closes it."""
        for batch in passes:
            plan = unison.current_plan()
            if self.recorder is not None and plan is not None:
                columns = (batch[name] for name in ("sample_ids", "input_ids", "labels"))
                self.recorder.see(plan.sample_ids, *map(joined, columns))
            yield to_device(batch, self.world.device)
            if self.regime.is_step_complete():
                return

    def evaluate(self, data: RowDataset) -> float:
        """Mean loss on a fixed choice of rows, spread evenly over the data set."""
        count = min(self.config.output.eval_rows, data.num_rows)
        chosen = np.linspace(0, data.num_rows - 1, num=count).astype(np.int64)
        # How many rows share a pass changes the bits of each.
        mechanism, most = self.config.mechanism, -(-count // self.world.size)
        per_pass = self.config.execution.micro_batch_size or min(most, EVAL_ROWS_PER_PASS)
        if mechanism.reducer == "ordered":
            per_pass = mechanism.granule
        batches = (
            to_device(
                {**data.rows(chosen[each]), "sample_ids": torch.from_numpy(each)}, self.world.device
            )
            for each in eval_passes(count, per_pass, self.world)
        )
        self.model.eval()
        loss = mean_loss(self.model, batches, num_rows=count, world=self.world, cast=self.cast)
        self.model.train()
        return loss


def eval_passes(num_rows: int, per_pass: int, world: World) -> list[np.ndarray]:
    """Which of some rows this rank evaluates, pass by pass; as many passes on every rank.

    Rows are cut into passes first and dealt to ranks then, so that the shape of the pass that a row
    is in does not depend on the ranks.
    """
    passes = np.split(np.arange(num_rows), range(per_pass, num_rows, per_pass))
    mine = np.array_split(np.arange(len(passes)), world.size)[world.rank]
    most = -(-len(passes) // world.size)
    none = np.arange(0)
    return [passes[mine[index]] if index < len(mine) else none for index in range(most)]


# ---- what a run is made of -----------------------------------------------------------------------


def set_threads(mechanism: MechanismConfig, stack: ExitStack) -> None:
    """Let torch have the threads of a run until `stack` is closed."""
    before = torch.get_num_threads()
    stack.callback(torch.set_num_threads, before)
    torch.set_num_threads(mechanism.threads or (1 if mechanism.reducer == "ordered" else before))


def open_model(
    config: TrainConfig, world: World, stack: ExitStack
) -> tuple[LanguageModel, RowDataset, RowDataset, float]:
    """Build a run's model without memory, and open its rows; every rank must call it.

    Returns:
        The model, the rows to train on, those that are held out, and their unigram entropy.
    """
    model_config, row_length = plan_model(config.mechanism)
    rows = stack.enter_context(open_rows(config.mechanism, model_config, row_length, world))
    with unison.meta_init():  # no rank ever holds more than its part
        model = build(model_config, device="meta")
    sizes = count_parameters(model), row_length
    world.agree(partial(check_memory, config, model_config, *sizes, world))
    return model, *rows


def plan_model(mechanism: MechanismConfig) -> tuple[ModelConfig, int]:
    """Decide the model's config and the length of a row.

    Raises:
        BadInput: If the row does not fit the context, or the vocabulary the settings of K-FAC.
    """
    config = preset(mechanism.preset, **mechanism.overrides)
    row_length = mechanism.row_length or config.context_length
    if row_length > config.context_length:
        raise BadInput(
            f"a row of {row_length} tokens is longer than the context of {mechanism.preset!r}, "
            f"{config.context_length}; lower --row-length or raise --context-length"
        )
    is_exact = mechanism.kfac is not None and mechanism.kfac.fisher == "exact"
    if is_exact and config.vocab_size > MOST_EXACT:
        raise BadInput(
            f"--fisher exact sends a gradient back for each of {config.vocab_size:,} tokens of the "
            f"vocabulary, at most {MOST_EXACT:,}; use --fisher mc, which draws one"
        )
    return config, row_length


def check_memory(
    config: TrainConfig, model: ModelConfig, num_parameters: int, row_length: int, world: World
) -> None:
    """Refuse what no memory of this machine holds, before a system ends processes to make room.

    Raises:
        BadInput: If the ranks here need more than the machine has.
    """
    mechanism, execution = config.mechanism, config.execution
    has = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    granule = mechanism.granule if mechanism.reducer == "ordered" else 1
    num_rows = -(-mechanism.batch_size // granule) * granule  # granules are full
    needs = num_local * num_rows * row_length * 16  # with labels, as int64, on every rank
    if world.device.type == "cpu":
        # Values, gradients and two of Adam's, as float32.
        copies = world.size if execution.shard in WHOLE_SHARDINGS else 1
        needs += 16 * num_parameters * copies * num_local // world.size
        # What one pass keeps, at least: the logits, and a tensor of each block.
        in_pass = max(granule, min(num_rows // world.size, execution.micro_batch_size or num_rows))
        kept = model.vocab_size + model.num_layers * model.d_model
        needs += 4 * num_local * in_pass * row_length * kept
    if needs > has:
        raise BadInput(
            f"{num_parameters:,} parameters and batches of {num_rows:,} rows of {row_length:,} "
            f"tokens need {needs >> 30:,} GB or more, this machine has {has >> 30:,} GB; take a "
            "smaller --preset, --micro-batch-size or --granule, or more machines"
        )


def fitting_tokenizer(mechanism: MechanismConfig, config: ModelConfig) -> Tokenizer:
    """Open the tokenizer and check that the model's vocabulary holds it."""
    tokenizer = open_tokenizer(mechanism.tokenizer)
    if tokenizer.vocab_size > config.vocab_size:
        raise BadInput(
            f"the tokenizer has {tokenizer.vocab_size} tokens, but the vocabulary of "
            f"{mechanism.preset!r} holds {config.vocab_size}; add "
            f"--vocab-size {tokenizer.vocab_size}"
        )
    return tokenizer


@contextmanager
def open_rows(
    mechanism: MechanismConfig, config: ModelConfig, row_length: int, world: World
) -> Iterator[tuple[RowDataset, RowDataset, float]]:
    """Tokenise the corpus once per machine and open its rows on every rank.

    The tokens lie in a private temporary folder that is gone when the run is over: protected text
    is not copied to a place where nobody expects it.
    """
    with ExitStack() as stack:

        def tokenise() -> tuple[int, str]:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="unison-rows-"))
            build_rows(
                open_corpus(mechanism.data, text_field=mechanism.text_field, seed=mechanism.seed),
                fitting_tokenizer(mechanism, config),
                row_length=row_length,
                layout=mechanism.layout,
                directory=folder,
                eval_fraction=mechanism.eval_fraction,
                seed=mechanism.seed,
                long_documents=mechanism.long_documents,
            )
            return world.node, folder

        made = world.agree(tokenise, when=world.local_rank == 0)
        folder = dict(entry for entry in made if entry is not None)[world.node]
        train, held_out = RowDataset.open(folder, "train"), RowDataset.open(folder, "eval")
        known = train if mechanism.privacy is None else held_out
        yield train, held_out, unigram_entropy(known)
        world.agree(lambda: None)  # nobody removes the folder under another rank's feet


def check_before_launch(config: TrainConfig) -> None:
    """Find what is wrong with the input cheaply, before any process is started.

    Raises:
        BadInput: If the folder, the data, the tokenizer or the model cannot be what was asked for.
    """
    config.check_parts()
    mechanism, sealed = config.mechanism, config.output.seal_key
    if not (config.output.resume or was_launched()):  # ranks that are started again go on
        if sealed is not None and Path(sealed).exists():
            raise BadInput(f"{sealed} exists, and may be the key of another run: name a new file")
        run_folder.check_free(Path(config.output.folder), overwrite=config.output.overwrite)
    model_config, _ = plan_model(mechanism)
    fitting_tokenizer(mechanism, model_config)
    open_corpus(mechanism.data, text_field=mechanism.text_field, seed=mechanism.seed)
