"""Inverses of positive matrices, one by one or many side by side, and what makes them fast.

What is done otherwise on a GPU, and why:

* Sizes that are no multiple of 8 make products several times slower there: pad them.
* bfloat16 and float16 numbers have exact products in float32, which its matrix units add up in
  float32: as exact as products of wide copies, and ten times as fast.
* One factorisation leaves most of it idle: matrices go round several streams, or side by side.

Each matrix is inverted by itself and in the same way, whatever others a rank has: its bits do not
depend on who inverts it. On a GPU it is put together from products, which are faster than solves:

    M = LL',  L = [P 0; Q R],  X = L⁻¹ = [P⁻¹ 0; -R⁻¹ Q P⁻¹ R⁻¹],  M⁻¹ = X'X

with only the blocks of X that are not zero. All products are in full float32, also where torch may
round the factors of others (TF32): an error of 1e-3 of the largest eigenvalue of an inverse can be
more than all of its smallest one.

[Note: three products] An H200 multiplies float32 matrices at 47 Tflop/s, and such that are rounded
to the 11 bits of TF32 at 370. With x = h + l, h of 11 bits, the product of two matrices is
hh' + hl' + lh' but for parts of 2⁻²¹, and each of the three is exact in TF32 but for the rounding
of l: as good as float32, at two and a half times the speed.

Where bits need not be those of several ranks, matrices of one size go side by side, block by block,
so that almost all is products of batches:

    M = [A B'; B C],  A = PP',  Q = BP'⁻¹,  C - QQ' = RR',  L = [P 0; Q R]

Only blocks of up to `BATCH_LEAF` rows are factorised and inverted as such, in one launch for all of
them, and Q is found with the inverses of those alone: with the inverse of the whole P, rounding
would grow with its condition.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib import import_module
from typing import Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from unison import check
from unison.kernels.available import takes
from unison.shard.ranks import Ranks, gather_objects

ALIGNED = 8  # elements that matrix units load at once
LEAF = 1024  # rows up to which a triangle is solved whole
BATCH_LEAF = 256  # rows up to which a batch is factorised at once
LEAST_SPLIT = 512  # rows and columns from which on three products in TF32 are faster than one
STRIP = 512  # rows or columns of a product that are computed at once where it has zeros
NUM_STREAMS = 8

T = TypeVar("T")

# --- on a GPU -------------------------------------------------------------------------------------


def is_gpu(value: Tensor) -> bool:
    """Whether a tensor is on a GPU."""
    return value.is_cuda


def padding_of(size: int, like: Tensor) -> int:
    """Rows or columns of zeros with which products of this size are fast; none on a CPU."""
    return -size % ALIGNED if is_gpu(like) else 0


def is_half(value: Tensor) -> bool:
    """Whether `wide_product` takes a tensor as it is."""
    return is_gpu(value) and value.dtype in (torch.bfloat16, torch.float16)


def wide_product(left: Tensor, right: Tensor) -> Tensor:  # [..., n, k], [..., k, m] -> [..., n, m]
    """The float32 product of matrices of halves, or of batches of them."""
    if not left.is_cuda:
        return left.float() @ right.float()
    product = torch.mm if left.ndim == 2 else torch.bmm
    return product(left, right, out_dtype=torch.float32)


def side_by_side(jobs: Sequence[Callable[[], T]], where: torch.device) -> list[T]:
    """Do independent jobs, on a GPU in several streams; what they made can be used afterwards.

    Both ends wait for each other, so that memory of one end that the other has used is free when it
    is used again.
    """
    if where.type != "cuda":
        return [job() for job in jobs]
    main = torch.cuda.current_stream(where)
    streams = _streams(where)[: max(1, len(jobs))]
    for stream in streams:
        stream.wait_stream(main)
    found = []
    for number, job in enumerate(jobs):
        with torch.cuda.stream(streams[number % len(streams)]):
            found.append(job())
    for stream in streams:
        main.wait_stream(stream)
    return found


@functools.cache
def _streams(where: torch.device) -> tuple[torch.cuda.Stream, ...]:
    """The same ones every time: each keeps memory of its own."""
    return tuple(torch.cuda.Stream(where) for _ in range(NUM_STREAMS))


@contextmanager
def full_float32() -> Iterator[None]:
    """No TF32 inside, whoever allowed it."""
    is_rounded = torch.backends.cuda.matmul.fp32_precision == "tf32"
    with _precision("ieee") if is_rounded else nullcontext():
        yield


@contextmanager
def _precision(name: str) -> Iterator[None]:
    """How float32 matrices are multiplied on a GPU inside."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = name
        yield
    finally:
        matmul.fp32_precision = before


# --- one matrix -----------------------------------------------------------------------------------


