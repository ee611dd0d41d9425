"""What one rank has, on all of them."""

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor

from unison.shard.ranks import Ranks


def tensors_from(ranks: Ranks, source: int, tensors: Mapping[str, Tensor] | None) -> dict[str, Any]:
    """Named tensors of one rank, as copies on the CPU of every rank; a collective.

    Args:
        ranks: Everyone.
        source: The rank that has them.
        tensors: On that rank, the tensors; None on others.
    """
    own = None if tensors is None else {key: each.cpu().clone() for key, each in tensors.items()}
    return value_from(ranks, source, own)


def value_from(ranks: Ranks, source: int, value: Any) -> Any:
    """One rank's value, which can be pickled, on every rank; a collective."""
    if ranks.size == 1:
        return value
    found: list[Any] = [value]
    dist.broadcast_object_list(found, group=ranks.group, group_src=source)
    return found[0]
