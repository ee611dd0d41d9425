"""Cross-entropy of rows of logits for CUDA in Triton: one program per row, one read of it.

A row is read in blocks. All but the last are whole, and are read and written without a mask:
a mask that ends at an odd place would let Triton load element by element.
"""

# Triton's own annotations do not describe what its compiler accepts.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from unison.kernels.available import on_device_of

LARGEST_BLOCK = 4096  # columns


@triton.jit
def _joined(top, total, x):
    """Take a block into the largest element so far and the sum of exp(x - largest)."""
    new_top = tl.maximum(top, tl.max(x, 0))
    # A row may begin with -inf only: there is nothing to take away yet.
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    return new_top, total * tl.exp(top - base) + tl.sum(tl.exp(x - base), 0)


@triton.jit
def _statistics(
    logits, labels, lse, losses, num_columns, row_stride, ignore_index, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    first = logits + row * row_stride
    columns = tl.arange(0, BLOCK)
    num_whole = num_columns // BLOCK * BLOCK
    top = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    for start in range(0, num_whole, BLOCK):
        x = tl.load(first + start + columns).to(tl.float32)
        top, total = _joined(top, total, x)
    if num_whole < num_columns:
        is_inside = num_whole + columns < num_columns
        x = tl.load(first + num_whole + columns, mask=is_inside, other=float("-inf"))
        top, total = _joined(top, total, x.to(tl.float32))
    label = tl.load(labels + row)
    is_known = (label >= 0) & (label < num_columns)
    picked = tl.load(first + label, mask=is_known, other=float("nan")).to(tl.float32)
    log_total = tl.log(total)
    # Not lse - picked, which cancels where the label has nearly all of the probability.
    loss = tl.where(label == ignore_index, 0.0, log_total + (top - picked))
    tl.store(losses + row, loss)
    tl.store(lse + row, top + log_total)


@triton.jit
def _slope(x, columns, label, row_lse, scale, is_counted):
    """Return the gradient of some logits of a row."""
    share = tl.exp(x.to(tl.float32) - row_lse) - tl.where(columns == label, 1.0, 0.0)
    return tl.where(is_counted, share * scale, 0.0)  # an ignored row may hold NaN


@triton.jit
def _gradient(
    logits, labels, lse, g, out, out_stride, num_columns, row_stride, ignore_index,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    first = logits + row * row_stride
    out += row * out_stride
    dtype: tl.constexpr = logits.dtype.element_ty
    block = tl.arange(0, BLOCK)
    num_whole = num_columns // BLOCK * BLOCK
    label = tl.load(labels + row)
    is_counted = label != ignore_index
    row_lse = tl.load(lse + row)
    scale = tl.load(g + row)
    scale = tl.where((label >= 0) & (label < num_columns), scale, float("nan"))
    for start in range(0, num_whole, BLOCK):
        columns = start + block
        x = tl.load(first + columns)
        tl.store(out + columns, _slope(x, columns, label, row_lse, scale, is_counted).to(dtype))
    if num_whole < num_columns:
        columns = num_whole + block
        is_inside = columns < num_columns
        x = tl.load(first + columns, mask=is_inside, other=0.0)
        slope = _slope(x, columns, label, row_lse, scale, is_counted)
        tl.store(out + columns, slope.to(dtype), mask=is_inside)


def launch_options(num_columns: int) -> dict[str, Any]:
    """Return constants and launch options for rows of this length: by the shape alone."""
    block = min(LARGEST_BLOCK, max(128, triton.next_power_of_2(num_columns)))
    # Fused multiply-adds by name: what Triton does unasked changes with its version.
    return {"BLOCK": block, "num_warps": 8 if block >= 2048 else 4, "enable_fp_fusion": True}


def statistics(logits: Tensor, labels: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """As `statistics_reference`, in float32."""
    lse = logits.new_empty(len(logits), dtype=torch.float32)
    losses = torch.empty_like(lse)
    _launch(_statistics, logits, (labels.contiguous(), lse, losses), ignore_index)
    return lse, losses


def gradient(
    logits: Tensor, labels: Tensor, lse: Tensor, g: Tensor, ignore_index: int, out: Tensor
) -> None:
    """As `gradient_reference`, in float32."""
    assert out.stride(1) == 1 or out.shape[1] == 1, out.stride()
    rows = (each.contiguous() for each in (labels, lse, g))  # gradients of means are expanded
    _launch(_gradient, logits, (*rows, out, out.stride(0)), ignore_index)


def _launch(kernel: Any, logits: Tensor, rest: tuple[Any, ...], ignore_index: int) -> None:
    assert logits.stride(1) == 1 or logits.shape[1] == 1, logits.stride()
    num_rows, num_columns = logits.shape
    if num_rows == 0:
        return
    with on_device_of(logits):
        kernel[(num_rows,)](
            logits,
            *rest,
            num_columns,
            logits.stride(0),
            ignore_index,
            **launch_options(num_columns),
        )
