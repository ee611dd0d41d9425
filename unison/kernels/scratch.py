"""Memory that Triton asks for at a launch: for the descriptors that programs make themselves."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import triton
from torch import Tensor

try:
    from triton.runtime._allocation import _allocator
except ImportError:  # a Triton that keeps its allocator elsewhere
    _allocator = None


def _allocate(size: int, alignment: int, stream: int | None) -> Tensor:
    """Return memory on the current device; torch aligns by more than any descriptor needs."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


@contextmanager
def scratch() -> Iterator[None]:
    """Let launches in this block have memory, and leave the user's own allocator as it was.

    What is launched is done with it before the stream gives it to the next: torch's rule for all
    memory, in a CUDA graph too.
    """
    if _allocator is None:
        triton.set_allocator(_allocate)
        yield
        return
    token = _allocator.set(_allocate)
    try:
        yield
    finally:
        _allocator.reset(token)
