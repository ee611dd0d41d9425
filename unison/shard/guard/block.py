"""The guarded block: attaches, watches, raises, detaches.

[Note: from suspicion to verdict]
Each process has a thread that sends its heartbeats and reads the others'. A rank that finds
something wrong *asks*; all ranks then publish their recent calls with call sites. It writes a
report and *proposes* it; the store keeps the first proposal, so that all ranks raise one message.
Every rank *acknowledges* it, and the leader raises last, because its process may host the store
that the others still read. Only the leader reads all heartbeats in a large world: one request per
rank and tick, not one per pair.
"""

import atexit
import contextlib
import ctypes
import json
import os
import re
import signal
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from unison import check
from unison.errors import BadInput, UnisonError
from unison.shard.guard.records import (
    RECENT,
    CollectiveCall,
    CollectiveMismatch,
    Detail,
    Finding,
    Journal,
    RankLost,
    RankState,
    add_call,
    caller,
    examine,
    identity,
    is_dead,
    lines_of,
    specs_of,
    summary_of,
    verdict_of,
)

T = TypeVar("T")

# ------------------------------------------------------------------------------------------------
# The places where a collective is seen, and where waiting for one can be left.
#
# [Note: what is intercepted]
# - *Issued from Python*: the methods of torch's `ProcessGroup` class are replaced while the guard
#   is on. All of `torch.distributed` ends there, however its functions were imported, and so do
#   FSDP2 and `unison.shard`. It costs a few microseconds.
# - *Issued from C++* (DDP's reducer, functional collectives, DTensor): these call the operations
#   `c10d::allreduce_` and so on, for which a kernel is added at the key `ADInplaceOrView`. It is
#   below autograd, so that it runs inside a backward pass, and it does nothing for collectives. A
#   Python kernel costs about 0.1 ms, so the methods above switch the key off for their own calls.
# - *Waiting*: `Work.wait` is replaced by waits of a tenth of a second where the backend waits on
#   the host (gloo), so that a Python exception can be raised in between. The backend's own wait
#   ends such a slice at once when the work is done, so nothing is slower.
# - *Crashing*: a message longer than expected makes gloo call `std::terminate` from its own
#   thread, microseconds after a collective of another shape was issued. While the guard is on,
#   that thread is parked, so that the ranks live to say what they called.

_KINDS = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce_coalesced",
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather_coalesced",
    "_allgather_base": "all_gather_single",
    "all_gather_single": "all_gather_single",
    "allgather_into_tensor_coalesced": "all_gather_single_coalesced",
    "all_gather_single_coalesced": "all_gather_single_coalesced",
    "reduce": "reduce",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter_single",
    "reduce_scatter_single": "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single_coalesced",
    "reduce_scatter_single_coalesced": "reduce_scatter_single_coalesced",
    "broadcast": "broadcast",
    "gather": "gather",
    "scatter": "scatter",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
    "all_to_all_single": "all_to_all_single",
    "barrier": "barrier",
}
# Not collectives: they have no number, but waiting for them can be left too.
_POINT_TO_POINT = ("send", "recv", "recv_anysource")

_SLICE = timedelta(seconds=0.1)
_KEY = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
_HOST_BACKENDS = frozenset({"gloo", "mpi"})


# C++ may call these handlers of `std::terminate` at any time, so they are never freed.
_Handler = ctypes.CFUNCTYPE(None)
_handlers: list[Any] = []

# What ends a wait of the training thread: `PyThreadState_SetAsyncExc` would wait for the next
# bytecode; a real signal also ends a sleep, a read or a lock. `SIGURG` is ignored by default, so
# that one which comes late does no harm.
_INTERRUPT = signal.SIGURG

EXIT_CODE = 86
"""The exit code of every process whose guard has raised, or could not raise and ended it."""

