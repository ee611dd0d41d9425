"""A training run from settings to result."""

import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

import unison
from unison.config import MechanismConfig, TrainConfig
from unison.data import (
    RowDataset,
    Tokenizer,
    build_rows,
    open_corpus,
    open_tokenizer,
    unigram_entropy,
)
from unison.errors import BadInput
from unison.models import LanguageModel, ModelConfig, build, count_parameters, preset, save
from unison.privacy import BudgetSpent
from unison.rng import Key
from unison.shard import find_blocks, full_parameters
from unison.train import report
from unison.train.checkpoint import (
    Progress,
    check_resumable,
    check_same_rows,
    load_newest,
    save_newest,
)
from unison.train.optimization import (
    GradientTransform,
    NaturalGradient,
    make_optimizer,
    make_schedule,
)
from unison.train.parallel import Parallel
from unison.train.regime import PrivateRegime, Regime, RunRows
from unison.train.report import ProgressView, TrainResult
from unison.train.run_folder import (
    COVERED,
    CURVE_FILE,
    RESULT_FILE,
    Metrics,
    check_free,
    open_run_folder,
    open_stopped_run,
    plot_losses,
    read_metrics,
    write_json,
)
from unison.train.step import Batch, mean_loss, to_device, train_step
from unison.train.world import World, join_world

EVAL_ROWS_PER_PASS = 16
MOST_EXACT = 1024  # outputs for which `unison.KFAC` goes through all labels


def train(config: TrainConfig, *, on_stderr: bool = False) -> TrainResult:
    """Run a training run on this process's rank; every rank of the world must call it.

    Args:
        config: The settings.
        on_stderr: Whether progress goes to the error stream, leaving standard output to the
            caller's own result.

    Raises:
        UnisonError: On every rank alike, with nothing left on disk but checkpoints, and the ledger
            of a private run.
    """
    with join_world(config.execution.device) as world:
        # In a frame of its own: models and units hold process groups, and must go before the ranks
        # part.
        return _train_in(world, config, on_stderr=on_stderr)


def _train_in(world: World, config: TrainConfig, *, on_stderr: bool) -> TrainResult:
    mechanism, output, folder = config.mechanism, config.output, Path(config.output.folder)
    with ExitStack() as stack:
        config.check_parts()
        before = torch.get_num_threads()
        stack.callback(torch.set_num_threads, before)
        torch.set_num_threads(
            mechanism.threads or (1 if mechanism.reducer == "ordered" else before)
        )
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
        stack.callback(run.parallel.release)
        progress = run.prepare()

        # Only now is anything written: whatever was wrong with the input has been said.
        console, metrics = None, None
        if world.is_main:
            opened = open_run_folder(folder, overwrite=output.overwrite)
            stack.enter_context(opened if progress is None else open_stopped_run(folder))
        stack.enter_context(run.regime.attached())
        stack.enter_context(run.transform.attached())
        if world.is_main:
            console = Console(stderr=on_stderr)
            metrics = stack.enter_context(closing(run.start(console, progress)))
        first = 0 if progress is None else progress.step
        with ProgressView(console, config, first=first) as view:
            result = run.train(view, metrics, progress)
        # Every rank takes part in the gathering; one keeps what comes of it.
        parameters = {name: value.cpu() for name, value in full_parameters(model) if world.is_main}
        if world.is_main:
            save(model.config, parameters, folder)
            plot_losses(
                read_metrics(folder), folder / CURVE_FILE, unigram_entropy=rows.unigram_entropy
            )
            write_json(folder / RESULT_FILE, result.published(config).to_fields())
    if console is not None:
        report.say_end(console, config, result)
    return result.published(config)


