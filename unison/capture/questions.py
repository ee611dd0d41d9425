"""Torch functions that ask about a parameter, or give its values up: none of them is a use."""

import torch
from torch import Tensor

# They give the values up on purpose, or read none: what comes out is not followed.
UNFOLLOWED = {
    Tensor.detach,
    torch.detach,
    Tensor.data.__get__,  # type: ignore[attr-defined]
    torch.zeros_like,
    torch.ones_like,
    torch.empty_like,
    Tensor.new_zeros,
    Tensor.new_ones,
    Tensor.new_empty,
    Tensor.new_tensor,
}

# Questions about the tensor itself, asked often.
FACTS = {
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.stride,
    Tensor.is_contiguous,
    Tensor.is_floating_point,
    torch.is_floating_point,
    Tensor.__len__,
    *(
        getattr(Tensor, name).__get__
        for name in (
            *("shape", "ndim", "dtype", "device", "layout", "requires_grad", "is_leaf", "grad"),
            *("grad_fn", "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_nested"),
        )
    ),
}
