"""Inverses of positive definite matrices, many of them, without waiting for the GPU.

Each matrix is inverted by itself and in the same way, whatever others a rank has: its bits do not
depend on who inverts it. On a GPU, matrices go round several streams, since one factorisation
leaves most of it idle, and are put together from products, which are faster there than solves:

    M = LL',  L = [P 0; Q R],  X = L⁻¹ = [P⁻¹ 0; -R⁻¹ Q P⁻¹ R⁻¹],  M⁻¹ = X'X

with only the blocks of X that are not zero. All products are in full float32, also where torch may
round the factors of others (TF32): an error of 1e-3 of the largest eigenvalue of an inverse can be
more than all of its smallest one.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from unison.kfac import device

LEAF = 1024  # rows up to which a triangle is solved whole
NUM_STREAMS = 8

T = TypeVar("T")


def inverse_of_positive(matrix: Tensor) -> tuple[Tensor, Tensor]:  # [n, n] -> [n, n], []
    """The inverse, and whether there is one, without waiting for the answer.

    Args:
        matrix: Symmetric; not needed afterwards.
    """
    lower, info = torch.linalg.cholesky_ex(matrix)
    if device.is_gpu(matrix):
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
