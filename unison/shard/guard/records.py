"""What ranks remember of their collectives, and what is found when they compare it.

The training thread makes a `CollectiveCall`, which is cheap: shapes, options and code positions as
they are. Text, line numbers and digests are made of it later, by the watching thread. Nothing here
talks to a thread, or to a store: states go in, a finding or a text comes out.
"""

import functools
import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unison.errors import BadInput, UnisonError

Spec = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of one tensor."""

_TORCH = os.path.dirname(torch.__file__) + os.sep
_SHARD = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_PACKAGE = os.path.dirname(os.path.dirname(_SHARD))
_INTERNAL = (
    _TORCH,
    _SHARD,
    *(os.path.join(_PACKAGE, name) + os.sep for name in ("rng", "capture", "privacy")),
    os.path.join(_PACKAGE, "torch_internals.py"),  # its modes call what they are told of
)
_C10D = os.path.join(_TORCH, "distributed", "distributed_c10d.py")
_FUNCTIONAL = os.path.join(_TORCH, "distributed", "_functional_collectives.py")
_DEPTH = 4

# Ranks may pass tensors of other shapes than their peers to these; their dtypes must still agree.
UNEVEN = frozenset({"all_to_all", "all_to_all_single", "gather", "scatter"})
# Of these, only the list that has one entry per rank must agree: (which argument, kind).
_LISTED = {"all_gather": 0, "reduce_scatter": 1}

RECENT = 1024
"""Calls per group that are kept with their call sites."""
_DENSE = 64
_SPARSE = 4096


@dataclass(slots=True)
class CollectiveCall:
    """One collective as it was issued; nothing in it keeps a tensor alive."""

    group: str
    number: int
    kind: str
    specs: tuple[tuple[Spec, ...], ...]  # one entry per argument that holds tensors
    options: Any
    api: str | None
    stack: tuple[tuple[CodeType, int], ...]
    waits_on_host: bool

    @property
    def text(self) -> str:
        """The call as a reader would write it: `all_reduce(float32[3, 4], op=SUM)`."""
        parts = [_tensors(argument) for argument in self.specs]
        op, root = reduction(self.options), root_of(self.options)
        parts += [f"op={op}"] if op is not None else []
        parts += [f"root={root}"] if root is not None else []
        return f"{self.api or self.kind}({', '.join(parts)})"

    @property
    def signature(self) -> bytes:
        """What must be equal on all ranks."""
        return _signature(self.kind, self.specs, reduction(self.options), root_of(self.options))


@functools.lru_cache(maxsize=4096)
def _signature(kind: str, specs: tuple, op: str | None, root: int | None) -> bytes:
    dtypes = sorted({str(dtype) for argument in specs for _, dtype in argument})
    if kind in UNEVEN:
        compared: Any = None
    elif kind in _LISTED:
        compared = specs[_LISTED[kind]]
    else:
        compared = specs
    return repr((kind, dtypes, compared, op, root)).encode()


def specs_of(arguments: tuple[Any, ...]) -> tuple[tuple[tuple[Spec, ...], ...], str]:
    """Return the shapes and dtypes in a collective's arguments, and the type of their device.

    The device is an empty string where there is no tensor.
    """
    found, device = [], ""
    for argument in arguments:
        if isinstance(argument, Tensor):
            tensors = (argument,)
        elif isinstance(argument, list | tuple) and argument:
            # [tensor, ...], or [[tensor, ...]] with one list per device; lists of sizes have none.
            tensors = argument[0] if isinstance(argument[0], list | tuple) else argument
        else:
            continue
        if tensors and isinstance(tensors[0], Tensor):
            found.append(tuple([(t.shape, t.dtype) for t in tensors]))
            device = tensors[0].device.type
    return tuple(found), device


def _tensors(specs: tuple[Spec, ...]) -> str:
    shown = [f"{str(dtype).removeprefix('torch.')}{list(shape)}" for shape, dtype in specs]
    if len(set(shown)) == 1 and len(shown) > 1:
        return f"{len(shown)} × {shown[0]}"
    return ", ".join(shown[:4]) + (f", … {len(shown)} tensors" if len(shown) > 4 else "")


def reduction(options: Any) -> str | None:
    """Return the name of the reduce operation in a collective's options, if it has one."""
    op = getattr(options, "reduceOp", None)
    if op is None:
        return None
    return getattr(op, "op", op).name