# Of `timeout`, the part that a rank may lag; the rest is for the report to reach every rank.
_PATIENCE = 0.5
_GRACE = 2.0
# How gloo, NCCL and the stores word the loss of a peer.
_LOST_PEER = re.compile(
    r"Connection (closed|reset|refused)|Broken pipe|gloo|NCCL|Socket|timed out", re.IGNORECASE
)

_active: "Guard | None" = None
_num_entered: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_kept: list[Any] = []


def guard(timeout: float = 15.0, group: dist.ProcessGroup | None = None) -> "Guard":
    """Make every rank raise when ranks disagree about collectives or one of them is lost.

    Use it as a context manager, entered by all ranks at the same place. World size 1, or no process
    group, is a block that does nothing.

    Args:
        timeout: Seconds within which all ranks raise. A rank that lags behind another for more than
            half of it counts as stuck, so it must be twice what a rank may lawfully do alone while
            others wait for it (writing a checkpoint, say).
        group: The ranks that take part; all by default. Collectives of every group are seen.

    Returns:
        The context manager.

    Raises:
        BadInput: If `timeout` is not above 0, or this rank is not in `group`.
        CollectiveMismatch: Inside the block, on every rank: ranks called different collectives, or
            a rank skipped one. The message has each rank's call and call site.
        RankLost: Inside the block, on every rank: a rank died or is silent.

    Guarantees:
        - The results of the block are the same bits with and without it.
        - All ranks show the same message, unless the store that carries it is lost.
        - A rank that is blocked outside of Python prints the message and exits with `EXIT_CODE`.
          A process that has raised also ends with it, because its groups cannot be freed.
    """
    check.positive(timeout=timeout)
    return Guard(timeout, group)


