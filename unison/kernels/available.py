"""Whether compiled kernels for CUDA can run here."""

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

TAKEN = (torch.bfloat16, torch.float16, torch.float32)  # float64 goes through plain torch


@cache
def has_triton() -> bool:
    """Whether Triton is installed."""
    return find_spec("triton") is not None


def takes(*tensors: Tensor) -> bool:
    """Whether the Triton kernels take these tensors: on CUDA, and no wider than float32."""
    return has_triton() and all(each.is_cuda and each.dtype in TAKEN for each in tensors)
