"""How far a step's release moves when one record leaves: neighbouring data sets through the engine.

Sensitivity is a property of what leaves a step, so that is what is compared: for two data sets D
and D' that differ in one record, σ = 0 and every record drawn in every step,

    moved = max over steps of  ‖S_k(D) − S_k(D')‖ / C,

where S_k is the clipped sum of step k that the engine is about to put noise on. DP-SGD's ε is
computed for `moved ≤ 1`. Two neighbours are tried:

* **emptied**: the record's row is at its place, with other values (`Case.empty`) and weight 0. The
  weight is put where the engine itself puts that of a padding row, at the coefficient of the row
  (`_weight_of_zero`): shapes stay, and the other rows may know nothing of what stands there.
* **removed**: the row is gone, and the batch is one row shorter.

The learning rate is 0: later steps start from one model in both runs. (Models that differ because
noisy gradients differed are covered by composition; what is looked for is what goes past them.) A
buffer, or the `.grad` of anything that the engine does not own, has no noise at all: if it differs
between neighbours, `moved` is infinite.
"""

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tests.privacy.common import attach
from unison import UnisonError
from unison.privacy import Poisson, PrivacyEngine
from unison.privacy.mechanism import CLIP_RULES

Batch = tuple[Tensor, ...]
Loss = Callable[[nn.Module, Batch], Tensor]

LIMIT = 1 + 1e-6  # of `moved`, for sums in float32


@dataclass(frozen=True)
class Records:
    """A data set of tensors, batched on dim 0, and which record its neighbours lack.

    Attributes:
        at: The tensors at a step; most are the same at every one.
        record: Row of the record that differs.
        empty: What stands in its place where it is emptied, one row of each tensor; zeros unless
            given.
    """

    at: Callable[[int], Batch]
    record: int = 0
    empty: Batch | None = None

    def __len__(self) -> int:
        return len(self.at(0)[0])

    def emptied(self) -> "Records":
        """The neighbour whose record has other values."""

        def at(step: int) -> Batch:
            tensors = tuple(tensor.clone() for tensor in self.at(step))
            for place, tensor in enumerate(tensors):
                tensor[self.record] = 0 if self.empty is None else self.empty[place]
            return tensors

        return Records(at, self.record, self.empty)

    def with_record_at(self, place: int) -> "Records":
        """The same records in another order, rolled so that the one that differs is there."""
        shift = place - self.record
        return Records(
            lambda step: tuple(tensor.roll(shift, 0) for tensor in self.at(step)), place, self.empty
        )

    def removed(self) -> "Records":
        """The neighbour without the record."""
        keep = torch.arange(len(self)) != self.record
        return Records(lambda step: tuple(tensor[keep] for tensor in self.at(step)))


@dataclass(frozen=True)
class Case:
    """A private loop as a user might write it.

    Attributes:
        loss: The loss of a batch, of the module and the batch; a class is made anew for every run
            and holds what the loop keeps between steps.
        model: Makes the module.
        records: The data set.
        max_grad_norm: C.
        steps: How many steps are taken.
        step: What a user does with a batch instead of `loss(module, batch).backward()` and
            `optimizer.step()`.
        settings: Other arguments of `make_private`.
        collate: The loader's `collate_fn`.
        may_be_refused: For a legitimate loop that cannot be told from one that is not.
        has_oracle: Whether the loss of a batch of one row is what that row adds.
        at_one_shape: Whether no row can be removed: random numbers are drawn by place in the batch,
            where a removed row would give its own to the next; rows come in pairs; or they are
            computed in bfloat16, whose kernels have other bits at another shape.
    """

    loss: Loss | type
    model: Callable[[], nn.Module]
    records: Records
    max_grad_norm: float = 0.1
    steps: int = 1
    step: Callable[["Loop", Batch], None] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    collate: Callable[[list[Any]], Any] | None = None
    may_be_refused: bool = False
    has_oracle: bool = True
    at_one_shape: bool = False


@dataclass
class Loop:
    """What a user's loop holds while it runs."""

    engine: PrivacyEngine
    module: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Loss
    outside: list[Tensor] = field(default_factory=list)  # whose `.grad` is looked at, too


