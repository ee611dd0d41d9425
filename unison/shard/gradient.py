"""Gradients of shards: tensors that refuse what would be silently wrong on a part."""

from collections.abc import Callable
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


class ShardGradient(Tensor):
    """A rank's part of a gradient. It acts as a plain tensor, but has no norm of its own.

    A norm of parts is the norm of the whole only after a sum over ranks; torch's own functions do
    not know that and would clip each rank by another factor.
    """

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Refuse norms; let everything else work on plain tensors."""
        if func in _NORMS:
            raise UnsupportedOperation(
                "the norm of one rank's part of a gradient is not the gradient's norm; use "
                "unison.clip_grad_norm_(module, max_norm) or unison.grad_norm(module) on every rank"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def as_shard_gradient(part: Tensor, world_size: int) -> Tensor:
    """Mark a part of a gradient; with one rank the part is the whole and stays plain."""
    return part if world_size == 1 else part.as_subclass(ShardGradient)
