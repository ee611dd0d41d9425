"""Symmetric matrices as half of their elements: what ranks send one another.

[Note: folded triangles] An upper triangle is folded into a rectangle with slices alone, without a
list of places, which would be four times as large as what it packs. With k = n // 2, the columns
from k on are kept as they are, [n, n - k]; below their diagonal there is room for the other
triangle [k, k], transposed, one row further down.
"""

from torch import Tensor


def triangle_size(n: int) -> int:
    """Elements of the upper triangle of an n x n matrix.

    >>> triangle_size(3)
    6
    """
    return n * (n + 1) // 2


def packed(matrix: Tensor) -> Tensor:  # [n, n] -> [n (n + 1) / 2]
    """The upper triangle, folded; the lower one is taken to be equal."""
    n = matrix.shape[0]
    k = n // 2
    folded = matrix.new_zeros(_rows(n), n - k)
    folded[:n] = matrix[:, k:].triu(diagonal=-k)
    folded[k + 1 : 2 * k + 1, :k] += matrix[:k, :k].T.tril()
    return folded.view(-1)


def unpacked(triangle: Tensor, n: int) -> Tensor:  # -> [n, n]
    """The symmetric matrix of a folded triangle.

    >>> import torch
    >>> unpacked(packed(torch.tensor([[1.0, 2.0], [2.0, 3.0]])), 2)
    tensor([[1., 2.],
            [2., 3.]])
    """
    k = n // 2
    folded = triangle.view(_rows(n), n - k)
    upper = triangle.new_zeros(n, n)
    upper[:, k:] = folded[:n].triu(diagonal=-k)
    upper[:k, :k] = folded[k + 1 : 2 * k + 1, :k].tril().T
    return upper + upper.triu(diagonal=1).T


def _rows(n: int) -> int:
    """Rows of the rectangle: one more where n is even."""
    return n + (n % 2 == 0)
