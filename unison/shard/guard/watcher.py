"""The thread of each process that sends its heartbeats, reads the others', and finds what is wrong.

[Note: from suspicion to verdict]
A rank that finds something wrong *asks*; all ranks then publish their recent calls with call sites.
It writes a report and *proposes* it; the store keeps the first proposal, so that all ranks raise
one message. Every rank *acknowledges* it, and the leader raises last, because its process may host
the store that the others still read. Only the leader reads all heartbeats in a large world: one
request per rank and tick, not one per pair.
"""

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from unison.errors import UnisonError
from unison.shard.guard.diagnosis import (
    Diagnosis,
    FaultKind,
    Finding,
    RankState,
    Status,
    error_of,
    message_of,
)

if TYPE_CHECKING:
    from unison.shard.guard.block import Guard

# ------------------------------------------------------------------------------------------------
# The side channel between the ranks: a few keys in a store, and a look at processes next door.


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

    def publish(self, kind: str, value: Any) -> None:
        """Write what this rank says of a kind: its state, its detail, that it read the verdict."""
        self.set(f"{kind}/{self._rank}", value)

    def read(self, kind: str, ranks: Iterable[int]) -> dict[int, Any]:
        """Read what those of the ranks say that have written it."""
        there = {f"{kind}/{rank}": rank for rank in ranks if self.has(f"{kind}/{rank}")}
        with _store_answers():
            if there and self._store.has_extended_api():  # type: ignore[attr-defined]
                values = self._store.multi_get(list(there))
            else:
                values = [self._store.get(key) for key in there]
        return dict(zip(there.values(), map(json.loads, values), strict=True))

    def propose(self, value: list[str]) -> list[str]:
        """Write a verdict unless there is one; return the one that all ranks will read."""
        with _store_answers():
            return json.loads(self._store.compare_set("verdict/0", "", json.dumps(value)))

    def set(self, key: str, value: Any) -> None:
        """Write what is the same whoever says it."""
        with _store_answers():
            self._store.set(key, json.dumps(value))

    def has(self, key: str) -> bool:
        """Whether a key was written. To read one that is not there would block."""
        with _store_answers():
            if key not in self._known and self._store.check([key]):
                self._known.add(key)  # once there, it stays
        return key in self._known


@contextlib.contextmanager
def _store_answers() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise ChannelLost(str(error)) from error


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


_SMALL_WORLD = 16
_DETAIL_SECONDS = 1.5
_ACKNOWLEDGE_SECONDS = 2.0
# Silence that is enough once a collective has failed with a broken connection.
_SILENCE_AFTER_A_HINT = 3.0
_SILENT = "its process or machine is gone, stopped, or in a call that holds Python's lock"