def inverse_of_positive(matrix: Tensor) -> tuple[Tensor, Tensor]:  # [n, n] -> [n, n], []
    """The inverse, and whether there is one, without waiting for the answer.

    Args:
        matrix: Symmetric; not needed afterwards.
    """
    lower, info = torch.linalg.cholesky_ex(matrix)
    if is_gpu(matrix):
        inverse = gram_of_lower(invert_lower_(lower))
    elif int(info) == 0:
        inverse = torch.cholesky_inverse(lower)
    else:
        return matrix, torch.tensor(data=False)
    return inverse, (info == 0) & torch.isfinite(largest_elements([inverse])[0])


def largest_elements(values: Sequence[Tensor]) -> list[Tensor]:  # -> [] each
    """Of each tensor, the size of its largest element; finite only if all are; 0 for none.

    One pass over all of them: `isfinite(...).all()` is five, for each by itself.
    """
    some = [value if value.numel() else value.new_zeros(1) for value in values]
    return list(torch._foreach_norm(some, torch.inf)) if some else []


def all_finite(values: Iterable[Tensor]) -> bool:
    """Whether all elements of some tensors are, and their squares; a GPU is waited for."""
    return all(math.isfinite(float(each.square())) for each in largest_elements(list(values)))


def invert_lower_(lower: Tensor) -> Tensor:  # [n, n]
    """The inverse of a lower triangle, in its place; what is above the diagonal is zero."""
    n = len(lower)
    if n <= LEAF:
        return lower.copy_(_inverse_of_lower(lower))
    k = _half(n)
    invert_lower_(lower[:k, :k])
    invert_lower_(lower[k:, k:])
    _join_(lower, k)
    return lower


def _inverse_of_lower(lower: Tensor) -> Tensor:  # [..., n, n] -> [..., n, n]
    """The inverse of a small lower triangle."""
    eye = _identity(lower.shape[-1], lower.dtype, lower.device)
    return torch.linalg.solve_triangular(lower, eye, upper=False)