@dataclass(frozen=True)
class Run:
    """What left the steps of one run.

    Attributes:
        sums: The clipped sum of every step that was taken, over all parameters.
        unnoised: After every step, what has no noise: buffers, and gradients of others.
        refusal: Why the step after them was not taken.
        num_intents: Steps that the ledger has counted.
    """

    sums: list[Tensor]
    unnoised: list[dict[str, Tensor]]
    refusal: str | None
    num_intents: int


class _Stepwise(Dataset):
    """Hands out the records of the step that is set."""

    def __init__(self, records: Records) -> None:
        self.records, self.step = records, 0

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> Batch:
        return tuple(tensor[index] for tensor in self.records.at(self.step))


def run(
    case: Case, mode: str, records: Records | None = None, *, empty_row: int | None = None
) -> Run:
    """Train `case.steps` steps on some records; a refusal ends it.

    Args:
        case: The loop.
        mode: Clipping mode.
        records: The data set; the case's own unless given.
        empty_row: A row of every batch whose weight is 0.
    """
    records, size = records or case.records, len(case.records)
    torch.manual_seed(7)
    module = case.model().train()
    data = _Stepwise(records)
    is_mean = case.settings.get("loss_reduction", "mean") == "mean"
    sums: list[Tensor] = []
    unnoised: list[dict[str, Tensor]] = []
    refusal = None
    trainable = [each for each in module.parameters() if each.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=0.0)
    settings: dict[str, Any] = {
        "optimizer": optimizer,
        "data_loader": DataLoader(data, batch_size=size, collate_fn=case.collate),
        "noise_multiplier": 0.0,
        "max_grad_norm": case.max_grad_norm,
        "sampling": Poisson(rate=1.0),
        "expected_batch_size": size,
        "clipping": mode,
    }
    try:
        engine, module, optimizer, private = attach(module, **(settings | dict(case.settings)))
    except UnisonError as error:
        return Run([], [], str(error), 0)
    loss = case.loss() if isinstance(case.loss, type) else case.loss
    loop = Loop(engine, module, optimizer, loss)
    try:
        for step in range(case.steps):
            data.step = step
            torch.manual_seed(11 + step)
            with _weight_of_zero(empty_row) as is_empty:
                for batch in private:
                    optimizer.zero_grad()
                    (case.step or _usual_step)(loop, tuple(batch))
            assert is_empty(), "the row was not given a weight: the measurement is void"
            own = [torch.zeros_like(p) if p.grad is None else p.grad for p in trainable]
            scale = size if is_mean else 1  # what the engine divided by, in both neighbours
            sums.append(torch.cat([grad.detach().flatten().double() * scale for grad in own]))
            unnoised.append(_unnoised(loop, {id(p) for p in trainable}))
    except UnisonError as error:
        refusal = str(error)
    num_intents = engine.ledger.num_intents
    engine.detach()
    return Run(sums, unnoised, refusal, num_intents)


def _usual_step(loop: Loop, batch: Batch) -> None:
    loop.loss(loop.module, batch).backward()
    loop.optimizer.step()


@contextmanager
def _weight_of_zero(row: int | None) -> Iterator[Callable[[], bool]]:
    """Give one row of a logical batch weight 0; yield a question: has it been given?"""
    flat = CLIP_RULES["flat"]
    num_rows = 0

    def rule(each: Any, total: Any, clip_norm: float, names: Any) -> Mapping[str, Tensor]:
        nonlocal num_rows
        coefficients = flat(each, total, clip_norm, names)
        own = {id(values): values.clone() for values in coefficients.values()}
        for values in own.values():
            if row is not None and 0 <= row - num_rows < len(values):
                values[row - num_rows] = 0.0
        num_rows += len(next(iter(own.values())))
        return {name: own[id(values)] for name, values in coefficients.items()}

    CLIP_RULES["flat"] = rule
    try:
        yield lambda: row is None or num_rows > row
    finally:
        CLIP_RULES["flat"] = flat


