"""One process and many ranks, side by side: the same training, and whether it gave the same bits.

One process builds the model as usual. The ranks build it without memory, shard it and fill only
their own parts. Both train on the same global batches with the same optimizer; everything that is
compared is taken from whole parameters, gathered unit by unit.

    python -m bench parity
"""

import json
import math
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from bench.memory import MODEL_STATE, Bytes, Category, MemoryTracker
from bench.private_parity import private_parity
from bench.provenance import check_writable, write_result
from bench.runner import joined_ranks
from unison import check
from unison.cli.train import complete_preset
from unison.config import REDUCERS
from unison.errors import BadInput, Diverged
from unison.models import ModelConfig, build, count_parameters, per_sample_loss, preset
from unison.shard import (
    auto_shard,
    batch_mean,
    deal,
    digest,
    fingerprint,
    full_parameters,
    materialize,
    meta_init,
)
from unison.train import run_on_local_ranks


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """What both sides train; it says nothing of ranks.

    Attributes:
        preset: The model.
        num_layers: Replaces the preset's number of blocks.
        steps: Optimizer steps.
        batch_size: Rows per step, over all ranks.
        tokens: Tokens per row that the model reads.
        reducer: `"ordered"`, whose bits must not depend on the ranks, or `"fast"`.
        granule: Rows per granule of the ordered reducer.
        seed: Of the initial values and of the tokens.
        lr: Learning rate of AdamW.
    """

    preset: str
    num_layers: int | None = None
    steps: int = 3
    batch_size: int = 8
    tokens: int = 32
    reducer: str = "ordered"
    granule: int = 1
    seed: int = 0
    lr: float = 1e-3

    def __post_init__(self) -> None:
        check.one_of(REDUCERS, reducer=self.reducer)
        check.positive(
            steps=self.steps,
            batch_size=self.batch_size,
            tokens=self.tokens,
            granule=self.granule,
            lr=self.lr,
        )
        check.not_negative(seed=self.seed)
        longest = self.model.context_length
        if self.tokens > longest:
            raise BadInput(
                f"tokens must be at most {longest}, the context of {self.preset!r}, found "
                f"{self.tokens}"
            )

    @property
    def model(self) -> ModelConfig:
        """The model's shape."""
        overrides = {} if self.num_layers is None else {"num_layers": self.num_layers}
        return preset(self.preset, **overrides)

    def batches(self) -> Iterator[Tensor]:  # [batch_size, tokens + 1]
        """The global batches, random tokens: the same ones wherever they are drawn."""
        generator = torch.Generator().manual_seed(self.seed)
        shape = (self.batch_size, self.tokens + 1)
        for _ in range(self.steps):
            yield torch.randint(0, self.model.vocab_size, shape, generator=generator)


