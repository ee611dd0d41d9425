"""Symmetric matrices as half of their elements: what ranks send one another.

[Note: folded triangles] An upper triangle is folded into a rectangle with slices alone, without a
list of places, which would be four times as large as what it packs. With k = n // 2, the columns
from k on are kept as they are, [n, n - k]; below their diagonal there is room for the other
triangle [k, k], transposed, one row further down.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Packing:
    """How the sums of a layer are laid out in one vector.

    Attributes:
        is_folded: Whether matrices are triangles: half as much to send. Where nothing is sent, they
            stay as they are.
    """

    is_folded: bool

    def size(self, n: int) -> int:
        """Elements of an n x n matrix."""
        return triangle_size(n) if self.is_folded else n * n

    def pack(self, matrix: Tensor) -> Tensor:  # [n, n] -> [size]
        """Lay out a symmetric matrix."""
        return packed(matrix) if self.is_folded else matrix.reshape(-1)

    def unpack(self, vector: Tensor, n: int) -> Tensor:  # [size] -> [n, n]
        """The matrix again; a view of the vector where nothing is folded."""
        return unpacked(vector, n) if self.is_folded else vector.view(n, n)


FOLDED = Packing(is_folded=True)


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
