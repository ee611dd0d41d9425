"""What is measured: the model, the lengths, the cases, and the order in which they take turns."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from bench.clipping_speed import peers
from bench.clipping_speed.steps import Contender, NotPrivate, Private, Workload
from unison import check
from unison.clip import AUTO, MODES
from unison.errors import BadInput
from unison.models import ModelConfig, preset

NO_DP = "no_dp"
ALL_MODES = (NO_DP, *MODES, AUTO)
DTYPES = {"bf16": torch.bfloat16, "float32": torch.float32}
CASES_BETWEEN_BASELINES = 4


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """What is measured.

    Attributes:
        preset: The model; its context is each length in turn.
        num_layers: Replaces the preset's number of blocks.
        batch_size: Rows per step.
        lengths: Tokens per row, one after the other.
        modes: Of `ALL_MODES`. The baseline is measured whether it is named or not.
        dtype: Of parameters and activations, a name in `DTYPES`.
        device: `"cpu"` or `"cuda"`.
        has_graphs: Whether to time CUDA graphs too.
        noise_multipliers: σ of the private steps; each mode is measured with each.
        memory_budgets: Multiples of the non-private peak. `auto` is measured once more with each.
        has_peers: Whether to measure other libraries.
        rounds: Visits of every case.
        steps: Steps of a timed block.
        time_limit: Seconds after which no visit is begun; None for no limit.
    """

    preset: str = "tiny"
    num_layers: int | None = None
    batch_size: int = 4
    lengths: tuple[int, ...] = (64, 128, 256)
    modes: tuple[str, ...] = ALL_MODES
    dtype: str = "float32"
    device: str = "cpu"
    has_graphs: bool = False
    noise_multipliers: tuple[float, ...] = (1.0,)
    memory_budgets: tuple[float, ...] = ()
    has_peers: bool = False
    rounds: int = 2
    steps: int = 3
    time_limit: float | None = None

    def __post_init__(self) -> None:
        for mode in self.modes:
            check.one_of(ALL_MODES, mode=mode)
        check.one_of(DTYPES, dtype=self.dtype)
        check.one_of(["cpu", "cuda"], device=self.device)
        check.positive(batch_size=self.batch_size, rounds=self.rounds, steps=self.steps)
        for length in self.lengths:
            check.positive(length=length)
        if not self.lengths or len(set(self.lengths)) < len(self.lengths):
            raise BadInput(f"lengths must be different numbers, found {list(self.lengths)}")
        for sigma in self.noise_multipliers:
            check.not_negative(noise_multiplier=sigma)
        if self.time_limit is not None:
            check.positive(time_limit=self.time_limit)
        for multiple in self.memory_budgets:
            if not multiple >= 1:
                raise BadInput(
                    "a memory budget is a multiple of the non-private peak, 1 or more, found "
                    f"{multiple:g}"
                )
        if self.is_cuda and not torch.cuda.is_available():
            raise BadInput("device 'cuda' was asked for, and torch finds no CUDA device")
        if self.has_graphs and not self.is_cuda:
            raise BadInput("graphs are CUDA graphs: use device 'cuda', or leave them out")
        self.config(max(self.lengths))

    @property
    def is_cuda(self) -> bool:
        """Whether a GPU is measured."""
        return self.device == "cuda"

    def config(self, tokens: int) -> ModelConfig:
        """The model's shape at one length."""
        others = {} if self.num_layers is None else {"num_layers": self.num_layers}
        return preset(self.preset, context_length=tokens, **others)

    def workload(self, tokens: int) -> Workload:
        """What is trained at one length."""
        return Workload(
            config=self.config(tokens),
            batch_size=self.batch_size,
            tokens=tokens,
            dtype=DTYPES[self.dtype],
            device=torch.device(self.device),
        )

    @cached_property
    def cases(self) -> tuple["Case", ...]:
        """What is measured beside the baseline, at each length."""
        private = [mode for mode in dict.fromkeys(self.modes) if mode != NO_DP]
        found = [
            Case(mode=mode, noise_multiplier=sigma)
            for sigma in self.noise_multipliers
            for mode in private
        ]
        found += [
            Case(mode=AUTO, noise_multiplier=self.noise_multipliers[0], budget=multiple)
            for multiple in self.memory_budgets
        ]
        if self.has_peers:
            missing = peers.missing()
            there = [peer for peer in peers.PACKAGES if peer not in missing]
            found += [Case(mode=peers.NO_DP, is_peer=True)] if there else []
            found += [
                Case(mode=peer, noise_multiplier=self.noise_multipliers[0], is_peer=True)
                for peer in there
            ]
        return tuple(found)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to train.

    Attributes:
        mode: One of `ALL_MODES`, or a peer.
        noise_multiplier: σ; 0 for the baseline.
        budget: The most memory that it is to use, as a multiple of the non-private peak.
        is_peer: Whether it is another library's.
    """

    mode: str
    noise_multiplier: float = 0.0
    budget: float | None = None
    is_peer: bool = False

    @property
    def name(self) -> str:
        """What tables call it."""
        words = [self.mode]
        if self.budget is not None:
            words.append(f"within {self.budget:g}×")
        if self.is_mode and self.noise_multiplier == 0:
            words.append("without noise")
        return ", ".join(words)

    @property
    def is_mode(self) -> bool:
        """Whether it is one of our private modes, with or without a budget."""
        return not self.is_peer and self.mode != NO_DP

    def build(self, workload: Workload, baseline_peak: int | None) -> Contender:
        """Return the training.

        Args:
            workload: What is trained.
            baseline_peak: Bytes of the non-private training at its peak, if known.
        """
        if self.is_peer:
            sigma = self.noise_multiplier
            return peers.Peer(workload, name=self.mode, noise_multiplier=sigma)
        if self.mode == NO_DP:
            return NotPrivate(workload)
        return Private(
            workload,
            clipping=self.mode,
            noise_multiplier=self.noise_multiplier,
            memory_budget=self._bytes_beside(baseline_peak),
        )

    def _bytes_beside(self, baseline_peak: int | None) -> int | None:
        """What clipping may hold beside ordinary training."""
        if self.budget is None:
            return None
        if baseline_peak is None:
            raise BadInput("a budget is a multiple of the non-private peak, which is not known")
        return int((self.budget - 1) * baseline_peak)


BASELINE = Case(mode=NO_DP)


@dataclass(frozen=True)
class Planned:
    """A visit that is to be made."""

    case: Case
    tokens: int
    round: int

    def __str__(self) -> str:
        return f"{self.case.name} at {self.tokens} tokens, round {self.round + 1}"


def planned_visits(experiment: Experiment) -> Iterator[Planned]:
    """Every visit in order, see [Note: how steps are timed] in visits.py.

    >>> short = Experiment(modes=("auto", "ghost"), lengths=(8,), rounds=2)
    >>> [each.case.name for each in planned_visits(short)]
    ['no_dp', 'auto', 'ghost', 'no_dp', 'no_dp', 'ghost', 'auto', 'no_dp']
    """
    cases = experiment.cases
    for number in range(experiment.rounds):
        first = number % max(1, len(cases))
        turned = cases[first:] + cases[:first]
        for tokens in experiment.lengths:
            for place, case in enumerate(turned):
                if place % CASES_BETWEEN_BASELINES == 0:
                    yield Planned(BASELINE, tokens, number)
                yield Planned(case, tokens, number)
            yield Planned(BASELINE, tokens, number)