@dataclass(frozen=True, kw_only=True)
class Side:
    """One of the two sides of a comparison, as its ranks get it.

    Attributes:
        experiment: What to train.
        is_deferred: Whether the model is built without memory and filled after sharding.
        folder: Where the whole parameters of the first side lie. That side writes them; the other
            measures how far its own are from them.
    """

    experiment: Experiment
    is_deferred: bool
    folder: Path


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What one side ended with; the same on every rank, but for memory and time.

    Attributes:
        num_ranks: How many ranks trained.
        losses: Mean loss over the global batch, one per step.
        digest_before: Hash of all parameters before the first step.
        digest_after: And after the last.
        parameter_sum: Sum of all parameters, in float64 and by name.
        largest_difference: The farthest that an element is from the other side's; None on the side
            that is compared with.
        model_state: Bytes by category at the moment when parameters, gradients, optimizer state
            and gathered units took most together, on the rank that took most.
        memory: The same for all that the tracker sees.
        seconds: From building to the last step.
        fingerprint: What the bits depend on besides the experiment.
    """

    num_ranks: int
    losses: list[float]
    digest_before: str
    digest_after: str
    parameter_sum: float
    largest_difference: float | None
    model_state: Bytes
    memory: Bytes
    seconds: float
    fingerprint: dict[str, Any]

    @property
    def model_state_bytes(self) -> int:
        """Peak of parameters, gradients, optimizer state and gathered units together."""
        return sum(self.model_state[category] for category in MODEL_STATE)


@dataclass(frozen=True, kw_only=True)
class Parity:
    """Two sides of one experiment.

    Attributes:
        experiment: What was trained.
        num_parameters: Elements of the model.
        alone: One process, the model built as usual.
        together: Many ranks, the model built without memory.
    """

    experiment: Experiment
    num_parameters: int
    alone: Trained
    together: Trained

    @property
    def loss_differences(self) -> list[float]:
        """How far the losses of the steps are apart."""
        pairs = zip(self.alone.losses, self.together.losses, strict=True)
        return [abs(a - b) for a, b in pairs]

    @property
    def relative_differences(self) -> list[float]:
        """The same as parts of the loss of one process."""
        pairs = zip(self.loss_differences, self.alone.losses, strict=True)
        return [difference / abs(loss) if difference else 0.0 for difference, loss in pairs]

    @property
    def saving(self) -> float:
        """How many times less model state a rank holds at its peak than one process."""
        return self.alone.model_state_bytes / self.together.model_state_bytes

    def first_difference(self) -> str | None:
        """Where the two sides first part, in words; None if they agree in every bit."""
        alone, together = self.alone, self.together
        if alone.fingerprint != together.fingerprint:
            names = [
                name
                for name, value in alone.fingerprint.items()
                if together.fingerprint.get(name) != value
            ]
            return f"they ran under different conditions: {', '.join(names)}"
        if alone.digest_before != together.digest_before:
            return "the initial parameters differ, before any step"
        pairs = zip(alone.losses, together.losses, strict=True)
        for step, (a, b) in enumerate(pairs, 1):
            if a != b:
                return f"the losses differ from step {step} on ({a!r} and {b!r})"
        if alone.digest_after != together.digest_after:
            return (
                "all losses are equal, but the parameters after the last step differ by up to "
                f"{together.largest_difference:.3g}"
            )
        return None


def compare(experiment: Experiment, *, num_ranks: int) -> Parity:
    """Train an experiment on one process and on many ranks.

    Args:
        experiment: What to train.
        num_ranks: How many ranks the second side has.

    Raises:
        BadInput: If the experiment cannot be run as asked.
    """
    check.positive(num_ranks=num_ranks)
    with tempfile.TemporaryDirectory(prefix="unison-parity-") as folder:
        sides = [
            run_on_local_ranks(
                train_side,
                Side(experiment=experiment, is_deferred=is_deferred, folder=Path(folder)),
                num_ranks=size,
            )
            for is_deferred, size in ((False, 1), (True, num_ranks))
        ]
    return Parity(
        experiment=experiment,
        num_parameters=count_parameters(build(experiment.model, device="meta")),
        alone=sides[0],
        together=sides[1],
    )


def train_side(side: Side) -> Trained:
    """Train one side on this rank; every rank that the launcher started calls it."""
    torch.set_num_threads(1)  # threads change bits, and ranks would divide them
    experiment = side.experiment
    with joined_ranks():
        started = time.perf_counter()
        model = _sharded(side)
        digest_before = digest(model)
        losses, tracker = train(model, experiment)
        seconds = time.perf_counter() - started
        parameter_sum, largest_difference = _inspect_parameters(model, side)
        return Trained(
            num_ranks=dist.get_world_size(),
            losses=losses,
            digest_before=digest_before,
            digest_after=digest(model),
            parameter_sum=parameter_sum,
            largest_difference=largest_difference,
            model_state=_largest_of_ranks(tracker.peak(MODEL_STATE), MODEL_STATE),
            memory=_largest_of_ranks(tracker.peak(), tuple(Category)),
            seconds=seconds,
            fingerprint=fingerprint(granule=experiment.granule),
        )


def _sharded(side: Side) -> nn.Module:
    """The model with its initial values, each rank holding its part."""
    experiment = side.experiment
    options = {"reducer": experiment.reducer, "gradient_divisor": 1}
    if not side.is_deferred:
        return auto_shard(build(experiment.model, seed=experiment.seed), **options)
    with meta_init():
        model = build(experiment.model, device="meta")
    return materialize(auto_shard(model, **options), seed=experiment.seed)


def train(model: nn.Module, experiment: Experiment) -> tuple[list[float], MemoryTracker]:
    """Train a sharded model; returns the loss of each step, and what memory it took."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=experiment.lr)
    granule = experiment.granule if experiment.reducer == "ordered" else None
    losses = []
    with MemoryTracker() as tracker:
        for rows in deal(experiment.batches(), granule=granule):
            with tracker.births_are(Category.ACTIVATIONS):
                loss = batch_mean(per_sample_loss(model(rows[:, :-1]), rows[:, 1:]))
            loss.backward()
            tracker.label_training(model, optimizer)
            optimizer.step()
            tracker.label_training(model, optimizer)
            optimizer.zero_grad()
            losses.append(loss.item())
            if not math.isfinite(losses[-1]):
                raise Diverged(f"the loss of step {len(losses)} is {losses[-1]}; lower lr")
    return losses, tracker


