"""Per-sample gradients squared and combined: two operations, each one read of all gradients.

The backend is chosen by device, dtype and size alone, never by what ran before: the backends round
differently, and a step must not.
"""

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor

from unison.kernels.per_sample import reference

__all__ = ["squared_norms", "weighted_sum"]

# numba compiles for a second (once: the result is cached on disk), and small work is not worth it.
LEAST_ELEMENTS = 1 << 16
_COMPILED_DTYPES = (torch.float32, torch.float64)


@cache
def _compiled() -> ModuleType | None:
    if find_spec("numba") is None:
        return None
    return import_module("unison.kernels.per_sample.numba")


def _backend(x: Tensor) -> ModuleType:
    is_suited = x.device.type == "cpu" and x.dtype in _COMPILED_DTYPES
    if is_suited and x.numel() >= LEAST_ELEMENTS:
        return _compiled() or reference
    return reference


@torch.library.custom_op("unison::per_sample_squared_norms", mutates_args=())
def _squared_norms(x: Tensor) -> Tensor:
    return _backend(x).squared_norms(x)


@_squared_norms.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], dtype=torch.float64)


@torch.library.custom_op("unison::per_sample_weighted_sum", mutates_args=("out",))
def _weighted_sum(x: Tensor, weights: Tensor, out: Tensor) -> None:
    _backend(x).weighted_sum(x, weights, out)


@_weighted_sum.register_fake
def _(x: Tensor, weights: Tensor, out: Tensor) -> None:
    return None


def squared_norms(x: Tensor) -> Tensor:
    """Return Σ_i x[b, i]² of x [batch, numel]: [batch], float64, added in float64."""
    return _squared_norms(x.detach())


def weighted_sum(x: Tensor, weights: Tensor, out: Tensor) -> Tensor:
    """Write Σ_b weights[b] · x[b] to `out` [numel] and return it.

    Args:
        x: [batch, numel].
        weights: [batch], float64. A row of weight 0 is left out: it may hold NaN.
        out: [numel], float32 or float64. The sum is float64 and is rounded once, to its dtype.
    """
    assert weights.dtype == torch.float64, weights.dtype
    _weighted_sum(x.detach(), weights, out)
    return out
