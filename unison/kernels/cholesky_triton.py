"""Inverses of the Cholesky factors of many small matrices on CUDA, one program for each matrix.

The blocks on the diagonal of K-FAC's factors have some 200 rows. Torch's own factorisation and
triangular solve make dozens of launches for a batch of them, each of a few rows: some 1,800 of the
2,487 for all inverses of a GPT-2 of 124 M parameters.

Here a matrix is cut into tiles T of 64 rows. With M = LL', X = L⁻¹ and P = L[j, j]:

    PP' = M[j, j] - Σ_{k<j} L[j, k] L[j, k]'            in registers, column by column, with P⁻¹
    L[i, j] = (M[i, j] - Σ_{k<j} L[i, k] L[j, k]') P⁻¹'
    X[j, j] = P⁻¹,  X[i, j] = -X[i, i] Σ_{j≤k<i} L[i, k] X[k, j]

Every product is one of float32 with all its digits. Each sum has one order.
"""

# Triton's own annotations do not describe what its compiler accepts.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportOperatorIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from unison.kernels.available import on_device_of

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
