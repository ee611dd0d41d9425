"""Records: what one use of a parameter leaves behind, enough for every per-sample gradient of it.

[Note: three forms] The gradient of one sample's loss with respect to a parameter is a sum over the
sample's tokens. Three forms cover every operation:

* `Product`: Σ_t g_t a_tᵀ, an outer product per token: linear layers, convolutions as linear layers
  of their unfolded input. Never larger than activations until someone multiplies it out.
* `Lookup`: row id_t gets g_t: embeddings. It is the product with one-hot inputs, kept as ids.
* `Dense`: the per-sample gradients themselves: what has as many elements as a vector (biases,
  norms), and what came through a fallback.

A parameter that is used several times, or under several names, has several records; its gradient is
their sum. All tensors are laid out [batch, tokens, features]. A `Layout` says which rows of a
tensor belong to which sample.

[Note: rows with an index] Samples usually lie one after the other, each with as many rows: then a
reshape brings a tensor to [batch, tokens, features]. Rows that were selected, sorted or masked by
values (tokens routed to experts, packed sequences) lie anywhere, and samples have different numbers
of them, even where the total divides by the batch. Such a layout carries an *index*, the sample of
each row. Rows are then gathered sample by sample and padded with zeros to the longest: a row of
zeros in the gradient adds nothing to any product, lookup or sum.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from unison.errors import BadInput, UnsupportedOperation
from unison.kernels.multi_tensor import column_sums
from unison.torch_internals import machine_of

NOBODY = -1  # in an index: a row that belongs to no sample


@dataclass(frozen=True, eq=False)
class Product:
    """Σ_t g_t a_tᵀ per sample, a matrix [d_out, d_in] (or its transpose).

    Attributes:
        a: What went in [batch, tokens, d_in].
        g: The gradient of what came out [batch, tokens, d_out].
        is_transposed: Whether the parameter is laid out [d_in, d_out].
        shape: The parameter's own shape, as many elements as d_out * d_in.
    """

    a: Tensor
    g: Tensor
    is_transposed: bool
    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Lookup:
    """Row `ids[t]` of a table gets `g_t`, per sample.

    Attributes:
        ids: Which rows were looked up [batch, tokens], int64; a negative id counts for nothing
            (padding).
        g: The gradient of what came out [batch, tokens, features].
        shape: The table's shape [rows, features].
    """

    ids: Tensor
    g: Tensor
    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Dense:
    """The per-sample gradients themselves.

    Attributes:
        value: [batch, *shape of the parameter].
        is_ours: Whether nobody else has it, so that other uses may be added to it.
    """

    value: Tensor
    is_ours: bool = False


Record = Product | Lookup | Dense


def plain_record(record: Any) -> Record:
    """Return a record in one of these forms: one that is made while it is read, made whole."""
    return record if isinstance(record, Record) else record.as_product()


def shape_of(record: Any) -> tuple[int, ...]:
    """Return the shape of a record's parameter."""
    return tuple(record.value.shape[1:]) if isinstance(record, Dense) else record.shape


def factors(product: Product) -> tuple[Tensor, Tensor]:
    """Return left [batch, tokens, rows] and right [batch, tokens, columns] of a product."""
    return (product.a, product.g) if product.is_transposed else (product.g, product.a)


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


def per_sample(record: Record) -> Tensor:
    """Multiply a record out: the per-sample gradients [batch, *shape], float32 at least."""
    match record:
        case Dense():
            return wide(record.value)
        case Product():
            left, right = map(wide, factors(record))
            return torch.bmm(left.transpose(1, 2), right).reshape(len(left), *record.shape)
        case Lookup():
            batch, features, rows = len(record.g), record.g.shape[-1], record.shape[0]
            counts = (record.ids >= 0).unsqueeze(-1)
            g = torch.where(counts, wide(record.g), 0.0).reshape(-1, features)
            first = torch.arange(batch, device=g.device)[:, None] * rows
            places = (record.ids.clamp(min=0) + first).reshape(-1)
            flat = add_rows_(g.new_zeros(batch * rows, features), places, g)
            return flat.view(batch, *record.shape)


