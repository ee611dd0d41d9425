"""Loops: what Python keeps between steps, what trains outside the module, faults that come late."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import unison
from tests.privacy.neighbours.data import CLASSES, FEATURES, case, linear
from tests.privacy.neighbours.harness import Batch, Case, Loop, Records
from tests.privacy.neighbours.losses import centred, row_losses
from tests.privacy.neighbours.models import Between, Summed, classify, frozen_norm

# ---- Python state --------------------------------------------------------------------------------


class ItemAverage:
    """Divides by an average of past losses, kept as a number."""

    def __init__(self) -> None:
        self.average = 0.0

    def __call__(self, module: nn.Module, batch: Batch) -> Tensor:
        loss, before = classify(module, batch), self.average
        self.average = 0.9 * before + loss.item()
        return loss / (1 + before)


class TensorAverage:
    """The same as a tensor."""

    def __init__(self) -> None:
        self.average = torch.tensor(1.0)

    def __call__(self, module: nn.Module, batch: Batch) -> Tensor:
        loss, before = classify(module, batch), self.average
        self.average = 0.9 * before + loss.detach()
        return loss / before


class PastLosses:
    """Divides by the largest of past losses, kept in a list."""

    def __init__(self) -> None:
        self.past: list[float] = []

    def __call__(self, module: nn.Module, batch: Batch) -> Tensor:
        loss = classify(module, batch)
        scale = max(self.past, default=1.0)
        self.past.append(float(loss.detach()))
        return loss / scale


class RunningCentre:
    """The centre of past outputs, as in DINO."""

    def __init__(self) -> None:
        self.centre = torch.zeros(CLASSES)

    def __call__(self, module: nn.Module, batch: Batch) -> Tensor:
        outputs, centre = module(batch[0]), self.centre.clone()
        self.centre.mul_(0.9).add_(outputs.detach().mean(0))
        return (outputs - centre).square().mean()


class MemoryBank:
    """Outputs of the last step as negatives, as in MoCo."""

    def __init__(self) -> None:
        self.bank: Tensor | None = None

    def __call__(self, module: nn.Module, batch: Batch) -> Tensor:
        outputs, bank = module(batch[0]), self.bank
        self.bank = outputs.detach()
        return outputs.square().sum(1).mean() if bank is None else (outputs @ bank.T).mean()


class OnTheModule:
    """A statistic that the loop leaves on the module."""

    def __call__(self, module: nn.Module, batch: Batch) -> Tensor:
        outputs = module(batch[0])
        centre = getattr(module, "last_mean", torch.zeros(CLASSES))
        module.last_mean = outputs.detach().mean(0)  # type: ignore[assignment]
        return (outputs - centre).square().mean()


class Counter:
    """Counts far rows as it goes, and divides by their number."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, module: nn.Module, batch: Batch) -> Tensor:
        loss = classify(module, batch) / 10.0**self.count
        for row in batch[0]:
            if row.abs().max() > 10:
                self.count += 1
        return loss


class NumpyHistory:
    """Scales by the spread of past outputs, through numpy."""

    def __init__(self) -> None:
        self.history: list[Any] = []

    def __call__(self, module: nn.Module, batch: Batch) -> Tensor:
        outputs = module(batch[0])
        scale = max((float(each.std()) for each in self.history), default=1.0)
        self.history.append(outputs.detach().numpy().copy())
        return F.cross_entropy(outputs, batch[1]) / scale


class Threshold:
    """Leaves out rows whose loss is above a quantile of the last step's."""

    def __init__(self) -> None:
        self.threshold = float("inf")

    def __call__(self, module: nn.Module, batch: Batch) -> Tensor:
        losses = row_losses(module, batch)
        kept = (losses * (losses < self.threshold)).mean()
        self.threshold = losses.detach().quantile(0.5).item()
        return kept


class BestSoFar:
    """Takes a smaller weight where the loss was larger than the best one."""

    def __init__(self) -> None:
        self.best = 1.5

    def __call__(self, module: nn.Module, batch: Batch) -> Tensor:
        loss = classify(module, batch)
        weight = 0.01 if self.best < 1.0 or loss.item() > self.best else 1.0
        self.best = min(self.best, loss.item())
        return loss * weight


class Evaluated:
    """A statistic of the same batch from a pass in evaluation mode."""

    def __call__(self, module: nn.Module, batch: Batch) -> Tensor:
        module.eval()
        with torch.no_grad():
            scale = module(batch[0]).abs().max()
        module.train()
        return F.cross_entropy(module(batch[0]) / scale, batch[1])