def _inspect_parameters(model: nn.Module, side: Side) -> tuple[float, float | None]:
    """Sum all parameters, and write them down or measure how far they are from those written."""
    sums: dict[str, float] = {}
    largest = 0.0
    for name, value in full_parameters(model):  # on every rank, since it gathers
        if dist.get_rank() != 0:
            continue
        sums[name] = value.detach().sum(dtype=torch.float64).item()
        file = side.folder / f"{name}.npy"
        if side.is_deferred:
            written = torch.from_numpy(np.load(file))
            largest = max(largest, (value.detach() - written).abs_().max().item())
        else:
            np.save(file, value.detach().numpy())
    # In order of names: a sharded model and a plain one list their parameters in other orders.
    total = sum(sums[name] for name in sorted(sums))
    return total, largest if side.is_deferred else None


def _largest_of_ranks(peak: Bytes, of: tuple[Category, ...]) -> Bytes:
    """The peak of the rank that had the highest, in the categories that count."""
    peaks: list[Bytes] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(peaks, peak)
    return max(peaks, key=lambda each: sum(each[category] for category in of))


# ---- the command ---------------------------------------------------------------------------------

Reducer = StrEnum("Reducer", list(REDUCERS))
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class _Size:
    """How much of a preset is trained unless the options say otherwise."""

    num_layers: int | None = None
    steps: int = 3
    tokens: int = 32


# A model that is trained as it is, and the width of a large one with as many blocks as a small
# machine can hold eight times over.
_SIZES = {"small": _Size(steps=20, tokens=64), "gpt2-xl": _Size(num_layers=2, steps=2)}


