"""Per-sample matrix products on CUDA: X_b = left_bᵀ right_b, stored, squared, or added up.

[Note: the same accumulator] One function, `_product`, makes a tile of X_b in float32 registers, in
an order that depends on the tile's size alone. Three kernels use it: one stores the tile, one only
squares it, one adds w_b times it over samples. So what the first pass has measured and what the
second adds up are the same bits, and the bound on a sample's share needs no worst case over its
tokens (bounds.py, "The measured tensor"). For this all three must run with one `Config`, which is a
function of shapes and dtypes: never of an autotuner's mood.

Sums of squares leave a kernel as one number per tile, to be added in a fixed order: no float is
added atomically, and no program waits for another.
"""

# Triton's own annotations do not describe what its compiler accepts.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false

import os
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice
from triton.tools.tensor_descriptor import TensorDescriptor

from unison.kernels.available import loads_tiles, shared_bytes
from unison.kernels.random.reference import ROUND_MAGIC

# The interpreter multiplies bfloat16 as if they were integers; as float32 the products are exact.
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
_SHARED_BESIDE = 2048  # bytes of shared memory beside the tiles that are loaded
MAGIC = tl.constexpr(ROUND_MAGIC)  # added and subtracted, it rounds a float64 to an integer
GROUP = tl.constexpr(8)  # tiles along rows that share their columns while these are in L2


@dataclass(frozen=True)
class Config:
    """How a product is cut into tiles.

    Attributes:
        rows: Rows of a tile.
        columns: Its columns.
        tokens: Tokens that are loaded at once.
        num_warps: Warps of a program.
        num_stages: Loads in flight.
    """

    rows: int
    columns: int
    tokens: int
    num_warps: int
    num_stages: int

    def num_tiles(self, rows: int, columns: int) -> int:
        """Return how many tiles a matrix has."""
        return triton.cdiv(rows, self.rows) * triton.cdiv(columns, self.columns)


