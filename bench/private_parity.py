"""Private training on one process and on many ranks, side by side: the reference note 000, again.

One process trains a plain module. Ranks train it sharded. Both draw the same records and the same
noise, since neither knows the rank; losses, gradient norms after noise, parameter norms and
per-sample norms are compared at every step, and every parameter at the end. The clipped gradient of
the first step, from equal parameters and before noise, is compared element by element.
"""

import json
import math
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

from bench.provenance import check_writable, write_result
from bench.runner import joined_ranks
from unison import check
from unison.config import REDUCERS
from unison.errors import BadInput
from unison.models import ModelConfig, build, per_sample_loss, preset
from unison.privacy import PrivacyEngine, PrivateLoader
from unison.shard import (
    auto_shard,
    batch_mean,
    digest,
    fingerprint,
    full_parameters,
    grad_norm,
    param_norm,
)
from unison.train import run_on_local_ranks

WORLD_SIZES = (1, 2, 3, 4, 8)


@dataclass(frozen=True, kw_only=True)
class PrivateExperiment:
    """What all sides train; it says nothing of ranks.

    Attributes:
        preset: The model.
        batch_size: Expected records per step, over all ranks.
        num_records: Records in the data set.
        tokens: Tokens per record that the model reads.
        steps: Optimizer steps.
        reducer: `"ordered"`, whose bits must not depend on the ranks, or `"fast"`.
        granule: Records per granule of the ordered reducer.
        noise_multiplier: σ.
        max_grad_norm: C.
        clipping: How clipping is computed.
        seed: Of initial values, tokens, sampling and noise.
        lr: Learning rate of AdamW.
    """

    preset: str = "small"
    batch_size: int = 8
    num_records: int = 24
    tokens: int = 32
    steps: int = 6
    reducer: str = "ordered"
    granule: int = 2
    noise_multiplier: float = 1.0
    max_grad_norm: float = 1.0
    clipping: str = "auto"
    seed: int = 0
    lr: float = 1e-3

    def __post_init__(self) -> None:
        check.one_of(REDUCERS, reducer=self.reducer)
        check.positive(
            batch_size=self.batch_size,
            num_records=self.num_records,
            tokens=self.tokens,
            steps=self.steps,
            granule=self.granule,
            max_grad_norm=self.max_grad_norm,
            lr=self.lr,
        )
        if self.tokens > self.model.context_length:
            raise BadInput(
                f"tokens must be at most {self.model.context_length}, the context of "
                f"{self.preset!r}, found {self.tokens}"
            )

    @property
    def model(self) -> ModelConfig:
        """The model's shape."""
        return preset(self.preset)

    def rows(self) -> Tensor:  # [num_records, tokens + 1]
        """The data set, random tokens."""
        generator = torch.Generator().manual_seed(self.seed)
        shape = (self.num_records, self.tokens + 1)
        return torch.randint(0, self.model.vocab_size, shape, generator=generator)


@dataclass(frozen=True, kw_only=True)
class PrivateSide:
    """One side of the comparison, as its ranks get it.

    Attributes:
        experiment: What to train.
        is_sharded: Whether the ranks share the parameters.
        folder: Where the gradient of the first side lies. That side writes it; the others measure
            how far their own is from it.
    """

    experiment: PrivateExperiment
    is_sharded: bool
    folder: Path


@dataclass(frozen=True, kw_only=True)
class PrivatelyTrained:
    """What one side came to; the same on every rank.

    Attributes:
        num_ranks: How many ranks trained.
        is_sharded: Whether they shared the parameters.
        gradient_difference: How far the first step's clipped gradient, before noise, is from that
            of the first side: the norm of the difference as a part of the norm, of the parameter
            where that is largest. 0 on the first side.
        losses: Mean loss over the logical batch, one per step.
        grad_norms: Norm of the gradient after noise, one per step.
        param_norms: Norm of all parameters after each step.
        sample_norms: Every sample's norm before clipping, step by step.
        digest_after: Hash of all parameters after the last step.
        fingerprint: What the bits depend on besides the experiment.
    """

    num_ranks: int
    is_sharded: bool
    gradient_difference: float
    losses: list[float]
    grad_norms: list[float]
    param_norms: list[float]
    sample_norms: list[list[float]]
    digest_after: str
    fingerprint: dict[str, Any]

    def differences(self, other: "PrivatelyTrained") -> dict[str, float]:
        """The largest relative difference of each figure from another side's."""
        return {
            "loss": _largest(self.losses, other.losses),
            "gradient norm": _largest(self.grad_norms, other.grad_norms),
            "gradient of step 1": self.gradient_difference,
            "parameter norm": _largest(self.param_norms, other.param_norms),
            "per-sample norm": max(
                (
                    _largest(a, b)
                    for a, b in zip(self.sample_norms, other.sample_norms, strict=True)
                ),
                default=0.0,
            ),
        }

    def has_same_bits(self, other: "PrivatelyTrained") -> bool:
        """Whether everything agrees, to the bit."""
        names = ("losses", "grad_norms", "param_norms", "sample_norms", "digest_after")
        is_same = all(getattr(self, name) == getattr(other, name) for name in names)
        return is_same and self.gradient_difference == 0


