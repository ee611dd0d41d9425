"""Terms of a loss that do not depend on data: `loss + 0.01 * sum(p.square().sum() ...)`.

They need no clipping and no noise. Their gradients reach parameters past the capture, and are added
to the noisy gradients as they are.
"""

from collections.abc import Mapping, Sequence
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from unison.errors import UnsupportedOperation
from unison.parallel import ParallelAdapter, ShardedParam
from unison.privacy.refuse import refuse_gradient
from unison.privacy.separation import LossCheck


class PublicTerms:
    """Keeps the gradients of public terms of one logical batch.

    Guarantees:
        A gradient is kept only if the loss of the running pass was found to have terms whose
        gradients are the same bits for any values of the batch; every other gradient that reaches a
        parameter raises.

    Args:
        owner: Who holds the parameters.
        loss_check: Knows whether the loss of the running pass has such terms.
    """

    def __init__(self, owner: ParallelAdapter, loss_check: LossCheck) -> None:
        self._owner, self._loss_check = owner, loss_check
        self._kept: dict[str, Tensor] = {}
        self._without_grad: set[int] = set()

    def hooks(self, name: str, parameter: nn.Parameter) -> list[RemovableHandle]:
        """Put hooks on a parameter: gradients that reach it are kept, or refused.

        They know this object weakly: hooks of tensors are out of the garbage collector's sight.
        """
        terms, own = ref(self), ref(parameter)

        def take(gradient: Tensor) -> Tensor | None:
            held, parameter = terms(), own()
            if held is None or parameter is None:
                return None
            held._take(name, parameter, gradient)
            return torch.zeros_like(gradient)

        def after(parameter: Tensor) -> None:
            held = terms()
            if held is not None and id(parameter) in held._without_grad:
                held._without_grad.discard(id(parameter))
                parameter.grad = None  # undo what autograd did with the zeros

        return [
            parameter.register_hook(take),
            parameter.register_post_accumulate_grad_hook(after),
        ]

    def _take(self, name: str, parameter: nn.Parameter, gradient: Tensor) -> None:
        if not self._loss_check.has_terms:
            refuse_gradient(name, gradient)
        if self._owner.everyone.size > 1 or parameter.shape != gradient.shape:
            raise UnsupportedOperation(
                f"the loss has a term of {name!r} that does not depend on the batch, and the "
                "module is trained on several ranks. Remedy: the optimizer's weight_decay, or "
                "add the term's gradient to parameter.grad before optimizer.step()"
            )
        # Each pass of a logical batch has the same term: it counts once.
        self._kept[name] = gradient.detach().clone()
        if parameter.grad is None:
            self._without_grad.add(id(parameter))

    def add(self, owned: Sequence[ShardedParam]) -> None:
        """Add what was kept to the noisy gradients, and forget it."""
        kept, self._kept = self._kept, {}
        for each in owned if kept else ():
            term = kept.get(each.name)
            if term is not None:
                assert each.parameter.grad is not None
                each.parameter.grad.add_(term)

    def drop(self) -> None:
        """Forget what was kept, with the logical batch."""
        self._kept = {}

    @property
    def kept(self) -> Mapping[str, Tensor]:
        """Gradients by name of the parameter."""
        return self._kept
