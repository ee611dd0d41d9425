"""Facts of tensors: dtype, shape and the like, and the torch functions that ask for them."""

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor


class TensorFacts:
    """What is known of tensors without their values, to be compared with others later.

    It holds no tensor.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._facts = list(map(_facts_of, tensors))

    def hold_for(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these are as many tensors as the known ones, each like the one in its place.

        Alike in dtype, device, layout, shape, strides and `requires_grad`.
        """
        return self._facts == list(map(_facts_of, tensors))


def _facts_of(tensor: Tensor) -> tuple[Any, ...]:
    strides = tensor.stride() if tensor.layout is torch.strided else None  # the others have none
    return *_attributes(tensor), strides


_attributes = attrgetter("requires_grad", "dtype", "device", "layout", "shape")


# --- functions that ask about a tensor ------------------------------------------------------------

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
