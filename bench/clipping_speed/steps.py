"""Training steps to be timed: not private, private, and both as CUDA graphs.

All train one model on one data set: random tokens that lie on the device, in shuffled batches of
one size. The head is the chunked one, with and without privacy.
"""

import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils.data import DataLoader, TensorDataset

from unison.clip import Plan
from unison.errors import UnsupportedOperation
from unison.models import LanguageModel, ModelConfig, build
from unison.privacy import PrivacyEngine

MAX_GRAD_NORM = 1.0
LEARNING_RATE = 1e-5
STEPS_PER_EPOCH = 32

Step = Callable[[], None]
Batch = Sequence[Tensor]  # ids and labels, [batch, tokens] each


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What every contender trains.

    Attributes:
        config: The model's shape.
        batch_size: Rows per step.
        tokens: Tokens per row.
        dtype: Of parameters and activations.
        device: Where all of it lies.
    """

    config: ModelConfig
    batch_size: int
    tokens: int
    dtype: torch.dtype
    device: torch.device

    def model(self) -> LanguageModel:
        """Return a new model."""
        return build(self.config, device=self.device).to(self.dtype)

    def loader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Return shuffled batches of random ids and labels, made on the device."""
        generator = torch.Generator(self.device).manual_seed(0)
        ids, labels = (
            torch.randint(
                self.config.vocab_size,
                (self.batch_size * STEPS_PER_EPOCH, self.tokens),
                generator=generator,
                device=self.device,
            )
            for _ in range(2)
        )
        rows = TensorDataset(ids, labels)
        return DataLoader(rows, batch_size=self.batch_size, shuffle=True, drop_last=True)

    def optimizer(self, model: nn.Module) -> AdamW:
        """Return AdamW, on CUDA fused into one kernel that a graph may hold."""
        is_cuda = self.device.type == "cuda"
        return AdamW(model.parameters(), lr=LEARNING_RATE, fused=is_cuda, capturable=is_cuda)


class Contender(Protocol):
    """A training that takes steps."""

    def step(self) -> None:
        """Take a whole step on the next batch: forward, backward, optimizer, and privacy."""
        ...

    def record(self) -> Step:
        """Return the step with its passes replayed from a CUDA graph.

        Raises:
            UnsupportedOperation: It cannot be recorded.
        """
        ...

    def plan(self) -> Plan | None:
        """Return how clipping is computed, once a step was taken; None if there is no plan."""
        ...

    def close(self) -> None:
        """Undo what was attached."""
        ...


class NotPrivate:
    """The baseline: ordinary training."""

    def __init__(self, workload: Workload) -> None:
        self._model = workload.model()
        self._optimizer = workload.optimizer(self._model)
        self._batches = endless(workload.loader())

    def step(self) -> None:
        """Take a step on the next batch."""
        self._train(next(self._batches))

    def record(self) -> Step:
        """Return the step, all of it in one CUDA graph but for the copy of the batch."""
        places = [x.clone() for x in next(self._batches)]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._train(places)
        torch.cuda.current_stream().wait_stream(side)
        self._optimizer.zero_grad(set_to_none=True)  # the graph is to hold its own gradients
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._train(places)

        def replay() -> None:
            for place, x in zip(places, next(self._batches), strict=True):
                place.copy_(x, non_blocking=True)
            graph.replay()

        return replay

    def plan(self) -> None:
        """There is none."""

    def close(self) -> None:
        """Nothing was attached."""

    def _train(self, batch: Batch) -> None:
        ids, labels = batch
        self._optimizer.zero_grad(set_to_none=True)
        self._model(ids, labels=labels).mean().backward()
        self._optimizer.step()


class Private:
    """Training with `PrivacyEngine`, noise from a secret key.

    Args:
        workload: What is trained.
        clipping: `"auto"` or one of `unison.clip.MODES`.
        noise_multiplier: σ.
        memory_budget: Bytes that clipping may hold, or None for no bound.
    """

    def __init__(
        self,
        workload: Workload,
        *,
        clipping: str,
        noise_multiplier: float,
        memory_budget: int | None = None,
    ) -> None:
        self._engine = PrivacyEngine(accountant="rdp")
        model = workload.model()
        with warnings.catch_warnings(action="ignore"):  # σ = 0 is no privacy: it is measured
            self._model, self._optimizer, loader = self._engine.make_private(
                module=model,
                optimizer=workload.optimizer(model),
                data_loader=workload.loader(),
                noise_multiplier=noise_multiplier,
                max_grad_norm=MAX_GRAD_NORM,
                clipping=clipping,
                memory_budget=memory_budget,
                poisson_sampling=False,
            )
        self._batches = endless(loader)

    def step(self) -> None:
        """Take a step on the next batch."""
        ids, labels = next(self._batches)
        self._optimizer.zero_grad(set_to_none=True)
        self._model(ids, labels=labels).mean().backward()
        self._optimizer.step()

    def record(self) -> Step:
        """Return the step with `PrivacyEngine.capture_graph`, which holds the optimizer too."""
        plan = self.plan()
        if (plan.num_backwards, plan.num_forwards) != (1, 1):
            raise UnsupportedOperation("two passes are not recorded")
        example = [x.clone() for x in next(self._batches)]  # its step is taken below
        self._optimizer.zero_grad(set_to_none=True)
        run = self._engine.capture_graph(
            lambda ids, labels: self._model(ids, labels=labels), *example, with_optimizer=True
        )
        batches = itertools.chain([example], self._batches)

        def replay() -> None:
            run(*next(batches))

        return replay

    def plan(self) -> Plan:
        """Return how clipping is computed, once a step was taken."""
        return self._engine.plan()

    def close(self) -> None:
        """Take the engine off its module."""
        self._engine.detach()


def endless(loader: DataLoader[tuple[Tensor, ...]] | object) -> Iterator[Batch]:
    """Go through a loader again and again."""
    while True:
        yield from loader  # type: ignore[attr-defined]
