"""Private training on one process and on many ranks, side by side: the reference note 000, again.

One process trains a plain module. Ranks train it sharded. Both draw the same records and the same
noise, since neither knows the rank; losses, gradient norms after noise and parameter norms are
compared at every step, and every per-sample norm and parameter at the end.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from unison import check
from unison.config import REDUCERS
from unison.errors import BadInput
from unison.models import ModelConfig, build, per_sample_loss, preset
from unison.privacy import PrivacyEngine
from unison.shard import auto_shard, batch_mean, digest, fingerprint, grad_norm, param_norm
from unison.verify.parity import Launch, joined_ranks

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
    """One side of the comparison, as its ranks get it."""

    experiment: PrivateExperiment
    is_sharded: bool


@dataclass(frozen=True, kw_only=True)
class PrivatelyTrained:
    """What one side came to; the same on every rank.

    Attributes:
        num_ranks: How many ranks trained.
        is_sharded: Whether they shared the parameters.
        losses: Mean loss over the logical batch, one per step.
        grad_norms: Norm of the gradient after noise, one per step.
        param_norms: Norm of all parameters after each step.
        sample_norms: Every sample's norm before clipping, step by step.
        digest_after: Hash of all parameters after the last step.
        fingerprint: What the bits depend on besides the experiment.
    """

    num_ranks: int
    is_sharded: bool
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
            "gradient norm, first step": _largest(self.grad_norms[:1], other.grad_norms[:1]),
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
        return all(getattr(self, name) == getattr(other, name) for name in names)


def _largest(found: Sequence[float], expected: Sequence[float]) -> float:
    if len(found) != len(expected):
        return math.inf
    pairs = zip(found, expected, strict=True)
    return max((abs(a - b) / abs(b) if a != b else 0.0 for a, b in pairs), default=0.0)


def compare_privately(
    experiment: PrivateExperiment, *, launch: Launch, sizes: Sequence[int] = WORLD_SIZES
) -> list[PrivatelyTrained]:
    """Train on one process, then on each number of ranks; the first result is the one process.

    Args:
        experiment: What to train.
        launch: What starts ranks.
        sizes: Numbers of ranks.
    """
    sides = [(False, 1), *((True, size) for size in sizes)]
    return [
        launch(
            train_privately,
            PrivateSide(experiment=experiment, is_sharded=is_sharded),
            num_ranks=size,
        )
        for is_sharded, size in sides
    ]


def train_privately(side: PrivateSide) -> PrivatelyTrained:
    """Train one side on this rank; every rank that the launcher started calls it."""
    torch.set_num_threads(1)  # threads change bits, and ranks would divide them
    experiment = side.experiment
    is_ordered = experiment.reducer == "ordered"
    with joined_ranks():
        model: nn.Module = build(experiment.model, seed=experiment.seed)
        if side.is_sharded:
            auto_shard(model, reducer=experiment.reducer, gradient_divisor=1)
        engine = PrivacyEngine(accountant="rdp", secure_noise=False)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="noise and sampling come from a seed")
            model, optimizer, loader = engine.make_private(
                module=model,
                optimizer=torch.optim.AdamW(model.parameters(), lr=experiment.lr),
                data_loader=DataLoader(
                    TensorDataset(experiment.rows()), batch_size=experiment.batch_size
                ),
                noise_multiplier=experiment.noise_multiplier,
                max_grad_norm=experiment.max_grad_norm,
                clipping=experiment.clipping,
                granule=experiment.granule if is_ordered else None,
                seed=experiment.seed,
            )
        losses, grad_norms, param_norms, sample_norms = [], [], [], []
        while len(losses) < experiment.steps:
            for (rows,) in loader:
                optimizer.zero_grad()
                loss = batch_mean(per_sample_loss(model(rows[:, :-1]), rows[:, 1:]))
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
            losses=losses,
            grad_norms=grad_norms,
            param_norms=param_norms,
            sample_norms=sample_norms,
            digest_after=digest(model),
            fingerprint=fingerprint(granule=experiment.granule),
        )