STATE: dict[str, Case] = {
    "average of items": case(ItemAverage, steps=3, max_grad_norm=1.0),
    "average of tensors": case(TensorAverage, steps=3, max_grad_norm=1.0),
    "largest of past losses": case(PastLosses, steps=2, max_grad_norm=1.0),
    "running centre": case(RunningCentre, steps=3),
    "memory bank": case(MemoryBank, steps=2),
    "a statistic on the module": case(OnTheModule, steps=2),
    "a counter": case(Counter, steps=3, max_grad_norm=0.1),
    "past outputs by numpy": case(NumpyHistory, steps=2, max_grad_norm=1.0),
    "a threshold of the last step": Case(
        Threshold, linear, case(classify, "halves").records, 0.3, steps=2
    ),
    "the best loss so far": case(BestSoFar, steps=3),
    "a pass in evaluation mode": case(Evaluated),
}

# ---- a fault that comes late ---------------------------------------------------------------------


class From:
    """Another loss from some step on."""

    def __init__(self, first: int, later: Callable[[nn.Module, Batch], Tensor]) -> None:
        self.first, self.later, self.step = first, later, 0

    def __call__(self, module: nn.Module, batch: Batch) -> Tensor:
        self.step += 1
        return (classify if self.step <= self.first else self.later)(module, batch)


def from_step(first: int, later: Callable[[nn.Module, Batch], Tensor], **options: Any) -> Case:
    """A case whose fault is in step `first`, counted from 0."""

    class Late(From):
        def __init__(self) -> None:
            super().__init__(first, later)

    return case(Late, steps=first + 1, **options)


class LoggedNumber:
    """Logs a number in every step; from the third on it scales the loss, where 1.0 did before.

    The same functions are called in the same order at every step.
    """

    def __init__(self, first: int = 2) -> None:
        self.first, self.step = first, 0

    def __call__(self, module: nn.Module, batch: Batch) -> Tensor:
        loss = classify(module, batch)
        logged = loss.item()
        weight = 1.0 if self.step < self.first else 1.0 / logged
        self.step += 1
        return loss * weight


class LoggedNumberLater(LoggedNumber):
    """The same from the sixth step on."""

    def __init__(self) -> None:
        super().__init__(5)


class OtherIndices:
    """Takes each row's own output at first, and that of the largest row later."""

    def __init__(self) -> None:
        self.step = 0

    def __call__(self, module: nn.Module, batch: Batch) -> Tensor:
        outputs = module(batch[0])
        largest = outputs.detach().norm(dim=1).argmax()
        own = torch.arange(len(outputs))
        index = own if self.step == 0 else largest.expand(len(outputs))
        self.step += 1
        return F.cross_entropy(outputs - outputs[index].detach(), batch[1])


class OtherDim:
    """The same function over another dimension from the third step on."""

    def __init__(self) -> None:
        self.step = 0

    def __call__(self, module: nn.Module, batch: Batch) -> Tensor:
        outputs = module(batch[0])
        dim = 1 if self.step < 2 else 0
        self.step += 1
        return (outputs - outputs.mean(dim, keepdim=True)).square().sum(1).mean()


LATE: dict[str, Case] = {
    **{f"centre from step {first} on": from_step(first, centred) for first in (1, 2, 4, 6)},
    "square of the mean from the third step on": from_step(
        2, lambda m, b: classify(m, b) ** 2, max_grad_norm=3.0
    ),
    "a branch from the third step on": from_step(
        2, lambda m, b: (lambda loss: loss * 0.01 if loss > 2 else loss)(classify(m, b))
    ),
    "a logged number from the third step on": case(LoggedNumber, steps=3, max_grad_norm=1.0),
    "a logged number from the sixth step on": case(LoggedNumberLater, steps=6, max_grad_norm=1.0),
    "other indices from the second step on": case(OtherIndices, steps=2),
    "another dimension from the third step on": case(OtherDim, steps=3),
}

# ---- gradients of the user's own -----------------------------------------------------------------


def coupled_gradient(loop: Loop, batch: Batch) -> None:
    outputs = loop.module(batch[0])
    outputs.backward((outputs - outputs.mean(0)).detach())
    loop.optimizer.step()


def scaled_gradient(loop: Loop, batch: Batch) -> None:
    loss = loop.loss(loop.module, batch)
    loss.backward(1 / loss.detach())
    loop.optimizer.step()


