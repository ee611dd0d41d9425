"""Per-sample squared norms: several ways to the same numbers, in one table.

Every method returns ‖Σ_uses gradient_b‖² [batch] in float64, cross terms between uses included.
They differ in FLOPs, in memory, and in the records they take; `NORM_METHODS` is the one place that
says which. To add a method, add a function and a line there; the tests run over the table.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unison import check
from unison.clip.bounds import SampleNorms, bounded
from unison.clip.gram import gram_squared_norms, lookup_squared_norms
from unison.clip.matrix import (
    ROWS_PER_TILE,
    TOKENS_PER_TILE,
    check_records,
    factors,
    matrix_shape,
    matrix_shapes,
    num_per_tile,
    plain_arithmetic,
    spans,
    take,
    tensors_of,
    wide_dtype,
)
from unison.errors import UnsupportedOperation
from unison.kernels.per_sample import squared_norms
from unison.ops import Dense, Lookup, Product, Record
from unison.ops.records import add_rows_


@dataclass(frozen=True)
class NormMethod:
    """One way to compute per-sample squared norms; call it with the records of one parameter.

    Attributes:
        name: As in `NORM_METHODS`.
        squared_norms: Records to squared norms [batch], float64.
        refusal: Says why it cannot take some records, or None if it can.
        is_kept: Whether it forms per-sample gradients, from which the clipped sum must be taken.
    """

    name: str
    squared_norms: Callable[[Sequence[Record]], Tensor]
    refusal: Callable[[Sequence[Record]], str | None]
    is_kept: bool = False

    def __call__(self, records: Sequence[Record]) -> Tensor:
        """Return ‖Σ_uses gradient_b‖² [batch], float64.

        Raises:
            UnsupportedOperation: if the method does not take these records.
        """
        check_records(records)
        why = self.refusal(records)
        if why is not None:
            raise UnsupportedOperation(f"norm method {self.name!r} cannot be used here: {why}")
        return self.squared_norms(records)


def measure(
    records: Sequence[Record], method: str, out: Tensor | None = None
) -> tuple[SampleNorms, Sequence[Record]]:
    """Return bounded norms, and the records from which the clipped sum is to be computed.

    The latter are the given ones, except that `materialize` returns the per-sample gradients it has
    formed. Its bound holds for these only, which is why they are returned together.

    Args:
        records: The uses of one parameter.
        method: A name in `NORM_METHODS`.
        out: Where `materialize` may put per-sample gradients: `needed_to_keep` says how much.
    """
    check.one_of(NORM_METHODS, method=method)
    if NORM_METHODS[method].is_kept:
        value, squared = materialize(records, out)
        records = [Dense(value)]
        return bounded(records, squared), records
    return bounded(records, NORM_METHODS[method](records)), records


def tile_squared_norms(records: Sequence[Record]) -> Tensor:
    """Return squared norms by forming per-sample gradients a few rows at a time: [batch], float64.

    The plain-torch reference of a kernel that squares tiles of products on chip. Extra memory is
    one tile [samples, rows in the tile, columns] and the tokens that go into it.
    """
    batch = check_records(records)
    num_rows, num_columns = matrix_shape(records)
    first = tensors_of(records[0])[0]
    total = torch.zeros(batch, dtype=torch.float64, device=first.device)
    height = min(ROWS_PER_TILE, max(16, num_per_tile(8 * num_columns, first.device)))
    bytes_per_sample = 16 * (height * num_columns + TOKENS_PER_TILE * (height + num_columns))
    with plain_arithmetic(first.device):
        for samples in spans(batch, num_per_tile(bytes_per_sample, first.device)):
            uses = [take(record, samples) for record in records]
            lookups = [use for use in uses if isinstance(use, Lookup)]
            if len(lookups) == len(uses):  # mostly empty rows: tiles of them would be a waste
                total[samples] = lookup_squared_norms(lookups)
                continue
            for rows in spans(num_rows, height):
                tile = first.new_zeros(
                    samples.stop - samples.start,
                    rows.stop - rows.start,
                    num_columns,
                    dtype=torch.float64,
                )
                for use in uses:
                    _add_rows(tile, use, rows)
                total[samples] += tile.square_().sum(-1).sum(-1)
    return total


def per_sample_gradients(records: Sequence[Record]) -> Tensor:
    """Return the per-sample gradients themselves: [batch, *shape], float32 or wider.

    A single `Dense` record that is wide enough is returned as it is, not copied.
    """
    return materialize(records)[0]


def needed_to_keep(records: Sequence[Record]) -> tuple[tuple[int, ...], torch.dtype] | None:
    """Return shape and dtype of what `materialize` has to allocate; None if it needs nothing."""
    if len(records) == 1 and isinstance(records[0], Dense):
        return None
    return (check_records(records), *records[0].shape), wide_dtype(records)


def materialize(records: Sequence[Record], out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Form the per-sample gradients, and square them while they are in cache.

    Args:
        records: The uses of one parameter.
        out: Where to put the gradients [batch, *shape], of the dtype of `needed_to_keep`.

    Returns:
        The gradients [batch, *shape], float32 or wider, and their squared norms [batch], float64.
    """
    batch = check_records(records)
    needed = needed_to_keep(records)
    first = tensors_of(records[0])[0]
    with plain_arithmetic(first.device):
        if needed is None:
            value = first.to(wide_dtype(records))
            return value, squared_norms(value.reshape(batch, math.prod(value.shape[1:])))
        shape, dtype = needed
        total = first.new_empty(shape, dtype=dtype) if out is None else out
        assert (total.shape, total.dtype) == (shape, dtype)
        squared = torch.zeros(batch, dtype=torch.float64, device=first.device)
        size = num_per_tile(dtype.itemsize * math.prod(shape[1:]), first.device)
        for samples in spans(batch, size):
            part = total[samples]
            uses = [take(record, samples) for record in records]
            if len(uses) == 1 and isinstance(uses[0], Product) and first.dtype == dtype:
                left, right = factors(uses[0])  # the usual case: written, not added to zeros
                torch.bmm(left.mT, right.to(dtype), out=part.view(len(left), *matrix_shape(uses)))
            else:
                part.zero_()
                for use in uses:
                    matrices = part.view(len(part), *matrix_shape([use]))
                    _add_rows(matrices, use, slice(0, matrices.shape[1]))
            squared[samples] = squared_norms(part.view(len(part), -1))
    return total, squared