class Run:
    """One model being trained, seen from one rank."""

    def __init__(
        self, config: TrainConfig, model: LanguageModel, rows: RunRows, world: World
    ) -> None:
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
            sums_gradients=mechanism.privacy is None,
        )
        if mechanism.compile and mechanism.privacy is None:
            for block in find_blocks(model):
                block.compile()
        self.optimizer = make_optimizer(model, mechanism)
        self.scheduler = make_schedule(self.optimizer, mechanism)
        self.transform = GradientTransform()
        if mechanism.kfac is not None:
            self.transform = NaturalGradient(config, self.parallel, self.optimizer)
        self.key = Key.from_seed(mechanism.seed)
        self.cast = nullcontext
        if mechanism.precision == "bf16":
            self.cast = partial(torch.autocast, world.device.type, dtype=torch.bfloat16)
        self.view, self.started = ProgressView(None, config), time.perf_counter()
        self.metrics: Metrics | None = None
        # Whether files must not hold what no ε covers.
        self.is_guarded = mechanism.privacy is not None and not config.output.unsafe_diagnostics
        self.regime = Regime(config, rows.train)
        if mechanism.privacy is not None:
            self.regime = PrivateRegime(
                config,
                self.parallel,
                self.optimizer,
                rows.train,
                world=world,
                num_elements=self.num_parameters,
                cast=self.cast,
            )

    def prepare(self) -> Progress | None:
        """Settle what the steps apply; a run that goes on goes back to its newest checkpoint."""
        progress, state, curvature = None, None, None
        if self.config.output.resume:
            folder = Path(self.config.output.folder)
            summary = report.summarize(self.rows, self.config)
            self.world.agree(partial(check_same_rows, folder, summary), when=self.world.is_main)
            progress, state, curvature = load_newest(
                folder, self.model, self.optimizer, self.scheduler, self.world
            )
        self.regime.prepare(state)
        self.transform.prepare(curvature)
        return progress

    def start(self, console: Console, progress: Progress | None) -> Metrics:
        """Write and say what the run is made of, or where it goes on, and open its metrics."""
        config, output = self.config, self.config.output
        folder = Path(output.folder)
        if progress is None:
            report.write_start(folder, config, self.model.config, self.rows, self.world)
        else:
            report.write_resumption(folder, config, progress.step, self.world)
        metrics = Metrics(
            folder,
            tensorboard=output.tensorboard,
            after_step=progress and progress.step,
            only=COVERED if self.is_guarded else None,
        )
        privacy, others = self.regime.describe(), self.transform.describe()
        report.say_start(
            console, config, self.num_parameters, self.rows, self.world, privacy, others
        )
        if progress is not None:
            report.say_resumption(console, config, progress.step, self.world)
        return metrics

    def train(
        self, view: ProgressView, metrics: Metrics | None, progress: Progress | None = None
    ) -> TrainResult:
        """Train for all steps, or all that are left; `metrics` is given on the main rank."""
        mechanism, output = self.config.mechanism, self.config.output
        self.view, self.metrics = view, metrics
        self.started = time.perf_counter() - (progress.seconds if progress else 0.0)
        if progress is None:
            on_eval, on_train = self.evaluate(self.rows.eval), self.evaluate(self.rows.train)
            progress = Progress(
                step=0,
                num_targets=0,
                training_seconds=0.0,
                seconds=0.0,
                train_before=on_train,
                eval_before=on_eval,
                eval_after=on_eval,
            )
            self.record(0, **{"eval/loss": on_eval, "eval/train_loss": on_train})
            view.show_eval(0, on_eval)

        # Closed here rather than whenever it is collected: its end forgets the current plan, which
        # may then be that of another run in this process.
        with closing(self.regime.passes(range(progress.step, mechanism.steps))) as passes:
            progress, budget_sentence = self.take_steps(passes, progress)
        progress = self.evaluated(progress)
        train_after = self.evaluate(self.rows.train)
        self.record(progress.step, **{"eval/train_loss": train_after})
        return TrainResult(
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
            unigram_entropy=self.rows.unigram_entropy,
            tokens_per_second=progress.num_targets / max(progress.training_seconds, 1e-9),
            seconds=time.perf_counter() - self.started,
            privacy=self.regime.result(budget_sentence),
        )

    def record(self, step: int, **values: float) -> None:
        """Write some numbers of one step to the run's metrics; the main rank has them."""
        if self.metrics is not None:
            self.metrics.write(step, **values)

    def take_steps(
        self, passes: Iterator[Batch], progress: Progress
    ) -> tuple[Progress, str | None]:
        """Take the steps that are left, with evaluations and checkpoints in between.

        Returns:
            How far that led, and the reason if a privacy budget did not allow all of them.
        """
        mechanism, output = self.config.mechanism, self.config.output
        first = progress.step + 1
        for step in range(first, mechanism.steps + 1):
            compiles = mechanism.compile and step == first
            began = time.perf_counter()
            if compiles:
                self.view.note("compiling: the first step takes longer than the others")
            try:
                progress = self.take_step(step, passes, progress)
            except BudgetSpent as refusal:  # raised before anything of the step is applied
                return progress, (
                    f"step {step} would have spent ε = {refusal.would_spend:.4f}; the steps before "
                    f"it spent {refusal.spent:.4f}"
                )
            if compiles:
                seconds = time.perf_counter() - began
                self.view.note(f"the first step, with compiling, took {seconds:.0f} s")
            if step == mechanism.steps:  # it is evaluated by the caller, and ends in the model
                break
            if output.eval_every and step % output.eval_every == 0:
                progress = self.evaluated(progress)
            if output.checkpoint_every and step % output.checkpoint_every == 0:
                now = replace(progress, seconds=time.perf_counter() - self.started)
                if self.is_guarded:
                    now = replace(now, train_before=None)
                save_newest(
                    output,
                    self.world,
                    self.model,
                    self.optimizer,
                    self.scheduler,
                    now,
                    self.regime.state_dict(),
                    self.transform.state_dict(),
                )
        return progress, None

    def take_step(self, step: int, passes: Iterator[Batch], progress: Progress) -> Progress:
        """Take one step, and record and show what came of it."""
        started = time.perf_counter()
        result = train_step(
            self.parallel,
            self.optimizer,
            self.scheduler,
            self.passes_of_step(passes),
            step=step,
            key=self.key,
            objective=self.regime.objective,
            transform=self.transform,
            cast=self.cast,
            clip_norm=self.config.mechanism.clip_norm,
        )
        seconds = time.perf_counter() - started
        progress = replace(
            progress,
            step=step,
            num_targets=progress.num_targets + result.num_targets,
            training_seconds=progress.training_seconds + seconds,
        )
        facts = self.regime.facts(step)
        self.record(
            step,
            **{
                "train/loss": result.loss,
                "train/grad_norm": result.grad_norm,
                "train/lr": result.lr,
                "train/tokens_per_second": result.num_targets / seconds,
                **(facts.metrics() if facts else {}),
            },
        )
        self.view.show_step(step, result, progress.num_targets / progress.training_seconds, facts)
        return progress

    def evaluated(self, progress: Progress) -> Progress:
        """Measure, record and show the loss on the held-out rows."""
        loss = self.evaluate(self.rows.eval)
        self.record(progress.step, **{"eval/loss": loss})
        self.view.show_eval(progress.step, loss)
        return replace(progress, eval_after=loss)

    def passes_of_step(self, passes: Iterator[Batch]) -> Iterator[Batch]:
        """This rank's passes of the next logical batch, up to the one that closes it."""
        for batch in passes:
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
        places = eval_passes(count, per_pass, self.world)
        batches = (
            to_device(
                {**data.rows(chosen[each]), "sample_ids": torch.from_numpy(each)}, self.world.device
            )
            for each in places
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
) -> Iterator[RunRows]:
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
        yield RunRows(train=train, eval=held_out, unigram_entropy=unigram_entropy(known))
        world.agree(lambda: None)  # nobody removes the folder under another rank's feet


def check_before_launch(config: TrainConfig) -> None:
    """Find what is wrong with the input cheaply, before any process is started.

    Raises:
        BadInput: If the folder, the data, the tokenizer or the model cannot be what was asked for.
    """
    config.check_parts()
    mechanism = config.mechanism
    if not config.output.resume:
        check_free(Path(config.output.folder), overwrite=config.output.overwrite)
    model_config, _ = plan_model(mechanism)
    fitting_tokenizer(mechanism, model_config)
    open_corpus(mechanism.data, text_field=mechanism.text_field, seed=mechanism.seed)
