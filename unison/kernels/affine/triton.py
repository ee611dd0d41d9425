"""Per-sample sums for the gain and the offset of a norm, on CUDA: one pass over x and g.

The normalised input is made again from the input, row by row, in float32; nothing of the size of
the input is written. A program adds a few tokens of one sample; their sums are added in order.

[Note: many at once] A model has hundreds of biases and norms, and each of these kernels is over
sooner than the host has launched it. So there is one of each that takes several tensors: as
arguments, because a table of addresses would have to be sent to the device first. Programs pick
their tensor, and then do the same in the same order: the results are those of single launches, to
the bit.
"""

# Triton's own annotations do not describe what its compiler accepts.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAssignmentType=false

import itertools
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from unison.kernels.affine import MOST_AT_ONCE
from unison.kernels.launcher import Launcher, Prepared

_TOKENS, _ROWS = 16, 4  # of a program, and of one step of it
_COLUMNS = 32  # of a program that adds columns up
_MOST_KNOWN = 256  # shapes


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
    """Sums over a few tokens of one sample: out [samples, parts, 1 or 2, features]."""
    part, sample = tl.program_id(0), tl.program_id(1).to(tl.int64)
    WIDTH: tl.constexpr = 2 if OFFSET else 1
    place = out + (sample * num_parts + part) * WIDTH * features
    _add_tokens(
        x + sample * sxb, g + sample * sgb, place, features, part, tokens, features, sxt, sgt, eps,
        CENTRED, OFFSET, TOKENS, ROWS, FEATURES,
    )  # fmt: skip


@triton.jit
def _many_sums_kernel(
    x0, x1, x2, x3, x4, x5, x6, x7, g0, g1, g2, g3, g4, g5, g6, g7, out,
    tokens, features, eps, num_parts,
    CENTRED: tl.constexpr, OFFSET: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
):  # fmt: skip
    """The same of contiguous x and g of several norms.

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
    first = sample * tokens * features
    _add_tokens(
        x + first, g + first, place, apart, part, tokens, features, features, features, eps,
        CENTRED, OFFSET, TOKENS, ROWS, FEATURES,
    )  # fmt: skip


_launch_sums, _launch_many_sums = Launcher(_sums_kernel), Launcher(_many_sums_kernel)


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
    launch = _launch_sums.prepared(
        (num_parts, batch),
        (tokens, features, *strides, eps, num_parts),
        **_constants_of_sums(features, is_centred, has_offset),
    )
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


def _constants_of_sums(features: int, is_centred: bool, has_offset: bool) -> dict[str, Any]:
    size = 1 << (features - 1).bit_length()
    return {
        "CENTRED": is_centred, "OFFSET": has_offset,
        "TOKENS": _TOKENS, "ROWS": _ROWS, "FEATURES": size,
        "num_warps": max(1, min(8, size // 128)), "enable_fp_fusion": True,
    }  # fmt: skip


def sums_of_many(
    xs: Sequence[Tensor], gs: Sequence[Tensor], eps: float, *, is_centred: bool, has_offset: bool
) -> tuple[Tensor, ...]:
    """See `unison.kernels.affine.sums_of_many`."""
    run = _sums_of_many(len(xs), xs[0].shape, float(eps), is_centred, has_offset)
    return run(xs, gs)


@lru_cache(maxsize=_MOST_KNOWN)
def _sums_of_many(
    count: int, given: torch.Size, eps: float, is_centred: bool, has_offset: bool
) -> Callable[[Sequence[Tensor], Sequence[Tensor]], tuple[Tensor, ...]]:
    batch, tokens, features = given
    num_parts = -(-tokens // _TOKENS)
    width = 2 if has_offset else 1
    launch = _launch_many_sums.prepared(
        (count * num_parts, batch),
        (tokens, features, eps, num_parts),
        asked=(0, MOST_AT_ONCE),  # all x are alike, and all g
        **_constants_of_sums(features, is_centred, has_offset),
    )
    shape = (count * width, batch, features)
    parts = (count * width * batch, num_parts, features)
    add = _launch_of_columns(parts, (num_parts * features, features))
    is_empty = batch * num_parts * features == 0

    def run(xs: Sequence[Tensor], gs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        out = torch.empty(shape, dtype=torch.float32, device=xs[0].device)
        if is_empty:
            return out.zero_().unbind(0)
        of_parts = torch.empty(parts, dtype=torch.float32, device=xs[0].device)
        launch(*_filled_up(xs), *_filled_up(gs), of_parts)
        add(of_parts, out)
        return out.unbind(0)

    return run


def _filled_up(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return as many tensors as a kernel for many takes: those past the last are not read."""
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
    g, out, tokens, features, sgb, sgt,
    TOKENS: tl.constexpr, STEPS: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """Σ_t g_t of a few features of one sample."""
    sample = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    _add_columns(
        g + sample * sgb, out + sample * features, at, tokens, features, sgt,
        TOKENS, STEPS, FEATURES,
    )  # fmt: skip


