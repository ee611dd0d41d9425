"""K-FAC's own kernels for CUDA: inverses of small blocks, drawn labels, and Adam's averages.

Every sum has a fixed order.
"""

# Triton's own annotations do not describe what its compiler accepts.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportAssignmentType=false

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from unison.kernels.available import on_device_of
from unison.kernels.multi_tensor import on_device, tile_map
from unison.kernels.multi_tensor_triton import _number, _pointer, total_kernel

# --- inverses of small blocks ---------------------------------------------------------------------
#
# Inverses of the Cholesky factors of many small matrices on CUDA, one program for each matrix.
#
# The blocks on the diagonal of K-FAC's factors have some 200 rows. Torch's own factorisation and
# triangular solve make dozens of launches for a batch of them, each of a few rows: some 1,800 of
# the 2,487 for all inverses of a GPT-2 of 124 M parameters.
#
# Here a matrix is cut into tiles T of 64 rows. With M = LL', X = L⁻¹ and P = L[j, j]:
#
#     PP' = M[j, j] - Σ_{k<j} L[j, k] L[j, k]'            in registers, column by column, with P⁻¹
#     L[i, j] = (M[i, j] - Σ_{k<j} L[i, k] L[j, k]') P⁻¹'
#     X[j, j] = P⁻¹,  X[i, j] = -X[i, i] Σ_{j≤k<i} L[i, k] X[k, j]
#
# Every product is one of float32 with all its digits. Each sum has one order.

TILE = 64  # rows; two tiles stay in registers


@triton.jit
def _invert_tile(d, TILE: tl.constexpr):
    """Return P⁻¹ of the symmetric tile d = PP', and 1 if there is none, or 0."""
    at = tl.arange(0, TILE)
    rows, columns = at[:, None], at[None, :]
    x = tl.where(rows == columns, 1.0, 0.0)
    has_failed = tl.zeros((), tl.int32)
    for c in range(TILE):
        column = tl.sum(tl.where(columns == c, d, 0.0), axis=1)
        pivot = tl.sum(tl.where(at == c, column, 0.0), axis=0)
        has_failed = tl.where((pivot > 0.0) & (pivot < float("inf")), has_failed, 1)
        root = tl.sqrt_rn(pivot)
        below = tl.where(at > c, column / root, 0.0)  # of column c of P
        d -= below[:, None] * below[None, :]
        of_row = tl.sum(tl.where(rows == c, x, 0.0), axis=0) / root
        x = tl.where(rows == c, of_row[None, :], x - below[:, None] * of_row[None, :])
    return x, has_failed


@triton.jit
def _load(matrix, i, j, n, stride, TILE: tl.constexpr):
    """Return tile [i, j] of a matrix, with zeros behind its end."""
    r, c = i * TILE + tl.arange(0, TILE)[:, None], j * TILE + tl.arange(0, TILE)[None, :]
    return tl.load(matrix + r * stride + c, mask=(r < n) & (c < n), other=0.0)


@triton.jit
def _store(matrix, i, j, n, stride, value, TILE: tl.constexpr):
    """Put tile [i, j] of a matrix in its place, as far as it has one."""
    r, c = i * TILE + tl.arange(0, TILE)[:, None], j * TILE + tl.arange(0, TILE)[None, :]
    tl.store(matrix + r * stride + c, value, mask=(r < n) & (c < n))


