"""How a model lies on the ranks, behind one face for the training step."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import unison
from unison.errors import BadInput
from unison.shard import find_blocks

DEFAULT_REPLICAS = 2


class Parallel:
    """A model as the ranks hold it: sharded, copied, or alone.

    Args:
        model: The model, which may have been built without memory.
        shard: One of `unison.config.SHARDINGS`.
        reducer: How gradients are summed.
        world_size: Number of ranks.
        replicas: Copies of the sharded model, for `"hybrid"`.
        device: Where it computes; by default where it is.
        fill: Gives a model that was built without memory its values; called once it is known what
            of it this rank holds.
        sums_gradients: Whether what holds the model sums the ranks' gradients. In a private run
            `PrivacyEngine` does.

    Attributes:
        model: The model itself, whose parameters the optimizer takes.
        module: What is called: the model, or what torch wrapped around it. Keep no reference to it.
        gradient_scale: What a loss of `unison.batch_mean` is multiplied with before its backward
            pass: DDP divides the summed gradient by the number of ranks, and this undoes it.
    """

    def __init__(
        self,
        model: nn.Module,
        shard: str,
        *,
        reducer: str,
        world_size: int,
        replicas: int | None = None,
        device: torch.device | None = None,
        fill: Callable[[], object] = lambda: None,
        sums_gradients: bool = True,
    ) -> None:
        self.model = model
        self.gradient_scale = 1
        self._sums_gradients, self._is_ordered = sums_gradients, reducer == "ordered"
        self._is_sharded = shard in ("full", "zero2", "hybrid", "fsdp2")
        self.module: nn.Module = model
        device_type = (device or next(model.parameters()).device).type
        match shard:
            case "full" | "zero2" | "hybrid":
                mesh = None
                if shard == "hybrid":
                    mesh = hybrid_mesh(device_type, world_size, replicas or DEFAULT_REPLICAS)
                unison.auto_shard(
                    model,
                    mesh=mesh,
                    reshard_after_forward=shard != "zero2",
                    reducer=reducer,
                    gradient_divisor=1,
                )
                fill()
            case "fsdp2":
                shard_with_fsdp2(model, init_device_mesh(device_type, (world_size,)), reducer, fill)
            case "ddp":
                fill()
                self.module = DistributedDataParallel(model)
                if sums_gradients:
                    self.gradient_scale = world_size
            case "none":
                if world_size > 1:
                    raise BadInput(
                        f"shard 'none' is for one rank, found {world_size}; use full, zero2, "
                        "hybrid, fsdp2 or ddp"
                    )
                fill()
            case other:
                raise AssertionError(f"no rule for shard {other!r}")

    def __call__(self, *args: Any) -> Tensor:
        """Run the model's forward."""
        return self.module(*args)

    def passes_on(self, is_last: bool) -> AbstractContextManager:
        """Around a backward pass: whether ranks sum their gradients in it."""
        module, waits = self.module, self._sums_gradients and not is_last
        if waits and isinstance(module, DistributedDataParallel):
            return module.no_sync()
        return nullcontext()

    def release(self) -> None:
        """Let go of what torch wrapped around the model, while the ranks are still connected.

        DDP holds the process group; freed after the ranks have parted, the group's destructor waits
        for threads that wait for the interpreter.
        """
        self.module = self.model

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Bound the gradient's norm and return what it was; every rank must call this."""
        if self._is_sharded:
            return unison.clip_grad_norm_(self.model, max_norm).item()
        if self._is_ordered:
            return _clip_as_on_shards(self.model, max_norm)
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm).item()


@torch.no_grad()
def _clip_as_on_shards(model: nn.Module, max_norm: float) -> float:
    """Bound the gradient's norm to the bit as `unison.clip_grad_norm_` does on shards."""
    norm = unison.grad_norm(model)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(factor.to(parameter.grad.device, parameter.grad.dtype))
    return norm.item()


def hybrid_mesh(device_type: str, world_size: int, replicas: int) -> DeviceMesh:
    """Arrange the ranks as copies of a sharded model, neighbours within one copy.

    Raises:
        BadInput: If the ranks do not make equal copies.
    """
    if world_size % replicas:
        raise BadInput(
            f"replicas={replicas} must divide the number of ranks, {world_size}; pass another "
            "--replicas or --nproc"
        )
    return init_device_mesh(
        device_type, (replicas, world_size // replicas), mesh_dim_names=("replicate", "shard")
    )


def shard_with_fsdp2(
    model: nn.Module, mesh: DeviceMesh, reducer: str, fill: Callable[[], object]
) -> None:
    """Put the repeated blocks of a model, then the model, under torch's own `fully_shard`.

    Gradients are summed and not divided: `unison.batch_mean` has divided by the global batch.
    """
    from torch.distributed.fsdp import FSDPModule, fully_shard  # it takes a second to import

    for block in find_blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    fill()
    match reducer:
        case "ordered":
            unison.use_ordered_reduction(model)
        case "fast":
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.set_gradient_divide_factor(1.0)
                    # Otherwise a factor other than the world size becomes a kind of reduction that
                    # gloo does not have.
                    module.set_force_sum_reduction_for_comms(True)
        case other:
            raise AssertionError(f"no rule for the reducer {other!r}")
