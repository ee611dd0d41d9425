"""Ranks meet before a collective that user code asked for without naming it.

`p.grad.norm()` of a sharded gradient needs every rank. Under `if rank == 0` one rank would be alone
in it: it would wait for ever, or worse, be matched with the next collective of the others, which
gloo answers by ending the process. So ranks meet in the store first, which no collective can be
mistaken for, and a rank that stays alone raises, naming the line.
"""

import hashlib
import sys
import weakref
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist

from unison.errors import NeedsWhole
from unison.shard.guard.records import caller, lines_of
from unison.shard.ranks import Ranks

PATIENCE = timedelta(seconds=20)


@dataclass
class _Meetings:
    """How often the ranks of a group have met, and what the last meeting left in the store."""

    count: int = 0
    keys: list[str] = field(default_factory=list)


_meetings: weakref.WeakKeyDictionary[dist.ProcessGroup, _Meetings] = weakref.WeakKeyDictionary()


def meet(ranks: Ranks, what: str) -> None:
    """Wait until every rank has come to this call.

    Args:
        ranks: Who must come.
        what: What they come for, for the message.

    Raises:
        NeedsWhole: A rank did not come within `PATIENCE`; naming the line of this one.
    """
    if ranks.size == 1:
        return
    assert ranks.group is not None
    line = lines_of(caller(sys._getframe(1))[1])[0]
    meetings = _meetings.setdefault(ranks.group, _Meetings())
    meetings.count += 1
    members = dist.get_process_group_ranks(ranks.group)
    told = hashlib.blake2b(f"{members} {line} {what}".encode(), digest_size=8).hexdigest()
    key = f"unison/meet/{meetings.count}/{told}"
    store = dist.distributed_c10d._get_default_store()
    if store.add(key, 1) == ranks.size:
        store.set(f"{key}/all", "")
    try:
        store.wait([f"{key}/all"], PATIENCE)
    except RuntimeError as error:
        raise NeedsWhole(
            f"{what} needs all {ranks.size} ranks, and rank {ranks.rank} was alone in it for "
            f"{PATIENCE.seconds} s, at {line}; call it on every rank, outside of `if rank == ...`"
        ) from error
    # Whoever is here has left the meeting before.
    if ranks.rank == 0:
        for old in meetings.keys:
            store.delete_key(old)
        meetings.keys = [key, f"{key}/all"]
