"""Where Triton kernels can run and on which tensors, and how plain torch cuts work into tiles."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from unison.torch_internals import machine_of

TAKEN = (torch.bfloat16, torch.float16, torch.float32)  # float64 goes through plain torch


@cache
def is_installed(package: str) -> bool:
    """Return whether a package can be imported."""
    return find_spec(package) is not None


@cache
def has_triton() -> bool:
    """Return whether Triton is installed."""
    return is_installed("triton")


@cache
def shared_bytes(device: torch.device) -> int:
    """Return how much shared memory a program may have; elsewhere than on CUDA there is no bound.

    228 KB less a few on the GPUs of data centres since 2022, 164 before, 100 on those of desktops.
    """
    if device.type != "cuda":
        return 1 << 30
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)


@cache
def loads_tiles(device: torch.device) -> bool:
    """Return whether the hardware itself loads tiles, by descriptors (TMA): GPUs since 2022."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def takes(*tensors: Tensor) -> bool:
    """Return whether the Triton kernels take these tensors: on CUDA, and no wider than float32.

    Or would, where a plan is of a GPU. Those of a graph that is being traced have no memory: what
    is computed with them is for its compiler to see.
    """
    for each in tensors:
        if not is_on_gpu(each) or each.dtype not in TAKEN or is_traced(each):
            return False
    return has_triton()


def is_on_gpu(x: Tensor) -> bool:
    """Return whether a tensor is on CUDA, or would be where a plan is of a GPU."""
    return x.is_cuda or (x.is_meta and machine_of(x.device) == "cuda")


def is_traced(x: Tensor) -> bool:
    """Return whether a tensor stands for others while a graph is made."""
    return isinstance(x, FakeTensor | FunctionalTensor)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums keep their digits: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def on_device_of(x: Tensor) -> AbstractContextManager:
    """Return a context in which kernels are launched on the device of x."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


@contextmanager
def plain_arithmetic(device: torch.device) -> Iterator[None]:
    """Compute in the dtypes that tensors have: no autograd, no autocast."""
    kind = device.type
    is_cast = kind != "meta" and torch.is_autocast_enabled(kind)
    with torch.no_grad(), torch.autocast(kind, enabled=False) if is_cast else nullcontext():
        yield


# Of a float64 tile: on a CPU it should stay in cache, and be small enough for the allocator to use
# its memory again (a page fault per 4 KiB costs more than the arithmetic). On a GPU it should be
# large beside the launch of a kernel.
_BYTES_PER_TILE = {"cpu": 2 << 20}
_BYTES_PER_TILE_ELSEWHERE = 64 << 20


def spans(total: int, size: int) -> list[slice]:
    """Cut range(total) into slices of at most `size`.

    >>> spans(5, 2)
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    return [slice(start, min(total, start + size)) for start in range(0, total, size)]


def num_per_tile(bytes_each: int, device: torch.device) -> int:
    """Return how many things of `bytes_each` make a tile, at least one."""
    total = _BYTES_PER_TILE.get(machine_of(device), _BYTES_PER_TILE_ELSEWHERE)
    return max(1, total // max(1, bytes_each))