def _unnoised(loop: Loop, owned: set[int]) -> dict[str, Tensor]:
    """Whatever has left a step and is no gradient of the engine's."""
    found = {f"buffer {name}": value for name, value in loop.module.named_buffers()}
    others = [each for group in loop.optimizer.param_groups for each in group["params"]]
    for place, each in enumerate([*others, *loop.outside]):
        if id(each) not in owned and each.grad is not None:
            found[f"gradient {place} of shape {list(each.shape)}"] = each.grad
    return {name: value.detach().clone() for name, value in found.items()}


# ---- the verdict ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """What became of a case.

    Attributes:
        moved: The most that a step's sum moved, in units of C, by neighbour.
        refusal: Why a step was not taken, on these records or on a neighbour's; None if all were.
            A loop that is refused for one of them is told so: it is compared as far as both went.
        fault: What was spent before it was refused; empty if nothing.
        is_split: Whether a step was taken on these records and refused to a neighbour, or the other
            way round: then whether it is refused depends on a record.
    """

    moved: dict[str, float]
    refusal: str | None
    fault: str
    is_split: bool = False

    @property
    def is_covered(self) -> bool:
        """Whether ε holds for all that left the steps."""
        return not self.fault and all(value <= LIMIT for value in self.moved.values())


def judge(case: Case, mode: str) -> Verdict:
    """Run a case and its neighbours, as many steps as all of them take."""
    whole = run(case, mode)
    neighbours = {"emptied": run(case, mode, case.records.emptied(), empty_row=case.records.record)}
    if not case.at_one_shape:
        neighbours["removed"] = run(case, mode, case.records.removed())
    moved = {
        name: max(map(_moved(case), _steps(whole), _steps(other)), default=0.0)
        for name, other in neighbours.items()
    }
    faults = [_late(each) for each in (whole, *neighbours.values())]
    refusals = [each.refusal for each in (whole, *neighbours.values()) if each.refusal]
    is_split = any(len(each.sums) != len(whole.sums) for each in neighbours.values())
    fault = "; ".join(filter(None, faults))
    return Verdict(moved, refusals[0] if refusals else None, fault, is_split)


def _steps(taken: Run) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    return zip(taken.sums, taken.unnoised, strict=True)


def _moved(case: Case) -> Callable[[Any, Any], float]:
    def moved(ours: Any, theirs: Any) -> float:
        (sums, unnoised), (other_sums, other_unnoised) = ours, theirs
        if unnoised.keys() != other_unnoised.keys():
            return math.inf
        for name, value in unnoised.items():
            if not torch.equal(value, other_unnoised[name]):
                return math.inf
        return float((sums - other_sums).norm() / case.max_grad_norm)

    return moved


def _late(taken: Run) -> str:
    """What a refused step had spent; empty if nothing, or if no step was refused."""
    if taken.refusal is not None and taken.num_intents > len(taken.sums):
        return f"refused after the ledger had counted the step: {taken.refusal}"
    return ""


# ---- exactness -----------------------------------------------------------------------------------


def oracle_sum(case: Case) -> Tensor:
    """The clipped sum of step 0 by a float64 loop over rows, over all parameters."""
    torch.manual_seed(7)
    module = copy.deepcopy(case.model()).double().train()
    loss = case.loss() if isinstance(case.loss, type) else case.loss
    trainable = [each for each in module.parameters() if each.requires_grad]
    total = torch.zeros(sum(each.numel() for each in trainable), dtype=torch.float64)
    batch = case.records.at(0)
    for row in range(len(case.records)):
        one = tuple(tensor[row : row + 1] for tensor in batch)
        one = tuple(each.double() if each.is_floating_point() else each for each in one)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of libraries, about batches of one
            found = torch.autograd.grad(loss(module, one), trainable, allow_unused=True)
        parts = [
            torch.zeros_like(p) if g is None else g for p, g in zip(trainable, found, strict=True)
        ]
        gradient = torch.cat([part.flatten() for part in parts])
        total += gradient * (case.max_grad_norm / gradient.norm()).clamp(max=1.0)
    return total
