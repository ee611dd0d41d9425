"""The side channel between the ranks: a few keys in a store, and a look at processes next door."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from unison.shard.guard.judge import Detail, RankState


class ChannelLost(Exception):
    """The store no longer answers."""


class Channel:
    """What the ranks tell each other, over a connection of its own.

    A client of a store serves one request at a time. Were the connection shared, a rank that waits
    for a key (in `new_group`, say) could not send heartbeats and would pass for dead.

    Args:
        store: Any store that all ranks share.
        prefix: The same on every rank, and new for every guarded block.
        rank: This rank.
    """

    def __init__(self, store: dist.Store, prefix: str, rank: int) -> None:
        own = store.clone() if hasattr(store, "clone") else store  # type: ignore[attr-defined]
        self._store = dist.PrefixStore(prefix, own)
        self._rank = rank
        self._known: set[str] = set()

    def publish_state(self, state: RankState) -> None:
        """Write this rank's heartbeat."""
        self._set(f"state/{self._rank}", state.to_json())

    def states(self, ranks: Iterable[int]) -> dict[int, RankState]:
        """Read the heartbeats of those ranks that have written one."""
        found = self._read({f"state/{rank}": rank for rank in ranks})
        return {rank: RankState.from_json(data) for rank, data in found.items()}

    def ask(self) -> None:
        """Ask all ranks for details."""
        self._set("ask", True)

    @property
    def is_asked(self) -> bool:
        """Whether some rank has found something wrong."""
        return self._has("ask")

    def publish_detail(self, detail: Any) -> None:
        """Write this rank's recent calls in full."""
        self._set(f"detail/{self._rank}", detail)

    def details(self, ranks: Iterable[int]) -> dict[int, Detail]:
        """Read the details of those ranks that have written them."""
        return self._read({f"detail/{rank}": rank for rank in ranks})

    def propose_verdict(self, kind: str, message: str) -> tuple[str, str]:
        """Write a verdict unless there is one; return the one that all ranks will read."""
        value = json.dumps([kind, message])
        try:
            winner = self._store.compare_set("verdict", "", value)
        except RuntimeError as error:
            raise ChannelLost(str(error)) from error
        kind, message = json.loads(winner or value)
        return kind, message

    def verdict(self) -> tuple[str, str] | None:
        """Read the verdict, if there is one."""
        found = self._read({"verdict": 0})
        return tuple(found[0]) if found else None

    def acknowledge(self) -> None:
        """Say that this rank has read the verdict, so that the store's host may end."""
        self._set(f"ack/{self._rank}", True)

    def acknowledged(self, ranks: Iterable[int]) -> bool:
        """Whether all of these ranks have read the verdict."""
        return all(self._has(f"ack/{rank}") for rank in ranks)

    def _set(self, key: str, value: Any) -> None:
        try:
            self._store.set(key, json.dumps(value))
        except RuntimeError as error:
            raise ChannelLost(str(error)) from error

    def _has(self, key: str) -> bool:
        # Reading a key that is not there would block; once there, a key stays.
        try:
            if key not in self._known and self._store.check([key]):
                self._known.add(key)
        except RuntimeError as error:
            raise ChannelLost(str(error)) from error
        return key in self._known

    def _read(self, keys: dict[str, int]) -> dict[int, Any]:
        there = [key for key in keys if self._has(key)]
        if not there:
            return {}
        try:
            if self._store.has_extended_api():  # type: ignore[attr-defined]
                values = self._store.multi_get(there)
            else:
                values = [self._store.get(key) for key in there]
        except RuntimeError as error:
            raise ChannelLost(str(error)) from error
        return {keys[key]: json.loads(value) for key, value in zip(there, values, strict=True)}


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