def _largest(found: Sequence[float], expected: Sequence[float]) -> float:
    if len(found) != len(expected):
        return math.inf
    pairs = zip(found, expected, strict=True)
    return max((abs(a - b) / abs(b) if a != b else 0.0 for a, b in pairs), default=0.0)


def compare_privately(
    experiment: PrivateExperiment, *, sizes: Sequence[int] = WORLD_SIZES
) -> list[PrivatelyTrained]:
    """Train on one process, then on each number of ranks; the first result is the one process.

    Args:
        experiment: What to train.
        sizes: Numbers of ranks.
    """
    sides = [(False, 1), *((True, size) for size in sizes)]
    with tempfile.TemporaryDirectory(prefix="unison-parity-") as folder:
        return [
            run_on_local_ranks(
                train_privately,
                PrivateSide(experiment=experiment, is_sharded=is_sharded, folder=Path(folder)),
                num_ranks=size,
            )
            for is_sharded, size in sides
        ]


def train_privately(side: PrivateSide) -> PrivatelyTrained:
    """Train one side on this rank; every rank that the launcher started calls it."""
    torch.set_num_threads(1)  # threads change bits, and ranks would divide them
    experiment = side.experiment
    with joined_ranks():
        model: nn.Module = build(experiment.model, seed=experiment.seed)
        if side.is_sharded:
            auto_shard(model, reducer=experiment.reducer, gradient_divisor=1)
        gradient_difference = _compare_gradients(_clipped_gradient(model, experiment), side)
        engine, optimizer, loader = _attached(model, experiment, experiment.noise_multiplier)
        losses, grad_norms, param_norms, sample_norms = [], [], [], []
        while len(losses) < experiment.steps:
            for (rows,) in loader:
                optimizer.zero_grad()
                loss = _mean_loss(model, rows)
                loss.backward()
                grad_norms.append(float(grad_norm(model)))
                optimizer.step()
                losses.append(loss.item())
                param_norms.append(float(param_norm(model)))
                sample_norms.append(engine.per_sample_norms().tolist())
                if len(losses) == experiment.steps:
                    break
        return PrivatelyTrained(
            num_ranks=dist.get_world_size(),
            is_sharded=side.is_sharded,
            gradient_difference=gradient_difference,
            losses=losses,
            grad_norms=grad_norms,
            param_norms=param_norms,
            sample_norms=sample_norms,
            digest_after=digest(model),
            fingerprint=fingerprint(granule=experiment.granule),
        )


def _attached(
    model: nn.Module, experiment: PrivateExperiment, noise_multiplier: float
) -> tuple[PrivacyEngine, Optimizer, PrivateLoader]:
    """Make the model private, with a seed, so that every side draws the same."""
    engine = PrivacyEngine(accountant="rdp", secure_noise=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="noise and sampling come from a seed")
        _, optimizer, loader = engine.make_private(
            module=model,
            optimizer=torch.optim.AdamW(model.parameters(), lr=experiment.lr),
            data_loader=DataLoader(
                TensorDataset(experiment.rows()), batch_size=experiment.batch_size
            ),
            noise_multiplier=noise_multiplier,
            max_grad_norm=experiment.max_grad_norm,
            clipping=experiment.clipping,
            granule=experiment.granule if experiment.reducer == "ordered" else None,
            seed=experiment.seed,
        )
    return engine, optimizer, loader


def _mean_loss(model: nn.Module, rows: Tensor) -> Tensor:
    return batch_mean(per_sample_loss(model(rows[:, :-1]), rows[:, 1:]))