def root_of(options: Any) -> int | None:
    """Return the source or destination in a collective's options, if it has one."""
    root = options.get("root_rank") if isinstance(options, dict) else None
    return getattr(options, "rootRank", root)


# ---- where ------------------------------------------------------------------------------------


def caller(frame: FrameType | None) -> tuple[str | None, tuple[tuple[CodeType, int], ...]]:
    """Return the torch function a user called, and the user's own frames, innermost first.

    Frames of torch, of `unison.shard` and of modes are skipped; positions are left unresolved,
    because a line number costs more than a training step can spare.
    """
    api = None
    outermost = frame
    while frame is not None and frame.f_code.co_filename.startswith(_INTERNAL):
        if frame.f_code.co_filename in (_C10D, _FUNCTIONAL):
            api = frame.f_code.co_name
        outermost, frame = frame, frame.f_back
    frame = frame or outermost
    stack = []
    while frame is not None and len(stack) < _DEPTH:
        stack.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return api, tuple(stack)


def lines_of(stack: tuple[tuple[CodeType, int], ...]) -> list[str]:
    """Return `file:line in function` for each position."""
    return [
        f"{_shown(code.co_filename)}:{_line(code, at)} in {code.co_qualname}" for code, at in stack
    ]


def _line(code: CodeType, at: int) -> int:
    for start, end, line in code.co_lines():
        if start <= at < end and line is not None:
            return line
    return code.co_firstlineno


def _shown(path: str) -> str:
    try:
        return path.removeprefix(os.getcwd() + os.sep)
    except FileNotFoundError:  # the folder was removed under us
        return path


# ---- the digest of all calls ------------------------------------------------------------------

GroupState = dict[str, Any]
"""What one rank says of its calls in one group.

`ranks`: its members; `last`: the number of the last call, with its text `call` and call sites
`stack`; `marks`: digests by number, which is a string, as JSON has it.
"""


Journal = tuple[deque[CollectiveCall], dict[int, str]]
"""The last calls of one group in full, and marks by number: a chained digest of all calls so far.

There are marks of recent calls, densely of the last ones and sparsely before. Two ranks whose
chains agree at one number have agreed on every call up to it."""


def add_call(journal: Journal, call: CollectiveCall) -> None:
    """Append a call."""
    recent, marks = journal
    chain = next(reversed(marks.values()), "")
    digest = hashlib.blake2b(chain.encode() + call.signature, digest_size=8)
    marks[call.number] = digest.hexdigest()
    recent.append(call)
    if (call.number - _DENSE) % _DENSE:
        marks.pop(call.number - _DENSE, None)
    marks.pop(call.number - _SPARSE, None)


def summary_of(journal: Journal, ranks: list[int]) -> GroupState:
    """Return what every heartbeat says of a group."""
    recent, marks = journal
    call = recent[-1]
    return {
        "ranks": ranks,
        "last": call.number,
        "marks": {str(number): chain for number, chain in marks.items()},
        "call": call.text,
        "stack": lines_of(call.stack),
    }


# ---- what is found when ranks compare ----------------------------------------------------------


class CollectiveMismatch(UnisonError):
    """Ranks called different collectives, or one of them skipped one."""


class RankLost(UnisonError):
    """A rank died, or has given no sign of life for too long."""


