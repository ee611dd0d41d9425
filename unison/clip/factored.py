"""Uses whose per-sample gradients are never formed: their factors are kept until the pass is over.

[Note: factors that wait] A layer that is measured by inner products and added up from its records
keeps both factors of its per-sample gradients anyway. So nothing is done with them until the pass
is over: then one launch measures all such layers, and when the coefficients are known another adds
all of them up (`unison.kernels.factored`). Layer by layer, each would be two launches, and a GPU
that is not full.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from unison.capture.tap import refuse_changed
from unison.clip.bounds import SampleNorms
from unison.clip.matrix import factors
from unison.clip.measured import bound_grams
from unison.clip.modes import MODES, Choice
from unison.clip.sum_grid import SumGrid
from unison.kernels import factored
from unison.kernels.multi_tensor import ADDRESS, TensorBatch, TensorMeta
from unison.ops import Product, Record, Streamed

CHOICE = MODES["ghost_bk"]


class Factors(NamedTuple):
    """The one use of a parameter: X_b = left_bᵀ right_b.

    Attributes:
        left: [samples, tokens, rows].
        right: [samples, tokens, columns].
        is_transposed: Whether the gradient of the output is on the right.
        shape: Of the parameter.
        held: The gradient as autograd has it, which adds to gradients in place, but only to those
            that nobody else holds.
        versions: Of left and right.
    """

    left: Tensor
    right: Tensor
    is_transposed: bool
    shape: tuple[int, ...]
    held: Tensor
    versions: tuple[int, int]

    @classmethod
    def of(cls, product: Product) -> "Factors":
        """Return the factors of a record."""
        left, right = (factored.aligned(each) for each in factors(product))
        versions = left._version, right._version
        return cls(left, right, product.is_transposed, product.shape, product.g, versions)

    def check(self) -> None:
        """Require that nobody has written to the factors, before or after they were measured."""
        if (self.left._version, self.right._version) != self.versions:
            refuse_changed()

    @property
    def product(self) -> Product:
        """The record of the use."""
        a, g = (self.left, self.right) if self.is_transposed else (self.right, self.left)
        return Product(a, g, self.is_transposed, self.shape)

    @property
    def num_bytes(self) -> int:
        """What is given back with the gradient of the output: its input may be another's too."""
        return (self.right if self.is_transposed else self.left).nbytes


def can_wait(records: Sequence[Record | Streamed], choice: Choice) -> bool:
    """Whether records are measured and added up with those of other parameters."""
    only = records[0] if len(records) == 1 else None
    return choice == CHOICE and type(only) is Product and factored.are_taken(*factors(only))


