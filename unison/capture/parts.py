"""Parameters that lie in parts on several ranks: torch's DTensors, as in tensor parallelism.

[Note: records of parts] Operations run on DTensors, by torch, and so do their backward passes. The
record of a use is made of *local* tensors, and belongs to this rank's part of the parameter:

* *Cut*, `Shard(d)`: the record of the part. The gradient of what came out and what went in are
  brought to the cuts that a table below knows, which they have already in the usual plans: a
  matrix cut by rows has whole inputs and gradients cut by columns. Otherwise the whole record is
  made, and its part taken.
* *Replicated*, or a plain tensor: the whole record, the same on every rank. A gradient that is
  `Partial` is added up over ranks first. Where tokens are cut (sequence parallelism), each rank's
  share of the per-sample gradient is added up over ranks before anybody squares it.

Redistributing is a collective. Every rank of the mesh runs the same operations in the same order,
as DTensors themselves need.

torch.distributed.tensor takes a second to import; where nobody has, there is no DTensor.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from unison.errors import UnsupportedOperation
from unison.ops import Builder, Dense, Layout, Record, looked_up, part_of, per_sample
from unison.ops.embedding import of_table
from unison.ops.linear import of_bias, of_transposed, of_weight
from unison.ops.norm import of_gain, of_offset
from unison.torch_internals import is_dtensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


def local(value: Tensor) -> Tensor:
    """This rank's memory of a tensor: its part, complete if a collective is on its way."""
    to_local = getattr(value, "to_local", None)  # of DTensors, and of what follows their protocol
    if to_local is not None:
        value = to_local()
    wait = getattr(value, "wait", None)  # of an AsyncCollectiveTensor
    return value if wait is None else wait()


Span = tuple[int, int, int]
"""Where this rank's part of a tensor lies, a run of one dimension: dimension, start and size."""


