"""Memory for per-sample gradients, used again from batch to batch."""

import math

import torch
from torch import Tensor


class Storage:
    """Lends tensors, and keeps what is given back for the next who asks.

    Per-sample gradients are large, and a CPU's allocator returns large blocks to the operating
    system at once: to get them again costs a page fault per 4 KiB, about as much time as to fill
    them by a matrix product. A GPU's allocator keeps its blocks, so there nothing is kept here.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[str, int, torch.dtype], Tensor] = {}

    def lend(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return a tensor of any content. Nobody else holds it until it is given back."""
        found = self._free.pop((name, math.prod(shape), dtype), None)
        if found is None or device.type != "cpu":
            self._free = {key: value for key, value in self._free.items() if key[0] != name}
            return torch.empty(shape, dtype=dtype, device=device)
        return found.view(shape)

    def give_back(self, name: str, tensor: Tensor) -> None:
        """Keep a tensor for the next batch."""
        if tensor.device.type == "cpu":
            self._free[name, tensor.numel(), tensor.dtype] = tensor

    def clear(self) -> None:
        """Give the memory up."""
        self._free.clear()
