"""Adam's averages of many gradients, and how long its steps would be, in one pass over memory.

K-FAC multiplies averaged gradients with inverses, many layers side by side, each with its bias as
one more column and columns of zeros after it. Averages lie in memory as these products read them:
rows of a mean are `stride` elements apart, and nothing is copied between a gradient and a product.

Every sum has a fixed order: a tile's by the layout of its registers, a tensor's over its tiles in
float64.
"""

# Triton's own annotations do not describe what its compiler accepts.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAssignmentType=false

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from unison.kernels.available import on_device_of
from unison.kernels.multi_tensor import on_device, tile_map
from unison.kernels.multi_tensor_triton import total_kernel

# Columns of the table, all int64.
GRADIENT, MEAN, VARIANCE, ROWS, COLUMNS, STRIDE = (tl.constexpr(i) for i in range(6))
WIDTH = tl.constexpr(6)
_LONG, _HIGH = (16, 256), (256, 16)  # tiles of tensors whose rows are loaded wide, and of others


@triton.jit
def _place(row, column, ALIGNED: tl.constexpr):
    """Return an address from the table; if aligned, a multiple of 16 bytes."""
    pointer = tl.load(row + column).to(tl.pointer_type(tl.float32))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _length(row, column, ALIGNED: tl.constexpr):
    """Return a number of elements from the table; if aligned, a multiple of 8.

    The compiler believes arithmetic, not hints on what was loaded: else it would load one by one.
    """
    number = tl.load(row + column)
    if ALIGNED:
        number = (number // 8) * 8
    return number


@triton.jit
def moments_kernel(
    table, tensors, first_tiles, squares, is_held, beta1, beta2, scale1, scale2, eps,
    HAS_FLAG: tl.constexpr, ALIGNED: tl.constexpr, HEIGHT: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    """One tile of Adam's averages, and Σ s² of its step s = m̂ / (√v̂ + ε), which is not written.

    Averages stay as they are where `is_held` is not 0.
    """
    program = tl.program_id(0)
    tensor = tl.load(tensors + program)
    row = table + tensor * WIDTH
    tile = program - tl.load(first_tiles + tensor)
    rows, columns = tl.load(row + ROWS), _length(row, COLUMNS, ALIGNED)
    across = tl.cdiv(columns, LENGTH)
    r = (tile // across) * HEIGHT + tl.arange(0, HEIGHT)[:, None]
    c = (tile % across) * LENGTH + tl.arange(0, LENGTH)[None, :]
    mask = (r < rows) & (c < columns)
    at = r * columns + c
    means = _place(row, MEAN, ALIGNED) + r * _length(row, STRIDE, ALIGNED) + c
    variances = _place(row, VARIANCE, ALIGNED) + at
    g = tl.load(_place(row, GRADIENT, ALIGNED) + at, mask=mask, other=0.0)
    m, v = tl.load(means, mask=mask, other=0.0), tl.load(variances, mask=mask, other=0.0)
    m += (1 - beta1) * (g - m)
    v = beta2 * v + (1 - beta2) * (g * g)
    step = m * scale1 / (tl.sqrt(v * scale2) + eps)
    tl.store(squares + program, tl.sum(tl.where(mask, step * step, 0.0)))
    if HAS_FLAG:
        mask = mask & (tl.zeros((HEIGHT, LENGTH), tl.float32) + tl.load(is_held) == 0.0)
    tl.store(means, m, mask=mask)
    tl.store(variances, v, mask=mask)


def _sides(mean: Tensor) -> tuple[int, int, int]:
    """Rows and columns of a mean, and how many elements its rows are apart."""
    if mean.is_contiguous():
        length = _LONG[1] if mean.numel() % _LONG[1] == 0 else mean.numel()
        return mean.numel() // length, length, length
    columns = 1
    for size, stride in zip(reversed(mean.shape[1:]), reversed(mean.stride()[1:]), strict=True):
        assert stride == columns, f"a mean must lie in rows, found strides {mean.stride()}"
        columns *= size
    return len(mean), columns, mean.stride(0)


def moments(
    gradients: Sequence[Tensor],
    means: Sequence[Tensor],
    variances: Sequence[Tensor],
    count: int,
    betas: tuple[float, float],
    eps: float,
    is_held: Tensor | None,
) -> Tensor:
    """See `multi_tensor.moments`; here means may lie in rows that are apart, and all is float32."""
    device, (beta1, beta2) = means[0].device, betas
    table = np.zeros((len(means), WIDTH.value), np.int64)
    for column, values in ((GRADIENT, gradients), (MEAN, means), (VARIANCE, variances)):
        table[:, column] = [each.data_ptr() for each in values]
    table[:, ROWS.value : STRIDE.value + 1] = [_sides(each) for each in means]
    is_aligned = (table[:, COLUMNS] % 8 == 0) & (table[:, STRIDE] % 8 == 0)
    for column in (GRADIENT, MEAN, VARIANCE):
        is_aligned &= table[:, column] % 16 == 0
    out = torch.empty(len(means), dtype=torch.float64, device=device)
    for aligned, (height, length) in ((True, _LONG), (False, _HIGH)):
        which = np.flatnonzero(is_aligned == aligned)
        if not len(which):
            continue
        own = table[which]
        counts = -(-own[:, ROWS] // height) * -(-own[:, COLUMNS] // length)
        tensors, first = tile_map(tuple(counts.tolist()), 1, device)
        parts = torch.empty(1, len(tensors), device=device)
        totals = out if len(which) == len(out) else out.new_empty(len(which))
        with on_device_of(out):
            if len(tensors):
                moments_kernel[(len(tensors),)](
                    on_device(torch.from_numpy(own), device), tensors, first, parts,
                    parts if is_held is None else is_held, beta1, beta2,
                    1 / (1 - beta1**count), 1 / (1 - beta2**count), eps,
                    HAS_FLAG=is_held is not None, ALIGNED=aligned, HEIGHT=height, LENGTH=length,
                    num_warps=8, enable_fp_fusion=True,
                )  # fmt: skip
            total_kernel[(len(which), 1)](
                parts, first, totals, len(which), len(tensors),
                BLOCK=256, num_warps=4, enable_fp_fusion=True,
            )  # fmt: skip
        if totals is not out:
            out.index_copy_(0, on_device(torch.from_numpy(which), device), totals)
    return out