def add_rows_(table: Tensor, rows: Tensor, values: Tensor) -> Tensor:
    """Add `values` [n, features] to the named rows of `table`, in the same order every time.

    On a GPU `index_add_` adds rows that are named twice in whatever order its threads come, and the
    last bits change from run to run; `index_put_` sorts them first.
    """
    if machine_of(table.device) == "cpu":
        return table.index_add_(0, rows, values)
    return table.index_put_((rows,), values, accumulate=True)


def transposed(record: Record) -> Record:
    """The record of a matrix from that of its transpose."""
    if isinstance(record, Product):
        flipped = (record.shape[1], record.shape[0])
        return replace(record, is_transposed=not record.is_transposed, shape=flipped)
    return Dense(per_sample(record).transpose(1, 2))


def reshaped(record: Record, shape: tuple[int, ...]) -> Record:
    """The record of a parameter from that of the same elements in another shape."""
    if isinstance(record, Product):
        return replace(record, shape=shape)
    if isinstance(record, Lookup) and shape == record.shape:
        return record
    value = per_sample(record)
    return Dense(value.reshape(len(value), *shape))


def in_rows(record: Record, start: int, shape: tuple[int, ...]) -> Record:
    """The record of a parameter from that of some of its rows, from `start` on.

    It stays as large as activations: the other rows get zeros before anything is multiplied out.
    """
    num_rows = shape_of(record)[0]
    after = shape[0] - start - num_rows
    match record:
        case Product() if not record.is_transposed:
            # g is [batch, tokens, rows * what a row of the output holds]
            per_row = record.g.shape[-1] // num_rows
            g = F.pad(record.g, (start * per_row, after * per_row))
            return replace(record, g=g, shape=shape)
        case Product() if record.a.shape[-1] == num_rows:
            return replace(record, a=F.pad(record.a, (start, after)), shape=shape)
        case Lookup():
            ids = torch.where(record.ids >= 0, record.ids + start, record.ids)
            return Lookup(ids, record.g, shape)
        case Dense() if len(shape) == 2:
            ids = torch.arange(start, start + num_rows, device=record.value.device)
            return Lookup(ids.expand(len(record.value), -1), record.value, shape)
    value = per_sample(record)
    sides = [0, 0] * (len(shape) - 1) + [start, after]
    return Dense(F.pad(value, sides))


def part_of(record: Record, dim: int, start: int, size: int) -> Record:
    """The record of a part of a parameter, cut along `dim`, from that of all of it.

    Args:
        record: Of the whole parameter.
        dim: A dimension of the parameter.
        start: Where the part begins.
        size: How long it is.
    """
    before = shape_of(record)
    shape = (*before[:dim], size, *before[dim + 1 :])
    match record:
        case Product() if len(shape) == 2:
            if (dim == 0) == record.is_transposed:
                return replace(record, a=record.a.narrow(-1, start, size), shape=shape)
            return replace(record, g=record.g.narrow(-1, start, size), shape=shape)
        case Lookup() if dim == 0:
            ids = record.ids - start
            is_inside = (record.ids >= 0) & (ids >= 0) & (ids < size)
            return Lookup(torch.where(is_inside, ids, -1), record.g, shape)
        case Lookup():
            return Lookup(record.ids, record.g.narrow(-1, start, size), shape)
    return Dense(per_sample(record).narrow(1 + dim, start, size))


def wide(value: Tensor) -> Tensor:
    """A tensor in which sums over tokens keep their digits: float32 at least."""
    return value.to(torch.promote_types(value.dtype, torch.float32))


