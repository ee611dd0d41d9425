"""Per-sample sums for the gain and the offset of a norm, on CUDA: one pass over x and g.

The normalised input is made again from the input, row by row, in float32; nothing of the size of
the input is written. A program adds a few tokens of one sample; their sums are added in order.
"""

# Triton's own annotations do not describe what its compiler accepts.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAssignmentType=false

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from unison.kernels.launcher import Launcher, Prepared

_TOKENS, _ROWS = 16, 4  # of a program, and of one step of it
_MOST_KNOWN = 256  # shapes


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
    return sums_like(x, g, eps, is_centred=is_centred, has_offset=has_offset)(x, g)


def sums_like(
    x: Tensor, g: Tensor, eps: float, *, is_centred: bool, has_offset: bool
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return `sums` for tensors of these shapes and strides, which are not asked for again."""
    strides = (x.stride(0), x.stride(1), g.stride(0), g.stride(1))
    return _sums_like(x.shape, strides, float(eps), is_centred, has_offset)


@lru_cache(maxsize=_MOST_KNOWN)
def _sums_like(
    given: torch.Size, strides: tuple[int, ...], eps: float, is_centred: bool, has_offset: bool
) -> Callable[[Tensor, Tensor], Tensor]:
    batch, tokens, features = given
    num_parts = -(-tokens // _TOKENS)
    width = 2 if has_offset else 1
    size = 1 << (features - 1).bit_length()
    launch = _launch_sums.prepared(
        (num_parts, batch),
        (tokens, features, *strides, eps, num_parts),
        CENTRED=is_centred, OFFSET=has_offset, TOKENS=_TOKENS, ROWS=_ROWS, FEATURES=size,
        num_warps=max(1, min(8, size // 128)), enable_fp_fusion=True,
    )  # fmt: skip
    parts, shape = (batch, num_parts, width * features), (batch, width, features)
    add = _launch_of_columns(parts, (num_parts * width * features, width * features))
    is_empty = batch * num_parts * features == 0

    def run(x: Tensor, g: Tensor) -> Tensor:
        out = torch.empty(shape, dtype=torch.float32, device=x.device)
        if is_empty:
            return out.zero_()
        of_parts = torch.empty(parts, dtype=torch.float32, device=x.device)
        launch(x, g, of_parts)
        add(of_parts, out)
        return out

    return run


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
    return column_sums_like(g)(g)


def column_sums_like(g: Tensor) -> Callable[[Tensor], Tensor]:
    """Return `column_sums` for tensors of this shape and stride, which are not asked for again."""
    return _column_sums_like(g.shape, (g.stride(0), g.stride(1)))


@lru_cache(maxsize=_MOST_KNOWN)
def _column_sums_like(given: torch.Size, strides: tuple[int, int]) -> Callable[[Tensor], Tensor]:
    batch, _, features = given
    launch = _launch_of_columns(given, strides)
    shape, is_empty = (batch, features), batch * features == 0

    def run(g: Tensor) -> Tensor:
        out = torch.empty(shape, dtype=torch.float32, device=g.device)
        if not is_empty:
            launch(g, out)
        return out

    return run


def _launch_of_columns(shape: Sequence[int], strides: tuple[int, int]) -> Prepared:
    batch, tokens, features = shape
    is_short = tokens <= 32
    return _launch_columns.prepared(
        (-(-features // 32), batch),
        (tokens, features, *strides),
        TOKENS=32 if is_short else 128, STEPS=1 if is_short else 4, FEATURES=32,
        num_warps=2 if is_short else 8, enable_fp_fusion=True,
    )  # fmt: skip