class Group:
    """Parameters whose factors kernels take together: alike in samples, tokens and dtype.

    Args:
        names: Of the parameters, in order of names.
        found: Their factors, or others like these.
    """

    def __init__(self, names: Sequence[str], found: Mapping[str, Factors]) -> None:
        mine = [found[name] for name in names]
        self.names = names
        self._lefts = TensorMeta([each.left for each in mine])
        self._rights = TensorMeta([each.right for each in mine])
        self._features = max(each.left.shape[2] + each.right.shape[2] for each in mine)
        self._shapes = [(1, *each.shape) for each in mine]
        self._sizes = [math.prod(each.shape) for each in mine]
        # Of every sum in the memory of all: as aligned as factors are, by which kernels store.
        self._starts = np.cumsum([0, *self._sizes[:-1]], dtype=ADDRESS) * 4

    def measure(self, found: Mapping[str, Factors]) -> SampleNorms:
        """Return the norms of all samples [parameters, samples]."""
        lefts, rights = self._sides(found)
        grams = factored.grams(lefts, rights)
        batch, tokens = lefts[0].shape[:2]
        return bound_grams(grams, batch, tokens, self._features, lefts[0].dtype)

    def sums(
        self, found: Mapping[str, Factors], coefficients: Sequence[Tensor], grid: SumGrid | None
    ) -> Sequence[Tensor]:
        """Return the clipped sum of every parameter [1, *shape]; all in one memory.

        Args:
            found: Their factors.
            coefficients: [samples] of each.
            grid: To which each sample's share is rounded: sums are int32. None for float32.
        """
        lefts, rights = self._sides(found)
        weights = stacked(coefficients, grid)
        dtype = torch.float32 if grid is None else torch.int32
        memory = torch.empty(sum(self._sizes), dtype=dtype, device=weights.device)
        pieces = torch.unsafe_split_with_sizes(memory, self._sizes)  # views, unknown to autograd
        made = [piece.view(shape) for piece, shape in zip(pieces, self._shapes, strict=True)]
        at = (self._starts + memory.data_ptr()).tobytes()
        outs = TensorBatch(made, _NO_FACTS, True, at)  # of outputs only addresses are asked for
        factored.weighted_sums(lefts, rights, weights, outs)
        return made

    def add(
        self,
        found: Mapping[str, Factors],
        coefficients: Sequence[Tensor],
        grid: SumGrid,
        totals: Sequence[Tensor],
    ) -> None:
        """Add the clipped sum of every parameter to integers.

        Args:
            found: Their factors.
            coefficients: [samples] of each.
            grid: To which each sample's share is rounded.
            totals: Of each parameter, int32, contiguous.
        """
        lefts, rights = self._sides(found)
        factored.weighted_sums(lefts, rights, stacked(coefficients, grid), totals, add=True)

    def _sides(self, found: Mapping[str, Factors]) -> tuple[TensorBatch, TensorBatch]:
        lefts, rights = [], []
        for name in self.names:
            each = found[name]
            each.check()
            lefts.append(each.left)
            rights.append(each.right)
        return TensorBatch(lefts, self._lefts, True), TensorBatch(rights, self._rights, True)


_NO_FACTS = TensorMeta(())


def groups_of(found: Mapping[str, Factors]) -> list[Group]:
    """Return parameters in groups, in an order that depends on names and shapes alone."""
    places: dict[tuple, list[str]] = {}
    for name in sorted(found):
        left = found[name].left
        places.setdefault((*left.shape[:2], left.dtype, left.device), []).append(name)
    return [Group(names, found) for names in places.values()]


def sums_of(
    found: dict[str, Factors],
    coefficients: Mapping[str, Tensor],
    grid: SumGrid | None = None,
    *,
    is_bounded: bool,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the clipped sum of each parameter [1, *shape], letting its factors go.

    Args:
        found: The factors by name; empty afterwards.
        coefficients: [samples] of every parameter.
        grid: To which each sample's share is rounded: sums are int32. None for float32.
        is_bounded: Whether memory is. Then no more sums are made at a time than fit into what the
            largest takes, and into what the factors before them have given back.
    """
    sizes = {name: 4 * math.prod(each.shape) for name, each in found.items()}
    least = max(sizes.values(), default=0) if is_bounded else sum(sizes.values())
    room = least
    for group in groups_of(found):
        names = list(group.names)
        while names:
            count = size = 0
            while count < len(names) and (count == 0 or size + sizes[names[count]] <= room):
                size += sizes[names[count]]
                count += 1
            some, names = Group(names[:count], found), names[count:]
            made = some.sums(found, [coefficients[name] for name in some.names], grid)
            given = sum(found.pop(name).num_bytes for name in some.names)
            room = max(least, room + given - size)
            yield from zip(some.names, made, strict=True)


def stacked(coefficients: Sequence[Tensor], grid: SumGrid | None = None) -> Tensor:
    """Return coefficients of several parameters [parameters, samples], float32, in few launches.

    Args:
        coefficients: [samples] of each.
        grid: For shares that are counted in its spacings.
    """
    first = coefficients[0]
    is_one = all(each is first for each in coefficients)
    found = first if is_one else torch.stack(list(coefficients))
    weights = found.float() if grid is None else grid.weights(found)
    return weights.expand(len(coefficients), -1).contiguous() if is_one else weights
