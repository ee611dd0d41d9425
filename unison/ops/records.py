"""Records: what one use of a parameter leaves behind, enough for every per-sample gradient of it.

[Note: three forms] The gradient of one sample's loss with respect to a parameter is a sum over the
sample's tokens. Three forms cover every operation:

* `Product`: Σ_t g_t a_tᵀ, an outer product per token: linear layers, convolutions as linear layers
  of their unfolded input. Never larger than activations until someone multiplies it out.
* `Lookup`: row id_t gets g_t: embeddings. It is the product with one-hot inputs, kept as ids.
* `Dense`: the per-sample gradients themselves: what has as many elements as a vector (biases,
  norms), and what came through a fallback.

A parameter that is used several times, or under several names, has several records; its gradient is
their sum. All tensors are laid out [batch, tokens, features].
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor


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

    @property
    def shape(self) -> tuple[int, ...]:
        """The parameter's shape."""
        return tuple(self.value.shape[1:])


Record = Product | Lookup | Dense


def per_sample(record: Record) -> Tensor:
    """Multiply a record out: the per-sample gradients [batch, *shape], float32 at least."""
    match record:
        case Dense():
            return _wide(record.value)
        case Product():
            a, g = _wide(record.a), _wide(record.g)
            left, right = (a, g) if record.is_transposed else (g, a)
            return torch.bmm(left.transpose(1, 2), right).reshape(len(a), *record.shape)
        case Lookup():
            batch, features, rows = len(record.g), record.g.shape[-1], record.shape[0]
            counts = (record.ids >= 0).unsqueeze(-1)
            g = torch.where(counts, _wide(record.g), 0.0).reshape(-1, features)
            first = torch.arange(batch, device=g.device)[:, None] * rows
            places = (record.ids.clamp(min=0) + first).reshape(-1)
            flat = add_rows_(g.new_zeros(batch * rows, features), places, g)
            return flat.view(batch, *record.shape)
    raise AssertionError(f"no rule for {record!r}")


def add_rows_(table: Tensor, rows: Tensor, values: Tensor) -> Tensor:
    """Add `values` [n, features] to the named rows of `table`, in the same order every time.

    On a GPU `index_add_` adds rows that are named twice in whatever order its threads come, and the
    last bits change from run to run; `index_put_` sorts them first.
    """
    if table.device.type == "cpu":
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
    num_rows = record.shape[0]
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
    shape = (*record.shape[:dim], size, *record.shape[dim + 1 :])
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


def _wide(value: Tensor) -> Tensor:
    return value.to(torch.promote_types(value.dtype, torch.float32))