def parity_command(
    preset: Annotated[
        list[str] | None,
        typer.Option(
            "--preset",
            help="Which model (see `unison presets`); may be given several times. By default small "
            "and gpt2-xl, the latter with 2 blocks.",
            autocompletion=complete_preset,
        ),
    ] = None,
    num_layers: Annotated[
        int | None, typer.Option("--num-layers", help="Replace the number of blocks.")
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option("--steps", help="Optimizer steps; 20 for small, 2 for gpt2-xl, 3 else."),
    ] = None,
    batch_size: Annotated[
        int, typer.Option("--batch-size", help="Rows per step, over all ranks.")
    ] = 8,
    tokens: Annotated[
        int | None, typer.Option("--tokens", help="Tokens per row; 64 for small, 32 else.")
    ] = None,
    reducer: Annotated[
        Reducer,
        typer.Option("--reducer", help="ordered must give the same bits; fast need not."),
    ] = Reducer("ordered"),
    granule: Annotated[
        int, typer.Option("--granule", help="Rows per granule of the ordered reducer.")
    ] = 1,
    seed: Annotated[int, typer.Option("--seed", help="Seed of initial values and tokens.")] = 0,
    nproc: Annotated[
        int, typer.Option("--nproc", min=1, help="Ranks to compare with one process.")
    ] = 8,
    is_private: Annotated[
        bool,
        typer.Option(
            "--private",
            help="Train privately: Poisson sampling, clipping and noise, on 1, 2, 3, 4, ... ranks "
            "up to --nproc, 24 records of 32 tokens, with both reducers.",
        ),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE",
            help="Write the figures to a JSON file, with the "
            "command, the commit, the hardware and the versions.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the figures as one JSON object instead of tables.")
    ] = False,
) -> None:
    """Train on one process and on many ranks, and compare every loss and every parameter.

    One process builds the model as usual. The ranks build it without memory, shard it and fill
    their own parts. Then both train on the same batches, on the CPU, with one thread per rank.
    With the ordered reducer the exit code is 1 if any bit differs.

    \b
    python -m bench parity                               both tables, a few minutes
    python -m bench parity --preset small --nproc 3      any number of ranks
    python -m bench parity --preset gpt2 --reducer fast --out fast.json
    python -m bench parity --private                     a table per reducer, a few minutes
    """
    if is_private:
        if num_layers is not None or (preset and len(preset) > 1):
            raise typer.BadParameter("--private takes one --preset and no --num-layers")
        given = {
            "preset": preset[0] if preset else None,
            "steps": steps,
            "batch_size": batch_size,
            "tokens": tokens,
            "seed": seed,
        }
        private_parity(
            {name: value for name, value in given.items() if value is not None},
            nproc=nproc,
            out=out,
            as_json=as_json,
        )
        return

    if out is not None:
        check_writable(out)
    experiments = [
        _experiment(
            name,
            num_layers=num_layers,
            steps=steps,
            tokens=tokens,
            batch_size=batch_size,
            reducer=reducer.value,
            granule=granule,
            seed=seed,
        )
        for name in preset or _SIZES
    ]
    screen, errors = Console(), Console(stderr=True)
    results = []
    for experiment in experiments:
        with errors.status(f"training {experiment.preset} on one process, then on {nproc} ranks"):
            results.append(compare(experiment, num_ranks=nproc))
        if not as_json:
            show(screen, results[-1])
    figures = {result.experiment.preset: figures_of(result) for result in results}
    if as_json:
        typer.echo(json.dumps(figures))
    if out is not None:
        write_result(out, "parity", figures)
    broken = [result for result in results if not _keeps_its_promise(result)]
    for result in broken:
        typer.echo(f"unison: {_verdict(result)}", err=True)
    if broken:
        raise typer.Exit(1)


def _experiment(name: str, **options: Any) -> Experiment:
    """The experiment with a preset; an option that was not given takes the preset's size."""
    sizes = asdict(_SIZES.get(name, _Size()))
    given = {option: value for option, value in options.items() if value is not None}
    return Experiment(preset=name, **(sizes | given))


def _keeps_its_promise(result: Parity) -> bool:
    return result.experiment.reducer != "ordered" or result.first_difference() is None


def _verdict(result: Parity) -> str:
    """What the comparison came to, as one sentence."""
    name, num_ranks = result.experiment.preset, result.together.num_ranks
    apart = result.first_difference()
    if apart is None:
        return f"{name}: one process and {num_ranks} ranks agree in every bit"
    if result.experiment.reducer == "ordered":
        return f"{name}: one process and {num_ranks} ranks must agree in every bit, but {apart}"
    return (
        f"{name}: the largest relative difference of a loss is "
        f"{max(result.relative_differences):.1e}; the fast reducer promises no bits"
    )