@triton.jit
def _many_columns_kernel(
    g0, g1, g2, g3, g4, g5, g6, g7, out,
    tokens, f0, f1, f2, f3, f4, f5, f6, f7,
    TOKENS: tl.constexpr, STEPS: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """The same of several contiguous tensors, each with features of its own, one after the other.

    out: all sums of the first tensor [samples, features], then all of the second, and so on.
    """
    sample, num_samples = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    program = tl.program_id(0)
    # A tensor has as many programs as it takes; who is past the last one is of the next tensor.
    g, features, before, here = g0, f0, program * 0, program
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
    place = out + before * num_samples.to(tl.int64) + sample * features
    at = here * FEATURES + tl.arange(0, FEATURES)
    _add_columns(
        g + sample * tokens * features, place, at, tokens, features, features,
        TOKENS, STEPS, FEATURES,
    )  # fmt: skip


_launch_columns, _launch_many_columns = Launcher(_columns_kernel), Launcher(_many_columns_kernel)


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
    numbers = (tokens, features, *strides)
    constants = _constants_of_columns(tokens)
    return _launch_columns.prepared((_num_programs(features), batch), numbers, **constants)


def _constants_of_columns(tokens: int) -> dict[str, Any]:
    is_short = tokens <= 32
    return {
        "TOKENS": 32 if is_short else 128, "STEPS": 1 if is_short else 4, "FEATURES": _COLUMNS,
        "num_warps": 2 if is_short else 8, "enable_fp_fusion": True,
    }  # fmt: skip


def _num_programs(features: int) -> int:
    return -(-features // _COLUMNS)


def column_sums_of_many(gs: Sequence[Tensor]) -> list[Tensor]:
    """See `unison.kernels.affine.column_sums_of_many`."""
    batch, tokens, _ = gs[0].shape
    return _column_sums_of_many(batch, tokens, tuple([g.shape[2] for g in gs]))(gs)


@lru_cache(maxsize=_MOST_KNOWN)
def _column_sums_of_many(
    batch: int, tokens: int, features: tuple[int, ...]
) -> Callable[[Sequence[Tensor]], list[Tensor]]:
    all_features = (*features, *[0] * (MOST_AT_ONCE - len(features)))
    launch = _launch_many_columns.prepared(
        (sum(map(_num_programs, features)), batch),
        (tokens, *all_features),
        asked=(0,),  # all g are alike
        **_constants_of_columns(tokens),
    )
    sizes = [batch * each for each in features]
    firsts = [0, *itertools.accumulate(sizes)][:-1]
    pieces = [((batch, f), (f, 1), first) for f, first in zip(features, firsts, strict=True)]
    numel = sum(sizes)

    def run(gs: Sequence[Tensor]) -> list[Tensor]:
        out = torch.empty(numel, dtype=torch.float32, device=gs[0].device)
        if numel:
            launch(*_filled_up(gs), out)
        return [out.as_strided(*piece) for piece in pieces]

    return run
