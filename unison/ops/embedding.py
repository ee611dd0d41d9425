"""Embeddings: rows of a table, looked up by id."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from unison.errors import UnsupportedOperation
from unison.ops.layout import Layout
from unison.ops.records import Lookup, Record, per_sample
from unison.ops.registry import Tap, rule

NO_ROW = -1


def of_table(
    layout: Layout, g: Tensor, ids: Tensor, *, shape: tuple[int, ...], padding: int | None = None
) -> Lookup:
    """Record of a table [rows, features]; the row `padding` gets no gradient."""
    rows = layout.rows(ids, num_features=0)
    return Lookup(_without(padding, rows, shape), layout.rows(g), shape)


def looked_up(
    record: Record, ids: Tensor, shape: tuple[int, ...], padding: int | None = None
) -> Lookup:
    """Record of a table from that of the rows that were looked up once for all samples.

    Args:
        record: Of what came out, [batch, *ids.shape, features] once multiplied out.
        ids: The rows, of any shape.
        shape: The table's shape.
        padding: A row that gets no gradient.
    """
    value = per_sample(record)
    rows = ids.reshape(1, -1).expand(len(value), -1)  # [batch, tokens]
    g = value.reshape(len(value), rows.shape[1], shape[-1])  # [batch, tokens, features]
    return Lookup(_without(padding, rows, shape), g, shape)


def _without(padding: int | None, rows: Tensor, shape: tuple[int, ...]) -> Tensor:
    if padding is None:
        return rows
    return rows.masked_fill(rows == padding % shape[0], NO_ROW)


@rule(F.embedding)
def embedding(
    tap: Tap,
    input: Any,  # noqa: A002
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """`F.embedding`."""
    if max_norm is not None or scale_grad_by_freq:
        raise UnsupportedOperation(
            "F.embedding with max_norm or scale_grad_by_freq, which couple samples with one another"
        )
    y = F.embedding(input, tap.plain(weight), padding_idx)
    return tap(y, saved=(input,), uses=[(weight, partial(of_table, padding=padding_idx))])


@rule(Tensor.__getitem__)
def rows_by_id(tap: Tap, table: Any, index: Any) -> Any:
    """`table[ids]`, the same without a function's name."""
    if not is_lookup(tap.plain(table), index):
        return NotImplemented
    y = tap.plain(table)[index]
    # It may be asked for rows from the end.
    return tap(y, saved=(index.remainder(len(tap.plain(table))),), uses=[(table, of_table)])


def is_lookup(table: Tensor, index: Any) -> bool:
    """Whether `table[index]` looks up rows of a matrix by their numbers."""
    return table.ndim == 2 and isinstance(index, Tensor) and index.dtype == torch.int64