def materialize_squared_norms(records: Sequence[Record]) -> Tensor:
    """Return the squared norms of the per-sample gradients, formed whole: [batch], float64."""
    return materialize(records)[1]


def rank_one_squared_norms(records: Sequence[Record]) -> Tensor:
    """Return ‖a‖²‖g‖² of a product with one token per sample: [batch], float64."""
    (product,) = records
    assert isinstance(product, Product)
    with plain_arithmetic(product.a.device):
        a, g = product.a.squeeze(1).double(), product.g.squeeze(1).double()  # [batch, features]
        return a.square().sum(-1) * g.square().sum(-1)


def _add_rows(tile: Tensor, record: Record, rows: slice) -> None:
    """Add some rows of the samples' gradients to `tile` [batch, rows in the tile, columns]."""
    dtype = tile.dtype
    match record:
        case Product():
            left, right = factors(record)
            # Tokens are cut only where a cast would copy them.
            is_cast = left.dtype != dtype or right.dtype != dtype
            size = TOKENS_PER_TILE if is_cast else max(1, left.shape[1])
            for tokens in spans(left.shape[1], size):
                tile.baddbmm_(left[:, tokens, rows].mT.to(dtype), right[:, tokens].to(dtype))
        case Lookup(ids=ids, g=g):
            batch, height, columns = tile.shape
            is_here = (ids >= rows.start) & (ids < rows.stop)  # [batch, tokens]
            index = (ids - rows.start).masked_fill(~is_here, 0)
            index = index + height * torch.arange(batch, device=ids.device).unsqueeze(1)
            g = g.to(dtype).masked_fill(~is_here.unsqueeze(-1), 0.0)
            add_rows_(tile.view(batch * height, columns), index.flatten(), g.flatten(0, 1))
        case Dense(value=value):
            columns = tile.shape[2]
            num_rows = math.prod(record.shape) // max(1, columns)
            tile += value.reshape(len(value), num_rows, columns)[:, rows]
        case _:
            raise TypeError(f"expected a Product, Lookup or Dense, found {type(record)}")


def _needs_one_matrix(records: Sequence[Record]) -> str | None:
    found = sorted(matrix_shapes(records))
    if len(found) > 1:
        return f"uses see the parameter as matrices of different shapes {found}; use 'materialize'"
    return None


def _needs_one_token(records: Sequence[Record]) -> str | None:
    if len(records) != 1 or not isinstance(records[0], Product):
        kinds = [type(record).__name__ for record in records]
        return f"it needs one Product, found {kinds}; use 'gram'"
    if records[0].a.shape[1] != 1:
        return f"it needs one token per sample, found {records[0].a.shape[1]}; use 'gram'"
    return None


def _needs_nothing(records: Sequence[Record]) -> str | None:
    return None


NORM_METHODS: dict[str, NormMethod] = {
    method.name: method
    for method in (
        NormMethod("gram", gram_squared_norms, _needs_one_matrix),
        NormMethod("tile", tile_squared_norms, _needs_one_matrix),
        NormMethod("materialize", materialize_squared_norms, _needs_nothing, is_kept=True),
        NormMethod("rank_one", rank_one_squared_norms, _needs_one_token),
    )
}