def hook_on_outputs(loop: Loop, batch: Batch) -> None:
    outputs = loop.module(batch[0])
    outputs.register_hook(lambda g: g - g.mean(0))
    F.cross_entropy(outputs, batch[1]).backward()
    loop.optimizer.step()


def hook_on_a_layer(loop: Loop, batch: Batch) -> None:
    if not hasattr(loop.module, "is_hooked"):
        loop.module.is_hooked = True  # type: ignore[assignment]
        loop.module.down.register_full_backward_hook(  # type: ignore[union-attr]
            lambda _module, inner, _outer: (inner[0] - inner[0].mean(0),)
        )
    loop.loss(loop.module, batch).backward()
    loop.optimizer.step()


def parameter_outside_forward(module: nn.Module, batch: Batch) -> Tensor:
    return classify(module, batch) + (batch[0] @ module.weight.T).square().mean()  # type: ignore


GRADIENTS: dict[str, Case] = {
    "backward with a coupled gradient": case(classify, step=coupled_gradient),
    "backward scaled by the loss": case(classify, step=scaled_gradient, max_grad_norm=1.0),
    "a hook on the outputs": case(classify, step=hook_on_outputs),
    "a hook on a layer": case(classify, model=lambda: Between(lambda h: h), step=hook_on_a_layer),
    "a parameter outside forward": case(parameter_outside_forward),
}

# ---- what trains outside the module --------------------------------------------------------------


def _head(loop: Loop) -> nn.Module:
    """A layer of the user's that the engine has never seen; made once in a run."""
    if not loop.outside:
        layer = nn.Linear(CLASSES, CLASSES)
        loop.outside += list(layer.parameters())
        loop.module.__dict__["user_head"] = layer  # beside the module, not in it
    return loop.module.__dict__["user_head"]


def added_group(loop: Loop, batch: Batch) -> None:
    is_new = not loop.outside
    head = _head(loop)
    if is_new:
        loop.optimizer.add_param_group({"params": list(head.parameters())})
    F.cross_entropy(head(loop.module(batch[0])), batch[1]).backward()
    loop.optimizer.step()


def appended_parameter(loop: Loop, batch: Batch) -> None:
    is_new = not loop.outside
    head = _head(loop)
    if is_new:
        loop.optimizer.param_groups[0]["params"] += list(head.parameters())
    F.cross_entropy(head(loop.module(batch[0])), batch[1]).backward()
    loop.optimizer.step()


def head_with_its_own_optimizer(loop: Loop, batch: Batch) -> None:
    head = _head(loop)
    own = torch.optim.SGD(head.parameters(), lr=0.0)
    F.cross_entropy(head(loop.module(batch[0])), batch[1]).backward()
    own.step()
    loop.optimizer.step()


def layer_before(loop: Loop, batch: Batch) -> None:
    if not loop.outside:
        layer = nn.Linear(FEATURES, FEATURES)
        loop.outside += list(layer.parameters())
        loop.module.__dict__["user_layer"] = layer
    layer = loop.module.__dict__["user_layer"]
    F.cross_entropy(loop.module(layer(batch[0])), batch[1]).backward()
    loop.optimizer.step()


def temperature(loop: Loop, batch: Batch) -> None:
    if not loop.outside:
        loop.outside.append(nn.Parameter(torch.tensor(1.0)))
    F.cross_entropy(loop.module(batch[0]) * loop.outside[0], batch[1]).backward()
    loop.optimizer.step()


def inputs_with_gradients(loop: Loop, batch: Batch) -> None:
    batch[0].requires_grad_()
    loop.outside[:] = [batch[0]]
    F.cross_entropy(loop.module(batch[0]), batch[1]).backward()
    loop.optimizer.step()


def thawed(loop: Loop, batch: Batch) -> None:
    if not loop.outside:
        backbone = loop.module[0]  # type: ignore[index]
        loop.outside += [each.requires_grad_() for each in backbone.parameters()]
        loop.optimizer.add_param_group({"params": loop.outside})
    loop.loss(loop.module, batch).backward()
    loop.optimizer.step()


def frozen_backbone() -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, 8).requires_grad_(False), nn.Tanh(), nn.Linear(8, CLASSES)
    )


def from_the_second_step(
    step: Callable[[Loop, Batch], None],
) -> Callable[[Loop, Batch], None]:
    def run(loop: Loop, batch: Batch) -> None:
        if loop.engine.ledger.num_intents:
            step(loop, batch)
        else:
            loop.loss(loop.module, batch).backward()
            loop.optimizer.step()

    return run