@triton.jit
def invert_factors_kernel(matrices, lowers, infos, n, apart, stride, TILE: tl.constexpr):
    """Put X in the place of one matrix; what is above the diagonal is not read, and zero then.

    Other threads than those that wrote a tile read it: there is a barrier between both. Loads must
    not be moved before it, so that they may not be made ahead of time (one stage).
    """
    number = tl.program_id(0).to(tl.int64)
    matrix = matrices + number * apart
    num = tl.cdiv(n, TILE)
    size = num * TILE
    lower = lowers + number * size * size
    has_failed = tl.zeros((), tl.int32)
    at = tl.arange(0, TILE)
    rows, columns = at[:, None], at[None, :]
    for j in range(num):
        d = _load(matrix, j, j, n, stride, TILE)
        d = tl.where(rows >= columns, d, tl.trans(d))
        d = tl.where((rows == columns) & (j * TILE + rows >= n), 1.0, d)
        for k in range(j):
            left = _load(lower, j, k, size, size, TILE)
            d -= tl.dot(left, tl.trans(left), input_precision="ieee")
        x, is_bad = _invert_tile(d, TILE)
        has_failed = tl.maximum(has_failed, is_bad)
        for i in range(j + 1, num):
            s = _load(matrix, i, j, n, stride, TILE)
            for k in range(j):
                left = _load(lower, i, k, size, size, TILE)
                right = _load(lower, j, k, size, size, TILE)
                s -= tl.dot(left, tl.trans(right), input_precision="ieee")
            _store(lower, i, j, size, size, tl.dot(s, tl.trans(x), input_precision="ieee"), TILE)
            _store(matrix, j, i, n, stride, tl.zeros((TILE, TILE), tl.float32), TILE)
        tl.debug_barrier()  # all of a tile were read before it is written over
        _store(matrix, j, j, n, stride, x, TILE)
        tl.debug_barrier()
    for j in range(num):
        for i in range(j + 1, num):
            s = tl.zeros((TILE, TILE), tl.float32)
            for k in range(j, i):
                left = _load(lower, i, k, size, size, TILE)
                right = _load(matrix, k, j, n, stride, TILE)
                s += tl.dot(left, right, input_precision="ieee")
            left = _load(matrix, i, i, n, stride, TILE)
            _store(matrix, i, j, n, stride, -tl.dot(left, s, input_precision="ieee"), TILE)
            tl.debug_barrier()
    tl.store(infos + number, has_failed)


def invert_factors_(matrices: Tensor) -> Tensor:  # [batch, n, n] -> [batch]
    """Put L⁻¹ in the place of each M = LL'; returns 0 for those that have one, int32.

    Args:
        matrices: Float32; columns lie side by side. Nothing above the diagonal is read.
    """
    batch, n, _ = matrices.shape
    size = triton.cdiv(n, TILE) * TILE
    lowers = torch.empty(batch, size, size, device=matrices.device)
    infos = torch.empty(batch, dtype=torch.int32, device=matrices.device)
    if batch:
        with on_device_of(matrices):
            invert_factors_kernel[(batch,)](
                matrices, lowers, infos, n, matrices.stride(0), matrices.stride(1),
                TILE=TILE, num_warps=8, num_stages=1, enable_fp_fusion=True,
            )  # fmt: skip
    return infos


# --- drawn labels ---------------------------------------------------------------------------------
#
# Gradients of labels that are drawn from a softmax, on CUDA: softmax(z) - e_y, row by row.
#
# A vocabulary's logits are the largest tensor of a step. Plain torch reads and writes probabilities
# of float32 several times over; here logits come from memory once (a row is read three times, and
# stays in the cache meanwhile), and the gradient is written once, in their dtype.
#
# The label y is the class in which u falls if classes lie side by side, as wide as they are
# probable: sums of blocks of classes are added in float64, and classes inside of one block in
# float32. A row's bits depend on that row alone.

BLOCK = 4096  # classes that are read at once


