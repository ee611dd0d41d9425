"""A training run from settings to result."""

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

import unison
from unison.config import TrainConfig
from unison.data import RowDataset
from unison.models import LanguageModel, build, count_parameters, save
from unison.rng import Key
from unison.shard import full_parameters
from unison.train import report
from unison.train.batches import RowOrder, global_batches, part_of_rank, to_device
from unison.train.checkpoint import (
    Checkpoints,
    Progress,
    check_resumable,
    check_same_rows,
    load_newest,
)
from unison.train.metrics import Metrics, has_tensorboard, open_metrics, read_metrics
from unison.train.optimization import make_optimizer, make_schedule
from unison.train.parallel import Parallel
from unison.train.plot import CURVE_FILE, plot_losses
from unison.train.progress import ProgressView
from unison.train.report import TrainResult
from unison.train.run_folder import RESULT_FILE, check_free, open_run_folder, write_json
from unison.train.setup import Rows, open_rows, plan_model
from unison.train.step import mean_loss, train_step
from unison.train.world import World, join_world, num_threads

EVAL_ROWS_PER_PASS = 16


def train(config: TrainConfig, *, on_stderr: bool = False) -> TrainResult:
    """Run a training run on this process's rank; every rank of the world must call it.

    Args:
        config: The settings.
        on_stderr: Whether progress goes to the error stream, leaving standard output to the
            caller's own result.

    Raises:
        UnisonError: On every rank alike, with nothing left on disk but checkpoints.
    """
    mechanism, output, folder = config.mechanism, config.output, Path(config.output.folder)
    with ExitStack() as stack:
        world = stack.enter_context(join_world(config.execution.device))
        stack.enter_context(num_threads(mechanism))
        if config.execution.guard:
            stack.enter_context(unison.guard())
        check_folder = partial(check_free, folder, overwrite=output.overwrite)
        if output.resume:
            check_folder = partial(check_resumable, folder)
        world.agree(check_folder, when=world.is_main)
        model_config, row_length = plan_model(mechanism)
        rows = stack.enter_context(open_rows(mechanism, model_config, row_length, world))
        with unison.meta_init():  # no rank ever holds more than its part
            model = build(model_config, device="meta")
        run = Run(config, model, rows, world)
        progress = run.resumed() if output.resume else None

        # Only now is anything written: whatever was wrong with the input has been said.
        console, metrics = None, None
        if world.is_main:
            console = Console(stderr=on_stderr)
            if progress is None:
                stack.enter_context(open_run_folder(folder, overwrite=output.overwrite))
                report.write_start(folder, config, model_config, rows, world)
            else:
                report.write_resumption(folder, config, progress.step, world)
            metrics = stack.enter_context(
                open_metrics(
                    folder,
                    tensorboard=output.tensorboard and has_tensorboard(),
                    after_step=progress and progress.step,
                )
            )
            report.say_start(console, config, run.num_parameters, rows, world)
            if progress is not None:
                report.say_resumption(console, config, progress.step, world)
        first = 0 if progress is None else progress.step
        with ProgressView(console, mechanism.steps, output.log_every, first=first) as view:
            result = run.train(view, metrics, progress)
        # Every rank takes part in the gathering; one keeps what comes of it.
        parameters = {name: value.cpu() for name, value in full_parameters(model) if world.is_main}
        if world.is_main:
            save(model.config, parameters, folder)
            plot_losses(
                read_metrics(folder), folder / CURVE_FILE, unigram_entropy=rows.unigram_entropy
            )
            write_json(folder / RESULT_FILE, asdict(result))
    if console is not None:
        report.say_end(console, result)
    return result