RankState = dict[str, Any]
"""What one rank says of itself in a heartbeat, as JSON holds it.

- `beat` counts up: a rank whose beat stands still is silent.
- `status` is where it is in its guarded block: "inside", where alone it can still call collectives;
  "leaving", done and waiting a moment for the others; "left"; or "failed", left by an exception of
  the user's, of which `note` tells.
- `stack` is its own Python location, innermost first.
- `waiting` is the group and number of the collective it waits for.
- `identity` is machine, process id and start time, to see from next door whether it lives.
- `groups` has its `GroupState`s, by the name of the group.
- `everyone_left` says whether it knows that nobody is inside any more.
"""


Finding = tuple[tuple[int, ...], str, int, bool, str]
"""What is wrong: the ranks that differ, lag or are gone; the group in which collectives differ, or
one is missing, and the number of the first; whether ranks called different ones, or else skipped
one or are lost; and how they were lost, empty for others."""


def examine(
    states: Mapping[int, RankState],
    behind: dict[tuple[str, int], tuple[int, float]],
    *,
    patience: float,
    now: float,
) -> Finding | None:
    """Return the first thing that is wrong between ranks, or None.

    Args:
        states: What the ranks say of themselves.
        behind: Since when a rank lags in a group, and at which number; kept from call to call.
        patience: Seconds that a rank may lag.
        now: The time.
    """
    for name in sorted({name for state in states.values() for name in state["groups"]}):
        members = {
            r: s["groups"].get(name) for r, s in states.items() if r in _ranks_of(name, states)
        }
        issued = {r: group["marks"] for r, group in members.items() if group is not None}
        first = issued[min(issued)]
        for rank, marks in issued.items():
            differing = [int(n) for n in first.keys() & marks.keys() if first[n] != marks[n]]
            if differing:
                return (rank,), name, min(differing), True, ""
        last = {r: 0 if group is None else group["last"] for r, group in members.items()}
        lagging = [r for r in last if last[r] < max(last.values())]
        for rank in last.keys() - lagging:
            behind.pop((name, rank), None)
        late = []
        for rank in lagging:
            number, since = behind.get((name, rank), (-1, now))
            since = since if number == last[rank] else now
            behind[name, rank] = last[rank], since
            if now - since > patience:
                late.append(rank)
        found = [r for r in lagging if states[r]["status"] != "inside"] or late
        if found:
            # The first collective that is missing is the one whose callers wait.
            return tuple(sorted(found)), name, min(last[r] for r in found) + 1, False, ""
    return None


def _ranks_of(group: str, states: Mapping[int, RankState]) -> list[int]:
    groups = (state["groups"] for state in states.values())
    return next(each[group]["ranks"] for each in groups if group in each)


# ---- the message ------------------------------------------------------------------------------

Detail = Mapping[str, Mapping[str, tuple[str, list[str], str]]]
"""Of one rank: group name, then number as a string, then call, stack and signature."""

_REMEDY = (
    "Every rank of a group must call the same collectives in the same order: move a collective out "
    "of `if rank == 0:` and out of loops whose length differs between ranks."
)
_SLOW = " If the rank is only slow, give guard(timeout=...) more seconds."


def verdict_of(
    finding: Finding, states: Mapping[int, RankState], details: Mapping[int, Detail]
) -> UnisonError:
    """The error to raise: what is wrong, then one paragraph per rank, then what to do."""
    concerned, group, number, is_mismatch, why = finding
    ranks = sorted(states)
    if group:
        ranks = [r for r in ranks if r in _ranks_of(group, states)]
    calls = {r: each[group] for r, each in details.items() if group in each}
    if is_mismatch:  # at the first number at which calls differ, if it is still known
        found = _first_difference(calls, number, lambda call: call[2])
        number = number if found is None else found[0]
    parts = [_headline((concerned, group, number, is_mismatch, why), states)]
    # Many ranks mostly say the same; the ones concerned come first, then a few of the others.
    shown = [*concerned, *(r for r in ranks if r not in concerned)][:16]
    for rank in sorted(shown):
        lines = _paragraph(states.get(rank), number, calls.get(rank, {}))
        parts.append(f"  rank {rank}: " + "\n      ".join(lines))
    if len(ranks) > len(shown):
        parts.append(f"  … and {len(ranks) - len(shown)} more ranks")
    if why:
        return RankLost("\n".join(parts))
    # A skipped collective may go unnoticed while the next ones look alike; other lines of the same
    # program are then the only trace of it.
    calls = {r: calls[r] for r in ranks if r in calls}
    found = _first_difference(calls, number - 1, lambda call: call[1][0])
    if found is not None:
        number, sites = found
        shown = ", ".join(f"rank {r} at {site}" for r, site in list(sites.items())[:4])
        parts.append(f"  The call sites first part at number {number}: {shown}.")
    is_inside = any(states[r]["status"] == "inside" for r in concerned)
    parts.append(_REMEDY + (_SLOW if is_inside and not is_mismatch else ""))
    return CollectiveMismatch("\n".join(parts))


