"""What the tests of clipping share: records of every kind, and their gradients in float64."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from unison.ops import Dense, Lookup, Product, Record
from unison.ops.records import shape_of

# The common one, a narrow one, and the one in which methods work without a copy.
DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float64,
    pytest.param(torch.float16, marks=pytest.mark.full),
]

Make = Callable[[torch.Generator], list[Record]]


def explicit_gradients(records: Sequence[Record]) -> Tensor:
    """Return every sample's gradient, one sample and one use after another: [batch, *shape]."""
    first = records[0]
    batch = len(first.value if isinstance(first, Dense) else first.g)
    gradients = torch.zeros(batch, *shape_of(first), dtype=torch.float64)
    for i in range(batch):
        for record in records:
            gradients[i] += _gradient(record, i)
    return gradients


def _gradient(record: Record, i: int) -> Tensor:  # [*shape]
    if isinstance(record, Dense):
        return record.value[i].double()
    g = record.g[i].double()  # [tokens, d_out]
    if isinstance(record, Product):
        a = record.a[i].double()  # [tokens, d_in]
        matrix = a.T @ g if record.is_transposed else g.T @ a
        return matrix.reshape(record.shape)
    table = torch.zeros(record.shape, dtype=torch.float64)
    for row, gradient in zip(record.ids[i].tolist(), g, strict=True):
        if row >= 0:
            table[row] += gradient
    return table


def explicit_norms(records: Sequence[Record]) -> Tensor:  # [batch]
    gradients = explicit_gradients(records)
    return gradients.reshape(len(gradients), first_size(gradients)).norm(dim=1)


def first_size(gradients: Tensor) -> int:
    """Return the number of elements of one sample, for a batch of none too."""
    return gradients.new_zeros(gradients.shape[1:]).numel()


def explicit_mass(records: Sequence[Record]) -> Tensor:
    """Return Σ_t ‖a_t‖‖g_t‖ over all uses: [batch]."""
    total = torch.zeros(())
    for record in records:
        match record:
            case Product(a=a, g=g):
                part = (a.double().norm(dim=-1) * g.double().norm(dim=-1)).sum(1)
            case Lookup(ids=ids, g=g):
                part = (g.double().norm(dim=-1) * (ids >= 0)).sum(1)
            case Dense(value=value):
                part = value.double().reshape(len(value), first_size(value)).norm(dim=1)
        total = total + part
    return total


def cast(records: Sequence[Record], dtype: torch.dtype) -> list[Record]:
    """Return the records in another dtype, with the strides they had."""
    done = []
    for record in records:
        match record:
            case Product(a=a, g=g):
                done.append(Product(a.to(dtype), g.to(dtype), record.is_transposed, record.shape))
            case Lookup(ids=ids, g=g):
                done.append(Lookup(ids, g.to(dtype), record.shape))
            case Dense(value=value):
                done.append(Dense(value.to(dtype)))
    return done


def product(
    gen: torch.Generator,
    batch: int = 5,
    tokens: int = 123,
    d_in: int = 77,
    d_out: int = 13,
    is_transposed: bool = False,
    shape: tuple[int, ...] | None = None,
) -> Product:
    a = torch.randn(batch, tokens, d_in, generator=gen)
    g = torch.randn(batch, tokens, d_out, generator=gen)
    own = (d_in, d_out) if is_transposed else (d_out, d_in)
    return Product(a, g, is_transposed, shape or own)


def lookup(
    gen: torch.Generator, batch: int = 5, tokens: int = 123, rows: int = 13, features: int = 77
) -> Lookup:
    """Return lookups of few rows, so that most tokens share theirs, with padding among them."""
    ids = torch.randint(-2, rows, (batch, tokens), generator=gen)
    return Lookup(ids, torch.randn(batch, tokens, features, generator=gen), (rows, features))


def dense(gen: torch.Generator, *shape: int, batch: int = 5) -> Dense:
    return Dense(torch.randn(batch, *shape, generator=gen))


