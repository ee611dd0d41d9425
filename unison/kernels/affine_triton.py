"""Per-sample sums for the gain and the offset of a norm, on CUDA: one pass over x and g.

The normalised input is made again from the input, row by row, in float32; nothing of the size of
the input is written. A program adds a few tokens of one sample; their sums are added in order.

[Note: many at once] A model has hundreds of biases and norms, and each of these kernels is over
sooner than the next can begin. So each takes several tensors: as
arguments, because a table of addresses would have to be sent to the device first. Programs pick
their tensor, and then do the same in the same order: the results are those of single launches, to
the bit.
"""

# Triton's own annotations do not describe what its compiler accepts.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAssignmentType=false

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from unison.kernels.affine import MOST_AT_ONCE
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
    x0, x1, x2, x3, x4, x5, x6, x7, g0, g1, g2, g3, g4, g5, g6, g7, out,
    tokens, features, sxb, sxt, sgb, sgt, eps, num_parts,
    CENTRED: tl.constexpr, OFFSET: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
):  # fmt: skip
    """Sums over a few tokens of one sample of one of several norms, alike in shapes and strides.

    out: [norms, 1 or 2, samples, parts, features].
    """
    which, part = tl.program_id(0) // num_parts, tl.program_id(0) % num_parts
    sample, num_samples = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    x, g = x0, g0
    if which == 1:
        x, g = x1, g1
    if which == 2:
        x, g = x2, g2
    if which == 3:
        x, g = x3, g3
    if which == 4:
        x, g = x4, g4
    if which == 5:
        x, g = x5, g5
    if which == 6:
        x, g = x6, g6
    if which == 7:
        x, g = x7, g7
    WIDTH: tl.constexpr = 2 if OFFSET else 1
    place = out + ((which * WIDTH * num_samples + sample) * num_parts + part) * features
    apart = num_samples.to(tl.int64) * num_parts * features
    _add_tokens(
        x + sample * sxb, g + sample * sgb, place, apart, part, tokens, features, sxt, sgt, eps,
        CENTRED, OFFSET, TOKENS, ROWS, FEATURES,
    )  # fmt: skip


def sums(
    xs: Sequence[Tensor], gs: Sequence[Tensor], eps: float, *, is_centred: bool, has_offset: bool
) -> tuple[Tensor, ...]:
    """See `unison.kernels.affine.sums_of_many`."""
    batch, tokens, features = xs[0].shape
    count, num_parts = len(xs) * (2 if has_offset else 1), -(-tokens // _TOKENS)
    out = torch.empty(count, batch, features, dtype=torch.float32, device=xs[0].device)
    if batch * num_parts * features == 0:
        return out.zero_().unbind(0)
    parts = out.new_empty(count * batch, num_parts, features)
    size = 1 << (features - 1).bit_length()
    with on_device_of(out):
        _sums_kernel[(len(xs) * num_parts, batch)](
            *_filled_up(xs), *_filled_up(gs), parts, tokens, features,
            *xs[0].stride()[:2], *gs[0].stride()[:2], float(eps), num_parts,
            CENTRED=is_centred, OFFSET=has_offset, TOKENS=_TOKENS, ROWS=_ROWS, FEATURES=size,
            num_warps=max(1, min(8, size // 128)), enable_fp_fusion=True,
        )  # fmt: skip
    _launch_columns([parts], out)
    return out.unbind(0)


def _filled_up(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return as many tensors as a kernel takes: those past the last are not read."""
    return [*tensors, *[tensors[0]] * (MOST_AT_ONCE - len(tensors))]


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
    g0, g1, g2, g3, g4, g5, g6, g7, out,
    tokens, sgb, sgt, f0, f1, f2, f3, f4, f5, f6, f7,
    MANY: tl.constexpr, TOKENS: tl.constexpr, STEPS: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """Σ_t g_t of a few features of one sample of a tensor, or of one of several contiguous ones.

    out: all sums of the first tensor [samples, features], then all of the second, and so on.
    """
    sample, num_samples = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    program = tl.program_id(0)
    g, features, before, here, start = g0, f0, program * 0, program, sample * sgb
    if MANY:
        # A tensor has as many programs as it takes; past the last one is the next tensor.
        edge, total = tl.cdiv(f0, FEATURES), f0
        if program >= edge:
            g, features, before, here = g1, f1, total, program - edge
        edge, total = edge + tl.cdiv(f1, FEATURES), total + f1
        if program >= edge:
            g, features, before, here = g2, f2, total, program - edge
        edge, total = edge + tl.cdiv(f2, FEATURES), total + f2
        if program >= edge:
            g, features, before, here = g3, f3, total, program - edge
        edge, total = edge + tl.cdiv(f3, FEATURES), total + f3
        if program >= edge:
            g, features, before, here = g4, f4, total, program - edge
        edge, total = edge + tl.cdiv(f4, FEATURES), total + f4
        if program >= edge:
            g, features, before, here = g5, f5, total, program - edge
        edge, total = edge + tl.cdiv(f5, FEATURES), total + f5
        if program >= edge:
            g, features, before, here = g6, f6, total, program - edge
        edge, total = edge + tl.cdiv(f6, FEATURES), total + f6
        if program >= edge:
            g, features, before, here = g7, f7, total, program - edge
        start, sgt = sample * tokens * features, features
    place = out + before * num_samples.to(tl.int64) + sample * features
    at = here * FEATURES + tl.arange(0, FEATURES)
    _add_columns(g + start, place, at, tokens, features, sgt, TOKENS, STEPS, FEATURES)


def column_sums(gs: Sequence[Tensor]) -> list[Tensor]:
    """Return Σ_t g_t of each g [samples, tokens, features]: [samples, features], float32.

    Several are contiguous, and each has more than one feature: a 1 would be compiled in.
    """
    if len(gs) > 1 and any(g.shape[2] == 1 for g in gs):
        return [column_sums([g])[0] for g in gs]
    sizes = [g.shape[0] * g.shape[2] for g in gs]
    out = torch.empty(sum(sizes), dtype=torch.float32, device=gs[0].device)
    if out.numel():
        _launch_columns(gs, out)
    return [part.view(g.shape[0], g.shape[2]) for part, g in zip(out.split(sizes), gs, strict=True)]


def _launch_columns(gs: Sequence[Tensor], out: Tensor) -> None:
    (batch, tokens, _), features = gs[0].shape, [g.shape[2] for g in gs]
    is_short = tokens <= 32
    with on_device_of(out):
        _columns_kernel[(sum(-(-each // _COLUMNS) for each in features), batch)](
            *_filled_up(gs), out, tokens, *gs[0].stride()[:2],
            *features, *[0] * (MOST_AT_ONCE - len(gs)),
            MANY=len(gs) > 1, TOKENS=32 if is_short else 128, STEPS=1 if is_short else 4,
            FEATURES=_COLUMNS, num_warps=2 if is_short else 8, enable_fp_fusion=True,
        )  # fmt: skip