def _headline(finding: Finding, states: Mapping[int, RankState]) -> str:
    ranks, group, number, is_mismatch, why = finding
    who, what = _listed(ranks), f"collective number {number} of {_group(group)}"
    if why:
        return f"{who} is lost: {why}; last known of each rank:"
    if is_mismatch:
        return f"ranks called different collectives as {what}:"
    last = {r: s["groups"].get(group, {"last": 0})["last"] for r, s in states.items()}
    callers = [r for r in states if last[r] >= number]
    return f"{who} did not call {what}, which {_listed(callers)} called:"


def _group(name: str) -> str:
    return "the default group" if name == "0" else f"group {name!r}"


def _listed(ranks: Iterable[int]) -> str:
    ranks = sorted(ranks)
    shown = ", ".join(str(r) for r in ranks[:_SHOWN_RANKS])
    more = ", …" if len(ranks) > _SHOWN_RANKS else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


def _paragraph(state: RankState | None, number: int, calls: Mapping[str, Any]) -> list[str]:
    if state is None:
        return ["no heartbeat of it has been read"]
    stack, waiting = state["stack"], state["waiting"]
    if str(number) in calls:
        text, stack, _ = calls[str(number)]
        return [f"number {number}: {text} at {stack[0]}", *map("from {}".format, stack[1:])]
    match state["status"]:
        case "inside" if waiting is not None and waiting[0] in state["groups"]:
            group, number = waiting
            lines = [f"waiting in number {number} of {_group(group)}, called at {stack[0]}"]
        case "inside":
            lines = [f"not in a collective, at {stack[0]}"]
        case "failed":
            lines = [f"left the guard with {state['note']} at {stack[0]}"]
        case _:
            lines = [f"left the guard at {stack[0]}"]
    lines += map("from {}".format, stack[1:])
    for name, group in state["groups"].items():
        last, call, site = group["last"], group["call"], group["stack"][0]
        lines.append(f"its last in {_group(name)}: number {last}, {call} at {site}")
    return lines


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
        value = value if len(value) <= 120 else value[:117] + "..."
        parts.append(f"{_listed(ranks)} {'has' if len(ranks) == 1 else 'have'} {value}")
    return "; ".join(parts)


# ---- processes next door ----------------------------------------------------------------------


def identity() -> list[str]:
    """Return what tells this process from all others: machine, process id, start time."""
    return [_machine(), str(os.getpid()), _status_of(os.getpid())[1]]


def is_dead(who: list[str]) -> bool | None:
    """Whether a process of this machine has ended; None for one that cannot be seen from here."""
    machine, pid, started = who
    if not machine or machine != _machine():
        return None
    state, start = _status_of(int(pid))
    return state in ("", "Z", "X") or start != started


def _machine() -> str:
    # Process ids mean the same only within one boot and one pid namespace; containers differ.
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _status_of(pid: int) -> tuple[str, str]:
    """Return a process's state letter and start time, or two empty strings."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "", ""
    fields = text.rpartition(")")[2].split()  # the name before it may hold anything
    return fields[0], fields[19]
