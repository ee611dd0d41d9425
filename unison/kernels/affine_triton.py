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

from unison.kernels.available import on_device_of

_TOKENS, _ROWS = 16, 4  # of a program, and of one step of it
_COLUMNS = 32  # of a program that adds columns up


@triton.jit
def _add_tokens(
    x, g, place, apart, part, tokens, features, sxt, sgt, eps,
    CENTRED: tl.constexpr, OFFSET: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
):  # fmt: skip
    """Write the sums over a few tokens of a sample that begins at x and g.

    Those for the offset are written `apart` elements behind those for the gain.
    """
    at = tl.arange(0, FEATURES)
    inside = at < features
    gain = tl.zeros((FEATURES,), dtype=tl.float32)
    offset = tl.zeros((FEATURES,), dtype=tl.float32)
    for step in tl.static_range(TOKENS // ROWS):
        token = part * TOKENS + step * ROWS + tl.arange(0, ROWS)
        mask = (token < tokens)[:, None] & inside[None, :]
        rows = x + token[:, None].to(tl.int64) * sxt + at[None, :]
        row = tl.load(rows, mask=mask, other=0.0).to(tl.float32)  # [ROWS, FEATURES]
        gradients = g + token[:, None].to(tl.int64) * sgt + at[None, :]
        value = tl.load(gradients, mask=mask, other=0.0).to(tl.float32)
        if CENTRED:
            row = tl.where(mask, row - (tl.sum(row, axis=1) / features)[:, None], 0.0)
        variance = tl.sum(row * row, axis=1) / features
        scaled = row * tl.rsqrt(variance + eps)[:, None]
        # Past the last token all is 0, and 0 · rsqrt(0) is not: eps may be 0.
        gain += tl.sum(tl.where(mask, value * scaled, 0.0), axis=0)
        if OFFSET:
            offset += tl.sum(value, axis=0)
    tl.store(place + at, gain, mask=inside)
    if OFFSET:
        tl.store(place + apart + at, offset, mask=inside)


@triton.jit
def _sums_kernel(
    x, g, out, tokens, features, sxb, sxt, sgb, sgt, eps, num_parts,
    CENTRED: tl.constexpr, OFFSET: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
):  # fmt: skip
    """Sums over a few tokens of one sample: out [1 or 2, samples, parts, features]."""
    part = tl.program_id(0)
    sample, num_samples = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    place = out + (sample * num_parts + part) * features
    apart = num_samples.to(tl.int64) * num_parts * features
    _add_tokens(
        x + sample * sxb, g + sample * sgb, place, apart, part, tokens, features, sxt, sgt, eps,
        CENTRED, OFFSET, TOKENS, ROWS, FEATURES,
    )  # fmt: skip


def norm_sums(x: Tensor, g: Tensor, eps: float, *, is_centred: bool, has_offset: bool) -> Tensor:
    """See `unison.kernels.multi_tensor.norm_sums`."""
    batch, tokens, features = x.shape
    count, num_parts = 2 if has_offset else 1, -(-tokens // _TOKENS)
    if batch * num_parts * features == 0:
        return x.new_zeros(count, batch, features, dtype=torch.float32)
    parts = x.new_empty(count * batch, num_parts, features, dtype=torch.float32)
    size = 1 << (features - 1).bit_length()
    with on_device_of(x):
        _sums_kernel[(num_parts, batch)](
            x, g, parts, tokens, features, *x.stride()[:2], *g.stride()[:2], float(eps), num_parts,
            CENTRED=is_centred, OFFSET=has_offset, TOKENS=_TOKENS, ROWS=_ROWS, FEATURES=size,
            num_warps=max(1, min(8, size // 128)), enable_fp_fusion=True,
        )  # fmt: skip
    return column_sums(parts).view(count, batch, features)


@triton.jit
def _add_columns(
    g, out, at, tokens, features, sgt,
    TOKENS: tl.constexpr, STEPS: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """Write Σ_t g_t of a few features of the sample that begins at g."""
    inside = at < features
    # Threads keep sums of their own tokens to the end: one exchange between them, not one a step.
    total = tl.zeros((TOKENS, FEATURES), dtype=tl.float32)
    for first in range(0, tokens, TOKENS * STEPS):
        for step in tl.static_range(STEPS):  # loads that do not wait for each other
            token = first + step * TOKENS + tl.arange(0, TOKENS)
            mask = (token < tokens)[:, None] & inside[None, :]
            places = g + token[:, None].to(tl.int64) * sgt + at[None, :]
            total += tl.load(places, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at, tl.sum(total, axis=0), mask=inside)


@triton.jit
def _columns_kernel(
    g, out, tokens, features, sgb, sgt,
    TOKENS: tl.constexpr, STEPS: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """Σ_t g_t of a few features of one sample: out [samples, features]."""
    sample = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    place = out + sample * features
    _add_columns(g + sample * sgb, place, at, tokens, features, sgt, TOKENS, STEPS, FEATURES)


def column_sums(g: Tensor) -> Tensor:
    """Return Σ_t g_t of g [samples, tokens, features]: [samples, features], float32."""
    batch, tokens, features = g.shape
    out = g.new_empty(batch, features, dtype=torch.float32)
    is_short = tokens <= 32
    if out.numel():
        with on_device_of(g):
            _columns_kernel[(-(-features // _COLUMNS), batch)](
                g, out, tokens, features, *g.stride()[:2],
                TOKENS=32 if is_short else 128, STEPS=1 if is_short else 4,
                FEATURES=_COLUMNS, num_warps=2 if is_short else 8, enable_fp_fusion=True,
            )  # fmt: skip
    return out
