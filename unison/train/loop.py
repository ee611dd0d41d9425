"""A training run from settings to result."""

import time
from contextlib import ExitStack, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from torch.nn.parallel import DistributedDataParallel

from unison.config import TrainConfig
from unison.data import RowDataset
from unison.models import LanguageModel, build, count_parameters, save
from unison.rng import Key
from unison.train import report
from unison.train.batches import RowOrder, load_rows, num_micro_batches, part_of_rank
from unison.train.metrics import Metrics, has_tensorboard, open_metrics, read_metrics
from unison.train.optimization import make_optimizer, make_schedule
from unison.train.plot import CURVE_FILE, plot_losses
from unison.train.progress import ProgressView
from unison.train.report import TrainResult
from unison.train.run_folder import check_free, open_run_folder, write_json
from unison.train.setup import Rows, open_rows, plan_model
from unison.train.step import mean_loss, train_step
from unison.train.world import World, join_world


def train(config: TrainConfig, *, on_stderr: bool = False) -> TrainResult:
    """Run a training run on this process's rank; every rank of the world must call it.

    Args:
        config: The settings.
        on_stderr: Whether progress goes to the error stream, leaving standard output to the
            caller's own result.

    Raises:
        UnisonError: On every rank alike, with nothing left on disk.
    """
    mechanism, folder = config.mechanism, Path(config.output.folder)
    overwrite = config.output.overwrite
    with ExitStack() as stack:
        world = stack.enter_context(join_world(config.execution.device))
        world.agree(partial(check_free, folder, overwrite=overwrite), when=world.is_main)
        model_config, row_length = plan_model(mechanism)
        passes = num_micro_batches(
            mechanism.batch_size,
            world_size=world.size,
            micro_batch_size=config.execution.micro_batch_size,
        )
        rows = stack.enter_context(open_rows(mechanism, model_config, row_length, world))
        model = build(model_config, seed=mechanism.seed, device=world.device)

        # Only now is anything written: whatever was wrong with the input has been said.
        console, metrics = None, None
        if world.is_main:
            console = Console(stderr=on_stderr)
            stack.enter_context(open_run_folder(folder, overwrite=overwrite))
            report.write_start(folder, config, model_config, rows, world)
            metrics = stack.enter_context(
                open_metrics(folder, tensorboard=config.output.tensorboard and has_tensorboard())
            )
            report.say_start(console, config, model, rows, world)
        with ProgressView(console, mechanism.steps, config.output.log_every) as view:
            run = Run(config, model, rows, world, num_micro_batches=passes)
            result = run.train(view, metrics)
        if world.is_main:
            save(model, folder)
            plot_losses(
                read_metrics(folder), folder / CURVE_FILE, unigram_entropy=rows.unigram_entropy
            )
            write_json(folder / "result.json", asdict(result))
    if console is not None:
        report.say_end(console, result)
    return result


class Run:
    """One model being trained on this rank's part of every batch."""

    def __init__(
        self,
        config: TrainConfig,
        model: LanguageModel,
        rows: Rows,
        world: World,
        *,
        num_micro_batches: int,
    ) -> None:
        mechanism = config.mechanism
        self.config, self.model, self.rows, self.world = config, model, rows, world
        self.num_micro_batches = num_micro_batches
        self.order = RowOrder(
            num_rows=rows.train.num_rows, batch_size=mechanism.batch_size, seed=mechanism.seed
        )
        self.key = Key.from_seed(mechanism.seed)
        self.optimizer = make_optimizer(model, mechanism)
        self.scheduler = make_schedule(self.optimizer, mechanism)
        self.ddp = DistributedDataParallel(model)
        self.cast = nullcontext
        if mechanism.precision == "bf16":
            self.cast = partial(torch.autocast, world.device.type, dtype=torch.bfloat16)

    def train(self, view: ProgressView, metrics: Metrics | None) -> TrainResult:
        """Train for all steps; `metrics` is given on the main rank."""
        mechanism, output = self.config.mechanism, self.config.output
        record = metrics.write if metrics else lambda *_args, **_values: None
        started = time.perf_counter()
        eval_before, train_before = self.evaluate(self.rows.eval), self.evaluate(self.rows.train)
        record(0, **{"eval/loss": eval_before, "eval/train_loss": train_before})
        view.show_eval(0, eval_before)

        num_targets, training_seconds = 0, 0.0
        eval_after = eval_before
        for step in range(1, mechanism.steps + 1):
            step_started = time.perf_counter()
            result = train_step(
                self.ddp,
                self.optimizer,
                self.scheduler,
                self.micro_batches(step),
                step=step,
                world=self.world,
                key=self.key,
                cast=self.cast,
                clip_norm=mechanism.clip_norm,
            )
            seconds = time.perf_counter() - step_started
            training_seconds += seconds
            num_targets += result.num_targets
            record(
                step,
                **{
                    "train/loss": result.loss,
                    "train/grad_norm": result.grad_norm,
                    "train/lr": result.lr,
                    "train/tokens_per_second": result.num_targets / seconds,
                },
            )
            view.show_step(step, result.loss, num_targets / training_seconds)
            is_last = step == mechanism.steps
            if is_last or (output.eval_every and step % output.eval_every == 0):
                eval_after = self.evaluate(self.rows.eval)
                record(step, **{"eval/loss": eval_after})
                view.show_eval(step, eval_after)
        train_after = self.evaluate(self.rows.train)
        record(mechanism.steps, **{"eval/train_loss": train_after})
        return TrainResult(
            folder=output.folder,
            preset=mechanism.preset,
            parameters=count_parameters(self.model),
            world_size=self.world.size,
            steps=mechanism.steps,
            train_loss_before=train_before,
            train_loss_after=train_after,
            eval_loss_before=eval_before,
            eval_loss_after=eval_after,
            unigram_entropy=self.rows.unigram_entropy,
            tokens_per_second=num_targets / training_seconds,
            seconds=time.perf_counter() - started,
        )

    def micro_batches(self, step: int) -> list[dict[str, torch.Tensor]]:
        """This rank's rows of a step (counted from 1), cut into forward passes."""
        mine = self._mine(self.order.rows_of_step(step - 1))
        parts = np.array_split(mine, self.num_micro_batches)
        return [load_rows(self.rows.train, part, self.world.device) for part in parts]

    def evaluate(self, data: RowDataset) -> float:
        """Mean loss on a fixed choice of rows, spread evenly over the data set."""
        count = min(self.config.output.eval_rows, data.num_rows)
        chosen = np.linspace(0, data.num_rows - 1, num=count).astype(np.int64)
        mine = self._mine(chosen)
        per_pass = -(-self.config.mechanism.batch_size // self.world.size // self.num_micro_batches)
        batches = (
            load_rows(data, mine[start : start + per_pass], self.world.device)
            for start in range(0, len(mine), per_pass)
        )
        return mean_loss(self.model, batches, world=self.world, cast=self.cast)

    def _mine(self, rows: np.ndarray) -> np.ndarray:
        return part_of_rank(rows, rank=self.world.rank, world_size=self.world.size)
