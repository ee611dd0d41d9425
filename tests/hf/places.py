"""A private run of all rows in every step, in each of the places where users train."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from trl import SFTConfig

import unison
from tests.harness import oracle
from tests.hf.common import (
    CLIP_NORM,
    DELTA,
    MAX_LENGTH,
    Gradients,
    StopAt,
    accelerator,
    arguments,
    clipped_mean,
    llama,
    rows,
    tokenizer,
)
from tests.hf.test_lightning import Net, fit
from tests.privacy.common import data, losses, make_model
from unison.hf import PrivateSFTTrainer, PrivateTrainer
from unison.privacy import attach


@dataclass(frozen=True)
class Run:
    """What a run did.

    Attributes:
        found: What the optimizer got at its first step, times the rows of a step [elements].
        expected: The same in float64, by single rows; a function, since it takes a while.
        num_steps: Steps of the optimizer, as whoever runs it counts them.
        logged: The steps that were logged.
        epsilon: ε, as logged last.
        noise_multiplier: σ.
        parameters: After the run.
    """

    found: Tensor
    expected: Callable[[], Tensor]
    num_steps: int
    logged: list[int]
    epsilon: float
    noise_multiplier: float
    parameters: dict[str, Tensor]


@dataclass(frozen=True)
class Order:
    """What a run is asked for.

    Attributes:
        folder: Where the ledger and checkpoints lie.
        privacy: What it applies.
        without: A row that is left out; of several processes, whose batches must be even, one that
            another stands in for.
        steps: Steps of the whole run.
        stop_at: The step after which it ends, with a checkpoint.
        resumes: Whether it goes on from there.
        rank: Of this process.
        size: Number of processes.
    """

    folder: Path
    privacy: unison.Privacy
    without: int | None = None
    steps: int = 2
    stop_at: int | None = None
    resumes: bool = False
    rank: int = 0
    size: int = 1

    def left(self, records: Any) -> list[Any]:
        """The rows that take part."""
        found = list(records)
        if self.without is not None:
            found[self.without : self.without + 1] = found[:1] if self.size > 1 else []
        return found


def flat(values: dict[str, Tensor]) -> Tensor:
    return torch.cat([each.double().flatten() for each in values.values()])


def with_trainer(order: Order, *, shard: Callable[[Any], Any] = lambda model: model) -> Run:
    records = order.left(rows())
    records[-1] = records[-1] | {"labels": records[-1]["input_ids"]}  # more labels than others

    def make(seen: list[Any]) -> Any:
        given = {"per_device_train_batch_size": len(records) // order.size}
        args = arguments(order.folder, **given, **_of(order))
        return PrivateTrainer(
            model=shard(llama(num_hidden_layers=2)),
            args=args,
            train_dataset=records,
            privacy=order.privacy,
            max_length=MAX_LENGTH,
            callbacks=seen,
        )

    return _of_trainer(make, order, lambda _: records)


def with_sft(order: Order, *, form: str = "text") -> Run:
    texts = order.left(["abc" * (1 + number % 3) + "xyz"[: number % 4] for number in range(12)])
    lines = [{"text": each} for each in texts]
    if form == "completion":
        lines = [{"prompt": each[:2], "completion": each[2:]} for each in texts]

    def make(seen: list[Any]) -> Any:
        usual = arguments(order.folder, per_device_train_batch_size=len(texts), **_of(order))
        names = ("per_device_train_batch_size", "report_to", "use_cpu", "disable_tqdm")
        names += ("learning_rate", "max_grad_norm", "dataloader_pin_memory")
        given = {name: getattr(usual, name) for name in names}
        return PrivateSFTTrainer(
            model=llama(num_hidden_layers=2),
            args=SFTConfig(
                str(order.folder),
                **given,
                **_of(order),
                max_length=16,
                bf16=False,
                gradient_checkpointing=False,
            ),
            train_dataset=Dataset.from_list(lines),
            processing_class=tokenizer(),
            privacy=order.privacy,
            callbacks=seen,
        )

    def records(trainer: Any) -> list[Any]:
        names = "input_ids", "labels"
        return [{name: each[name] for name in names} for each in trainer.train_dataset]

    return _of_trainer(make, order, records)


def _of(order: Order) -> dict[str, Any]:
    often = {"logging_strategy": "steps", "logging_steps": 1}
    often |= {"save_strategy": "steps", "save_steps": 100}
    return {"max_steps": order.steps, "gradient_accumulation_steps": 1, **often}


def _of_trainer(make: Callable, order: Order, records: Callable) -> Run:
    with warnings.catch_warnings(), accelerator(order.rank, order.size):
        warnings.simplefilter("ignore")
        seen = Gradients()
        stops = [] if order.stop_at is None else [StopAt(order.stop_at)]
        trainer = make([seen, *stops])
        done = trainer.train(resume_from_checkpoint=order.resumes or None)
        state = unison.full_state_dict(trainer.model)
    rows = records(trainer)
    logs = [each for each in trainer.state.log_history if "grad_norm" in each]
    name = "epsilon" if order.privacy.secure_noise else "epsilon_if_secret"
    return Run(
        found=flat(seen.found) * len(rows),
        expected=lambda: flat(clipped_mean(llama(num_hidden_layers=2), rows, 1)),
        num_steps=done.global_step,
        logged=[each["step"] for each in logs],
        epsilon=logs[-1][name],
        noise_multiplier=logs[-1]["noise_multiplier"],
        parameters=state,
    )


def with_accelerate(order: Order) -> Run:
    records = order.left(zip(*data(), strict=True))
    x, y = (torch.stack(each) for each in zip(*records, strict=True))
    module, found, logged = make_model(), [], []
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    with accelerator(order.rank, order.size) as accelerate, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, optimizer = accelerate.prepare(module, optimizer)
        engine, loader = attach(
            order.privacy,
            module=model,
            optimizer=optimizer,
            data_loader=DataLoader(TensorDataset(x, y), batch_size=len(x)),
            steps=order.steps,
            seed=3,
            ledger=order.folder / "ledger.jsonl",
            max_physical_batch_size=50,
        )
        accelerate.register_for_checkpointing(engine)
        if order.resumes:
            accelerate.load_state(str(order.folder / "state"))
        while loader.next_step < (order.stop_at or order.steps):
            for inputs, labels in loader:
                optimizer.zero_grad()
                accelerate.backward(cross_entropy(model(inputs), labels))
                if not loader.is_open:
                    logged.append(loader.next_step)
                    found.append(flat({n: p.grad for n, p in module.named_parameters()}))
                optimizer.step()
        if order.stop_at is not None:
            accelerate.save_state(str(order.folder / "state"))
        epsilon = engine.ledger.epsilon_if_secret(DELTA)
        sigma, num_steps = engine.mechanism.release(0).noise_multiplier, loader.next_step
        engine.detach()
    return Run(
        found=found[0] * len(x),
        expected=lambda: flat(oracle.clipped_sum(make_model(), losses, (x, y), CLIP_NORM)),
        num_steps=num_steps,
        logged=logged,
        epsilon=epsilon,
        noise_multiplier=float(sigma),
        parameters={name: each.detach().clone() for name, each in module.named_parameters()},
    )


class Ranks(LightningEnvironment):
    """Processes that are there already."""

    creates_processes_externally = True  # type: ignore[assignment]


class Stops(Net):
    """Ends a run after a step, with a checkpoint."""

    order: Order

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step == self.order.stop_at:
            self.trainer.save_checkpoint(self.order.folder / "saved.ckpt")
            self.trainer.should_stop = True


def with_lightning(order: Order, *, calls_itself: bool = False) -> Run:
    records = order.left(zip(*data(), strict=True))
    x, y = (torch.stack(each) for each in zip(*records, strict=True))
    model = Stops(calls_itself)
    model.order = order
    settings: dict[str, Any] = {}
    if order.size > 1:
        place = Ranks()
        place.set_global_rank(order.rank)
        place.set_world_size(order.size)
        place.local_rank = lambda: order.rank  # type: ignore[method-assign]
        settings = {"strategy": "ddp", "devices": order.size, "plugins": [place]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = fit(
            order.folder,
            model,
            order.privacy,
            passes=50,
            batch=len(x) // order.size,
            rows=TensorDataset(x, y),
            checkpoint=order.folder / "saved.ckpt" if order.resumes else None,
            max_steps=order.steps,
            min_epochs=0,
            **settings,
        )
    metrics = trainer.callback_metrics
    name = "epsilon" if order.privacy.secure_noise else "epsilon_if_secret"
    lines = (order.folder / "metrics.csv").read_text().splitlines() if order.rank == 0 else []
    where = lines[0].split(",").index("step") if lines else 0
    return Run(
        found=flat(model.grads or {}) * len(x),
        expected=lambda: flat(oracle.clipped_sum(make_model(), losses, (x, y), CLIP_NORM)),
        num_steps=trainer.global_step,
        logged=[int(each.split(",")[where]) + 1 for each in lines[1:]],
        epsilon=float(metrics[name]),
        noise_multiplier=float(metrics["noise_multiplier"]),
        parameters={name: each.detach() for name, each in model.net.named_parameters()},
    )