def cancelling(gen: torch.Generator, tokens: int = 256, kind: str = "product") -> list[Record]:
    """Tokens in pairs that cancel but for a part in 10^4: n is far below S = Σ ‖a‖‖g‖."""
    half = product(gen, batch=3, tokens=tokens // 2, d_in=40, d_out=30)
    g = torch.cat([half.g, -half.g + 1e-4 * torch.randn(half.g.shape, generator=gen)], 1)
    if kind == "lookup":
        ids = torch.randint(0, 50, (3, tokens // 2), generator=gen).repeat(1, 2)
        return [Lookup(ids, g, (50, 30))]
    return [Product(half.a.repeat(1, 2, 1), g, False, (30, 40))]


def _all_equal_ids(gen: torch.Generator) -> list[Record]:
    record = lookup(gen)
    return [Lookup(torch.full_like(record.ids, 7), record.g, record.shape)]


def _all_padding(gen: torch.Generator) -> list[Record]:
    record = lookup(gen)
    return [Lookup(torch.full_like(record.ids, -100), record.g, record.shape)]


def _not_contiguous(gen: torch.Generator) -> list[Record]:
    a = torch.randn(77, 5, 123, generator=gen).permute(1, 2, 0)
    g = torch.randn(123, 5, 26, generator=gen).transpose(0, 1)[..., ::2]
    ids = torch.randint(0, 13, (123, 5), generator=gen).T
    rows = torch.randn(5, 1, 77, generator=gen).expand(5, 123, 77)  # as of a position's gradient
    value = torch.randn(77, 13, 5, generator=gen).permute(2, 1, 0)
    return [Product(a, g, False, (13, 77)), Lookup(ids, rows, (13, 77)), Dense(value)]


RECORDS: dict[str, Make] = {
    "product": lambda gen: [product(gen)],
    "transposed": lambda gen: [product(gen, is_transposed=True)],
    "one token": lambda gen: [product(gen, tokens=1)],
    "one feature": lambda gen: [product(gen, d_in=1)],
    "several tiles": lambda gen: [product(gen, batch=2, tokens=531, d_in=9, d_out=300)],
    "convolution": lambda gen: [product(gen, shape=(13, 11, 7))],
    "lookup": lambda gen: [lookup(gen)],
    "long lookup": lambda gen: [lookup(gen, batch=2, tokens=600, rows=5000, features=5)],
    "one row": _all_equal_ids,
    "all padding": _all_padding,
    "dense": lambda gen: [dense(gen, 13, 77)],
    "vector": lambda gen: [dense(gen, 13)],
    "scalar": lambda gen: [dense(gen)],
    "two vectors": lambda gen: [dense(gen, 13), dense(gen, 13)],
    "two products": lambda gen: [product(gen), product(gen, tokens=300)],
    "opposite products": lambda gen: [
        product(gen, d_in=7, d_out=9),
        product(gen, d_in=9, d_out=7, is_transposed=True),
    ],
    "two lookups": lambda gen: [lookup(gen), lookup(gen, tokens=4)],
    "tied": lambda gen: [lookup(gen, tokens=290), product(gen, tokens=300)],
    "tied, transposed": lambda gen: [
        lookup(gen),
        product(gen, d_in=13, d_out=77, is_transposed=True),
    ],
    "product and dense": lambda gen: [product(gen), dense(gen, 13, 77)],
    "convolution and dense": lambda gen: [
        product(gen, shape=(13, 11, 7)),
        dense(gen, 13, 11, 7),
    ],
    "lookup and dense": lambda gen: [lookup(gen), dense(gen, 13, 77)],
    "all kinds": lambda gen: [product(gen), lookup(gen), dense(gen, 13, 77), product(gen)],
    "two matrices": lambda gen: [
        product(gen, d_in=77, d_out=13, shape=(13, 11, 7)),
        product(gen, d_in=7, d_out=143, shape=(13, 11, 7)),
    ],
    "not contiguous": _not_contiguous,
    "empty batch": lambda gen: [
        product(gen, batch=0),
        lookup(gen, batch=0),
        dense(gen, 13, 77, batch=0),
    ],
    "no tokens": lambda gen: [product(gen, tokens=0)],
    "no tokens in a lookup": lambda gen: [lookup(gen, tokens=0)],
}
