"""How a model lies on the ranks, behind one face for the training step."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import unison
from unison.errors import BadInput


class Parallel:
    """A model as the ranks hold it: sharded, copied, or alone.

    Attributes:
        model: The module itself, whose parameters the optimizer takes.
        gradient_scale: What a loss of `unison.batch_mean` is multiplied with before its backward
            pass: DDP divides the summed gradient by the number of ranks, and this undoes it.
    """

    def __init__(self, model: nn.Module, shard: str, *, reducer: str, world_size: int) -> None:
        self.model = model
        self.gradient_scale = 1
        self._is_sharded = shard in ("full", "zero2")
        self._module: nn.Module = model
        match shard:
            case "full" | "zero2":
                unison.auto_shard(
                    model,
                    reshard_after_forward=shard == "full",
                    reducer=reducer,
                    gradient_divisor=1,
                )
            case "ddp":
                self._module = DistributedDataParallel(model)
                self.gradient_scale = world_size
            case "none":
                if world_size > 1:
                    raise BadInput(
                        f"shard 'none' is for one rank, found {world_size}; use full, zero2 or ddp"
                    )
            case other:
                raise AssertionError(f"no rule for shard {other!r}")

    def __call__(self, *args: Any) -> Tensor:
        """Run the model's forward."""
        return self._module(*args)

    def passes_on(self, is_last: bool) -> AbstractContextManager:
        """Around a backward pass: whether ranks sum their gradients in it."""
        if isinstance(self._module, DistributedDataParallel) and not is_last:
            return self._module.no_sync()
        return nullcontext()

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Bound the gradient's norm and return what it was; every rank must call this."""
        if self._is_sharded:
            return unison.clip_grad_norm_(self.model, max_norm).item()
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm).item()