def _clipped_gradient(model: nn.Module, experiment: PrivateExperiment) -> dict[str, Tensor]:
    """The whole gradient of the first step without its noise, on every rank; the model stays."""
    engine, optimizer, loader = _attached(model, experiment, noise_multiplier=0.0)
    (rows,) = next(batches := iter(loader))
    _mean_loss(model, rows).backward()
    # What gathers parameters gathers gradients, where these stand in for them.
    kept = [parameter.detach().clone() for parameter in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.copy_(parameter.grad.as_subclass(Tensor))
        found = {name: value.clone() for name, value in full_parameters(model)}
        for parameter, value in zip(model.parameters(), kept, strict=True):
            parameter.copy_(value)
    optimizer.zero_grad()
    del batches
    engine.detach()
    return found


def _compare_gradients(gradient: dict[str, Tensor], side: PrivateSide) -> float:
    """Write a gradient down, or measure how far it is from the one that was written."""
    largest = 0.0
    for name, value in gradient.items():
        file = side.folder / f"{name}.npy"
        if side.is_sharded:
            written = torch.from_numpy(np.load(file)).double()
            difference = float((value.double() - written).norm())
            largest = max(largest, difference / float(written.norm()) if difference else 0.0)
        elif dist.get_rank() == 0:
            np.save(file, value.numpy())
    return largest


# ---- the command ---------------------------------------------------------------------------------

# What the reference note 000 reached at world size 1; at 2 its gradient norm was off by sqrt(2).
REFERENCE = {"loss": 3.9e-4, "gradient norm": 2.1e-3, "parameter norm": 9.6e-6}


def private_parity(
    settings: dict[str, Any], *, nproc: int, out: Path | None, as_json: bool
) -> None:
    """Train privately on one process and on ranks, with both reducers, and print the differences.

    Args:
        settings: Of the experiment, those that were given.
        nproc: Most ranks.
        out: Where the figures go, if anywhere.
        as_json: Whether to print one JSON object instead of tables.
    """
    if out is not None:
        check_writable(out)
    sizes = [size for size in WORLD_SIZES if size <= nproc]
    screen, errors = Console(), Console(stderr=True)
    figures, is_broken = {}, False
    for reducer in ("ordered", "fast"):
        experiment = PrivateExperiment(reducer=reducer, **settings)
        with errors.status(f"{reducer}: one process, then {sizes} ranks"):
            alone, *others = compare_privately(experiment, sizes=sizes)
        figures[reducer] = {
            "experiment": asdict(experiment),
            "one process": asdict(alone),
            "ranks": {
                str(each.num_ranks): {
                    "differences": each.differences(alone),
                    "has_same_bits": each.has_same_bits(alone),
                }
                for each in others
            },
        }
        is_broken |= reducer == "ordered" and not all(each.has_same_bits(alone) for each in others)
        if not as_json:
            show(screen, experiment, alone, others)
    if as_json:
        typer.echo(json.dumps(figures))
    if out is not None:
        write_result(out, "parity-private", figures)
    if is_broken:
        typer.echo("unison: the ordered reducer must agree in every bit", err=True)
        raise typer.Exit(1)


def show(
    screen: Console,
    experiment: PrivateExperiment,
    alone: PrivatelyTrained,
    others: list[PrivatelyTrained],
) -> None:
    """Print how far every number of ranks is from one process, in at most 80 columns."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    names = list(others[0].differences(alone))
    table.add_column("relative difference")
    for each in others:
        ranks = "1 rank" if each.num_ranks == 1 else f"{each.num_ranks} ranks"
        table.add_column(ranks, justify="right")
    table.add_column("note 000", justify="right", style="dim")
    for name in names:
        values = [each.differences(alone)[name] for each in others]
        cells = ["0" if value == 0 else f"{value:.1e}" for value in values]
        table.add_row(name, *cells, f"{REFERENCE[name]:.1e}" if name in REFERENCE else "")
    bits = ["yes" if each.has_same_bits(alone) else "no" for each in others]
    table.add_row("the same bits", *bits, "", style="bold")
    screen.print()
    screen.print(
        f"[bold]{experiment.preset}, private, {experiment.reducer} reducer[/]  "
        f"{experiment.steps} steps, {experiment.batch_size} of {experiment.num_records} records "
        f"of {experiment.tokens} tokens, σ {experiment.noise_multiplier:g}, "
        f"C {experiment.max_grad_norm:g}"
    )
    screen.print(table)
    screen.print(
        "The largest from one process, over all steps; of step 1, the clipped gradient before its "
        "noise. Note 000 is a reference at 1 rank; at 2 its gradient norm was off by √2.",
        style="dim",
    )
