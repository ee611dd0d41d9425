"""Which optimizers may follow K-FAC."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from unison.errors import BadInput

_ADAPTIVE = ("betas", "eps", "rho", "etas", "lambd")  # settings that only adaptive optimizers have


def is_adaptive(optimizer: Optimizer) -> bool:
    """Whether an optimizer scales elements by what it has seen of their gradients."""
    if isinstance(optimizer, SGD):
        return False
    return any(name in optimizer.defaults for name in _ADAPTIVE)


def refuse_adaptive(optimizer: Optimizer, graft: str) -> None:
    """Refuse an optimizer that would undo what K-FAC has done.

    Raises:
        BadInput: With what to use instead.
    """
    if graft != "none" and is_adaptive(optimizer):
        raise BadInput(
            f"graft={graft!r} gives the step its length and direction, and "
            f"{type(optimizer).__name__} would scale every element of it again: use "
            "torch.optim.SGD (momentum and weight decay are fine), with the learning rate that the "
            "grafted optimizer would have"
        )


def watch_optimizers(parameters: Iterable[Tensor], graft: str) -> RemovableHandle:
    """Refuse an adaptive optimizer when it is about to step any of the parameters."""
    ids = {id(each) for each in parameters}

    def check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if is_adaptive(optimizer) and any(
            id(each) in ids for group in optimizer.param_groups for each in group["params"]
        ):
            refuse_adaptive(optimizer, graft)

    return register_optimizer_step_pre_hook(check)