class Guard:
    """One guarded block; see `guard`."""

    def __init__(self, timeout: float, group: dist.ProcessGroup | None) -> None:
        self._timeout = timeout
        self._has_raised = False  # the verdict, in the guarded thread
        self._patience = _PATIENCE * timeout
        self._group = group
        self._watcher: Any = None  # a `Watcher`, while several ranks are guarded
        self._verdict: UnisonError | None = None
        self._decided, self._delivered = threading.Event(), threading.Event()
        self._status, self._note = "inside", ""
        self._stack: list[str] = []
        self._waiting: CollectiveCall | None = None
        self._thread = 0
        self._beat = 0
        self._identity = identity()
        self._log: deque[CollectiveCall] = deque()
        self._members: dict[str, list[int]] = {}
        self._journals: dict[str, Journal] = {}
        self._numbers: dict[str, int] = {}
        self._on_host: dict[tuple[str, str], bool] = {}  # by group and type of device
        self._calls: weakref.WeakKeyDictionary[Any, CollectiveCall] = weakref.WeakKeyDictionary()
        self._undo = ExitStack()
        self._can_interrupt = False

    @property
    def num_collectives(self) -> dict[str, int]:
        """Collectives that this rank has issued in the block, by the name of the group."""
        return dict(self._numbers)

    def __repr__(self) -> str:
        return f"Guard(timeout={self._timeout}, num_collectives={self.num_collectives})"

    def __enter__(self) -> "Guard":
        global _active
        if _active is not None:
            raise BadInput("guard() is already on in this process; one guard sees all collectives")
        if self._delivered.is_set() or self._thread:
            raise BadInput("this guard was used before; call guard() for a new one")
        _active = self
        try:
            self._thread = threading.get_ident()
            if dist.is_initialized() and dist.get_world_size(self._group) != 1:
                self._attach()
        except BaseException:
            self._detach()
            raise
        return self

    def _attach(self) -> None:
        group = self._group or dist.group.WORLD
        assert group is not None
        if dist.get_rank(group) < 0:
            raise BadInput(
                f"rank {dist.get_rank()} is not in the group it guards; enter on its members only"
            )
        self._watcher = Watcher(self, group, self._timeout)
        self._park_terminating_threads()
        self._handle_signals()
        self._intercept()
        self._watcher.start()

    def _detach(self) -> None:
        global _active
        _active = None
        self._undo.close()
        if self._watcher is not None and self._watcher.is_alive():
            self._watcher.stop()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._delivered.set()  # from here on the verdict is raised below, and not by a signal
        try:
            if self._watcher is not None:
                self._leave(error, trace)
        finally:
            self._status = "left" if error is None else "failed"
            self._detach()
        if self._verdict is None:
            return
        _keep_groups()
        if error is self._verdict:
            return
        # Not an error of this rank's own, but what a peer's end looked like from here, or what some
        # library made of the verdict when it was raised in the midst of its code.
        if error is None or _is_lost_peer(error) or self._has_raised:
            raise self._verdict from error

    def _leave(self, error: BaseException | None, trace: Any) -> None:
        """Say that this rank leaves, and linger so that nobody is missed while it can be told."""
        if error is None:
            self._stack = lines_of(caller(sys._getframe(2))[1])
            self._status, seconds = "leaving", self._timeout
        else:
            while trace is not None and trace.tb_next is not None:
                trace = trace.tb_next
            self._stack = lines_of(caller(trace.tb_frame if trace else sys._getframe(2))[1])
            self._note = f"{type(error).__name__}: {error}".partition("\n")[0]
            # Long enough for the others to read it; a broken connection deserves an explanation.
            self._status, seconds = "failed", _GRACE
            if _is_lost_peer(error):
                self._watcher.hint()
                seconds = self._patience + _GRACE
        if error is not None and error is self._verdict:
            return
        self._watcher.hurry()
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self._watcher.everyone_left:
            if self._decided.wait(0.02):
                return

    # ---- collectives, in the training thread ----------------------------------------------------

    def _intercept(self) -> None:
        """Replace methods of torch's classes, and add kernels to its operations."""

        def put(owner: type, name: str, by: Callable) -> None:
            # What the class holds is a descriptor; what getattr gives would not bind when put back.
            self._undo.callback(setattr, owner, name, vars(owner)[name])
            setattr(owner, name, by)

        for name in (*_KINDS, *_POINT_TO_POINT):
            if name in vars(c10d.ProcessGroup):  # the names vary with torch's version
                put(c10d.ProcessGroup, name, self._issuer(name))
        put(c10d.Work, "wait", self._waiter())
        library = torch.library.Library("c10d", "IMPL")
        self._undo.callback(library._destroy)
        for name in _KINDS:
            packet = getattr(torch.ops.c10d, name if name == "barrier" else f"{name}_", None)
            if packet is not None:
                kernel = self._kernel(packet.default, _KINDS[name])
                library.impl(packet.default, kernel, "ADInplaceOrView")

    def _issued(
        self, group: Any, kind: str, tensors: tuple[Any, ...], options: Any, is_numbered: bool
    ) -> CollectiveCall:
        """Take note of a call; the watcher reads it from the log."""
        name = group.group_name
        specs, device = specs_of(tensors)
        on_host = self._on_host.get((name, device))
        if on_host is None:
            on_host = self._on_host[name, device] = _waits_on_host(group, device)
        number = self._numbers.get(name, 0) + is_numbered
        # Frame 0 is this one; what lies between it and the user's is skipped by its file.
        api, stack = caller(sys._getframe(1))
        call = CollectiveCall(name, number, kind, specs, options, api, stack, on_host)
        if is_numbered:
            self._raise_verdict()
            if name not in self._members:
                self._members[name] = dist.get_process_group_ranks(group)
            self._log.append(call)
            self._numbers[name] = number
        return call

    def _issuer(self, name: str) -> Callable:
        original = getattr(c10d.ProcessGroup, name)
        kind, is_numbered = _KINDS.get(name, name), name in _KINDS

        def issue(group: Any, *args: Any, **kwargs: Any) -> Any:
            options = kwargs.get("opts", args[-1] if args else None)
            call = self._issued(group, kind, args, options, is_numbered)
            with torch._C._ExcludeDispatchKeyGuard(_KEY):
                work = original(group, *args, **kwargs)
            if call.waits_on_host and work is not None:
                self._calls[work] = call
            return work

        return issue

    def _kernel(self, op: Any, kind: str) -> Callable:
        names = [argument.name for argument in op._schema.arguments]

        def issue(*args: Any) -> Any:
            given = dict(zip(names, args, strict=False))
            group = c10d.ProcessGroup.unbox(given["process_group"])
            tensors = () if kind == "barrier" else args
            self._issued(group, kind, tensors, given, is_numbered=True)
            with torch._C._ExcludeDispatchKeyGuard(_KEY):
                return op(*args)

        return issue

    def _waiter(self) -> Callable:
        original = c10d.Work.wait

        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            call = self._calls.get(work)
            if call is None:
                return original(work, *args, **kwargs)
            timeout = kwargs.get("timeout", args[0] if args else None)
            until = time.monotonic() + timeout.total_seconds() if timeout else float("inf")
            is_guarded_thread = threading.get_ident() == self._thread
            if is_guarded_thread:
                self._waiting = call
            try:
                while time.monotonic() < until:
                    with contextlib.suppress(RuntimeError):
                        return original(work, _SLICE)
                    # The slice is over, or the work has failed.
                    if work.is_completed():
                        return self._result(original, work)
                    self._check_watcher()
                return original(work, timedelta(milliseconds=1))  # raises what the user expects
            finally:
                if is_guarded_thread:
                    self._waiting = None

        return wait

    def _result(self, wait: Callable, work: Any) -> Any:
        """Return the result of a completed work; it may have completed just after a slice ended."""
        try:
            return wait(work)
        except RuntimeError as error:
            # A broken connection announces a verdict.
            self._watcher.hint()
            self._decided.wait(self._patience + _GRACE)
            if self._verdict is None:
                raise
            self._delivered.set()
            raise self._verdict from error

    def _check_watcher(self) -> None:
        """Raise the verdict, if there is one, or that there can be none any more."""
        self._raise_verdict()
        silent = time.monotonic() - self._watcher.ticked_at
        if silent > self._patience + 2 * _GRACE:
            # The watcher hangs in a request: the store's host is stopped, or cut off.
            here = lines_of(self._waiting.stack)[0] if self._waiting else "(unknown)"
            self._verdict = RankLost(
                f"the store has not answered for {silent:.0f} s: what hosts it (rank 0, or the "
                f"launcher) is stopped or cut off; this rank waits at {here}"
            )
            self._raise_verdict()

    def _raise_verdict(self) -> None:
        if self._verdict is not None:
            self._delivered.set()
            self._has_raised = True
            _keep_groups()  # here and not only in __exit__, which a signal may cut short
            raise self._verdict

    # ---- signals, and threads that would end the process ----------------------------------------

    def _handle_signals(self) -> None:
        """Install signal handlers; outside the main thread Python allows none."""
        if threading.current_thread() is not threading.main_thread():
            return

        def interrupt(*_: Any) -> None:
            if not self._delivered.is_set():
                self._raise_verdict()

        def terminate(*_: Any) -> None:
            # A launcher ends us, most likely because another rank ended: say which, if we can.
            if self._watcher is not None and not self._delivered.is_set():
                self._watcher.hint()
                self._decided.wait(_GRACE)
                interrupt()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

        handlers: dict[int, Callable] = {_INTERRUPT: interrupt}
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            handlers[signal.SIGTERM] = terminate
        for number, handler in handlers.items():
            before = signal.getsignal(number)
            # None: a handler that was not installed from Python, and cannot be put back from here.
            if before is not None:
                signal.signal(number, handler)
                self._undo.callback(signal.signal, number, before)
                self._can_interrupt = True

    def _park_terminating_threads(self) -> None:
        """Make C++ threads that call `std::terminate` sleep, once the ranks know why."""
        try:
            set_terminate = ctypes.CDLL("libstdc++.so.6")._ZSt13set_terminatePFvvE
        except (OSError, AttributeError):
            return  # another C++ library: the other ranks will report a lost rank
        set_terminate.restype = ctypes.c_void_p
        set_terminate.argtypes = [ctypes.c_void_p]
        before: list[int] = []

        def handle() -> None:
            if threading.current_thread() is not threading.main_thread():
                self._watcher.hint()
                if self._decided.wait(self._patience + _GRACE):
                    while True:
                        time.sleep(1e6)
            _Handler(before[0])()

        _handlers.append(_Handler(handle))
        before.append(set_terminate(ctypes.cast(_handlers[-1], ctypes.c_void_p)))
        self._undo.callback(set_terminate, before[0])

    # ---- told by the watcher, in its thread -----------------------------------------------------

    def state(self) -> RankState:
        """Return a heartbeat."""
        while self._log:
            call = self._log.popleft()
            journal = self._journals.setdefault(call.group, (deque(maxlen=RECENT), {}))
            add_call(journal, call)
        self._beat += 1
        waiting, stack = self._waiting, self._stack
        if self._status == "inside":
            frame = sys._current_frames().get(self._thread)
            stack = lines_of(waiting.stack if waiting else caller(frame)[1])
        return {
            "beat": self._beat,
            "status": self._status,
            "note": self._note,
            "stack": stack or ["(unknown)"],
            "waiting": (waiting.group, waiting.number) if waiting else None,
            "identity": self._identity,
            "groups": {
                name: summary_of(journal, self._members[name])
                for name, journal in self._journals.items()
            },
        }

    def detail(self) -> Detail:
        """Return text, call sites and signature of the recent calls of each group, by number."""
        return {
            name: {
                str(call.number): (call.text, lines_of(call.stack), call.signature.decode())
                for call in recent
            }
            for name, (recent, _) in self._journals.items()
        }

    def receive(self, verdict: UnisonError) -> None:
        """Raise the verdict in the training thread; end the process if it cannot be reached."""
        self._verdict = verdict
        self._decided.set()
        until = time.monotonic() + _GRACE
        while time.monotonic() < until:
            if self._can_interrupt:
                signal.pthread_kill(threading.main_thread().ident, _INTERRUPT)  # type: ignore[arg-type]
            if self._delivered.wait(0.25):
                return
            # Break collectives that run on a GPU, where waiting only orders streams, so that a
            # thread that waits for it comes back.
            on_device = {name for (name, _), is_host in self._on_host.items() if not is_host}
            for group in list(dist.distributed_c10d._world.pg_map):
                if group.group_name in on_device:
                    group.abort()
        print(f"unison.guard: {type(verdict).__name__}: {verdict}", file=sys.stderr)
        sys.stderr.flush()
        os._exit(EXIT_CODE)