@functools.lru_cache(maxsize=8)
def _identity(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The same memory every time: a GPU needs two launches to make one, blocks are many."""
    return torch.eye(n, dtype=dtype, device=device)


def _join_(lower: Tensor, k: int) -> None:  # [..., n, n]
    """From [P⁻¹ 0; Q R⁻¹] to the inverse of [P 0; Q R], where P has k rows."""
    first, last, between = lower[..., :k, :k], lower[..., k:, k:], lower[..., k:, :k]
    product = _multiply_into(torch.empty_like(between), between, first, zeros="lower right")
    _multiply_into(between, last, product, alpha=-1, zeros="lower left")


def gram_of_lower(
    x: Tensor, leaf: int | None = None, out: Tensor | None = None
) -> Tensor:  # [..., n, n] -> [..., n, n]
    """X'X of a lower triangle, in `out` or new memory; up to `leaf` rows at once."""
    n = x.shape[-1]
    found = torch.empty_like(x) if out is None else out
    if n <= (leaf or LEAF):
        return _multiply_into(found, x.mT, x)
    k = _half(n)
    first, last, between = x[..., :k, :k], x[..., k:, k:], x[..., k:, :k]
    gram_of_lower(first, leaf, found[..., :k, :k])
    _multiply_into(found[..., :k, :k], between.mT, between, beta=1)
    _multiply_into(found[..., k:, :k], last.mT, between, zeros="upper left")
    found[..., :k, k:] = found[..., k:, :k].mT
    gram_of_lower(last, leaf, found[..., k:, k:])
    return found


Zeros = Literal["none", "lower left", "upper left", "lower right", "symmetric"]
"""What of a product is left out: one side is a triangle, or nobody reads above the diagonal."""


def _multiply_into(
    out: Tensor,
    left: Tensor,
    right: Tensor,
    alpha: float = 1,
    beta: float = 0,
    zeros: Zeros = "none",
) -> Tensor:
    """Put alpha left·right + beta out in the place of `out`, a block of one matrix or of many.

    `out[...] = left @ right` would make the product elsewhere and copy it. Large ones are made of
    three, see [Note: three products], and of strips that begin or end at the diagonal.
    """
    add = Tensor.addmm_ if out.ndim == 2 else Tensor.baddbmm_
    is_large = min(*left.shape[-2:], right.shape[-1]) >= LEAST_SPLIT
    if not (is_large and is_gpu(left) and left.dtype == torch.float32):
        return add(out, left, right, alpha=alpha, beta=beta)
    lefts = _split(left)
    if right.data_ptr() == left.data_ptr() and right.stride() == left.mT.stride():
        rights = lefts[0].mT, lefts[1].mT
    else:
        rights = _split(right)
    n = right.shape[-1] if zeros == "lower right" else left.shape[-2]
    ends = [*range(STRIP, n - STRIP // 2, STRIP), n] if zeros != "none" else [n]
    with _precision("tf32"):
        for low, high in itertools.pairwise([0, *ends]):
            place, of_left, of_right = _strip(zeros, low, high)
            strip = out[..., *place]
            high_left, low_left = (each[..., *of_left] for each in lefts)
            high_right, low_right = (each[..., *of_right] for each in rights)
            add(strip, low_left, high_right, alpha=alpha, beta=beta)
            add(strip, high_left, low_right, alpha=alpha, beta=1)
            add(strip, high_left, high_right, alpha=alpha, beta=1)
    return out


def _strip(zeros: Zeros, low: int, high: int) -> tuple[tuple[slice, slice], ...]:
    """Of rows or columns [low, high) of a product: which these are, and what of both sides."""
    every, own, before, behind = slice(None), slice(low, high), slice(high), slice(low, None)
    known = {
        "lower left": ((own, every), (own, before), (before, every)),
        "upper left": ((own, every), (own, behind), (behind, every)),
        "lower right": ((every, own), (every, behind), (behind, own)),
        "symmetric": ((own, before), (own, every), (every, before)),
    }
    return known.get(zeros, ((own, every), (own, every), (every, every)))


def _split(value: Tensor) -> tuple[Tensor, Tensor]:
    """Float32 numbers as those of 11 bits nearest to them, which TF32 takes as they are, and rest.

    >>> high, low = _split(torch.tensor([[1.0001, -3.0]]))
    >>> (high + low).tolist() == torch.tensor([[1.0001, -3.0]]).tolist(), high[0, 0].item()
    (True, 1.0)
    """
    if value.stride(-1) != 1 and value.stride(-2) == 1:
        high, low = _split(value.mT)
        return high.mT, low.mT
    if takes(value) and value.stride(-1) == 1:
        return import_module("unison.kernels.products_triton").split(value)
    high = ((value.view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)
    return high, value - high


def _half(n: int) -> int:
    """About half of n, such that blocks begin where a GPU likes to load."""
    return n // 2 // 64 * 64


# --- many matrices of one size --------------------------------------------------------------------


def joint_sizes(sizes: Sequence[int]) -> list[int]:
    """What to pad sizes to so that few are left: those with and without a bias are a batch.

    >>> joint_sizes([768, 776, 3072, 3080, 2304])
    [776, 776, 3080, 3080, 2304]
    """
    found: dict[int, int] = {}
    for size in sorted(set(sizes), reverse=True):
        larger = found.get(size + ALIGNED)
        found[size] = size + ALIGNED if larger == size + ALIGNED else size
    return [found[size] for size in sizes]


def inverses_of_positive(
    matrices: Sequence[Tensor], dampings: Sequence[float], size: int, paddings: Sequence[int] = ()
) -> tuple[list[Tensor], Tensor]:
    """(matrix + damping I)⁻¹ of each, and whether there is one, without waiting for the answer.

    Args:
        matrices: Symmetric [n, n].
        dampings: Of each matrix.
        size: What to pad all of them to, n or more.
        paddings: Rows and columns of the identity that each inverse ends with; none by default.

    Returns:
        The inverses [n, n], views of one memory; whether each is right [batch].
    """
    whole = matrices[0].new_zeros(len(matrices), size, size)
    lengths = [len(each) for each in matrices]
    places = [place[:n, :n] for place, n in zip(whole, lengths, strict=True)]
    torch._foreach_copy_(places, list(matrices))
    rows = torch.arange(size, device=whole.device)
    added = whole.new_tensor(dampings)[:, None]
    is_padding = rows >= torch.tensor(lengths, device=whole.device)[:, None]
    whole.diagonal(dim1=1, dim2=2).add_(torch.where(is_padding, 1.0, added))
    infos: list[Tensor] = []
    _factorise_(whole, 0, size, infos)
    whole.tril_()
    _invert_factors_(whole, 0, size)
    # Blocks on the diagonal in one product of float32: of three, errors were ten times as large.
    found = gram_of_lower(whole, BATCH_LEAF)
    is_right = torch.stack(infos).eq(0).all(dim=0)
    largest = torch.linalg.vector_norm(found, torch.inf, dim=(1, 2))
    ends = [n + extra for n, extra in zip(lengths, paddings or [0] * len(lengths), strict=True)]
    inverses = [each[:end, :end] for each, end in zip(found, ends, strict=True)]
    return inverses, is_right & torch.isfinite(largest)


def _factorise_(whole: Tensor, low: int, high: int, infos: list[Tensor]) -> None:
    """Put the factors of the rows and columns [low, high) of [batch, n, n] in their place.

    Of the smallest blocks on the diagonal the inverses of the factors are put there: all that is
    read of them. `infos` gets which of the matrices have none, one tensor for each such block.
    """
    if high - low <= BATCH_LEAF:
        infos.append(_invert_leaf_(whole[:, low:high, low:high]))
        return
    middle = low + _half(high - low)
    between = whole[:, middle:high, low:middle]
    _factorise_(whole, low, middle, infos)
    _divide_(between, whole, low, middle)
    rest = whole[:, middle:high, middle:high]
    _multiply_into(rest, between, between.mT, alpha=-1, beta=1, zeros="symmetric")
    _factorise_(whole, middle, high, infos)


def _invert_leaf_(block: Tensor) -> Tensor:  # [batch, n, n] -> [batch]
    """Put the inverses of the factors in the place of a block; returns 0 where there are some."""
    if takes(block):
        return import_module("unison.kernels.kfac_triton").invert_factors_(block)
    lower, info = torch.linalg.cholesky_ex(block)
    block.copy_(_inverse_of_lower(lower))
    return info


def _divide_(rows: Tensor, whole: Tensor, low: int, high: int) -> None:
    """Multiply rows [batch, any, high - low] with the inverse of the factors there, transposed."""
    if high - low <= BATCH_LEAF:
        rows.copy_(rows @ whole[:, low:high, low:high].mT)
        return
    middle = low + _half(high - low)
    first, last = rows[:, :, : middle - low], rows[:, :, middle - low :]
    _divide_(first, whole, low, middle)
    _multiply_into(last, first, whole[:, middle:high, low:middle].mT, alpha=-1, beta=1)
    _divide_(last, whole, middle, high)


def _invert_factors_(whole: Tensor, low: int, high: int) -> None:
    """Put the inverse of the factors' rows and columns [low, high) in their place."""
    if high - low <= BATCH_LEAF:
        return  # there since it was factorised
    middle = low + _half(high - low)
    _invert_factors_(whole, low, middle)
    _invert_factors_(whole, middle, high)
    _join_(whole[:, low:high, low:high], middle - low)


# --- around a ring of ranks ----------------------------------------------------------------------
#
# [Note: ring] Each rank r has some rows U_r of U [tokens, n], and all want to multiply with
# P = (U'U + d I)⁻¹. Ranks come in turn. With P_q the inverse of d I and the rows of ranks 0 to q,
#
#     Z_r = U_r P_(r-1),    I + U_r Z_r' = LL',    W_r = L⁻¹Z_r,    P_r = P_(r-1) - W_r'W_r
#
# which is one block of a Cholesky factor after the other. All that is needed of the ranks before is
# their W: Z_r begins as U_r / d, and loses (U_r W_q') W_q for each of them. At the end
#
#     P Y = Y / d - Σ_r W_r'(W_r Y)
#
# is a sum over ranks, so that each keeps its own W_r and one all-reduce applies all of them. No
# rank ever holds more than its own T_r x T_r matrix. What reference note 003 wrote instead, each
# rank's whole inverse applied to what the last one left, is the product of the ranks' inverses.
#
# `KFAC` does not use it: T x T is small there (docs/kfac.md), and columns go to their owner.


def ring_factor(ranks: Ranks, rows: Tensor, damping: float) -> Tensor:  # [own, n] -> [own, n]
    """Return this rank's W of the inverse of U'U + d I; a collective.

    Args:
        ranks: Everyone.
        rows: This rank's rows of U [own, n], divided by the root of the number of all; any number
            of them, also none.
        damping: d, above 0.

    Raises:
        BadInput: If the damping is not above 0.
    """
    check.positive(damping=damping)
    wide = rows.double()
    z = wide / damping
    own = torch.empty_like(wide)
    for turn, count in enumerate(gather_objects(ranks, len(rows))):
        if turn == ranks.rank:
            matrix = wide @ z.T
            matrix.diagonal().add_(1.0)
            lower = torch.linalg.cholesky(matrix)
            own = torch.linalg.solve_triangular(lower, z, upper=False)
        if ranks.size == 1 or not count:
            continue
        sent = own.contiguous() if turn == ranks.rank else wide.new_empty(count, rows.shape[1])
        dist.broadcast(sent, group=ranks.group, group_src=turn)
        if ranks.rank > turn:
            z -= (wide @ sent.T) @ sent
    return own.to(rows.dtype)


def ring_apply(ranks: Ranks, factor: Tensor, y: Tensor, damping: float) -> Tensor:
    """Return (U'U + d I)⁻¹ Y of what `ring_factor` returned; a collective.

    Args:
        ranks: Everyone.
        factor: This rank's W [own, n].
        y: The same on every rank [n, any].
        damping: d, as it was.
    """
    return y / damping - ranks.sum_(factor.T @ (factor @ y))
