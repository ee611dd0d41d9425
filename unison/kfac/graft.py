"""Grafting: the step length of an optimizer that is easy to tune, in the direction of another.

K-FAC's own step is as long as its curvature says, which is fragile where the curvature is rough. A
grafted step has the norm that Adam's (or SGD's) step of the same layer would have. Measured in the
reference notes: K-FAC with Adam's length needed fewer steps than tuned AdamW, K-FAC with its own
never did.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from unison.errors import BadInput
from unison.kfac import device
from unison.kfac.config import KFACConfig

Values = dict[str, Tensor]  # by parameter


class Graft(Protocol):
    """The optimizer whose step length is taken."""

    def step(self, gradients: Mapping[str, Tensor]) -> tuple[Values | None, Values]:
        """Its own step (None for none), and what is to be preconditioned."""
        ...

    def tensors(self, names: Iterable[str]) -> dict[str, Tensor]:
        """What it remembers of some parameters, for a checkpoint."""
        ...

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what `tensors` gave."""
        ...


class Adam:
    """Adam without its learning rate: m̂ / (√v̂ + ε); m̂, the averaged gradient, is preconditioned.

    So a layer without curvature takes exactly Adam's step, and one with curvature averages as Adam
    does. Momentum in the optimizer behind would average twice: set `betas=(0, ...)` for that.

    All parameters are computed together: on a GPU one launch for many of them.
    """

    def __init__(self, config: KFACConfig) -> None:
        self._beta1, self._beta2 = config.betas
        self._eps = config.eps
        self._counts: dict[str, int] = {}
        self._m: Values = {}
        self._v: Values = {}

    def step(self, gradients: Mapping[str, Tensor]) -> tuple[Values | None, Values]:
        """See `Graft`."""
        by_count: dict[int, list[str]] = defaultdict(list)  # one, unless some had no gradient
        for name, gradient in gradients.items():
            if name not in self._m:
                self._m[name] = torch.zeros_like(gradient)
                self._v[name] = torch.zeros_like(gradient)
            self._counts[name] = self._counts.get(name, 0) + 1
            by_count[self._counts[name]].append(name)
        steps: Values = {}
        averages: Values = {}
        for count, names in by_count.items():
            own = [gradients[name] for name in names]
            m, v = [self._m[name] for name in names], [self._v[name] for name in names]
            if device.is_gpu(own[0]):
                averages.update(zip(names, m, strict=True))
                steps.update(zip(names, self._fused(own, m, v, count), strict=True))
                continue
            torch._foreach_lerp_(m, own, 1 - self._beta1)
            torch._foreach_mul_(v, self._beta2)
            torch._foreach_addcmul_(v, own, own, value=1 - self._beta2)
            mean = torch._foreach_div(m, 1 - self._beta1**count)
            scale = torch._foreach_div(v, 1 - self._beta2**count)
            torch._foreach_sqrt_(scale)
            torch._foreach_add_(scale, self._eps)
            averages.update(zip(names, mean, strict=True))
            steps.update(zip(names, torch._foreach_div(mean, scale), strict=True))
        return steps, averages

    def _fused(
        self, own: list[Tensor], m: list[Tensor], v: list[Tensor], count: int
    ) -> list[Tensor]:
        """The same in one pass over memory, by torch's own Adam: steps of rate -1 from zeros.

        Averages are not divided by 1 - β₁ᵗ there: what is preconditioned gets another length.
        """
        steps = [torch.empty_like(each) for each in own]
        torch._foreach_zero_(steps)
        number = torch.full((), float(count), dtype=torch.float32, device=own[0].device)
        torch._fused_adam_(
            steps,
            own,
            m,
            v,
            [],
            [number] * len(steps),
            lr=-1.0,
            beta1=self._beta1,
            beta2=self._beta2,
            weight_decay=0.0,
            eps=self._eps,
            amsgrad=False,
            maximize=False,
        )
        return steps

    def tensors(self, names: Iterable[str]) -> dict[str, Tensor]:
        """See `Graft`."""
        found = {}
        for name in names:
            if name in self._m:
                found[f"m.{name}"], found[f"v.{name}"] = self._m[name], self._v[name]
                found[f"count.{name}"] = torch.tensor(self._counts[name])
        return found

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """See `Graft`."""
        for key, value in tensors.items():
            kind, _, name = key.partition(".")
            match kind:
                case "m":
                    self._m[name] = value
                case "v":
                    self._v[name] = value
                case "count":
                    self._counts[name] = int(value)
                case _:
                    raise BadInput(f"expected the state of Adam, found {key!r}")


class Plain:
    """SGD, whose step is the gradient; or nothing, where K-FAC's own length is to be kept."""

    def __init__(self, *, has_step: bool) -> None:
        self._has_step = has_step

    def step(self, gradients: Mapping[str, Tensor]) -> tuple[Values | None, Values]:
        """See `Graft`."""
        values = dict(gradients)
        return (values if self._has_step else None), values

    def tensors(self, names: Iterable[str]) -> dict[str, Tensor]:
        """See `Graft`."""
        return {}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """See `Graft`."""
        if tensors:
            raise BadInput(
                f"the state is of a run with another `graft`: it holds {sorted(tensors)[0]!r}"
            )


def graft_of(config: KFACConfig) -> Graft:
    """The optimizer to graft, fresh."""
    match config.graft:
        case "adam":
            return Adam(config)
        case "sgd":
            return Plain(has_step=True)
        case "none":
            return Plain(has_step=False)
    raise AssertionError(f"no rule for graft={config.graft!r}")