def _waits_on_host(group: Any, device: str) -> bool:
    """Whether a collective's wait blocks until it is done, and may be cut into slices.

    NCCL's orders streams instead, and one with a timeout would abort the group. A barrier has no
    tensor to tell which of a group's backends it uses, so all of them must agree.
    """
    devices = [torch.device(device)] if device else group._device_types
    backends = {group._get_backend(d).name().lower() for d in devices}
    return bool(backends) and backends <= _HOST_BACKENDS


def _is_lost_peer(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and bool(_LOST_PEER.search(str(error)))


def _keep_groups() -> None:
    """Never free today's groups, and end this process without doing so.

    To free a gloo group is to wait for its threads, and those still wait for the other ranks, or
    are parked: after a verdict, ranks could wait for each other while they end.
    """
    if not _kept:
        atexit.register(_end_at_once)
    _kept.extend(dist.distributed_c10d._world.pg_map)


def _end_at_once() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(EXIT_CODE)


# ------------------------------------------------------------------------------------------------
# The watching thread.

_SMALL_WORLD = 16
_DETAIL_SECONDS = 1.5
_ACKNOWLEDGE_SECONDS = 2.0
# Silence that is enough once a collective has failed with a broken connection.
_SILENCE_AFTER_A_HINT = 3.0
_SILENT = "its process or machine is gone, stopped, or in a call that holds Python's lock"


class Watcher(threading.Thread):
    """The thread that publishes this rank's state and looks after the others'.

    Args:
        guard: This rank's guard.
        group: The ranks that are guarded together.
        timeout: Seconds within which all ranks raise.
    """

    def __init__(self, guard: Guard, group: dist.ProcessGroup, timeout: float) -> None:
        super().__init__(name="unison-guard", daemon=True)
        number = _num_entered[group] = _num_entered.get(group, 0) + 1
        store = dist.distributed_c10d._get_default_store()
        # Over a connection of its own: a client of a store serves one request at a time. Were it
        # shared, a rank that waits for a key (in `new_group`, say) could not send heartbeats and
        # would pass for dead.
        own = store.clone()  # type: ignore[attr-defined]
        self._store = dist.PrefixStore(f"unison/guard/{group.group_name}/{number}", own)
        self._written: set[str] = set()
        self._guard, self._rank, ranks = guard, dist.get_rank(), dist.get_process_group_ranks(group)
        self._others = [r for r in ranks if r != self._rank]
        # A rank of another machine may be silent for longer than it may lag: a call that holds
        # Python's lock silences a rank that is well.
        self._patience, self._silence = _PATIENCE * timeout, timeout
        self._behind: dict[tuple[str, int], tuple[int, float]] = {}
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
        return any(s["everyone_left"] for s in states if s) or all(
            s is not None and s["status"] != "inside" for s in states
        )

    # ---- the thread ---------------------------------------------------------------------------

    def run(self) -> None:
        """Tick until stopped or until there is a verdict."""
        while not self._stopping.is_set():
            verdict = self._tick()
            self.ticked_at = time.monotonic()
            if verdict is not None:
                self._guard.receive(verdict)
                return
            self._wake.wait(self._interval)
            self._wake.clear()
        self._unless_blind(lambda: self._publish("state", self._own_state()))

    def _tick(self) -> UnisonError | None:
        own = self._own_state()
        verdict = self._unless_blind(lambda: self._exchange(own))
        states = {**self._states, self._rank: own}
        if verdict is not None:
            return verdict
        finding = self._lost() or examine(
            states, self._behind, patience=self._patience, now=time.monotonic()
        )
        if finding is None:
            return None
        verdict = self._unless_blind(lambda: self._propose(finding, states))
        if verdict is None:
            details = {self._rank: self._guard.detail()}
            verdict = verdict_of(finding, states, details)
        return verdict

    def _own_state(self) -> RankState:
        return {
            **self._guard.state(),
            "everyone_left": not self._is_blind and self.everyone_left,
        }

    def _unless_blind(self, exchange: Callable[[], T]) -> T | None:
        """Do something with the store, and go on without it when it is gone."""
        try:
            return None if self._is_blind else exchange()
        except RuntimeError:  # the store no longer answers
            self._is_blind = True
            return None

    def _publish(self, kind: str, value: Any) -> None:
        """Write what this rank says of a kind: its state, its detail, that it read the verdict."""
        self._store.set(f"{kind}/{self._rank}", json.dumps(value))

    def _has(self, key: str) -> bool:
        """Whether a key was written. To read one that is not there would block."""
        if key not in self._written and self._store.check([key]):
            self._written.add(key)  # once there, it stays
        return key in self._written

    def _read(self, kind: str, ranks: Iterable[int]) -> dict[int, Any]:
        """Read what those of the ranks say that have written it."""
        there = {f"{kind}/{rank}": rank for rank in ranks if self._has(f"{kind}/{rank}")}
        if there and self._store.has_extended_api():  # type: ignore[attr-defined]
            values = self._store.multi_get(list(there))
        else:
            values = [self._store.get(key) for key in there]
        return dict(zip(there.values(), map(json.loads, values), strict=True))

    def _exchange(self, own: RankState) -> UnisonError | None:
        self._publish("state", own)
        if self._has("ask"):
            self._publish_detail()
            found = self._read("verdict", [0])
            if found:
                return self._agreed(*found[0])
        now = time.monotonic()
        for rank, state in self._read("state", self._whom()).items():
            self._states[rank] = state
            if self._seen.get(rank, (-1, 0.0))[0] != state["beat"]:
                self._seen[rank] = state["beat"], now
        return None

    def _whom(self) -> list[int]:
        leader = min([*filter(self._answers, self._others), self._rank])
        if leader == self._rank or len(self._others) < _SMALL_WORLD or self._is_hinted:
            return self._others
        return [leader]

    def _lost(self) -> Finding | None:
        now, lost = time.monotonic(), ("", 0, False)
        silence = min(self._silence, _SILENCE_AFTER_A_HINT) if self._is_hinted else self._silence
        for rank, state in self._states.items():
            if state["status"] != "inside":
                continue
            if is_dead(state["identity"]):
                return (rank,), *lost, f"its process {state['identity'][1]} has ended"
            quiet = now - self._seen[rank][1]
            if quiet > silence and not self._is_blind:
                return (rank,), *lost, f"no sign of life for {quiet:.0f} s ({_SILENT})"
        if self._is_blind:
            # Of a lost store rank 0 is to blame, its host, unless a launcher hosts it or it left.
            host = self._states.get(0)
            by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            if self._rank == 0 or by_launcher or (host and host["status"] != "inside"):
                return None
            return (0,), *lost, "the store it hosts no longer answers"
        absent = [r for r in self._whom() if r not in self._states]
        if absent and now - self._started_at > self._silence:
            return tuple(absent), *lost, "it has not entered the guard"
        return None

    # ---- verdicts -----------------------------------------------------------------------------

    def _publish_detail(self) -> None:
        if not self._is_detailed:
            self._is_detailed = True
            self._publish("detail", self._guard.detail())

    def _propose(self, finding: Finding, states: dict[int, RankState]) -> UnisonError:
        self._store.set("ask", json.dumps(True))
        self._publish_detail()
        concerned, *_, why = finding
        gone = concerned if why else ()
        expected = [r for r in self._others if r not in gone and self._answers(r)]
        until = time.monotonic() + _DETAIL_SECONDS
        while True:
            details = self._read("detail", [*self._others, self._rank])
            if all(r in details for r in expected) or time.monotonic() > until:
                break
            time.sleep(0.02)
        states = {**states, **self._read("state", self._whom()), self._rank: self._own_state()}
        verdict = verdict_of(finding, states, details)
        proposal = json.dumps([type(verdict).__name__, str(verdict)])
        # The store keeps the first proposal, and gives it to all.
        return self._agreed(*json.loads(self._store.compare_set("verdict/0", "", proposal)))

    def _answers(self, rank: int) -> bool:
        state = self._states.get(rank)
        return state is None or state["status"] in ("inside", "leaving")

    def _agreed(self, kind: str, message: str) -> UnisonError:
        """Take the verdict that all ranks take, and let the others read it first if we may host."""
        living = [
            r
            for r in self._others
            if r in self._states and self._answers(r) and not is_dead(self._states[r]["identity"])
        ]
        until = time.monotonic() + _ACKNOWLEDGE_SECONDS
        with contextlib.suppress(RuntimeError):  # the verdict is here, which is what counts
            self._publish("ack", True)
            while self._rank == min([*living, self._rank]) and time.monotonic() < until:
                if all(self._has(f"ack/{rank}") for rank in living):
                    break
                time.sleep(0.02)
        return (RankLost if kind == RankLost.__name__ else CollectiveMismatch)(message)
