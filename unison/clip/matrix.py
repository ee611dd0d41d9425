"""A parameter as a matrix [rows, columns], whatever form its records have.

[Note: left and right] The gradient of a sample is Σ_t left_t right_tᵀ reshaped to the parameter's
shape. A `Product` has left = g and right = a, or the other way round if it is transposed; a
`Lookup` has the one-hot vector of its id on the left. Seen like this, two uses of one parameter
differ in nothing but their number of tokens, and join on the token axis.

Everything here cuts tensors into tiles, so that a float64 copy of a whole record never exists.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from unison.errors import BadInput
from unison.ops import Dense, Lookup, Product, Record, Streamed

# Samples × tokens that one float64 GEMM adds up. Few, and its rounding is small: see bounds.py.
MOST_TERMS_TOGETHER = 4096
# Sizes of tiles. They bound memory, and a GEMM of a few hundred tokens runs at full speed.
TOKENS_PER_TILE = 256
ROWS_PER_TILE = 256
# Of a float64 tile: on a CPU it should stay in cache, and be small enough for the allocator to use
# its memory again (a page fault per 4 KiB costs more than the arithmetic). On a GPU it should be
# large beside the launch of a kernel.
_BYTES_PER_TILE = {"cpu": 2 << 20}
_BYTES_PER_TILE_ELSEWHERE = 64 << 20


@contextmanager
def plain_arithmetic(device: torch.device) -> Iterator[None]:
    """Compute in the dtypes that the code names: no autograd, no autocast."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


def spans(total: int, size: int) -> Iterator[slice]:
    """Cut range(total) into slices of at most `size`.

    >>> list(spans(5, 2))
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    for start in range(0, total, size):
        yield slice(start, min(total, start + size))


def num_per_tile(bytes_each: int, device: torch.device) -> int:
    """Return how many things of `bytes_each` make a tile, at least one."""
    total = _BYTES_PER_TILE.get(device.type, _BYTES_PER_TILE_ELSEWHERE)
    return max(1, total // max(1, bytes_each))


def factors(product: Product) -> tuple[Tensor, Tensor]:
    """Return left [batch, tokens, rows] and right [batch, tokens, columns] of a product."""
    return (product.a, product.g) if product.is_transposed else (product.g, product.a)


def tensors_of(record: Record | Streamed) -> tuple[Tensor, ...]:
    """Return the floating-point tensors of a record, each batched on dim 0.

    Of one that is made while it is read, those that it holds: what is made has their dtype.
    """
    match record:
        case Product():
            return record.a, record.g
        case Streamed():
            return (record.a,)
        case Lookup():
            return (record.g,)
        case Dense():
            return (record.value,)
        case _:
            raise TypeError(f"expected a Product, Lookup or Dense, found {type(record)}")


def take(record: Record, samples: slice) -> Record:
    """Return the record of some samples of the batch, as views."""
    match record:
        case Product():
            a, g = record.a[samples], record.g[samples]
            return Product(a, g, record.is_transposed, record.shape)
        case Lookup():
            return Lookup(record.ids[samples], record.g[samples], record.shape)
        case Dense():
            return Dense(record.value[samples])
        case _:
            raise TypeError(f"expected a Product, Lookup or Dense, found {type(record)}")


def num_terms(record: Record | Streamed) -> int:
    """Return how many terms one sample's gradient is a sum of: its tokens, 1 for `Dense`."""
    match record:
        case Product() | Streamed():
            return record.a.shape[1]
        case Lookup():
            return record.ids.shape[1]
        case Dense():
            return 1
        case _:
            raise TypeError(f"expected a Product, Lookup or Dense, found {type(record)}")


def matrix_shapes(records: Sequence[Record | Streamed]) -> set[tuple[int, int]]:
    """Return the [rows, columns] in which the uses see their parameter: one, unless they differ.

    `Dense` records are matrices of any shape, and count only if there is nothing else.
    """
    found = set()
    for record in records:
        if isinstance(record, Product):
            left, right = factors(record)
            found.add((left.shape[-1], right.shape[-1]))
        elif isinstance(record, Lookup | Streamed):
            found.add((record.shape[0], math.prod(record.shape[1:])))
    if found:
        return found
    shape = records[0].shape
    return {(shape[0], math.prod(shape[1:])) if shape else (1, 1)}


def matrix_shape(records: Sequence[Record | Streamed]) -> tuple[int, int]:
    """Return the one [rows, columns] of all uses.

    Raises:
        BadInput: if two uses see the parameter as matrices of different shapes.
    """
    found = matrix_shapes(records)
    if len(found) > 1:
        raise BadInput(f"expected uses of one matrix [rows, columns], found {sorted(found)}")
    return next(iter(found))


def check_records(records: Sequence[Record | Streamed]) -> int:
    """Require records to be uses of one parameter by one batch, and return the batch's size.

    Raises:
        BadInput: if there is no record, or if shapes, batches or devices differ.
    """
    if not records:
        raise BadInput("expected the records of a parameter, found none: it was not used")
    shapes = {record.shape for record in records}
    if len(shapes) > 1:
        raise BadInput(f"expected records of one parameter, found shapes {sorted(shapes)}")
    tensors = [tensor for record in records for tensor in tensors_of(record)]
    batches = {len(tensor) for tensor in tensors}
    if len(batches) > 1:
        raise BadInput(f"expected records of one batch, found batches of {sorted(batches)} samples")
    devices = {str(tensor.device) for tensor in tensors}
    if len(devices) > 1:
        raise BadInput(f"expected records on one device, found {sorted(devices)}")
    for record in records:
        _check_layout(record)
    return batches.pop()


def _check_layout(record: Record | Streamed) -> None:
    match record:
        case Product(a=a, g=g, shape=shape):
            if a.ndim != 3 or g.ndim != 3 or a.shape[:2] != g.shape[:2]:
                raise BadInput(
                    "expected a [batch, tokens, d_in] and g [batch, tokens, d_out], "
                    f"found {list(a.shape)} and {list(g.shape)}"
                )
            if a.shape[2] * g.shape[2] != math.prod(shape):
                raise BadInput(
                    f"expected d_in * d_out elements of a parameter of shape {list(shape)}, "
                    f"found a {list(a.shape)} and g {list(g.shape)}"
                )
        case Lookup(ids=ids, g=g, shape=shape):
            if g.ndim != 3 or ids.shape != g.shape[:2] or g.shape[2] != math.prod(shape[1:]):
                raise BadInput(
                    f"expected ids [batch, tokens] and g [batch, tokens, features] of a table "
                    f"{list(shape)}, found {list(ids.shape)} and {list(g.shape)}"
                )
        case Dense() | Streamed():
            pass
        case _:
            raise TypeError(f"expected a Product, Lookup or Dense, found {type(record)}")


def wide_dtype(records: Sequence[Record]) -> torch.dtype:
    """Return the dtype of results: the widest of the records', and at least float32."""
    dtype = torch.float32
    for record in records:
        for tensor in tensors_of(record):
            dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype
