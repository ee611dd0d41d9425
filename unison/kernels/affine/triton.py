"""Per-sample sums for the gain and the offset of a norm, on CUDA: one pass over x and g.

The normalised input is made again from the input, row by row, in float32; nothing of the size of
the input is written. A program adds a few tokens of one sample; their sums are added in order.
"""

# Triton's own annotations do not describe what its compiler accepts.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAssignmentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from unison.kernels.launcher import Launcher

_TOKENS, _ROWS = 16, 4  # of a program, and of one step of it


@triton.jit
def _sums_kernel(
    x, g, out, tokens, features, sxb, sxt, sgb, sgt, eps, num_parts,
    CENTRED: tl.constexpr, OFFSET: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
):  # fmt: skip
    """Sums over a few tokens of one sample: out [samples, parts, 1 or 2, features]."""
    part, sample = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = tl.arange(0, FEATURES)
    inside = at < features
    gain = tl.zeros((FEATURES,), dtype=tl.float32)
    offset = tl.zeros((FEATURES,), dtype=tl.float32)
    for step in tl.static_range(TOKENS // ROWS):
        token = part * TOKENS + step * ROWS + tl.arange(0, ROWS)
        mask = (token < tokens)[:, None] & inside[None, :]
        rows = x + sample * sxb + token[:, None].to(tl.int64) * sxt + at[None, :]
        row = tl.load(rows, mask=mask, other=0.0).to(tl.float32)  # [ROWS, FEATURES]
        gradients = g + sample * sgb + token[:, None].to(tl.int64) * sgt + at[None, :]
        value = tl.load(gradients, mask=mask, other=0.0).to(tl.float32)
        if CENTRED:
            row = tl.where(mask, row - (tl.sum(row, axis=1) / features)[:, None], 0.0)
        variance = tl.sum(row * row, axis=1) / features
        scaled = row * tl.rsqrt(variance + eps)[:, None]
        # Past the last token all is 0, and 0 · rsqrt(0) is not: eps may be 0.
        gain += tl.sum(tl.where(mask, value * scaled, 0.0), axis=0)
        if OFFSET:
            offset += tl.sum(value, axis=0)
    WIDTH: tl.constexpr = 2 if OFFSET else 1
    place = out + (sample * num_parts + part) * WIDTH * features + at
    tl.store(place, gain, mask=inside)
    if OFFSET:
        tl.store(place + features, offset, mask=inside)


_launch_sums = Launcher(_sums_kernel)


def sums(x: Tensor, g: Tensor, eps: float, *, is_centred: bool, has_offset: bool) -> Tensor:
    """Return Σ_t g_t x̂_t, and Σ_t g_t if asked: [samples, 1 or 2, features], float32.

    Args:
        x: What was normalised [samples, tokens, features].
        g: The gradient of what came out, likewise.
        eps: Added to the variance.
        is_centred: Whether the mean is taken out (layer norm), or not (RMS norm).
        has_offset: Whether something is added after the gain.
    """
    batch, tokens, features = x.shape
    num_parts = -(-tokens // _TOKENS)
    width = 2 if has_offset else 1
    out = torch.empty(batch, num_parts, width, features, device=x.device)
    if out.numel():
        size = 1 << (features - 1).bit_length()
        _launch_sums(
            (num_parts, batch),
            (x, g, out),
            (
                tokens, features, x.stride(0), x.stride(1), g.stride(0), g.stride(1), float(eps),
                num_parts,
            ),
            CENTRED=is_centred, OFFSET=has_offset, TOKENS=_TOKENS, ROWS=_ROWS, FEATURES=size,
            num_warps=max(1, min(8, size // 128)), enable_fp_fusion=True,
        )  # fmt: skip
    return column_sums(out.flatten(2)).view(batch, width, features)


@triton.jit
def _columns_kernel(
    g, out, tokens, features, sgb, sgt,
    TOKENS: tl.constexpr, STEPS: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """Σ_t g_t of a few features of one sample."""
    sample = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    inside = at < features
    # Threads keep sums of their own tokens to the end: one exchange between them, not one a step.
    total = tl.zeros((TOKENS, FEATURES), dtype=tl.float32)
    for first in range(0, tokens, TOKENS * STEPS):
        for step in tl.static_range(STEPS):  # loads that do not wait for each other
            token = first + step * TOKENS + tl.arange(0, TOKENS)
            mask = (token < tokens)[:, None] & inside[None, :]
            places = g + sample * sgb + token[:, None].to(tl.int64) * sgt + at[None, :]
            total += tl.load(places, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + sample * features + at, tl.sum(total, axis=0), mask=inside)


_launch_columns = Launcher(_columns_kernel)


def column_sums(g: Tensor) -> Tensor:
    """Return Σ_t g_t of g [samples, tokens, features]: [samples, features], float32."""
    batch, tokens, features = g.shape
    out = torch.empty(batch, features, device=g.device)
    if out.numel():
        is_short = tokens <= 32
        _launch_columns(
            (-(-features // 32), batch),
            (g, out),
            (tokens, features, g.stride(0), g.stride(1)),
            TOKENS=32 if is_short else 128, STEPS=1 if is_short else 4, FEATURES=32,
            num_warps=2 if is_short else 8, enable_fp_fusion=True,
        )  # fmt: skip
    return out