class Run:
    """One model being trained, seen from one rank."""

    def __init__(self, config: TrainConfig, model: LanguageModel, rows: Rows, world: World) -> None:
        mechanism, execution = config.mechanism, config.execution
        self.config, self.model, self.rows, self.world = config, model, rows, world
        self.num_parameters = count_parameters(model)  # before a rank keeps only its part
        self.parallel = Parallel(
            model,
            execution.shard,
            reducer=mechanism.reducer,
            world_size=world.size,
            replicas=execution.replicas,
            device=world.device,
            fill=partial(unison.materialize, model, seed=mechanism.seed, device=world.device),
        )
        self.optimizer = make_optimizer(model, mechanism)
        self.scheduler = make_schedule(self.optimizer, mechanism)
        self.key = Key.from_seed(mechanism.seed)
        self.cast = nullcontext
        if mechanism.precision == "bf16":
            self.cast = partial(torch.autocast, world.device.type, dtype=torch.bfloat16)

    def resumed(self) -> Progress:
        """Go back to where the run's newest checkpoint was written."""
        folder = Path(self.config.output.folder)
        summary = report.summarize(self.rows)
        self.world.agree(partial(check_same_rows, folder, summary), when=self.world.is_main)
        return load_newest(folder, self.model, self.optimizer, self.scheduler)

    def train(
        self, view: ProgressView, metrics: Metrics | None, progress: Progress | None = None
    ) -> TrainResult:
        """Train for all steps, or all that are left; `metrics` is given on the main rank."""
        mechanism, output = self.config.mechanism, self.config.output
        record = metrics.write if metrics else lambda *_args, **_values: None
        started = time.perf_counter() - (progress.seconds if progress else 0.0)
        if progress is None:
            progress = self.measured_before()
            record(
                0,
                **{"eval/loss": progress.eval_before, "eval/train_loss": progress.train_before},
            )
            view.show_eval(0, progress.eval_before)

        # Closed here rather than whenever it is collected: its end forgets the current plan, which
        # may then be that of another run in this process.
        with closing(self.passes(range(progress.step, mechanism.steps))) as passes:
            progress = self.train_on(passes, progress, view, record, started)
        train_after = self.evaluate(self.rows.train)
        record(mechanism.steps, **{"eval/train_loss": train_after})
        return TrainResult(
            folder=output.folder,
            preset=mechanism.preset,
            parameters=self.num_parameters,
            world_size=self.world.size,
            shard=self.config.execution.shard,
            reducer=mechanism.reducer,
            digest=unison.digest(self.model),
            steps=mechanism.steps,
            train_loss_before=progress.train_before,
            train_loss_after=train_after,
            eval_loss_before=progress.eval_before,
            eval_loss_after=progress.eval_after,
            unigram_entropy=self.rows.unigram_entropy,
            tokens_per_second=progress.num_targets / progress.training_seconds,
            seconds=time.perf_counter() - started,
        )

    def train_on(
        self,
        passes: Iterator[dict[str, Any]],
        progress: Progress,
        view: ProgressView,
        record: Callable[..., None],
        started: float,
    ) -> Progress:
        """Take the steps that are left, with evaluations and checkpoints in between."""
        mechanism, output = self.config.mechanism, self.config.output
        checkpoints = Checkpoints(output, self.world)
        for step in range(progress.step + 1, mechanism.steps + 1):
            step_started = time.perf_counter()
            result = train_step(
                self.parallel,
                self.optimizer,
                self.scheduler,
                self.passes_of_step(passes),
                step=step,
                key=self.key,
                cast=self.cast,
                clip_norm=mechanism.clip_norm,
            )
            seconds = time.perf_counter() - step_started
            progress = replace(
                progress,
                step=step,
                num_targets=progress.num_targets + result.num_targets,
                training_seconds=progress.training_seconds + seconds,
            )
            record(
                step,
                **{
                    "train/loss": result.loss,
                    "train/grad_norm": result.grad_norm,
                    "train/lr": result.lr,
                    "train/tokens_per_second": result.num_targets / seconds,
                },
            )
            view.show_step(step, result.loss, progress.num_targets / progress.training_seconds)
            is_last = step == mechanism.steps
            if is_last or (output.eval_every and step % output.eval_every == 0):
                progress = replace(progress, eval_after=self.evaluate(self.rows.eval))
                record(step, **{"eval/loss": progress.eval_after})
                view.show_eval(step, progress.eval_after)
            if checkpoints.is_due(step) and not is_last:  # the last one ends in the model itself
                now = replace(progress, seconds=time.perf_counter() - started)
                checkpoints.save(self.model, self.optimizer, self.scheduler, now)
        return progress

    def measured_before(self) -> Progress:
        """The losses of the model as it was built."""
        eval_before = self.evaluate(self.rows.eval)
        return Progress(
            step=0,
            num_targets=0,
            training_seconds=0.0,
            seconds=0.0,
            train_before=self.evaluate(self.rows.train),
            eval_before=eval_before,
            eval_after=eval_before,
        )

    def passes(self, steps: range) -> Generator[dict[str, Any], None, None]:
        """This rank's passes of some steps, all after one another."""
        mechanism, rows = self.config.mechanism, self.rows.train
        order = RowOrder(
            num_rows=rows.num_rows, batch_size=mechanism.batch_size, seed=mechanism.seed
        )
        yield from unison.deal(
            global_batches(rows, order, steps),
            granule=mechanism.granule if mechanism.reducer == "ordered" else None,
            micro_batch=self.config.execution.micro_batch_size,
        )

    def passes_of_step(self, passes: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """This rank's passes of the next logical batch, up to the one that closes it."""
        for batch in passes:
            yield to_device(batch, self.world.device)
            plan = unison.current_plan()
            if plan is None or plan.closes_logical_batch:
                return

    def evaluate(self, data: RowDataset) -> float:
        """Mean loss on a fixed choice of rows, spread evenly over the data set."""
        count = min(self.config.output.eval_rows, data.num_rows)
        chosen = np.linspace(0, data.num_rows - 1, num=count).astype(np.int64)
        mine = part_of_rank(chosen, rank=self.world.rank, world_size=self.world.size)
        most = -(-count // self.world.size)  # rows of the rank that has most: all run its passes
        per_pass = self.config.execution.micro_batch_size or min(most, EVAL_ROWS_PER_PASS)
        batches = (
            to_device(
                {**data.rows(mine[start : start + per_pass]), "sample_ids": torch.empty(0)},
                self.world.device,
            )
            for start in range(0, most, per_pass)
        )
        self.model.eval()
        loss = mean_loss(self.model, batches, world=self.world, cast=self.cast)
        self.model.train()
        return loss
