"""Parameters that PyTorch's FSDP2 (or `distribute_tensor`) has split: each rank's part is a box."""

from typing import Any

import torch
from torch import Tensor, nn

from unison.errors import UnsupportedOperation
from unison.rng import Box


def give_memory(module: nn.Module, device: torch.device | None) -> None:
    """Give the DTensors of a module that have no memory some, uninitialised."""
    from torch.distributed.tensor import DTensor

    def with_memory(tensor: Tensor) -> Tensor:
        if not (isinstance(tensor, DTensor) and tensor.is_meta):
            return tensor
        return torch.empty_like(tensor, device=device or tensor.device_mesh.device_type)

    # As `to_empty` does it: FSDP2 watches for this call and adopts the new tensors.
    module._apply(with_memory)


def local_box(tensor: Any, name: str) -> Box:
    """Return which part of the whole a rank's part of a DTensor is."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if not all(type(placement) in (Replicate, Shard) for placement in tensor.placements):
        raise UnsupportedOperation(
            f"{name!r} is placed as {tensor.placements}; only Replicate and Shard parts are boxes"
        )
    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    # An empty part's offset may lie beyond the end.
    start = tuple(min(a, n) for a, n in zip(offset, tensor.shape, strict=True))
    stop = tuple(a + size for a, size in zip(start, shape, strict=True))
    return Box(tuple(tensor.shape), start, stop)
