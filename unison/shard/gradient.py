"""Gradients of shards: tensors that refuse what would be silently wrong on a part."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from unison.errors import UnsupportedOperation

# What torch.nn.utils.clip_grad_norm_ and get_total_norm call on gradients.
_NORMS = {
    torch._foreach_norm,
    torch.linalg.vector_norm,
    torch.linalg.norm,
    torch.norm,
    Tensor.norm,
}
# What torch.amp.GradScaler calls to decide whether to skip a step.
_FINITE_CHECK = torch._amp_foreach_non_finite_check_and_unscale_

_may_decide = False


@contextmanager
def allow_rank_decisions() -> Iterator[None]:
    """Let a rank look for infinities in its part; the caller shares what it finds."""
    global _may_decide
    before, _may_decide = _may_decide, True
    try:
        yield
    finally:
        _may_decide = before


class ShardGradient(Tensor):
    """A rank's part of a gradient. It acts as a plain tensor, but speaks for itself alone.

    A norm of parts is the norm of the whole only after a sum over ranks, and an infinity in one
    part must stop all ranks; torch's own functions do not know that.
    """

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Refuse what only the whole can tell; let the rest work on plain tensors."""
        if func in _NORMS:
            raise UnsupportedOperation(
                "the norm of one rank's part of a gradient is not the gradient's norm; use "
                "unison.clip_grad_norm_(module, max_norm) or unison.grad_norm(module) on every rank"
            )
        if func is _FINITE_CHECK and not _may_decide:
            raise UnsupportedOperation(
                "torch.amp.GradScaler would let each rank decide for itself whether to skip a "
                "step; use unison.GradScaler(module)"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def as_shard_gradient(part: Tensor) -> Tensor:
    """Mark a part of a gradient; where one rank has the whole, it stays plain."""
    return part.as_subclass(ShardGradient)
