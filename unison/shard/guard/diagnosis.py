"""From what the ranks say of themselves to a finding, and from a finding to a message.

Nothing here talks to a store or a thread: states go in, a finding or a text comes out.
"""

import enum
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed as dist

from unison.errors import BadInput, UnisonError

# ------------------------------------------------------------------------------------------------
# Ranks compare what must be equal before they begin.

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


class CollectiveMismatch(UnisonError):
    """Ranks called different collectives, or one of them skipped one."""


class RankLost(UnisonError):
    """A rank died, or has given no sign of life for too long."""


class Status(enum.StrEnum):
    """Where a rank is in its guarded block; only INSIDE can still call collectives."""

    INSIDE = "inside"
    LEAVING = "leaving"  # done, and waiting a moment for the others
    LEFT = "left"
    FAILED = "failed"  # left by an exception of the user's


@dataclass
class GroupState:
    """What one rank says of its calls in one group."""

    ranks: list[int]
    last: int
    marks: dict[str, str]  # by number, as JSON has it
    call: str
    stack: list[str]
    age: float


@dataclass
class RankState:
    """What one rank says of itself in a heartbeat.

    Attributes:
        beat: Counts up; a rank whose beat stands still is silent.
        status: Where it is in its guarded block.
        note: How it left, where it failed.
        stack: Its own Python location, innermost first.
        waiting: The group and number of the collective it waits for.
        identity: Machine, process id and start time, to see from next door whether it lives.
        groups: Its calls, by the name of the group.
        everyone_left: Whether it knows that nobody is inside any more.
    """

    beat: int
    status: Status
    note: str
    stack: list[str]
    waiting: Sequence[Any] | None
    identity: list[str]
    groups: dict[str, GroupState]
    everyone_left: bool = False

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "RankState":
        """Read what `to_json` of another rank wrote."""
        groups = {name: GroupState(**group) for name, group in data["groups"].items()}
        return cls(**{**data, "status": Status(data["status"]), "groups": groups})

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {**vars(self), "groups": {name: vars(each) for name, each in self.groups.items()}}


class FaultKind(enum.StrEnum):
    """What is wrong."""

    MISMATCH = "mismatch"
    SKIPPED = "skipped"
    LOST = "lost"


@dataclass(frozen=True)
class Finding:
    """What is wrong, and with whom."""

    kind: FaultKind
    ranks: tuple[int, ...]  # the ranks that differ, lag or are gone
    group: str = ""
    number: int = 0
    why: str = ""


@dataclass
class Diagnosis:
    """Compares the ranks' states; remembers since when a rank lags.

    Attributes:
        patience: Seconds that a rank may lag behind another in a group.
    """

    patience: float
    _behind: dict[tuple[str, int], tuple[int, float]] = field(default_factory=dict)

    def examine(self, states: Mapping[int, RankState], now: float) -> Finding | None:
        """Return the first thing that is wrong between these ranks, or None."""
        for name in sorted({name for state in states.values() for name in state.groups}):
            members = {r: s for r, s in states.items() if r in _ranks_of(name, states)}
            finding = self._mismatch(name, members) or self._skipped(name, members, now)
            if finding is not None:
                return finding
        return None

    def _mismatch(self, name: str, members: Mapping[int, RankState]) -> Finding | None:
        issued = {r: s.groups[name].marks for r, s in members.items() if name in s.groups}
        first = min(issued)
        for rank, marks in issued.items():
            common = issued[first].keys() & marks.keys()
            differing = [n for n in common if issued[first][n] != marks[n]]
            if differing:
                return Finding(FaultKind.MISMATCH, (rank,), name, min(map(int, differing)))
        return None

    def _skipped(self, name: str, members: Mapping[int, RankState], now: float) -> Finding | None:
        last = {r: s.groups[name].last if name in s.groups else 0 for r, s in members.items()}
        top = max(last.values())
        lagging = [r for r in last if last[r] < top]
        for rank in last.keys() - lagging:
            self._behind.pop((name, rank), None)
        gone = [r for r in lagging if members[r].status is not Status.INSIDE]
        late = []
        for rank in lagging:
            number, since = self._behind.get((name, rank), (-1, now))
            if number != last[rank]:
                since = now
            self._behind[name, rank] = last[rank], since
            if now - since > self.patience:
                late.append(rank)
        found = gone or late
        if not found:
            return None
        # The first collective that is missing is the one whose callers wait.
        number = min(last[r] for r in found) + 1
        return Finding(FaultKind.SKIPPED, tuple(sorted(found)), name, number)


def _ranks_of(group: str, states: Mapping[int, RankState]) -> list[int]:
    return next(state.groups[group].ranks for state in states.values() if group in state.groups)


# ---- the message ------------------------------------------------------------------------------

Detail = Mapping[str, Mapping[str, tuple[str, list[str], str]]]
"""Of one rank: group name, then number as a string, then call, stack and signature."""

_REMEDY = (
    "Every rank of a group must call the same collectives in the same order: move a collective out "
    "of `if rank == 0:` and out of loops whose length differs between ranks."
)
_SLOW = " If the rank is only slow, give guard(timeout=...) more seconds."