def span_of(value: "DTensor") -> Span | None:
    """Where this rank's part of a tensor lies; None if it is the whole, or one of its summands."""
    (placement,) = value.placements
    if not placement.is_shard():
        return None
    dim = placement.dim % value.ndim  # type: ignore[attr-defined]
    size = value.to_local().shape[dim]
    chunk = -(-value.shape[dim] // value.device_mesh.size())  # as torch.chunk cuts
    return dim, min(value.shape[dim], chunk * value.device_mesh.get_local_rank()), size


def record_of(
    builder: Builder, layout: Layout, value: Tensor, g: Tensor, saved: Sequence[Tensor]
) -> Record:
    """Make the record of this rank's part of a parameter; see [Note: records of parts].

    Args:
        builder: Makes records.
        layout: Where the samples lie in what came out.
        value: The parameter.
        g: The gradient of what came out.
        saved: What the rule saved.
    """
    if _plain(builder) in _READING_NOTHING:
        saved = ()
    span = span_of(value) if is_dtensor(value) else None
    if span is None:
        return _of_replicated(builder, layout, value, g, saved)
    cut = _CUTS.get(_plain(builder))
    needs = None if cut is None else cut(span[0], value.ndim)
    if needs is None:
        whole = builder(layout, _cut(g), *map(_cut, saved), shape=tuple(value.shape))
        return part_of(whole, *span)
    inputs = [_cut(x, at) for x, at in zip(saved, needs[1], strict=True)]
    return builder(layout, _cut(g, needs[0]), *inputs, shape=tuple(local(value).shape))


def _of_replicated(
    builder: Builder, layout: Layout, value: Tensor, g: Tensor, saved: Sequence[Tensor]
) -> Record:
    shape = tuple(value.shape)
    if is_dtensor(g) and g.placements[0].is_shard() and adds_tokens(builder):
        dim = g.placements[0].dim % g.ndim  # type: ignore[attr-defined]
        if dim != layout.axis and dim < g.ndim - value.ndim:  # tokens are cut along it
            share = builder(layout, local(g), *(_cut(x, dim) for x in saved), shape=shape)
            assert isinstance(share, Dense)
            total = share.value.contiguous()
            dist.all_reduce(total, group=g.device_mesh.get_group())
            return Dense(total)
    return builder(layout, _cut(g), *map(_cut, saved), shape=shape)


def _cut(value: Tensor, dim: int | None = None) -> Tensor:
    """This rank's memory of a tensor cut along a dimension, or of all of it."""
    if not is_dtensor(value):
        return local(value)
    from torch.distributed.tensor import Replicate, Shard

    placement = Replicate() if dim is None else Shard(dim % value.ndim)
    return local(value.redistribute(placements=[placement]))


def looked_up_part(
    record: Record, *, ids: Tensor, table: "DTensor", padding: int | None = None
) -> Record:
    """Record of this rank's part of a table from that of rows that all samples share.

    Args:
        record: Of what came out: of this rank's columns if the table is cut so, else whole.
        ids: The rows.
        table: The table.
        padding: A row that gets no gradient.
    """
    span, ids = span_of(table), _cut(ids)
    if span is None:
        return looked_up(record, ids, tuple(table.shape), padding)
    dim, _, size = span
    if dim == 0:
        return part_of(looked_up(record, ids, tuple(table.shape), padding), *span)
    return looked_up(record, ids, (table.shape[0], size), padding)


def moved_back(
    record: Record,
    *,
    before: Span | None,
    after: Span | None,
    shape: tuple[int, ...],
    mesh: "DeviceMesh",
) -> Record:
    """Record of a tensor from that of the same one redistributed; a collective.

    Args:
        record: Of what came out.
        before: Where this rank's part of what went in lies. Of a tensor that is whole, or a sum
            over ranks, every rank has the whole gradient.
        after: The same of what came out.
        shape: Of the whole tensor.
        mesh: The ranks.
    """
    if before == after:
        return record
    if after is not None:
        from torch.distributed.tensor import DTensor, Shard

        value = per_sample(record).contiguous()  # [batch, *part]
        total = torch.Size((len(value), *shape))
        parts = DTensor.from_local(
            value,
            mesh,
            [Shard(1 + after[0])],
            run_check=False,
            shape=total,
            stride=torch.empty(total, device="meta").stride(),
        )
        record = Dense(_cut(parts))
    return record if before is None else part_of(record, *before)


def refuse_use(names: Sequence[str], what: str) -> NoReturn:
    """Raise for something that is not known of parameters in parts."""
    raise UnsupportedOperation(
        f"{names[0]} lies in parts on several ranks, and {what}. Leave its module out of the "
        "parallel plan: every rank then holds all of it"
    )


# --- which dimension of which tensor goes with which dimension of the parameter -------------------
#
# Where the tensors around an operation are cut as its parameter is, nothing has to travel: a matrix
# cut by rows meets a gradient that is cut by columns and an input that is whole. What is not in the
# table is made from whole tensors, and the part taken from the result (`part_of`): always right,
# and more to send.

Needs = tuple[int | None, tuple[int | None, ...]]
"""Along which dimension the gradient, and each saved tensor that is read, must be cut as the
parameter is; None for a whole one."""

# (dimension of the cut, dimensions of the parameter) -> what is needed
_CUTS: dict[Builder, Callable[[int, int], Needs | None]] = {
    of_weight: lambda dim, _: (-1, (None,)) if dim == 0 else (None, (-1,)),
    of_transposed: lambda dim, _: (None, (-1,)) if dim == 0 else (-1, (None,)),
    of_bias: lambda dim, ndim: (dim - ndim, ()),
    of_table: lambda dim, _: None if dim == 0 else (-1, (None,)),
}

# They read none of the saved tensors; others read all.
_READING_NOTHING: frozenset[Builder] = frozenset({of_bias, of_offset})

# They make dense records that add up over tokens. What they read has the shape of the output.
_ADDING_TOKENS: frozenset[Builder] = frozenset({of_bias, of_offset, of_gain})


def adds_tokens(builder: Builder) -> bool:
    """Whether a builder makes, of some of the tokens, a part of the whole record's sum."""
    # With statistics per channel the other dimensions are no tokens.
    is_per_channel = "broadcast" in getattr(builder, "keywords", ())
    return _plain(builder) in _ADDING_TOKENS and not is_per_channel


def _plain(builder: Builder) -> Builder:
    """A builder without the options that a rule gave it."""
    return builder.func if isinstance(builder, partial) else builder
