"""Rows of logits: their losses, and their gradient, beside them or in their place.

The backend is chosen by device and dtype alone: the backends round differently, and a step must
not.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from unison import check
from unison.errors import BadInput
from unison.kernels.cross_entropy.reference import wide_dtype

_TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_forced: str | None = None


@contextmanager
def using_backend(name: str) -> Iterator[None]:
    """Force one backend ("reference" or "triton") inside the context, for comparisons."""
    global _forced
    check.one_of(["reference", "triton"], backend=name)
    previous, _forced = _forced, name
    try:
        yield
    finally:
        _forced = previous


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def _backend(logits: Tensor) -> ModuleType:
    name = _forced
    if name is None:
        is_suited = logits.is_cuda and logits.dtype in _TRITON_DTYPES and _has_triton()
        name = "triton" if is_suited else "reference"
    return import_module(f"unison.kernels.cross_entropy.{name}")


@torch.library.custom_op("unison::cross_entropy_statistics", mutates_args=())
def _statistics(logits: Tensor, labels: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    if labels.device.type == "cpu":  # a GPU would have to be waited for; there the loss is NaN
        _refuse_unknown(labels, logits.shape[1], ignore_index)
    return _backend(logits).statistics(logits, labels, ignore_index)


@_statistics.register_fake
def _(logits: Tensor, labels: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    dtype = wide_dtype(logits)
    rows = logits.shape[0]
    return logits.new_empty(rows, dtype=dtype), logits.new_empty(rows, dtype=dtype)


@torch.library.custom_op("unison::cross_entropy_gradient_", mutates_args=("logits",))
def _gradient_(logits: Tensor, labels: Tensor, lse: Tensor, g: Tensor, ignore_index: int) -> None:
    _backend(logits).gradient(logits, labels, lse, g, ignore_index, logits)


@_gradient_.register_fake
def _(logits: Tensor, labels: Tensor, lse: Tensor, g: Tensor, ignore_index: int) -> None:
    return None


@torch.library.custom_op("unison::cross_entropy_gradient", mutates_args=())
def _gradient(logits: Tensor, labels: Tensor, lse: Tensor, g: Tensor, ignore_index: int) -> Tensor:
    out = logits.new_empty(logits.shape)
    _backend(logits).gradient(logits, labels, lse, g, ignore_index, out)
    return out


@_gradient.register_fake
def _(logits: Tensor, labels: Tensor, lse: Tensor, g: Tensor, ignore_index: int) -> Tensor:
    return logits.new_empty(logits.shape)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: tuple[Tensor, Tensor]) -> None:
    logits, labels, ctx.ignore_index = inputs
    ctx.save_for_backward(logits, labels, output[0])
    ctx.mark_non_differentiable(output[0])


def _backward(ctx: Any, _: Tensor, g: Tensor) -> tuple[Tensor, None, None]:
    return _gradient(*ctx.saved_tensors, g, ctx.ignore_index), None, None


_statistics.register_autograd(_backward, setup_context=_keep)


def statistics(logits: Tensor, labels: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Return log-sum-exp and loss of each row, float32 or float64: [rows] each.

    Losses have a gradient.

    Args:
        logits: [rows, vocab], elements of a row side by side.
        labels: [rows], int64, contiguous.
        ignore_index: The label of rows that have loss 0.
    """
    return _statistics(logits, labels, ignore_index)


def gradient_(logits: Tensor, labels: Tensor, lse: Tensor, g: Tensor, ignore_index: int) -> Tensor:
    """Put g · (softmax − onehot) in the place of the logits, and return them.

    Args:
        logits: [rows, vocab], elements of a row side by side.
        labels: [rows], int64, contiguous.
        lse: [rows], as `statistics` returned it.
        g: The gradient of each row's loss [rows], of the dtype of `lse`, contiguous.
        ignore_index: The label of rows that become 0, whatever they hold.
    """
    _gradient_(logits, labels, lse, g, ignore_index)
    return logits


def _refuse_unknown(labels: Tensor, vocab: int, ignore_index: int) -> None:
    is_unknown = ((labels < 0) | (labels >= vocab)) & (labels != ignore_index)
    if bool(is_unknown.any()):
        found = int(labels[is_unknown][0])
        raise BadInput(
            f"expected labels from 0 to {vocab - 1}, or {ignore_index} where a token does not "
            f"count, found {found}"
        )