@triton.jit
def drawn_kernel(logits, uniforms, out, tokens, classes, sb, st, BLOCK: tl.constexpr):
    """One row: its largest logit; the sum of exponentials; the label, and the gradient."""
    row = tl.program_id(0).to(tl.int64)
    z = logits + (row // tokens) * sb + (row % tokens) * st
    at = tl.arange(0, BLOCK)
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    for low in range(0, classes, BLOCK):
        x = tl.load(z + low + at, mask=low + at < classes, other=float("-inf")).to(tl.float32)
        largest = tl.maximum(largest, x)
    most = tl.max(largest, axis=0)
    total = tl.zeros((), tl.float64)
    for low in range(0, classes, BLOCK):
        x = tl.load(z + low + at, mask=low + at < classes, other=float("-inf")).to(tl.float32)
        total += tl.sum(tl.exp(x - most), axis=0).to(tl.float64)
    place = tl.load(uniforms + row) * total
    scale = 1.0 / total.to(tl.float32)
    below = tl.zeros((), tl.float64)
    label = tl.zeros((), tl.int32) - 1
    for low in range(0, classes, BLOCK):
        x = tl.load(z + low + at, mask=low + at < classes, other=float("-inf")).to(tl.float32)
        e = tl.exp(x - most)
        own = tl.sum(e, axis=0).to(tl.float64)
        if (label < 0) & ((below + own > place) | (low + BLOCK >= classes)):
            ends = tl.cumsum(e, axis=0)
            end = tl.max(ends, axis=0)
            # A block's sum was rounded in another way: scaled, so that no class of probability 0
            # lies behind it.
            inside = ((place - below) / own * end).to(tl.float32)
            passed = tl.sum((ends <= inside).to(tl.int32), axis=0)
            label = low + tl.minimum(passed, tl.sum((ends < end).to(tl.int32), axis=0))
        below += own
        gradient = e * scale - tl.where(low + at == label, 1.0, 0.0)
        tl.store(
            out + row * classes + low + at,
            gradient.to(out.dtype.element_ty),
            mask=low + at < classes,
        )


def drawn(z: Tensor, u: Tensor) -> Tensor:  # [batch, tokens, classes], [batch, tokens]
    """Return softmax(z) - e_y in the dtype of z, for the classes y in which u in [0, 1) falls.

    Args:
        z: Logits; classes lie side by side.
        u: Float64, in one piece.
    """
    batch, tokens, classes = z.shape
    out = torch.empty(z.shape, dtype=z.dtype, device=z.device)
    if out.numel():
        with on_device_of(out):
            drawn_kernel[(batch * tokens,)](
                z, u, out, tokens, classes, z.stride(0), z.stride(1),
                BLOCK=min(BLOCK, triton.next_power_of_2(classes)), num_warps=8,
                enable_fp_fusion=True,
            )  # fmt: skip
    return out


# --- Adam's averages ------------------------------------------------------------------------------
#
# Adam's averages of many gradients, and how long its steps would be, in one pass over memory.
#
# K-FAC multiplies averaged gradients with inverses, many layers side by side, each with its bias as
# one more column and columns of zeros after it. Averages lie in memory as these products read them:
# rows of a mean are `stride` elements apart, and nothing is copied between a gradient and a
# product.
#
# Every sum has a fixed order: a tile's by the layout of its registers, a tensor's over its tiles in
# float64.

# Columns of the table, all int64.
GRADIENT, MEAN, VARIANCE, ROWS, COLUMNS, STRIDE = (tl.constexpr(i) for i in range(6))
WIDTH = tl.constexpr(6)
_LONG, _HIGH = (16, 256), (256, 16)  # tiles of tensors whose rows are loaded wide, and of others


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
    rows, columns = tl.load(row + ROWS), _number(row, COLUMNS, ALIGNED)
    across = tl.cdiv(columns, LENGTH)
    r = (tile // across) * HEIGHT + tl.arange(0, HEIGHT)[:, None]
    c = (tile % across) * LENGTH + tl.arange(0, LENGTH)[None, :]
    mask = (r < rows) & (c < columns)
    at = r * columns + c
    means = _pointer(row, MEAN, tl.float32, ALIGNED) + r * _number(row, STRIDE, ALIGNED) + c
    variances = _pointer(row, VARIANCE, tl.float32, ALIGNED) + at
    g = tl.load(_pointer(row, GRADIENT, tl.float32, ALIGNED) + at, mask=mask, other=0.0)
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