class Watcher(threading.Thread):
    """Publishes this rank's state and looks after the others'.

    Args:
        channel: The side channel.
        subject: This rank's guard.
        rank: Its number.
        ranks: All ranks that are guarded together.
        patience: Seconds that a rank may lag.
        silence: Seconds that a rank of another machine may be silent; longer, because a call that
            holds Python's lock silences a rank that is well.
    """

    def __init__(
        self,
        channel: Channel,
        subject: "Guard",
        rank: int,
        ranks: Sequence[int],
        patience: float,
        silence: float,
    ) -> None:
        super().__init__(name="unison-guard", daemon=True)
        self._channel = channel
        self._subject = subject
        self._rank = rank
        self._others = [r for r in ranks if r != rank]
        self._silence = silence
        self._diagnosis = Diagnosis(patience)
        self._interval = 0.25 if len(ranks) <= _SMALL_WORLD else 1.0
        self._states: dict[int, RankState] = {}
        self._seen: dict[int, tuple[int, float]] = {}
        self._wake, self._stopping = threading.Event(), threading.Event()
        self._is_hinted = False
        self._is_blind = False
        self._is_detailed = False
        self._started_at = self.ticked_at = time.monotonic()

    # ---- called by the training thread --------------------------------------------------------

    def hint(self) -> None:
        """Look at all ranks now: a collective has failed, or the process is being ended."""
        self._is_hinted = True
        self._wake.set()

    def hurry(self) -> None:
        """Tick often from now on; this rank is leaving."""
        self._interval = 0.05
        self._wake.set()

    def stop(self, seconds: float = 2.0) -> None:
        """End the thread; it writes this rank's state once more."""
        self._stopping.set()
        self._wake.set()
        self.join(seconds)

    @property
    def everyone_left(self) -> bool:
        """Whether no other rank is inside its guarded block, or nobody can be asked any more."""
        if self._is_blind:
            return True
        states = [self._states.get(r) for r in self._others]
        return any(s.everyone_left for s in states if s) or all(
            s is not None and s.status is not Status.INSIDE for s in states
        )

    # ---- the thread ---------------------------------------------------------------------------

    def run(self) -> None:
        """Tick until stopped or until there is a verdict."""
        while not self._stopping.is_set():
            verdict = self._tick()
            self.ticked_at = time.monotonic()
            if verdict is not None:
                self._subject.receive(verdict)
                return
            self._wake.wait(self._interval)
            self._wake.clear()
        if not self._is_blind:
            self._guarded(lambda: self._channel.publish("state", self._own_state().to_json()))

    def _tick(self) -> UnisonError | None:
        own = self._own_state()
        states = {**self._states, self._rank: own}
        if not self._is_blind:
            verdict = self._guarded(lambda: self._exchange(own))
            if verdict is not None:
                return verdict
            states = {**self._states, self._rank: own}
        finding = self._lost() or self._diagnosis.examine(states, time.monotonic())
        return self._conclude(finding, states) if finding else None

    def _own_state(self) -> RankState:
        state = self._subject.state()
        state.everyone_left = not self._is_blind and self.everyone_left
        return state

    def _guarded(self, exchange: Callable[[], UnisonError | None]) -> UnisonError | None:
        """Do something with the store, and go on without it when it is gone."""
        try:
            return exchange()
        except ChannelLost:
            self._is_blind = True
            return None

    def _exchange(self, own: RankState) -> UnisonError | None:
        self._channel.publish("state", own.to_json())
        if self._channel.has("ask"):
            self._publish_detail()
            found = self._channel.read("verdict", [0])
            if found:
                return self._agreed(*found[0])
        now = time.monotonic()
        for rank, state in self._read_states().items():
            self._states[rank] = state
            if self._seen.get(rank, (-1, 0.0))[0] != state.beat:
                self._seen[rank] = state.beat, now
        return None

    def _read_states(self) -> dict[int, RankState]:
        found = self._channel.read("state", self._whom())
        return {rank: RankState.from_json(data) for rank, data in found.items()}

    def _whom(self) -> list[int]:
        present = (Status.INSIDE, Status.LEAVING)
        states = self._states
        there = [r for r in self._others if r not in states or states[r].status in present]
        leader = min([*there, self._rank])
        if leader == self._rank or len(self._others) < _SMALL_WORLD or self._is_hinted:
            return self._others
        return [leader]

    def _lost(self) -> Finding | None:
        now = time.monotonic()
        silence = min(self._silence, _SILENCE_AFTER_A_HINT) if self._is_hinted else self._silence
        for rank, state in self._states.items():
            if state.status is not Status.INSIDE:
                continue
            if is_dead(state.identity):
                return Finding(
                    FaultKind.LOST, (rank,), why=f"its process {state.identity[1]} has ended"
                )
            quiet = now - self._seen[rank][1]
            if quiet > silence and not self._is_blind:
                why = f"no sign of life for {quiet:.0f} s ({_SILENT})"
                return Finding(FaultKind.LOST, (rank,), why=why)
        if self._is_blind:
            # Of a lost store rank 0 is to blame, its host, unless a launcher hosts it or it left.
            host = self._states.get(0)
            by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            if self._rank == 0 or by_launcher or (host and host.status is not Status.INSIDE):
                return None
            return Finding(FaultKind.LOST, (0,), why="the store it hosts no longer answers")
        absent = [r for r in self._whom() if r not in self._states]
        if absent and now - self._started_at > self._silence:
            return Finding(FaultKind.LOST, tuple(absent), why="it has not entered the guard")
        return None

    # ---- verdicts -----------------------------------------------------------------------------

    def _publish_detail(self) -> None:
        if not self._is_detailed:
            self._is_detailed = True
            self._channel.publish("detail", self._subject.detail())

    def _conclude(self, finding: Finding, states: dict[int, RankState]) -> UnisonError:
        verdict = None
        if not self._is_blind:
            verdict = self._guarded(lambda: self._propose(finding, states))
        if verdict is None:
            message = message_of(finding, states, {self._rank: self._subject.detail()})
            verdict = error_of(finding.kind, message)
        return verdict

    def _propose(self, finding: Finding, states: dict[int, RankState]) -> UnisonError:
        self._channel.set("ask", True)
        self._publish_detail()
        gone = finding.ranks if finding.kind is FaultKind.LOST else ()
        expected = [r for r in self._others if r not in gone and self._answers(r)]
        until = time.monotonic() + _DETAIL_SECONDS
        while True:
            details = self._channel.read("detail", [*self._others, self._rank])
            if all(r in details for r in expected) or time.monotonic() > until:
                break
            time.sleep(0.02)
        states = {**states, **self._read_states(), self._rank: self._own_state()}
        message = message_of(finding, states, details)
        return self._agreed(*self._channel.propose([finding.kind, message]))

    def _answers(self, rank: int) -> bool:
        state = self._states.get(rank)
        return state is None or state.status in (Status.INSIDE, Status.LEAVING)

    def _agreed(self, kind: str, message: str) -> UnisonError:
        """Take the verdict that all ranks take, and let the others read it first if we may host."""
        living = [
            r
            for r in self._others
            if r in self._states and self._answers(r) and not is_dead(self._states[r].identity)
        ]
        until = time.monotonic() + _ACKNOWLEDGE_SECONDS
        with contextlib.suppress(ChannelLost):  # the verdict is here, which is what counts
            self._channel.publish("ack", True)
            while self._rank == min([*living, self._rank]) and time.monotonic() < until:
                if all(self._channel.has(f"ack/{rank}") for rank in living):
                    break
                time.sleep(0.02)
        return error_of(kind, message)
