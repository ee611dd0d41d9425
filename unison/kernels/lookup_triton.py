"""Rows of a table that a sample has looked up, on CUDA: added up, squared, or weighted.

Tokens are sorted by id first, so that the rows of one id lie next to each other. The program of the
first of them adds them all, in the order of the tokens; the programs of the others have nothing to
do. No table of the size [samples, rows, features] is needed, nor one of [tokens, tokens]. All three
kernels make a row by `_row`, so that what is measured and what is added are the same bits.
"""

# Triton's own annotations do not describe what its compiler accepts.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from unison.kernels.available import on_device_of
from unison.kernels.products_triton import as_sum


@triton.jit
def _row(keys, order, g, begin, end, features, sgt, FEATURES: tl.constexpr):
    """Return the sum of g over the tokens that have the key at `begin`, and where they end."""
    key = tl.load(keys + begin)
    at = tl.arange(0, FEATURES)
    mask = at < features
    total = tl.zeros((FEATURES,), dtype=tl.float32)
    token = begin
    is_same = True
    while is_same:
        place = tl.load(order + token).to(tl.int64)
        total += tl.load(g + place * sgt + at, mask=mask, other=0.0).to(tl.float32)
        token += 1
        is_same = tl.load(keys + token, mask=token < end, other=-1) == key
    return total, token


@triton.jit
def rows_kernel(
    keys, order, g, table, squares, tokens, features, sgb, sgt, stb,
    ADD: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """Handle one token of one sample: add its id's row to the sample's table, or square it."""
    token, sample = tl.program_id(0), tl.program_id(1).to(tl.int64)
    keys += sample * tokens
    order += sample * tokens
    key = tl.load(keys + token)
    before = tl.load(keys + token - 1, mask=token > 0, other=-1)
    total = 0.0
    if (key >= 0) & (before != key):
        row, _end = _row(keys, order, g + sample * sgb, token, tokens, features, sgt, FEATURES)
        if ADD:
            at = tl.arange(0, FEATURES)
            mask = at < features
            place = table + sample * stb + key * features + at
            row += tl.load(place, mask=mask, other=0.0).to(tl.float32)
            tl.store(place, row.to(table.dtype.element_ty), mask=mask)
        total = tl.sum(row * row)
    if not ADD:
        tl.store(squares + sample * tokens + token, total)


@triton.jit
def weighted_kernel(
    keys, order, g, weights, out, batch, tokens, features, sgt, FEATURES: tl.constexpr
):  # fmt: skip
    """Handle one token of the batch: add w_b times every sample's row of its id to the table.

    Keys are id · batch + sample, sorted over the whole batch.
    """
    token = tl.program_id(0)
    key = tl.load(keys + token)
    before = tl.load(keys + token - 1, mask=token > 0, other=-1)
    row_id = key // batch
    if (key >= 0) & ((before < 0) | (before // batch != row_id)):
        at = tl.arange(0, FEATURES)
        mask = at < features
        total = tl.zeros((FEATURES,), dtype=out.dtype.element_ty)
        now = key
        while (now >= 0) & (now // batch == row_id):
            row, token = _row(keys, order, g, token, tokens, features, sgt, FEATURES)
            weight = tl.load(weights + now % batch)
            share = as_sum(weight * row, out.dtype.element_ty)
            total = tl.where(weight == 0.0, total, total + share)
            now = tl.load(keys + token, mask=token < tokens, other=-1)
        place = out + row_id * features + at
        tl.store(place, total + tl.load(place, mask=mask, other=0), mask=mask)


def _sizes(g: Tensor) -> dict[str, int]:
    """Return the size of a row, and warps for it: a thread squares 128 numbers of it at most."""
    size = 1 << (max(1, g.shape[-1]) - 1).bit_length()
    warps = max(4, min(32, size // 4096))
    return {"FEATURES": size, "num_warps": warps, "enable_fp_fusion": True}


def add_rows(ids: Tensor, g: Tensor, table: Tensor) -> None:
    """Add g [samples, tokens, features] to the rows `ids` of each sample's table, in place."""
    _rows(ids, g, table)


def squared_rows(ids: Tensor, g: Tensor) -> Tensor:
    """Return ‖row‖² at the first token of each id, 0 at others: [samples, tokens], float32."""
    return _rows(ids, g, None)


def _rows(ids: Tensor, g: Tensor, table: Tensor | None) -> Tensor:
    batch, tokens, features = g.shape
    # Sorting keeps the strides of what it sorts; the kernel reads samples one after the other.
    keys, order = ids.contiguous().sort(dim=1, stable=True)
    squares = torch.empty(batch, tokens if table is None else 0, device=g.device)
    if batch * tokens:
        stride = 0 if table is None else table.stride(0)
        with on_device_of(g):
            rows_kernel[(tokens, batch)](
                keys, order, g, squares if table is None else table, squares,
                tokens, features, g.stride(0), g.stride(1), stride,
                ADD=table is not None, **_sizes(g),
            )  # fmt: skip
    return squares


def weighted_rows(ids: Tensor, g: Tensor, weights: Tensor, out: Tensor) -> None:
    """Add Σ_b w_b · (rows of sample b) to `out` [rows, features].

    In float32, or in int32: then each sample's rows are rounded to integers first.
    """
    batch, tokens, features = g.shape
    if not batch * tokens:
        return
    samples = torch.arange(batch, device=ids.device).unsqueeze(1)
    keys = torch.where(ids < 0, -1, ids * batch + samples).flatten()
    keys, order = keys.sort(stable=True)
    flat = g.reshape(batch * tokens, features)
    with on_device_of(g):
        weighted_kernel[(batch * tokens,)](
            keys, order, flat, weights, out, batch, batch * tokens, features, flat.stride(0),
            **_sizes(g),
        )  # fmt: skip
