"""What is done otherwise on a GPU, and why.

* Sizes that are no multiple of 8 make products several times slower there: pad them.
* bfloat16 and float16 numbers have exact products in float32, which its matrix units add up in
  float32: as exact as products of wide copies, and ten times as fast.
"""

import torch
from torch import Tensor

ALIGNED = 8  # elements that matrix units load at once


def is_gpu(value: Tensor) -> bool:
    """Whether a tensor is on a GPU."""
    return value.is_cuda


def padding_of(size: int, like: Tensor) -> int:
    """Rows or columns of zeros with which products of this size are fast; none on a CPU."""
    return -size % ALIGNED if is_gpu(like) else 0


def is_half(value: Tensor) -> bool:
    """Whether `wide_product` takes a tensor as it is."""
    return is_gpu(value) and value.dtype in (torch.bfloat16, torch.float16)


def wide_product(left: Tensor, right: Tensor) -> Tensor:  # [..., n, k], [..., k, m] -> [..., n, m]
    """The float32 product of matrices of halves, or of batches of them."""
    if not left.is_cuda:
        return left.float() @ right.float()
    product = torch.mm if left.ndim == 2 else torch.bmm
    return product(left, right, out_dtype=torch.float32)
