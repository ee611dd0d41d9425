"""One process and many ranks, side by side: the same training, and whether it gave the same bits.

One process builds the model as usual. The ranks build it without memory, shard it and fill only
their own parts. Both train on the same global batches with the same optimizer; everything that is
compared is taken from whole parameters, gathered unit by unit.
"""

import math
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from unison import check
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
from unison.verify.memory import MODEL_STATE, Bytes, Category, MemoryTracker


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


class Launch(Protocol):
    """Starts ranks: `unison.train.run_on_local_ranks`."""

    def __call__(self, work: Any, config: Any, *, num_ranks: int) -> Any:
        """Run `work(config)` on new processes and return rank 0's result."""
        ...


def compare(experiment: Experiment, *, num_ranks: int, launch: Launch) -> Parity:
    """Train an experiment on one process and on many ranks.

    Args:
        experiment: What to train.
        num_ranks: How many ranks the second side has.
        launch: What starts them.

    Raises:
        BadInput: If the experiment cannot be run as asked.
    """
    check.positive(num_ranks=num_ranks)
    with tempfile.TemporaryDirectory(prefix="unison-parity-") as folder:
        sides = [
            launch(
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


@contextmanager
def joined_ranks() -> Iterator[None]:
    """Join the ranks that the launcher started, on the CPU.

    A rank that breaks keeps its connections until its process ends: were they closed here, the
    others would fail first, with "connection reset", and hide the cause.
    """
    dist.init_process_group("gloo")
    yield
    dist.destroy_process_group()


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