OUTSIDE: dict[str, Case] = {
    "a head by add_param_group": case(classify, step=added_group),
    "a head by add_param_group, from the second step on": case(
        classify, step=from_the_second_step(added_group), steps=2
    ),
    "a head in the optimizer's list": case(classify, step=appended_parameter),
    "a head with an optimizer of its own": case(classify, step=head_with_its_own_optimizer),
    "a trained layer before the module": case(classify, step=layer_before),
    "a trained temperature": case(classify, step=temperature),
    "a trained temperature from the second step on": case(
        classify, step=from_the_second_step(temperature), steps=2
    ),
    "gradients of inputs": case(classify, step=inputs_with_gradients),
    "a frozen layer that is thawed": case(classify, model=frozen_backbone, step=thawed),
    "running mean of a frozen batch norm, dropout": case(
        classify, model=lambda: frozen_norm(0.1), at_one_shape=True
    ),
}

# ---- legitimate ----------------------------------------------------------------------------------


class Teacher:
    """Distillation by an average of past parameters, which have noise."""

    def __init__(self) -> None:
        self.teacher: nn.Module | None = None

    def __call__(self, module: nn.Module, batch: Batch) -> Tensor:
        if self.teacher is None:
            self.teacher = type(module)(FEATURES, CLASSES).requires_grad_(False)
        with torch.no_grad():
            for ours, theirs in zip(self.teacher.parameters(), module.parameters(), strict=True):
                ours.lerp_(theirs, 0.1)
            targets = self.teacher(batch[0]).softmax(1)
        return F.cross_entropy(module(batch[0]), targets)


class Schedule:
    """A tensor of weights by step, made before training."""

    def __init__(self) -> None:
        self.weights, self.step = torch.linspace(1.0, 0.5, 4), 0

    def __call__(self, module: nn.Module, batch: Batch) -> Tensor:
        self.step += 1
        return classify(module, batch) * self.weights[self.step - 1]


def frozen_head(loop: Loop, batch: Batch) -> None:
    torch.manual_seed(3)
    head = nn.Linear(CLASSES, CLASSES).requires_grad_(False)
    F.cross_entropy(head(loop.module(batch[0])), batch[1]).backward()
    loop.optimizer.step()


def evaluates_between(loop: Loop, batch: Batch) -> None:
    loop.loss(loop.module, batch).backward()
    loop.optimizer.step()
    loop.module.eval()
    with torch.no_grad():
        assert loop.module(torch.zeros(2, FEATURES)).isfinite().all()
    loop.module.train()


def logs_after(loop: Loop, batch: Batch) -> None:
    loss = loop.loss(loop.module, batch)
    loss.backward()
    assert len(f"{loss.item():.3f}") > 1
    loop.optimizer.step()


def clips_after(loop: Loop, batch: Batch) -> None:
    loop.loss(loop.module, batch).backward()
    nn.utils.clip_grad_norm_(loop.module.parameters(), 1e6)
    loop.optimizer.step()


def two_metrics(loop: Loop, batch: Batch) -> None:
    outputs = loop.module(batch[0])
    with torch.no_grad():
        accuracy = (outputs.argmax(1) == batch[1]).float().mean()
        spread = (outputs - outputs.mean(0)).norm()  # looked at, and in no loss
    F.cross_entropy(outputs, batch[1]).backward()
    assert float(accuracy + spread) >= 0
    loop.optimizer.step()


LEGITIMATE_LOOPS: dict[str, Case] = {
    "a teacher of averaged parameters": case(Teacher, "near class", steps=2, has_oracle=False),
    "weights by step": case(Schedule, steps=3, has_oracle=False),
    "a frozen head after the module": case(classify, step=frozen_head, has_oracle=False),
    "evaluation between steps": case(classify, step=evaluates_between, steps=2),
    "logging after backward": case(classify, step=logs_after, steps=2),
    "clipping of what has noise": case(classify, step=clips_after, steps=2),
    "statistics that are looked at": case(classify, step=two_metrics, steps=2),
}


def scaled(loop: Loop, batch: Batch) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    scaler.scale(loop.loss(loop.module, batch)).backward()
    scaler.step(loop.optimizer)
    scaler.update()


GRAD_SCALER = case(classify, step=scaled)

# ---- terms on parameters, which know no data -----------------------------------------------------