def figures_of(result: Parity) -> dict[str, Any]:
    """A comparison as values that JSON can hold."""
    return asdict(result) | {
        "loss_differences": result.loss_differences,
        "relative_differences": result.relative_differences,
        "has_same_bits": result.first_difference() is None,
        "model_state_bytes": {
            "alone": result.alone.model_state_bytes,
            "together": result.together.model_state_bytes,
        },
        "saving": result.saving,
        "verdict": _verdict(result),
    }


# ---- tables --------------------------------------------------------------------------------------


def show(screen: Console, result: Parity) -> None:
    """Print a comparison as tables."""
    experiment, model = result.experiment, result.experiment.model
    granule = f", granule {experiment.granule}" if experiment.reducer == "ordered" else ""
    screen.print()
    screen.print(
        f"[bold]{experiment.preset}[/]  {result.num_parameters:,} parameters, "
        f"{model.num_layers} blocks of width {model.d_model}, vocabulary {model.vocab_size:,}"
    )
    screen.print(
        f"{experiment.batch_size} rows of {experiment.tokens} tokens per step, AdamW, "
        f"{experiment.reducer} reducer{granule}, seed {experiment.seed}",
        style="dim",
    )
    for table in (_loss_table(result), _end_table(result), _memory_table(result)):
        screen.print()
        screen.print(table)
    screen.print()
    is_good = _keeps_its_promise(result)
    screen.print(_verdict(result), style="green" if is_good else "bold red", highlight=False)


def _table(*titles: str) -> Table:
    """A table without lines: the first column to the left, the others to the right."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for number, title in enumerate(titles):
        table.add_column(title, justify="left" if number == 0 else "right", no_wrap=True)
    return table


def _loss_table(result: Parity) -> Table:
    table = _table("step", *_names(result), "difference", "relative")
    columns = (
        result.alone.losses,
        result.together.losses,
        result.loss_differences,
        result.relative_differences,
    )
    for step, (a, b, difference, relative) in enumerate(zip(*columns, strict=True), 1):
        table.add_row(
            str(step), f"{a:.10f}", f"{b:.10f}", _difference(difference), _difference(relative)
        )
    return table


def _end_table(result: Parity) -> Table:
    alone, together = result.alone, result.together
    largest = together.largest_difference
    assert largest is not None  # the ranks compare with one process
    table = _table("parameters", *_names(result), "difference")
    for title, a, b in (
        ("digest before training", alone.digest_before, together.digest_before),
        ("digest after training", alone.digest_after, together.digest_after),
    ):
        table.add_row(title, a[:16], b[:16], "none" if a == b else "differs")
    a, b = alone.parameter_sum, together.parameter_sum
    table.add_row("sum", f"{a:.9f}", f"{b:.9f}", _difference(abs(a - b)))
    table.add_row("largest difference", "", "", _difference(largest))
    return table


def _memory_table(result: Parity) -> Table:
    alone, together = result.alone, result.together
    table = _table("memory per rank at its peak, MiB", *_names(result), "saving")
    for category in MODEL_STATE:
        a, b = alone.model_state[category], together.model_state[category]
        if a or b:
            table.add_row(f"  {category}", _mib(a), _mib(b), "")
    a, b = alone.model_state_bytes, together.model_state_bytes
    table.add_row("together", _mib(a), _mib(b), f"{result.saving:.2f}x", style="bold")
    a, b = sum(alone.memory.values()), sum(together.memory.values())
    table.add_row("with activations and buffers", _mib(a), _mib(b), f"{a / b:.2f}x")
    table.add_row("seconds", *(f"{side.seconds:.1f}" for side in (alone, together)), "")
    return table


def _names(result: Parity) -> tuple[str, str]:
    def name(side: Trained) -> str:
        return "1 rank" if side.num_ranks == 1 else f"{side.num_ranks} ranks"

    return "one process", name(result.together)


def _difference(value: float) -> str:
    """Zero as 0, and nothing else as 0: rounding would hide what the table is there to show."""
    return "0" if value == 0 else f"{value:.1e}"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:,.2f}"