def index_in_order(size: int, batch: int, dim: int, ndim: int, device: torch.device) -> Tensor:
    """Return the samples of rows that lie one after the other, as many rows each."""
    ids = torch.arange(batch, device=device).repeat_interleave(size // max(batch, 1))
    return ids.reshape([-1 if d == dim else 1 for d in range(ndim)])


@dataclass(frozen=True, eq=False)
class Layout:
    """Where the samples of a batch lie in the output of an operation.

    Attributes:
        batch: Number of samples.
        axis: The dimension that holds them. It may be a multiple of `batch` long, where samples and
            tokens were flattened into one dimension, sample by sample.
        index: The sample of each row, where they lie in any other way; see [Note: rows with an
            index]. int64, as many dimensions as the output, each of its length or of 1 where the
            sample does not change along it; `NOBODY` for a row that takes no gradient.
    """

    batch: int
    axis: int = 0
    index: Tensor | None = None

    @cached_property
    def known_places(self) -> dict[int, tuple[Tensor, int]]:
        """What `_places` found, by the number of rows: a use's tensors share them."""
        return {}

    @cached_property
    def has_nobodys(self) -> bool:
        """Whether some row belongs to no sample."""
        return self.index is not None and bool((self.index == NOBODY).any())


def rows_of(layout: Layout, value: Tensor, num_features: int = 1) -> Tensor:
    """Bring a tensor to [batch, tokens, *features].

    Args:
        layout: Of the tensor.
        value: The tensor; its dimension `axis` holds the samples.
        num_features: How many trailing dimensions are features.

    Raises:
        BadInput: If the dimension does not divide into samples.
    """
    leading = value.ndim - num_features
    if layout.index is not None:
        return _gathered(layout, value, leading)
    if layout.axis == 0 and leading == 2 and value.shape[0] == layout.batch:
        return value
    if not layout.axis < leading or (layout.batch and value.shape[layout.axis] % layout.batch):
        raise BadInput(
            f"expected {layout.batch} samples along dimension {layout.axis}, found a tensor of "
            f"shape {list(value.shape)} with {num_features} dimensions of features"
        )
    features = value.shape[leading:]
    tokens = math.prod(value.shape[:leading]) // max(layout.batch, 1)
    return value.movedim(layout.axis, 0).reshape(layout.batch, tokens, *features)


def samples_of(layout: Layout, value: Tensor) -> Tensor:
    """Bring a tensor to [batch, *its own shape with 1 in the place of the samples].

    Where tokens are flattened into the batch dimension too, they stay in that place.
    """
    assert layout.index is None, "rows with an index have no place for each sample"
    rest = value.shape[layout.axis] // max(layout.batch, 1)
    moved = value.movedim(layout.axis, 0)
    split = moved.reshape(layout.batch, rest, *moved.shape[1:])
    return split.movedim(1, 1 + layout.axis)


def wide_sum_to(layout: Layout, g: Tensor, shape: tuple[int, ...]) -> Tensor:
    """As `sum_to`, added in float32 at least, without a wide copy in the usual case."""
    dtype = torch.promote_types(g.dtype, torch.float32)
    leading = g.ndim - len(shape)
    is_plain = layout.index is None and layout.axis == 0
    if is_plain and leading > 0 and layout.batch and g.shape[leading:] == shape:
        if len(shape) == 1:
            return column_sums(rows_of(layout, g))
        return rows_of(layout, g, num_features=len(shape)).sum(dim=1, dtype=dtype)
    return sum_to(layout, g.to(dtype), shape)


def sum_to(layout: Layout, value: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Add up each sample's elements as a parameter of `shape` was broadcast to them.

    Returns:
        [batch, *shape]

    Raises:
        BadInput: If the parameter has a dimension of its own where the samples are.
    """
    leading = value.ndim - len(shape)
    is_plain = layout.index is None and layout.axis == 0
    if is_plain and leading > 0 and layout.batch and value.shape[leading:] == shape:
        return rows_of(layout, value, num_features=len(shape)).sum(dim=1)  # the usual case
    if layout.index is None:
        parts = samples_of(layout, value)  # [batch, *value.shape with the samples taken out]
        return _broadcast_sums(layout, parts, value, shape)
    rows, index = _by_row(layout, value)  # [rows, *value.shape with 1 where samples change]
    sums = _broadcast_sums(layout, rows, value, shape)  # [rows, *shape]
    total = sums.new_zeros(layout.batch + 1, *shape)  # the last is nobody's
    return add_rows_(total, index % (layout.batch + 1), sums)[:-1]


def with_index(layout: Layout, value: Tensor) -> Layout:
    """The same with an index, for a tensor of which this is the layout."""
    if layout.index is not None:
        return layout
    batch, axis, size = layout.batch, layout.axis, value.shape[layout.axis]
    return Layout(batch, axis, index_in_order(size, batch, axis, value.ndim, value.device))


def grouped(layout: Layout, groups: Tensor, num_groups: int) -> Layout:
    """The same rows with every sample cut into groups, such as experts.

    Args:
        layout: The rows', with an index.
        groups: The group of each row of a tensor [rows, features].
        num_groups: How many there are.

    Returns:
        A layout of `batch * num_groups` samples, those of one sample next to each other.
    """
    assert layout.index is not None
    index = index_of(layout, tuple(groups.shape))
    whose = torch.where(index < 0, index, index * num_groups + groups)
    return Layout(layout.batch * num_groups, 0, whose.unsqueeze(-1))  # [rows, 1]


def check_nobodys(layout: Layout, g: Tensor) -> None:
    """Make sure that no gradient came to rows that belong to nobody.

    Raises:
        UnsupportedOperation: Otherwise: some sample's gradient would be left out.
    """
    assert layout.index is not None
    if not layout.has_nobodys:
        return
    if bool(((g != 0) & (layout.index == NOBODY)).any()):
        raise UnsupportedOperation(
            "a gradient came to rows that were made without any sample, among rows selected by "
            "values, so that it is not known whose they are. Make them from the batch, such as "
            "with torch.zeros_like(x) in place of torch.zeros(...)"
        )


# --- rows with an index ---------------------------------------------------------------------------


def index_of(layout: Layout, leading: tuple[int, ...]) -> Tensor:
    """The sample of each row of a tensor whose leading dimensions have these sizes [rows]."""
    assert layout.index is not None
    sizes = layout.index.shape[: len(leading)]
    if layout.index.numel() != math.prod(sizes):
        raise BadInput(
            f"expected rows in the first {len(leading)} dimensions, found an index of shape "
            f"{list(layout.index.shape)}: samples lie along features"
        )
    return layout.index.reshape(sizes).expand(leading).reshape(-1)


def _gathered(layout: Layout, value: Tensor, leading: int) -> Tensor:
    sizes = tuple(value.shape[:leading])
    index = index_of(layout, sizes)
    flat = value.reshape(math.prod(sizes), *value.shape[leading:])
    places, longest = _places(layout, index)
    # One row more, which takes nobody's, and is left out again.
    gathered = flat.new_zeros(layout.batch * longest + 1, *flat.shape[1:])
    gathered[places] = flat
    return gathered[:-1].unflatten(0, (layout.batch, longest))


def _places(layout: Layout, index: Tensor) -> tuple[Tensor, int]:
    """Where each row goes in [batch * longest + 1], and how long the longest sample is."""
    found = layout.known_places.get(len(index))
    if found is None:
        whose = torch.where(index < 0, layout.batch, index)
        counts = torch.bincount(whose, minlength=layout.batch + 1)
        longest = max(1, int(counts[:-1].max())) if layout.batch else 1
        order = torch.sort(whose, stable=True).indices
        first = counts.cumsum(0) - counts
        place = torch.empty_like(index)
        place[order] = torch.arange(len(index), device=index.device) - first[whose[order]]
        place = torch.where(index < 0, layout.batch * longest, whose * longest + place)
        found = layout.known_places[len(index)] = place, longest
    return found


def _by_row(layout: Layout, value: Tensor) -> tuple[Tensor, Tensor]:
    """Bring a tensor to [rows, *its shape with 1 where samples change], and whose they are."""
    assert layout.index is not None
    dims = [dim for dim, size in enumerate(layout.index.shape) if size != 1]
    rest = [1 if dim in dims else size for dim, size in enumerate(value.shape)]
    moved = value.movedim(dims, list(range(len(dims))))
    num_rows = math.prod(value.shape[dim] for dim in dims)
    index = layout.index.movedim(dims, list(range(len(dims)))).reshape(num_rows)
    return moved.reshape(num_rows, *rest), index


def _broadcast_sums(layout: Layout, parts: Tensor, value: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Add up what a parameter of `shape` was broadcast to: [parts, ...] to [parts, *shape]."""
    extra = parts.ndim - 1 - len(shape)
    if extra > 0:
        parts = parts.sum(dim=tuple(range(1, 1 + extra)))
    for dim, size in enumerate(shape):
        found = parts.shape[1 + dim]
        if found != size:
            if size != 1:
                raise BadInput(
                    f"a parameter of shape {list(shape)} does not broadcast over samples in "
                    f"dimension {layout.axis} of {list(value.shape)}"
                )
            parts = parts.sum(dim=1 + dim, keepdim=True)
    return parts.reshape(len(parts), *shape)
