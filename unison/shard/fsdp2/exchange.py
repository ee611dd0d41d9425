"""The ordered sum over ranks, as FSDP2 calls it."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unison.shard.tree import TreeSum


class OrderedReduceScatter:
    """All-to-all, then the canonical tree: what FSDP2 calls in place of its reduce-scatter.

    The bytes on the wire are those of a reduce-scatter. FSDP2 does not call it on one rank, where
    the subtree is the whole tree.

    Args:
        levels: Gives each rank's level in the tree: it sends the sum of 2**level granules.
    """

    def __init__(self, levels: Callable[[], Sequence[int]]) -> None:
        self._levels = levels

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Make a buffer of its own for every call."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,  # [n]
        input_tensor: Tensor,  # [ranks * n], one run per owner
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Fill `output_tensor` with this rank's part of the sum."""
        if op != dist.ReduceOp.SUM:
            raise AssertionError(f"expected FSDP2 to ask for a plain sum, found {op}")
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        total = TreeSum()
        for row, level in zip(received.view(group.size(), -1), self._levels(), strict=True):
            total.push(row, level)
        result = total.finish()
        assert result is not None
        output_tensor.copy_(result)
