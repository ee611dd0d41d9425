"""What a pass may leave without noise: terms of a loss that do not depend on data, and buffers.

Terms such as `loss + 0.01 * sum(p.square().sum() ...)` need no clipping and no noise. Their
gradients reach parameters past the capture, and are added to the noisy gradients as they are.
Buffers are watched in every pass: what the forward pass writes there is saved without noise.
"""

from collections.abc import Callable, Iterator, Sequence
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from unison.errors import UnsupportedOperation
from unison.parallel import ParallelAdapter, ShardedParam
from unison.privacy.arguments import refuse_gradient
from unison.privacy.loss_check import LossCheck


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


class BufferWatch:
    """Refuses buffers that a pass writes to, unless it is known that they hold nothing of the data.

    Whether values depend on the batch is found out where the module is checked; here versions are
    compared, which takes microseconds, so that what is written in a later pass for the first time
    is refused before that pass is released. (Writing through `.data` leaves no version; the check
    compares values, and sees it.)

    Args:
        is_allowed: Whether a buffer of this name may be written.
    """

    def __init__(self, is_allowed: Callable[[str], bool]) -> None:
        self._is_allowed = is_allowed
        self._modules: Sequence[tuple[str, nn.Module]] = ()
        self._before: dict[int, tuple[Tensor, int]] = {}  # by id; held, so that no id comes again

    def begin(self, modules: Sequence[tuple[str, nn.Module]]) -> None:
        """Note the versions of all buffers.

        Args:
            modules: All modules, by name.
        """
        self._modules = modules
        self._before = {id(value): (value, _version(value)) for _, _, value in self._buffers()}

    def check(self) -> None:
        """Compare them.

        Raises:
            UnsupportedOperation: Naming a buffer that was written.
        """
        for path, key, value in self._buffers():
            _, version = self._before.get(id(value), (value, None))
            name = f"{path}.{key}" if path else key
            if version != _version(value) and not self._is_allowed(name):
                raise UnsupportedOperation(
                    f"this pass wrote to the buffer {name!r}, which is saved with the model and "
                    "gets no noise; passes that were checked did not. Keep statistics of the data "
                    "out of buffers, or say that it may be published: make_private("
                    f"public_buffers=[{name!r}])"
                )

    def _buffers(self) -> Iterator[tuple[str, str, Tensor]]:
        for path, module in self._modules:
            for key, value in module._buffers.items():
                if value is not None:
                    yield path, key, value


def _version(value: Tensor) -> int:
    return 0 if value.is_inference() else value._version
