"""Inverses of positive definite matrices, many of them, without waiting for the GPU.

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

Where bits need not be those of several ranks, matrices of one size go side by side, block by block,
so that almost all is products of batches:

    M = [A B'; B C],  A = PP',  Q = BP'⁻¹,  C - QQ' = RR',  L = [P 0; Q R]

Only blocks of up to `BATCH_LEAF` rows are factorised and inverted as such, and Q is found with the
inverses of those alone: with the inverse of the whole P, rounding would grow with its condition.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

ALIGNED = 8  # elements that matrix units load at once
LEAF = 1024  # rows up to which a triangle is solved whole
BATCH_LEAF = 256  # rows up to which torch factorises a batch fast
NUM_STREAMS = 8

T = TypeVar("T")


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
    return list(torch._foreach_norm(some, torch.inf))


def invert_lower_(lower: Tensor) -> Tensor:  # [n, n]
    """The inverse of a lower triangle, in its place; what is above the diagonal is zero."""
    n = len(lower)
    if n <= LEAF:
        return lower.copy_(inverse_of_lower(lower))
    k = half(n)
    invert_lower_(lower[:k, :k])
    invert_lower_(lower[k:, k:])
    join_(lower, k)
    return lower


def inverse_of_lower(lower: Tensor) -> Tensor:  # [..., n, n] -> [..., n, n]
    """The inverse of a small lower triangle."""
    eye = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device)
    return torch.linalg.solve_triangular(lower, eye, upper=False)


def join_(lower: Tensor, k: int) -> None:  # [..., n, n]
    """From [P⁻¹ 0; Q R⁻¹] to the inverse of [P 0; Q R], where P has k rows."""
    first, last, between = lower[..., :k, :k], lower[..., k:, k:], lower[..., k:, :k]
    _multiply_into(between, last, between @ first, alpha=-1)


def gram_of_lower(
    x: Tensor, leaf: int | None = None, out: Tensor | None = None
) -> Tensor:  # [..., n, n] -> [..., n, n]
    """X'X of a lower triangle, in `out` or new memory; up to `leaf` rows at once."""
    n = x.shape[-1]
    found = torch.empty_like(x) if out is None else out
    if n <= (leaf or LEAF):
        return _multiply_into(found, x.mT, x)
    k = half(n)
    first, last, between = x[..., :k, :k], x[..., k:, k:], x[..., k:, :k]
    gram_of_lower(first, leaf, found[..., :k, :k])
    _multiply_into(found[..., :k, :k], between.mT, between, beta=1)
    _multiply_into(found[..., k:, :k], last.mT, between)
    found[..., :k, k:] = found[..., k:, :k].mT
    gram_of_lower(last, leaf, found[..., k:, k:])
    return found


def _multiply_into(
    out: Tensor, left: Tensor, right: Tensor, alpha: float = 1, beta: float = 0
) -> Tensor:
    """Put alpha left·right + beta out in the place of `out`, a block of one matrix or of many.

    `out[...] = left @ right` would make the product elsewhere and copy it.
    """
    add = out.addmm_ if out.ndim == 2 else out.baddbmm_
    return add(left, right, alpha=alpha, beta=beta)


def half(n: int) -> int:
    """About half of n, such that blocks begin where a GPU likes to load."""
    return n // 2 // 64 * 64


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
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    if before != "tf32":
        yield
        return
    try:
        matmul.fp32_precision = "ieee"
        yield
    finally:
        matmul.fp32_precision = before


# --- many matrices of one size --------------------------------------------------------------------


class _Lower:
    """Matrices on their way to their lower triangles.

    Args:
        whole: Symmetric matrices [batch, n, n]; the factors take their place.

    Attributes:
        whole: As given.
        inverses: Of the blocks on the diagonal, by their first row.
        failures: Of each block, which of its matrices are not positive definite, as not 0 [batch].
    """

    def __init__(self, whole: Tensor) -> None:
        self.whole = whole
        self.inverses: dict[int, Tensor] = {}
        self.failures: list[Tensor] = []

    def factorise_(self, low: int, high: int) -> None:
        """Put the factor of the rows and columns [low, high) in their place."""
        block = self.whole[:, low:high, low:high]
        if high - low <= BATCH_LEAF:
            lower, info = torch.linalg.cholesky_ex(block)
            self.failures.append(info)
            self.inverses[low] = inverse_of_lower(lower)
            block.copy_(lower)
            return
        middle = low + half(high - low)
        between, last = self.whole[:, middle:high, low:middle], self.whole[:, middle:high]
        self.factorise_(low, middle)
        self.divide_(between, low, middle)
        last[:, :, middle:high].baddbmm_(between, between.mT, alpha=-1)
        self.factorise_(middle, high)

    def divide_(self, rows: Tensor, low: int, high: int) -> None:
        """Rows [batch, any, high - low] times the inverse of the factor there, transposed."""
        if high - low <= BATCH_LEAF:
            rows.copy_(rows @ self.inverses[low].mT)
            return
        middle = low + half(high - low)
        first, last = rows[:, :, : middle - low], rows[:, :, middle - low :]
        self.divide_(first, low, middle)
        last.baddbmm_(first, self.whole[:, middle:high, low:middle].mT, alpha=-1)
        self.divide_(last, middle, high)

    def invert_(self, low: int, high: int) -> None:
        """Put the inverse of the factor's rows and columns [low, high) in their place."""
        if high - low <= BATCH_LEAF:
            self.whole[:, low:high, low:high].copy_(self.inverses[low])
            return
        middle = low + half(high - low)
        self.invert_(low, middle)
        self.invert_(middle, high)
        join_(self.whole[:, low:high, low:high], middle - low)


def inverses_of_positive(matrices: list[Tensor], dampings: list[float]) -> tuple[Tensor, Tensor]:
    """(matrix + damping I)⁻¹ of each, and whether there is one, without waiting for the answer.

    Args:
        matrices: Symmetric, of one size n.
        dampings: Of each matrix.

    Returns:
        The inverses [batch, n, n]; whether each is right [batch].
    """
    n = len(matrices[0])
    size = n + padding_of(n, matrices[0])
    whole = matrices[0].new_zeros(len(matrices), size, size)
    for place, matrix, damping in zip(whole, matrices, dampings, strict=True):
        place[:n, :n].copy_(matrix)
        place.diagonal()[:n].add_(damping)
    whole.diagonal(dim1=1, dim2=2)[:, n:].fill_(1.0)
    lower = _Lower(whole)
    lower.factorise_(0, size)
    whole.tril_()
    lower.invert_(0, size)
    found = gram_of_lower(whole, BATCH_LEAF)[:, :n, :n]
    is_right = torch.stack(lower.failures).eq(0).all(dim=0)
    largest = torch.linalg.vector_norm(found, torch.inf, dim=(1, 2))
    return found, is_right & torch.isfinite(largest)
