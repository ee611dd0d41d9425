"""Ranks compare what must be equal before they begin."""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from unison.errors import BadInput

_SHOWN_ITEMS = 3
_SHOWN_RANKS = 8


def compare_across_ranks(
    label: str, items: Mapping[str, object], group: dist.ProcessGroup | None = None
) -> None:
    """Raise on every rank if the ranks do not hold the same items in the same order.

    All ranks of the group must call it. One digest per rank is gathered; only where they differ
    are the values exchanged, for the message. Without a process group there is nothing to compare.

    Args:
        label: What the items are, to begin the message: `"parameters of model"`.
        items: Values by name. They are compared by `repr`, which must not hold an address.
        group: The ranks to compare; all by default.

    Raises:
        BadInput: On every rank, with the first items that differ and each rank's value.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return
    own = [(name, repr(value)) for name, value in items.items()]
    digest = hashlib.blake2b(repr((label, own)).encode(), digest_size=16).hexdigest()
    if len(set(_gather(digest, group))) == 1:
        return
    ranks = dist.get_process_group_ranks(group)
    gathered = dict(zip(ranks, _gather((label, own), group), strict=True))
    raise BadInput(_difference(label, gathered))


def _gather(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def _difference(label: str, gathered: Mapping[int, tuple[str, list[tuple[str, str]]]]) -> str:
    labels = {rank: theirs for rank, (theirs, _) in gathered.items()}
    if len(set(labels.values())) > 1:
        return f"ranks compare different things: {_by_rank(labels)}"
    items = {rank: dict(pairs) for rank, (_, pairs) in gathered.items()}
    names = list(dict.fromkeys(name for values in items.values() for name in values))
    lines = []
    for name in names:
        values = {rank: theirs.get(name, "absent") for rank, theirs in items.items()}
        if len(set(values.values())) > 1:
            lines.append(f"  {name}: {_by_rank(values)}")
    if lines:
        more = len(lines) - _SHOWN_ITEMS
        lines[_SHOWN_ITEMS:] = [f"  … and {more} more"] if more > 0 else []
    else:
        orders = {rank: list(theirs) for rank, theirs in items.items()}
        at = next(
            i for i, row in enumerate(zip(*orders.values(), strict=True)) if len(set(row)) > 1
        )
        lines = [f"  item {at}: " + _by_rank({rank: row[at] for rank, row in orders.items()})]
    listed = "\n".join(lines)
    return f"{label} must be equal on all ranks, found\n{listed}\nBuild them alike on every rank."


def _by_rank(values: Mapping[int, str]) -> str:
    """Write equal values once: `rank 0 has 3; ranks 1, 2 have 4`."""
    holders: dict[str, list[int]] = {}
    for rank, value in values.items():
        holders.setdefault(value, []).append(rank)
    parts = []
    for value, ranks in holders.items():
        shown = ", ".join(str(r) for r in ranks[:_SHOWN_RANKS])
        more = ", …" if len(ranks) > _SHOWN_RANKS else ""
        value = value if len(value) <= 120 else value[:117] + "..."
        verb = "rank {} has" if len(ranks) == 1 else "ranks {} have"
        parts.append(f"{verb.format(shown + more)} {value}")
    return "; ".join(parts)
