"""Whose the rows of every tensor are: a trace of the samples through a forward pass.

[Note: the sample of every row] Where rows are selected, sorted or masked by values, no count tells
which sample a row belongs to. So a second tensor goes along with each tensor that depends on the
batch: for every element the number of its sample, kept as one number for all elements along a
dimension where it does not change ([batch, 1, 1] beside [batch, tokens, features]). It begins at
the module's inputs. What moves elements about (views, indexing, sorting, packing) is done to the
numbers too, by the same function with the same indices. What computes with elements keeps a
number where all that went in agree; a sum over samples, or what has no rule here, gives `MIXED`,
and an operation with a parameter refuses that. What is made without the batch is `NOBODY`'s.

Gradients decide whose a row is, and integers have none: where a float and an integer meet, the
float's sample counts. To choose a row by its number does not make it the chooser's.

The trace runs below autograd, where torch has a few hundred functions with one name each, and only
for models that need it: those that move rows by values, or read values to decide what to do
(follow.py). Numbers belong to memory: all views of it see what is written to it in place.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from unison.ops.layout import NOBODY

MIXED = -2


@dataclass(frozen=True, eq=False, slots=True)
class Rows:
    """Whose the elements of a tensor are.

    Attributes:
        ids: The sample of each element, int64: as many dimensions as the tensor, each as long, or 1
            where the sample does not change along it. `NOBODY` and `MIXED` are no samples.
        is_by_value: Whether values have decided where the rows lie.
        is_random: Whether it is nobody's, and drawn at random.
        lost_by: The function that has made it `MIXED`.
    """

    ids: Tensor
    is_by_value: bool = False
    is_random: bool = False
    lost_by: str | None = None


def lost(tensor: Tensor, by: str) -> Rows:
    """The rows of a tensor of which nobody can tell whose it is."""
    return lost_of(tensor.ndim, tensor, by)


def lost_of(ndim: int, tensor: Tensor, by: str) -> Rows:
    """The same, of a tensor of so many dimensions on the device of another."""
    ids = torch.full((1,) * ndim, MIXED, device=tensor.device)
    return Rows(ids, lost_by=by)


def compressed(ids: Tensor) -> Tensor:
    """Keep one number where it does not change along a dimension."""
    for dim, size in enumerate(ids.shape):
        if size > 1:
            first = ids.narrow(dim, 0, 1)
            if bool((ids == first).all()):
                ids = first
    return ids.clone()


def combined(left: Tensor, right: Tensor) -> Tensor:
    """The sample on which two agree that are broadcast to one another; `MIXED` otherwise."""
    right = right.to(left.device)  # a number on the CPU may meet tensors elsewhere
    if left is right or (left.shape == right.shape and torch.equal(left, right)):
        return left
    agreed = torch.where((right == NOBODY) | (left == right), left, MIXED)
    return torch.where(left == NOBODY, right, agreed)


def filled(ids: Tensor, others: Tensor) -> Tensor:
    """The samples, and others where there is none."""
    if ids.numel() and bool((ids == NOBODY).any()):
        return torch.where(ids == NOBODY, others.to(ids.device), ids)
    return ids


def reduced(ids: Tensor, dims: Sequence[int], *, keepdim: bool) -> Tensor:
    """The sample on which all agree along some dimensions; `MIXED` otherwise."""
    dims = sorted({dim % max(ids.ndim, 1) for dim in dims}, reverse=True)
    if ids.ndim == 0:
        return ids
    wide = [dim for dim in dims if ids.shape[dim] != 1]
    if wide and 0 in (ids.shape[dim] for dim in wide):
        sizes = [1 if dim in wide else size for dim, size in enumerate(ids.shape)]
        ids = torch.full(sizes, NOBODY, device=ids.device)
    elif wide:
        none = torch.iinfo(torch.int64).max
        low = torch.where(ids == NOBODY, none, ids).amin(wide, keepdim=True)
        high = ids.amax(wide, keepdim=True)
        ids = torch.where(low == none, NOBODY, torch.where(low == high, high, MIXED))
    if not keepdim:
        for dim in dims:
            ids = ids.squeeze(dim)
    return ids


def grown(ids: Tensor, ndim: int) -> Tensor:
    """As many dimensions as something it is broadcast to."""
    return ids.reshape(*(1 for _ in range(ndim - ids.ndim)), *ids.shape)


def uniform(size: int, batch: int, dim: int, ndim: int, device: torch.device) -> Tensor:
    """The numbers of samples that lie one after the other, as many rows each."""
    ids = torch.arange(batch, device=device).repeat_interleave(size // max(batch, 1))
    return ids.reshape([-1 if d == dim else 1 for d in range(ndim)])


def is_mixed(rows: Rows) -> bool:
    """Whether samples are mixed in some element, or nobody can tell whose it is."""
    with _disable_current_modes():
        return bool((rows.ids == MIXED).any())