def error_of(kind: str, message: str) -> UnisonError:
    """Return the exception for a finding's kind."""
    return RankLost(message) if kind == FaultKind.LOST else CollectiveMismatch(message)


def message_of(
    finding: Finding, states: Mapping[int, RankState], details: Mapping[int, Detail]
) -> str:
    """Write the report: what is wrong, then one paragraph per rank, then what to do."""
    ranks = sorted(states)
    if finding.group:
        ranks = [r for r in ranks if r in _ranks_of(finding.group, states)]
    if finding.kind is FaultKind.MISMATCH:
        finding = _earliest(finding, details)
    parts = [_headline(finding, states)]
    # Many ranks mostly say the same; the ones concerned come first, then a few of the others.
    shown = [*finding.ranks, *(r for r in ranks if r not in finding.ranks)][:16]
    for rank in sorted(shown):
        lines = _paragraph(rank, finding, states.get(rank), details.get(rank, {}))
        parts.append(f"  rank {rank}: " + "\n      ".join(lines))
    if len(ranks) > len(shown):
        parts.append(f"  … and {len(ranks) - len(shown)} more ranks")
    parts += _where_sites_part(finding, ranks, details)
    if finding.kind is not FaultKind.LOST:
        is_slow = finding.kind is FaultKind.SKIPPED and any(
            states[r].status is Status.INSIDE for r in finding.ranks
        )
        parts.append(_REMEDY + (_SLOW if is_slow else ""))
    return "\n".join(parts)


def _headline(finding: Finding, states: Mapping[int, RankState]) -> str:
    who = _listed(finding.ranks)
    what = f"collective number {finding.number} of {_group(finding.group)}"
    match finding.kind:
        case FaultKind.MISMATCH:
            return f"ranks called different collectives as {what}:"
        case FaultKind.SKIPPED:
            callers = [
                r
                for r, s in states.items()
                if finding.group in s.groups and s.groups[finding.group].last >= finding.number
            ]
            return f"{who} did not call {what}, which {_listed(callers)} called:"
        case FaultKind.LOST:
            return f"{who} is lost: {finding.why}; last known of each rank:"


def _group(name: str) -> str:
    return "the default group" if name == "0" else f"group {name!r}"


def _listed(ranks: Iterable[int]) -> str:
    ranks = sorted(ranks)
    shown = ", ".join(str(r) for r in ranks[:8]) + (", …" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def _paragraph(rank: int, finding: Finding, state: RankState | None, detail: Detail) -> list[str]:
    if state is None:
        return ["no heartbeat of it has been read"]
    calls = detail.get(finding.group, {})
    if str(finding.number) in calls:
        text, stack, _ = calls[str(finding.number)]
        return [f"number {finding.number}: {text} at {stack[0]}", *_from(stack)]
    match state.status:
        case Status.INSIDE if state.waiting is not None and state.waiting[0] in state.groups:
            group, number = state.waiting
            lines = [f"waiting in number {number} of {_group(group)}, called at {state.stack[0]}"]
        case Status.INSIDE:
            lines = [f"not in a collective, at {state.stack[0]}"]
        case Status.LEAVING | Status.LEFT:
            lines = [f"left the guard at {state.stack[0]}"]
        case Status.FAILED:
            lines = [f"left the guard with {state.note} at {state.stack[0]}"]
    lines += _from(state.stack)
    for name, group in state.groups.items():
        lines.append(
            f"its last in {_group(name)}: number {group.last}, {group.call} at {group.stack[0]}"
        )
    return lines


def _from(stack: list[str]) -> list[str]:
    return [f"from {line}" for line in stack[1:]]


def _earliest(finding: Finding, details: Mapping[int, Detail]) -> Finding:
    """Move a mismatch to the first number at which the calls differ, if it is still known."""
    calls = {rank: each[finding.group] for rank, each in details.items() if finding.group in each}
    found = _first_difference(calls, finding.number, lambda call: call[2])
    return finding if found is None else replace(finding, number=found[0])


def _where_sites_part(
    finding: Finding, ranks: list[int], details: Mapping[int, Detail]
) -> list[str]:
    """Say where call sites first parted, if that was before the finding itself.

    A skipped collective may go unnoticed while the next ones look alike; other lines of the same
    program are then the only trace of it.
    """
    calls = {r: details[r][finding.group] for r in ranks if finding.group in details.get(r, {})}
    found = _first_difference(calls, finding.number - 1, lambda call: call[1][0])
    if finding.kind is FaultKind.LOST or found is None:
        return []
    number, sites = found
    shown = ", ".join(f"rank {r} at {site}" for r, site in list(sites.items())[:4])
    return [f"  The call sites first part at number {number}: {shown}."]


def _first_difference(
    calls: Mapping[int, Mapping[str, Any]], last: int, look: Callable[[Any], Any]
) -> tuple[int, dict[int, Any]] | None:
    """The first number up to `last` at which ranks' calls differ in what `look` takes of them."""
    common = set.intersection(*map(set, calls.values())) if len(calls) > 1 else set()
    for number in sorted(int(n) for n in common if int(n) <= last):
        found = {rank: look(of_rank[str(number)]) for rank, of_rank in calls.items()}
        if len(set(found.values())) > 1:
            return number, found
    return None
