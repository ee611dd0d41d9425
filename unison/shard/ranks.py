"""The ranks that share a model, and the collectives they use: the one seam to torch.distributed.

A group of one rank needs no process group at all; its collectives copy. Everything above this file
runs the same code at every world size. Every call is counted, so that a report can say what went
over the wire.
"""

import hashlib
import os
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _disable_current_modes

from unison.errors import (
    BadInput,
    CheckpointFailed,
    NeedsWhole,
    UnisonError,
    UnsupportedOperation,
)
from unison.shard.guard.records import caller, lines_of
from unison.torch_internals import has_values

T = TypeVar("T")

# torch 2.13 renamed these two; 2.11 knows only the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


DONE: torch.futures.Future[None] = torch.futures.Future()  # a collective that is over
DONE.set_result(None)
Work = dist.Work | torch.futures.Future
"""A collective under way; `wait` returns when its result may be used, on the current stream."""


class Ranks:
    """A group of ranks, this process among them.

    Attributes:
        rank: This process's index in the group.
        size: Number of ranks.
        shard: Those that hold the parts of one copy of a model; all, unless a mesh is hybrid.
        replicas: Those that hold the same part of different copies; one rank, unless a mesh is
            hybrid. Rank `replica * shard.size + place` is rank `place` of its `shard` group and
            rank `replica` of its `replicas` group.
        bytes_sent: Bytes this rank sent, by kind of collective.
        num_calls: Collectives this rank took part in, by kind.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        shard: "Ranks | None" = None,
        replicas: "Ranks | None" = None,
    ) -> None:
        self.group = group
        self.shard = shard or self
        self.replicas = replicas or (self if group is None else Ranks(None))
        self.rank = dist.get_rank(group) if group is not None else 0
        self.size = dist.get_world_size(group) if group is not None else 1
        self.bytes_sent: Counter[str] = Counter()
        self.num_calls: Counter[str] = Counter()
        self._neighbours: dict[int, Ranks] = {}

    @classmethod
    def of(cls, mesh: DeviceMesh | None) -> "Ranks":
        """All ranks of a mesh in its row-major order, or of the default group.

        A mesh has one dimension (shard) or two (replicate, shard).

        Raises:
            BadInput: If the process was launched as a rank but joined no group, or the mesh has
                more than two dimensions.
        """
        if mesh is not None:
            if mesh.ndim > 2:
                raise BadInput(
                    f"mesh must have one dimension (shard) or two (replicate, shard), found "
                    f"{mesh.ndim}: {mesh}"
                )
            if mesh.ndim == 1:
                return cls(mesh.get_group())
            replicas, shard = Ranks(mesh.get_group(0)), Ranks(mesh.get_group(1))
            return cls(_group_of_all(mesh), shard, replicas)
        if dist.is_initialized():
            return cls(dist.group.WORLD)
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise BadInput(
                "this process is one of several ranks (WORLD_SIZE is set) but has joined no "
                "process group; call torch.distributed.init_process_group() before sharding"
            )
        return cls(None)

    def neighbours(self, size: int) -> "Ranks":
        """The run of `size` consecutive ranks that holds this one; a collective, cached.

        Raises:
            BadInput: If the runs would not be equal.
        """
        if size not in self._neighbours:
            if size < 1 or self.size % size:
                raise BadInput(
                    f"reshard_after_forward={size} must divide the number of ranks, {self.size}"
                )
            self._neighbours[size] = Ranks(None)
            if size > 1:
                members = dist.get_process_group_ranks(self.group)
                # Every rank takes part in the making of every group, its own or not.
                for start in range(0, self.size, size):
                    group = dist.new_group(members[start : start + size])
                    if start <= self.rank < start + size:
                        assert isinstance(group, dist.ProcessGroup)
                        self._neighbours[size] = Ranks(group)
        return self._neighbours[size]

    def broadcast_object(self, value: T, source: int = 0) -> T:
        """One rank's value, which can be pickled, on every rank; a collective."""
        if self.size == 1:
            return value
        held = [value]
        dist.broadcast_object_list(held, group=self.group, group_src=source)
        return held[0]

    def gather(self, full: Tensor, shard: Tensor) -> Work:
        """Start to fill `full` [size * n] with every rank's `shard` [n]."""
        return self._start("gather", shard.nbytes * (self.size - 1), _all_gather, full, shard)

    def reduce_scatter(self, shard: Tensor, full: Tensor) -> Work:
        """Start to sum `full` [size * n] over ranks, each keeping its part in `shard` [n]."""
        num_bytes = full.nbytes - shard.nbytes
        return self._start("reduce_scatter", num_bytes, _reduce_scatter, shard, full)

    def exchange(self, received: Tensor, sent: Tensor) -> Work:
        """Start to send row r of `sent` [size, n] to rank r, and to receive a row from each."""
        num_bytes = sent.nbytes * (self.size - 1) // self.size
        return self._start("exchange", num_bytes, dist.all_to_all_single, received, sent)

    def _start(
        self, kind: str, num_bytes: int, collective: Any, received: Tensor, sent: Tensor
    ) -> Work:
        self.num_calls[kind] += 1
        self.bytes_sent[kind] += num_bytes
        if self.size == 1:
            received.copy_(sent)
            return DONE
        return collective(received, sent, group=self.group, async_op=True)

    def sum_(self, value: Tensor) -> Tensor:
        """Add a small tensor over ranks, in place."""
        return self._all_reduce("sum", value, dist.ReduceOp.SUM)

    def max_(self, value: Tensor) -> Tensor:
        """Take the largest of a small tensor over ranks, in place."""
        return self._all_reduce("max", value, dist.ReduceOp.MAX)

    def _all_reduce(self, kind: str, value: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        self.num_calls[kind] += 1
        self.bytes_sent[kind] += value.nbytes * (self.size - 1) // self.size * 2
        if self.size > 1:
            dist.all_reduce(value, op, group=self.group)
        return value


_WAYS = ("forward pass", "recomputation", "backward pass", "forward end", "backward end")


def compare_ways(
    everyone: Ranks, what: str, names: Sequence[str], name: str | None, device: torch.device
) -> None:
    """Make sure that every rank has come to the same place, where values may have led it.

    What is sharded is gathered by all ranks or by none: a rank that comes to another part, or to
    none, would let the others wait. So ranks compare where they are before they gather, and where
    a pass ends.

    Args:
        everyone: The ranks.
        what: What this rank is going to do.
        names: Of all parts that are gathered.
        name: Of the one that it has come to; None at the end of a pass.
        device: Where the ranks exchange.

    Raises:
        UnsupportedOperation: Another rank has come to another place; on every rank.
    """
    if everyone.size == 1 or not has_values():
        return
    place = len(names) if name is None else names.index(name)
    code = _WAYS.index(what) * (len(names) + 1) + place
    with _disable_current_modes():
        most, least = everyone.max_(torch.tensor([code, -code], device=device)).tolist()
    if most != -least:
        where = f"the {what} of " + ("a pass" if name is None else repr(name))
        raise UnsupportedOperation(
            f"values decide which parts of this module a pass runs: rank {everyone.rank} has come "
            f"to {where} and another rank has not, so that it would wait for ever. Shard only "
            "parts that every pass runs: the blocks that choose, with all that they choose from"
        )


def _group_of_all(mesh: DeviceMesh) -> dist.ProcessGroup:
    """One group of all ranks of a two-dimensional mesh, in row-major order."""
    members = mesh.mesh.flatten().tolist()
    if members == list(range(dist.get_world_size())):
        assert dist.group.WORLD is not None
        return dist.group.WORLD
    if members != sorted(members):
        raise BadInput(f"mesh must list its ranks in ascending order, found {members}")
    return mesh._flatten().get_group()


def flags_of_all(ranks: Ranks, flags: list[bool], device: torch.device) -> list[bool]:
    """Which flags are set on any rank; a collective, in which only who lacks one looks.

    To look is to wait for the device.
    """
    counts = ranks.sum_(torch.tensor(flags, dtype=torch.float32, device=device))
    return flags if all(flags) else [count > 0 for count in counts.tolist()]


def same_on_every_rank(ranks: Ranks, values: Tensor) -> bool:
    """Whether a small integer tensor is equal on all ranks; every rank must call it."""
    low, high = values.clone(), values.clone()
    if ranks.size > 1:
        dist.all_reduce(low, op=dist.ReduceOp.MIN, group=ranks.group)
        dist.all_reduce(high, op=dist.ReduceOp.MAX, group=ranks.group)
    return bool(torch.equal(low, high))


def checksum(value: Tensor) -> Tensor:  # int64 [2]
    """Number of bytes and a weighted sum of them, which changes with any one byte."""
    data = value.detach().cpu().contiguous().view(-1).view(torch.uint8).long()
    weights = torch.arange(1, len(data) + 1) % 65_521
    return torch.tensor([len(data), int((data * weights).sum())])


# ------------------------------------------------------------------------------------------------
# Ranks that agree before they act: an error on one is raised on all, and nobody waits in vain.


def buckets(items: Iterable[T], size_of: Callable[[T], int], most: float) -> Iterator[list[T]]:
    """Runs of items of at most so many bytes together; a larger one is a run by itself."""
    run: list[T] = []
    filled = 0
    for each in items:
        size = size_of(each)
        if run and filled + size > most:
            yield run
            run, filled = [], 0
        run.append(each)
        filled += size
    if run:
        yield run


def gather_objects(ranks: Ranks, value: T) -> list[T]:
    """Every rank's value, in rank order, on every rank; a collective."""
    values: list[Any] = [value] * ranks.size
    if ranks.size > 1:
        dist.all_gather_object(values, value, group=ranks.group)
    return values


def agree(ranks: Ranks, work: Callable[[], T]) -> list[T]:
    """Run `work` on every rank and share what came of it; a collective.

    Returns:
        Every rank's result, in rank order.

    Raises:
        UnisonError: The first one that any rank met, on every rank.
        CheckpointFailed: On every rank, where the first error was one of a file.
        RuntimeError: Where the first error was another one: on the ranks that did not meet it.
    """
    result: Any = None
    met, message = None, None
    try:
        result = work()
    except BaseException as error:  # an interrupt, too: the other ranks wait to hear of it
        # Not every exception can be pickled: what is sent is a type of ours, and a text.
        kind = CheckpointFailed if isinstance(error, OSError) else None
        met, message = error, (kind, f"{type(error).__name__}: {error}")
        if isinstance(error, UnisonError):
            message = type(error), str(error)
    outcomes = gather_objects(ranks, (result, message))
    for rank, (_, told) in enumerate(outcomes):
        if told is not None:
            kind, text = told
            own = met if rank == ranks.rank else None
            if kind is not None:
                raise kind(text) from own
            raise own or RuntimeError(f"rank {rank} failed with {text}")
    return [outcome for outcome, _ in outcomes]


def together(ranks: Ranks, work: Callable[[], T]) -> T:
    """Run `work` on every rank; each gets its own result, or all raise as `agree` does."""
    results: list[T] = []
    agree(ranks, lambda: results.append(work()))
    return results[0]


def from_rank_0(ranks: Ranks, work: Callable[[], T]) -> T:
    """Run `work` on rank 0 and give every rank its result, or raise as `agree` does."""
    result, *_ = agree(ranks, lambda: work() if ranks.rank == 0 else None)
    return result  # type: ignore[return-value]


# ------------------------------------------------------------------------------------------------
# Ranks meet before a collective that user code asked for without naming it.
#
# `p.grad.norm()` of a sharded gradient needs every rank, and so do `model(x)` in an evaluation and
# `save_checkpoint(...)`. Under `if rank == 0` one rank would be alone in it: it would wait for
# ever, or worse, be matched with the next collective of the others, which gloo answers by ending
# the process. So ranks meet in the store first, which no collective can be mistaken for, and a rank
# that stays alone raises, naming the line. Training passes and steps do without.

PATIENCE = timedelta(seconds=20)
PATIENCE_BESIDE_WORK = timedelta(minutes=5)


# By group: how often its ranks have met, and what the last meeting left in the store; and where
# this rank was alone, after which it is out of step with the others.
_meetings: weakref.WeakKeyDictionary[dist.ProcessGroup, tuple[int, list[str]]] = (
    weakref.WeakKeyDictionary()
)
_was_alone: weakref.WeakKeyDictionary[dist.ProcessGroup, str] = weakref.WeakKeyDictionary()


def meet(ranks: Ranks, what: str, *, may_be_late: bool = False) -> None:
    """Wait until every rank has come to this call.

    Args:
        ranks: Who must come.
        what: What they come for, for the message.
        may_be_late: Whether a rank may have work of its own before it comes, such as a file to
            write, and may call it at another line than others do.

    Raises:
        NeedsWhole: A rank did not come in time; naming the line of this one.
    """
    if ranks.size == 1:
        return
    assert ranks.group is not None
    if ranks.group in _was_alone:
        raise NeedsWhole(_was_alone[ranks.group])
    patience = PATIENCE_BESIDE_WORK if may_be_late else PATIENCE
    line = lines_of(caller(sys._getframe(1))[1])[0]
    count, old_keys = _meetings.get(ranks.group, (0, []))
    members = dist.get_process_group_ranks(ranks.group)
    place = "" if may_be_late else line
    told = hashlib.blake2b(f"{members} {place} {what}".encode(), digest_size=8).hexdigest()
    key = f"unison/meet/{count + 1}/{told}"
    _meetings[ranks.group] = count + 1, [key, f"{key}/all"]
    store = dist.distributed_c10d._get_default_store()
    if store.add(key, 1) == ranks.size:
        store.set(f"{key}/all", "")
    # Not `store.wait`, which would keep the store from other threads: one may write a checkpoint.
    end, pause = time.monotonic() + patience.total_seconds(), 2e-4
    while not store.check([f"{key}/all"]):
        if time.monotonic() > end:
            _was_alone[ranks.group] = (
                f"{what} needs all {ranks.size} ranks, and rank {ranks.rank} was alone in it for "
                f"{patience.total_seconds():g} s, at {line}; call it on every rank, as often as on "
                "the others, outside of `if rank == ...`"
            )
            raise NeedsWhole(_was_alone[ranks.group])
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    # Whoever is here has left the meeting before.
    for old in old_keys if ranks.rank == 0 else ():
        store.delete_key(old)
