"""Parameters that lie in parts on several ranks: torch's DTensors, as in tensor parallelism.

[Note: records of parts] Operations run on DTensors, by torch, and so do their backward passes. The
record of a use is made of *local* tensors, and belongs to this rank's part of the parameter:

* *Cut*, `Shard(d)`: the record of the part. The gradient of what came out and what went in are
  brought to the cuts that `unison.ops.cuts` knows, which they have already in the usual plans: a
  matrix cut by rows has whole inputs and gradients cut by columns. Otherwise the whole record is
  made, and its part taken.
* *Replicated*, or a plain tensor: the whole record, the same on every rank. A gradient that is
  `Partial` is added up over ranks first. Where tokens are cut (sequence parallelism), each rank's
  share of the per-sample gradient is added up over ranks before anybody squares it.

Redistributing is a collective. Every rank of the mesh runs the same operations in the same order,
as DTensors themselves need.

torch.distributed.tensor takes a second to import; where nobody has, there is no DTensor.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from unison.errors import UnsupportedOperation
from unison.ops import Builder, Dense, Layout, Record, looked_up, part_of, per_sample
from unison.ops.cuts import adds_tokens, needs_for_cut, num_read
from unison.torch_internals import is_in_parts

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


def shell_of(value: "DTensor") -> Tensor:
    """A plain tensor of the whole's shape, without its memory: of a DTensor no subclass is made."""
    return torch.empty((), dtype=value.dtype, device=value.device).expand(value.shape)


def local(value: Tensor) -> Tensor:
    """This rank's memory of a tensor: its part, complete if a collective is on its way."""
    to_local = getattr(value, "to_local", None)  # of DTensors, and of what follows their protocol
    if to_local is not None:
        value = to_local()
    wait = getattr(value, "wait", None)  # of an AsyncCollectiveTensor
    return value if wait is None else wait()


class Span(NamedTuple):
    """Where this rank's part of a tensor lies: a run of one dimension."""

    dim: int
    start: int
    size: int


def span_of(value: "DTensor") -> Span | None:
    """Where this rank's part of a tensor lies; None if it is the whole, or one of its summands."""
    (placement,) = value.placements
    if not placement.is_shard():
        return None
    dim = placement.dim % value.ndim  # type: ignore[attr-defined]
    size = value.to_local().shape[dim]
    chunk = -(-value.shape[dim] // value.device_mesh.size())  # as torch.chunk cuts
    return Span(dim, min(value.shape[dim], chunk * value.device_mesh.get_local_rank()), size)


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
    saved = saved[: num_read(builder, len(saved))]
    span = span_of(value) if is_in_parts(value) else None
    if span is None:
        return _of_replicated(builder, layout, value, g, saved)
    needs = needs_for_cut(builder, span.dim, value.ndim)
    if needs is None:
        whole = builder(layout, _cut(g), *map(_cut, saved), shape=tuple(value.shape))
        return part_of(whole, *span)
    inputs = [_cut(x, at) for x, at in zip(saved, needs[1], strict=True)]
    return builder(layout, _cut(g, needs[0]), *inputs, shape=tuple(local(value).shape))


def _of_replicated(
    builder: Builder, layout: Layout, value: Tensor, g: Tensor, saved: Sequence[Tensor]
) -> Record:
    shape = tuple(value.shape)
    if is_in_parts(g) and g.placements[0].is_shard() and adds_tokens(builder):
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
    if not is_in_parts(value):
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
    if span is None or span.dim == 0:
        found = looked_up(record, ids, tuple(table.shape), padding)
        return found if span is None else part_of(found, *span)
    return looked_up(record, ids, (table.shape[0], span.size), padding)


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
            [Shard(1 + after.dim)],
            run_check=False,
            shape=total,
            stride=torch.empty(total, device="meta").stride(),
        )
        record = Dense(_cut(parts))
    return record if before is None else part_of(record, *before)


def sum_of_parts(numbers: Tensor, value: Tensor) -> Tensor:
    """Add numbers that were made of this rank's part of a tensor over all parts, in place."""
    if is_in_parts(value):
        dist.all_reduce(numbers, group=value.device_mesh.get_group())
    return numbers


def refuse_use(names: Sequence[str], what: str) -> NoReturn:
    """Raise for something that is not known of parameters in parts."""
    raise UnsupportedOperation(
        f"{names[0]} lies in parts on several ranks, and {what}. Leave its module out of the "
        "parallel plan: every rank then holds all of it"
    )
