"""Embeddings: rows of a table, looked up by id."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from unison.errors import UnsupportedOperation
from unison.ops.records import (
    Layout,
    Lookup,
    Record,
    index_of,
    per_sample,
    rows_of,
    wide,
    with_index,
)
from unison.ops.registry import Tap, rule

NO_ROW = -1


def of_table(
    layout: Layout, g: Tensor, ids: Tensor, *, shape: tuple[int, ...], padding: int | None = None
) -> Lookup:
    """Record of a table [rows, features]; the row `padding` gets no gradient."""
    return Lookup(_without(padding, _id_rows(layout, ids), shape), rows_of(layout, g), shape)


def _id_rows(layout: Layout, ids: Tensor) -> Tensor:
    """Bring ids to [batch, tokens]; where samples are padded, with ids that count for nothing."""
    if layout.index is None:
        return rows_of(layout, ids, num_features=0)
    return rows_of(layout, ids - NO_ROW, num_features=0) + NO_ROW


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
    rows = rows.long()  # ids may come as int32
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


def of_bags(
    layout: Layout,
    g: Tensor,
    ids: Tensor,
    starts: Tensor,
    *weights: Tensor,
    shape: tuple[int, ...],
    is_mean: bool,
    padding: int | None,
) -> Lookup:
    """Record of a table [rows, features] whose rows were added up by bags.

    Args:
        layout: Where samples lie among the bags.
        g: The gradient of the sums [bags, features].
        ids: The rows [tokens].
        starts: Where each bag begins among them [bags].
        weights: A factor for each token [tokens], if they have any.
        shape: Of the table.
        is_mean: Whether sums were divided by the number of tokens.
        padding: A row that counts for nothing.
    """
    places = torch.arange(len(ids), device=ids.device)
    bags = torch.searchsorted(starts, places, right=True) - 1  # [tokens]
    counts = torch.ones_like(ids) if padding is None else (ids != padding % shape[0]).long()
    each = wide(g)[bags]
    if is_mean:
        sizes = torch.zeros_like(starts).index_add_(0, bags, counts)
        each = each / sizes.clamp(min=1)[bags].unsqueeze(-1)
    if weights:
        each = each * weights[0].unsqueeze(-1)
    samples = index_of(with_index(layout, g), (len(g),))[bags]
    tokens = Layout(layout.batch, 0, samples.unsqueeze(-1))  # [tokens, 1]
    return Lookup(_without(padding, _id_rows(tokens, ids), shape), rows_of(tokens, each), shape)


@rule(F.embedding_bag)
def embedding_bag(
    tap: Tap,
    input: Any,  # noqa: A002
    weight: Any,
    offsets: Any = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Any = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Any:
    """`F.embedding_bag` of sums and means."""
    if max_norm is not None or scale_grad_by_freq:
        raise UnsupportedOperation(
            "F.embedding_bag with max_norm or scale_grad_by_freq, which couple samples with one "
            "another"
        )
    if mode == "max" or tap.tracks(per_sample_weights):
        return NotImplemented
    y = F.embedding_bag(
        input,
        tap.plain(weight),
        offsets,
        mode=mode,
        per_sample_weights=per_sample_weights,
        include_last_offset=include_last_offset,
        padding_idx=padding_idx,
    )
    if offsets is None:
        starts = torch.arange(len(input), device=input.device) * input.shape[1]
    else:
        starts = (offsets[:-1] if include_last_offset else offsets).to(torch.int64)
    factors = () if per_sample_weights is None else (per_sample_weights.reshape(-1).detach(),)
    bags = partial(of_bags, is_mean=mode == "mean", padding=padding_idx)
    saved = (input.reshape(-1).to(torch.int64), starts.contiguous(), *factors)
    return tap(y, saved=saved, uses=[(weight, bags)])


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