@triton.jit
def _place(tile, rows, columns, BM: tl.constexpr, BN: tl.constexpr):
    """Return row and column of a tile's first element, neighbours in time near in memory."""
    num_m, num_n = tl.cdiv(rows, BM), tl.cdiv(columns, BN)
    in_group = GROUP * num_n
    first = (tile // in_group) * GROUP
    height = min(num_m - first, GROUP)
    m = first + (tile % in_group) % height
    n = (tile % in_group) // height
    return m * BM, n * BN


@triton.jit
def as_sum(share, DTYPE: tl.constexpr):
    """Return a sample's share as what it is added to: float32, or the nearest integers."""
    if tl.float32 == DTYPE:
        return share
    elif INTERPRETED:  # noqa: RET505 - Triton needs the branches apart
        return ((share.to(tl.float64) + MAGIC) - MAGIC).to(DTYPE)
    else:
        return libdevice.float2int_rn(share)


@triton.jit
def _load(
    x, sample, token, feature, tokens, features, sb, st, sf,
    BK: tl.constexpr, BF: tl.constexpr, TMA: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Return [BK tokens, BF features] of one sample, zeros outside."""
    if TMA:
        return x.load([sample, token, feature]).reshape(BK, BF)
    else:  # noqa: RET505 - Triton needs the branches apart
        t = token + tl.arange(0, BK)
        f = feature + tl.arange(0, BF)
        first = (tl.zeros((), tl.int64) + sample) * sb
        at = x + first + t[:, None].to(tl.int64) * st + f[None, :].to(tl.int64) * sf
        if EVEN:
            return tl.load(at)
        else:  # noqa: RET505
            return tl.load(at, mask=(t < tokens)[:, None] & (f < features)[None, :], other=0.0)


@triton.jit
def _product(
    left, right, sample, row, column, tokens, rows, columns,
    slb, slt, slf, srb, srt, srf,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    TMA_L: tl.constexpr, TMA_R: tl.constexpr, EVEN_L: tl.constexpr, EVEN_R: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Return a tile [BM, BN] of one sample's product: see [Note: the same accumulator]."""
    accumulator = tl.zeros((BM, BN), dtype=tl.float32)
    for token in range(0, tokens, BK):
        x = _load(left, sample, token, row, tokens, rows, slb, slt, slf, BK, BM, TMA_L, EVEN_L)
        y = _load(
            right, sample, token, column, tokens, columns, srb, srt, srf, BK, BN, TMA_R, EVEN_R
        )
        if INTERPRETED:
            x, y = x.to(tl.float32), y.to(tl.float32)
        accumulator = tl.dot(tl.trans(x), y, accumulator, input_precision=PRECISION)
    return accumulator


@triton.jit
def _per_sample_kernel(
    left, right, out, squares, tokens, rows, columns, num_tiles,
    slb, slt, slf, srb, srt, srf, sob,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    TMA_L: tl.constexpr, TMA_R: tl.constexpr, EVEN_L: tl.constexpr, EVEN_R: tl.constexpr,
    PRECISION: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    """One tile of one sample's product: stored if asked, and squared as it is stored."""
    sample = tl.program_id(0) // num_tiles
    tile = tl.program_id(0) % num_tiles
    row, column = _place(tile, rows, columns, BM, BN)
    value = _product(
        left, right, sample, row, column, tokens, rows, columns, slb, slt, slf, srb, srt, srf,
        BM, BN, BK, TMA_L, TMA_R, EVEN_L, EVEN_R, PRECISION,
    )  # fmt: skip
    if STORE:
        stored = value.to(out.dtype.element_ty)
        m = row + tl.arange(0, BM)
        n = column + tl.arange(0, BN)
        at = out + sample.to(tl.int64) * sob + m[:, None].to(tl.int64) * columns + n[None, :]
        tl.store(at, stored, mask=(m < rows)[:, None] & (n < columns)[None, :])
        value = stored.to(tl.float32)
    tl.store(squares + tl.program_id(0), tl.sum(value * value))


@triton.jit
def _weighted_kernel(
    left, right, weights, out, batch, tokens, rows, columns,
    slb, slt, slf, srb, srt, srf,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    TMA_L: tl.constexpr, TMA_R: tl.constexpr, EVEN_L: tl.constexpr, EVEN_R: tl.constexpr,
    PRECISION: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """One tile of Σ_b w_b X_b, samples one after the other; those of weight 0 are not read."""
    row, column = _place(tl.program_id(0), rows, columns, BM, BN)
    total = tl.zeros((BM, BN), dtype=out.dtype.element_ty)
    for sample in range(batch):
        weight = tl.load(weights + sample)
        if weight != 0.0:
            value = _product(
                left, right, sample, row, column, tokens, rows, columns,
                slb, slt, slf, srb, srt, srf,
                BM, BN, BK, TMA_L, TMA_R, EVEN_L, EVEN_R, PRECISION,
            )  # fmt: skip
            total += as_sum(weight * value, out.dtype.element_ty)
    m = row + tl.arange(0, BM)
    n = column + tl.arange(0, BN)
    at = out + m[:, None].to(tl.int64) * columns + n[None, :]
    mask = (m < rows)[:, None] & (n < columns)[None, :]
    if ADD:
        total += tl.load(at, mask=mask, other=0)
    tl.store(at, total, mask=mask)


def choose_config(rows: int, columns: int, dtype: torch.dtype, shared: int = 1 << 30) -> Config:
    """Return the tiles for a product: a function of its shape and dtype alone.

    Args:
        rows: Of the product.
        columns: Likewise.
        dtype: Of what is multiplied.
        shared: Bytes of shared memory that a program may have. Fewer loads are in flight where
            there is little, which changes no bit of the product.
    """
    config = _choose_config(rows, columns, dtype)
    of_stage = (config.rows + config.columns) * config.tokens * dtype.itemsize
    num_stages = max(1, (shared - _SHARED_BESIDE) // of_stage)
    return replace(config, num_stages=min(config.num_stages, num_stages))


def _choose_config(rows: int, columns: int, dtype: torch.dtype) -> Config:
    if dtype in (torch.bfloat16, torch.float16):
        if min(rows, columns) >= 256:
            return Config(128, 256, 64, 8, 3) if columns >= rows else Config(256, 128, 64, 8, 3)
        small_m = 16 if rows <= 16 else 32 if rows <= 32 else 64 if rows <= 64 else 128
        small_n = 16 if columns <= 16 else 32 if columns <= 32 else 64 if columns <= 64 else 128
        return Config(small_m, small_n, 64, 4, 4)
    return Config(64, 64, 32, 4, 3)


def _can_describe(x: Tensor) -> bool:
    """Whether the hardware's tile loads (TMA) take a tensor [batch, tokens, features]."""
    if not loads_tiles(x.device):
        return False
    sizes = [stride * x.element_size() for stride in x.stride()]
    return (
        x.stride(2) == 1
        and all(size % 16 == 0 and 0 < size < 1 << 40 for size in sizes[:2])
        and x.data_ptr() % 16 == 0
    )


@dataclass
class _Operands:
    """What the kernels are given of left and right."""

    left: Tensor | TensorDescriptor
    right: Tensor | TensorDescriptor
    strides: tuple[int, ...]
    constants: dict[str, object]


def _operands(
    left: Tensor, right: Tensor, config: Config, precision: str, *, tma: bool
) -> _Operands:
    tokens, rows, columns = left.shape[1], left.shape[2], right.shape[2]
    tma_left, tma_right = tma and _can_describe(left), tma and _can_describe(right)
    constants = {
        "BM": config.rows,
        "BN": config.columns,
        "BK": config.tokens,
        "TMA_L": tma_left,
        "TMA_R": tma_right,
        "EVEN_L": tokens % config.tokens == 0 and rows % config.rows == 0,
        "EVEN_R": tokens % config.tokens == 0 and columns % config.columns == 0,
        "PRECISION": precision,
        "num_warps": config.num_warps,
        "enable_fp_fusion": True,  # by name: its default changes with the version
        "num_stages": config.num_stages,
    }
    strides = (*left.stride(), *right.stride())
    given_left = (
        TensorDescriptor.from_tensor(left, [1, config.tokens, config.rows]) if tma_left else left
    )
    given_right = (
        TensorDescriptor.from_tensor(right, [1, config.tokens, config.columns])
        if tma_right
        else right
    )
    return _Operands(given_left, given_right, strides, constants)


def _on(x: Tensor):
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def per_sample(
    left: Tensor,
    right: Tensor,
    out: Tensor | None,
    precision: str,
    config: Config | None = None,
    *,
    tma: bool = True,
) -> Tensor:
    """Make X_b = left_bᵀ right_b, store it in `out` if given, and square it.

    Args:
        left: [batch, tokens, rows].
        right: [batch, tokens, columns].
        out: [batch, rows, columns], each sample's contiguous; any dtype.
        precision: Of float32 products, `"ieee"` or `"tf32"`.
        config: Tiles; chosen by shape unless given.
        tma: Whether to load by tensor descriptors where the tensors allow it.

    Returns:
        Sums of squares per tile [batch, tiles], float32.
    """
    (batch, tokens, rows), columns = left.shape, right.shape[2]
    config = config or choose_config(rows, columns, left.dtype, shared_bytes(left.device))
    num_tiles = config.num_tiles(rows, columns)
    squares = torch.empty(batch, num_tiles, dtype=torch.float32, device=left.device)
    if squares.numel() == 0:
        return squares
    given = _operands(left, right, config, precision, tma=tma)
    with _on(left):
        _per_sample_kernel[(batch * num_tiles,)](
            given.left, given.right, squares if out is None else out, squares,
            tokens, rows, columns, num_tiles, *given.strides, 0 if out is None else out.stride(0),
            STORE=out is not None, **given.constants,
        )  # fmt: skip
    return squares


def weighted(
    left: Tensor,
    right: Tensor,
    weights: Tensor,
    out: Tensor,
    precision: str,
    config: Config | None = None,
    *,
    add: bool,
    tma: bool = True,
) -> None:
    """Write Σ_b w_b X_b to `out` [rows, columns], or add it; samples of weight 0 are left out.

    In float32, or in int32: then each sample's w_b X_b is rounded to integers first.
    """
    (batch, tokens, rows), columns = left.shape, right.shape[2]
    config = config or choose_config(rows, columns, left.dtype, shared_bytes(left.device))
    if out.numel() == 0:
        return
    given = _operands(left, right, config, precision, tma=tma)
    with _on(left):
        _weighted_kernel[(config.num_tiles(rows, columns),)](
            given.left, given.right, weights, out, batch, tokens, rows, columns, *given.strides,
            ADD=add, **given.constants,
        )  # fmt: skip
