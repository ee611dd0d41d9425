"""Gradients of labels that are drawn from a softmax, on CUDA: softmax(z) - e_y, row by row.

A vocabulary's logits are the largest tensor of a step. Plain torch reads and writes probabilities
of float32 several times over; here logits come from memory once (a row is read three times, and
stays in the cache meanwhile), and the gradient is written once, in their dtype.

The label y is the class in which u falls if classes lie side by side, as wide as they are probable:
sums of blocks of classes are added in float64, and classes inside of one block in float32. A row's
bits depend on that row alone.
"""

# Triton's own annotations do not describe what its compiler accepts.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from unison.kernels.available import on_device_of

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