def squared(module: nn.Module) -> Tensor:
    return 0.01 * torch.stack([each.square().sum() for each in module.parameters()]).sum()


def orthogonal(module: Any) -> Tensor:
    weight = module.weight
    return 0.1 * (weight @ weight.T - torch.eye(CLASSES, dtype=weight.dtype)).square().sum()


def long(module: Any) -> Tensor:
    return 0.1 * module.weight.norm()


def summed(module: nn.Module) -> Any:
    """As many write it: a sum that begins with the number 0."""
    return 0.01 * sum(each.square().sum() for each in module.parameters())


TERMS: dict[str, Callable[[Any], Tensor]] = {
    "squares": squared,
    "squares by sum()": summed,
    "orthogonality": orthogonal,
    "norm": long,
}


def with_term(term: Callable[[nn.Module], Tensor] | None, **settings: Any) -> Case:
    def loss(module: nn.Module, batch: Batch) -> Tensor:
        plain = classify(module, batch)
        return plain if term is None else plain + term(module)

    return case(loss, steps=2, settings=settings, has_oracle=False)


# ---- what the user declares ----------------------------------------------------------------------


def over_a_public_number(module: nn.Module, batch: Batch) -> Tensor:
    number = unison.public((batch[1] == 2).sum().item())
    return F.cross_entropy(module(batch[0]), batch[1], reduction="sum") / number


DECLARED: dict[str, Case] = {
    "a number": case(over_a_public_number, steps=2, settings={"loss_reduction": "sum"}),
    "no checks after the first": case(classify, steps=3, settings={"recheck": False}),
    "a buffer": case(classify, model=Summed, steps=2, settings={"public_buffers": ["total"]}),
}

# ---- pairs ---------------------------------------------------------------------------------------
# `make_private(rows_per_sample=2)`: a record is two consecutive rows of the module's batch.


def _pairs() -> Records:
    x, y = case(classify, "near class").records.at(0)
    pairs = torch.stack([x, x.flip(1)], 1)  # [records, 2, features]
    return Records(lambda _step: (pairs, y), empty=(torch.zeros(2, FEATURES), torch.tensor(2)))


def preference(outputs: Tensor) -> Tensor:  # [records], of rows in pairs
    return -F.logsigmoid(outputs[0::2].sum(1) - outputs[1::2].sum(1))


def preferred(module: nn.Module, batch: Batch) -> Tensor:
    return preference(module(batch[0].flatten(0, 1))).mean()


def preferred_rows(module: nn.Module, batch: Batch) -> Tensor:
    """The same where the loader hands out two rows per record."""
    return preference(module(batch[0])).mean()


def preferred_to_the_mean(module: nn.Module, batch: Batch) -> Tensor:
    outputs = module(batch[0].flatten(0, 1))
    margins = outputs[0::2].sum(1) - outputs[1::2].sum(1)
    return -F.logsigmoid(margins - margins.mean().detach()).mean()


def preferred_to_the_next(module: nn.Module, batch: Batch) -> Tensor:
    outputs = module(batch[0].flatten(0, 1))
    return -F.logsigmoid(outputs[0::2].sum(1) - outputs[1::2].sum(1).roll(1)).mean()


def stack_rows(records: list[Batch]) -> Batch:
    """Two rows of every tensor per record: [2 records, ...]."""
    pairs, labels = zip(*records, strict=True)
    return torch.cat(list(pairs)), torch.stack(list(labels)).repeat_interleave(2)


_PAIRED = {"settings": {"rows_per_sample": 2}, "model": linear, "records": _pairs()}

PAIR_CASES: dict[str, Case] = {
    "pairs": Case(preferred, max_grad_norm=0.3, steps=2, **_PAIRED),
    "pairs that the loader stacks": Case(
        preferred_rows, max_grad_norm=0.3, collate=stack_rows, has_oracle=False, **_PAIRED
    ),
}
COUPLED_PAIRS: dict[str, Case] = {
    "pairs with a baseline of the batch": Case(preferred_to_the_mean, max_grad_norm=0.3, **_PAIRED),
    "pairs of neighbouring records": Case(preferred_to_the_next, max_grad_norm=0.3, **_PAIRED),
    "one rejected row for all": Case(
        lambda m, b: (lambda o: -F.logsigmoid(o[0::2].sum(1) - o[1].sum()).mean())(
            m(b[0].flatten(0, 1))
        ),
        max_grad_norm=0.3,
        **_PAIRED,
    ),
}
