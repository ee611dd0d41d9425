"""Inverses of many positive definite matrices of one size at once, on a GPU.

One factorisation leaves most of a GPU idle, and twelve of them one after the other leave it idle
twelve times. Here they go side by side, block by block, so that almost all is products of batches:

    M = [A B'; B C],  A = PP',  Q = BP'⁻¹,  C - QQ' = RR',  L = [P 0; Q R]

Only blocks of up to `LEAF` rows are factorised and inverted as such, and Q is found with the
inverses of those alone: with the inverse of the whole P, rounding would grow with its condition.
"""

import torch
from torch import Tensor

from unison.kfac import cholesky
from unison.kfac.device import padding_of

LEAF = 256  # rows up to which torch factorises a batch fast


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
        if high - low <= LEAF:
            lower, info = torch.linalg.cholesky_ex(block)
            self.failures.append(info)
            self.inverses[low] = cholesky.inverse_of_lower(lower)
            block.copy_(lower)
            return
        middle = low + cholesky.half(high - low)
        between, last = self.whole[:, middle:high, low:middle], self.whole[:, middle:high]
        self.factorise_(low, middle)
        self.divide_(between, low, middle)
        last[:, :, middle:high].baddbmm_(between, between.mT, alpha=-1)
        self.factorise_(middle, high)

    def divide_(self, rows: Tensor, low: int, high: int) -> None:
        """Rows [batch, any, high - low] times the inverse of the factor there, transposed."""
        if high - low <= LEAF:
            rows.copy_(rows @ self.inverses[low].mT)
            return
        middle = low + cholesky.half(high - low)
        first, last = rows[:, :, : middle - low], rows[:, :, middle - low :]
        self.divide_(first, low, middle)
        last.baddbmm_(first, self.whole[:, middle:high, low:middle].mT, alpha=-1)
        self.divide_(last, middle, high)

    def invert_(self, low: int, high: int) -> None:
        """Put the inverse of the factor's rows and columns [low, high) in their place."""
        if high - low <= LEAF:
            self.whole[:, low:high, low:high].copy_(self.inverses[low])
            return
        middle = low + cholesky.half(high - low)
        self.invert_(low, middle)
        self.invert_(middle, high)
        cholesky.join_(self.whole[:, low:high, low:high], middle - low)


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
    found = cholesky.gram_of_lower(whole, LEAF)[:, :n, :n]
    is_right = torch.stack(lower.failures).eq(0).all(dim=0)
    largest = torch.linalg.vector_norm(found, torch.inf, dim=(1, 2))
    return found, is_right & torch.isfinite(largest)
