"""Parameters that torch's own FSDP2 holds: distributed tensors, cut along dimension 0.

Nothing here imports `torch.distributed.tensor` or `torch.distributed.fsdp`, which take a second:
where nobody has imported them there is nothing of theirs to find.
"""

import itertools
import math
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from unison.errors import UnsupportedOperation
from unison.shard.ranks import Ranks
from unison.shard.sharded_tensor import ShardedTensor, gathered


def is_dtensor(value: Tensor) -> bool:
    """Whether a tensor is a distributed one."""
    tensor = sys.modules.get("torch.distributed.tensor")
    return tensor is not None and isinstance(value, tensor.DTensor)


def fsdp2_modules(module: nn.Module) -> list[tuple[str, Any]]:
    """The modules at and below one on which torch's `fully_shard` was called, with their paths."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return []
    return [(p, child) for p, child in module.named_modules() if isinstance(child, fsdp.FSDPModule)]


def show_shards(module: nn.Module) -> None:
    """Let an FSDP2 model's attributes be its sharded parameters.

    FSDP2 leaves the root's parameters full after a forward pass without a backward pass, and then
    `named_parameters()` shows those instead of what the optimizer holds.
    """
    for _, child in fsdp2_modules(module):
        child.reshard()


def mesh_of(parameter: Tensor, name: str) -> DeviceMesh:
    """The one-dimensional mesh over whose ranks a parameter's rows are spread.

    Raises:
        UnsupportedOperation: If the parameter lies on the ranks in any other way.
    """
    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    if mesh.ndim != 1 or not placements[0].is_shard(0):
        raise UnsupportedOperation(
            f"parameter {name!r} has the placements {tuple(placements)} on a mesh of shape "
            f"{tuple(mesh.shape)}; expected (Shard(dim=0),) on a mesh of one dimension. Use "
            "unison.fully_shard for other meshes"
        )
    return mesh


def element_ranges(parameter: Tensor, num_ranks: int) -> list[tuple[int, int]]:
    """Which elements [start, stop) of the flattened parameter each rank holds."""
    rows, *row = parameter.shape
    return row_ranges(rows, math.prod(row), num_ranks)


def row_ranges(rows: int, row_length: int, num_ranks: int) -> list[tuple[int, int]]:
    """Cut rows as torch.chunk does: equal runs, of which the last may be short or empty.

    >>> row_ranges(rows=5, row_length=10, num_ranks=4)
    [(0, 20), (20, 40), (40, 50), (50, 50)]
    """
    per_rank = -(-rows // num_ranks)
    edges = [min(rank * per_rank, rows) * row_length for rank in range(num_ranks + 1)]
    return list(itertools.pairwise(edges))


def local_part(value: Tensor) -> Tensor:
    """This rank's part of a tensor, in its own memory; a plain tensor is its own."""
    if isinstance(value, ShardedTensor):
        return value.local
    return value._local_tensor if is_dtensor(value) else value  # type: ignore[attr-defined]


@torch.no_grad()
def whole(value: Tensor, name: str) -> Tensor:
    """The whole of a tensor, on every rank; a collective if it is distributed.

    By our own gather: DTensor's crashes with gloo on CUDA tensors, and does not move what is
    offloaded to the device that the ranks exchange on.

    Raises:
        UnsupportedOperation: If it is spread in any other way than by rows, naming it.
    """
    if isinstance(value, ShardedTensor):
        return gathered(value)
    if not is_dtensor(value):
        return value.detach()
    mesh, part = mesh_of(value, name), local_part(value)
    rows, per_rank = value.shape[0], -(-value.shape[0] // mesh.size())
    sent = torch.zeros(per_rank, *value.shape[1:], dtype=value.dtype, device=mesh.device_type)
    sent[: part.shape[0]] = part
    full = sent.new_empty(mesh.size() * per_rank, *value.shape[1:])
    Ranks.of(mesh).gather(full, sent).wait()
    return full[:rows]
