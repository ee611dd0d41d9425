"""The guarded block: attaches, watches, raises, detaches."""

import atexit
import ctypes
import os
import re
import signal
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from unison import check
from unison.errors import BadInput, UnisonError
from unison.shard.guard.diagnosis import Detail, GroupState, RankLost, RankState, Status
from unison.shard.guard.records import CollectiveCall, Journal, caller, lines_of, specs_of
from unison.shard.guard.watcher import Channel, Watcher, identity

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


class Interceptor:
    """Replaces methods of torch's classes, and puts them back."""

    def __init__(self, guard: "Guard") -> None:
        self._guard = guard
        self.numbers: dict[str, int] = {}
        self._on_host: dict[tuple[str, str], bool] = {}
        self._calls: weakref.WeakKeyDictionary[Any, CollectiveCall] = weakref.WeakKeyDictionary()

    def attach(self, undo: ExitStack) -> None:
        """See collectives until `undo` is closed."""

        def replace(owner: type, name: str, by: Callable) -> None:
            # What the class holds is a descriptor; what getattr gives would not bind when put back.
            undo.callback(setattr, owner, name, vars(owner)[name])
            setattr(owner, name, by)

        for name in (*_KINDS, *_POINT_TO_POINT):
            if name in vars(c10d.ProcessGroup):  # the names vary with torch's version
                replace(c10d.ProcessGroup, name, self._issuer(name))
        replace(c10d.Work, "wait", self._waiter())
        library = torch.library.Library("c10d", "IMPL")
        undo.callback(library._destroy)
        for name in _KINDS:
            packet = getattr(torch.ops.c10d, name if name == "barrier" else f"{name}_", None)
            if packet is not None and hasattr(c10d.ProcessGroup, "unbox"):
                kernel = self._kernel(packet.default, _KINDS[name])
                library.impl(packet.default, kernel, "ADInplaceOrView")

    def is_on_device(self, group: str) -> bool:
        """Whether a group was seen to work on a GPU, where waiting only orders streams."""
        return any(name == group and not is_host for (name, _), is_host in self._on_host.items())

    def _note(
        self, group: Any, kind: str, tensors: tuple[Any, ...], options: Any, is_numbered: bool
    ) -> CollectiveCall:
        name = group.group_name
        specs, device = specs_of(tensors)
        on_host = self._on_host.get((name, device))
        if on_host is None:
            on_host = self._on_host[name, device] = _waits_on_host(group, device)
        number = self.numbers.get(name, 0) + is_numbered
        # Frame 0 is this one; what lies between it and the user's is skipped by its file.
        api, stack = caller(sys._getframe(1))
        call = CollectiveCall(name, number, kind, specs, options, api, stack, on_host)
        if is_numbered:
            self._guard.issued(call, group)
            self.numbers[name] = number
        return call

    def _issuer(self, name: str) -> Callable:
        original = getattr(c10d.ProcessGroup, name)
        kind, is_numbered = _KINDS.get(name, name), name in _KINDS
        note, calls = self._note, self._calls

        def issue(group: Any, *args: Any, **kwargs: Any) -> Any:
            options = kwargs.get("opts", args[-1] if args else None)
            call = note(group, kind, args, options, is_numbered)
            with torch._C._ExcludeDispatchKeyGuard(_KEY):
                work = original(group, *args, **kwargs)
            if call.waits_on_host and work is not None:
                calls[work] = call
            return work

        return issue

    def _kernel(self, op: Any, kind: str) -> Callable:
        names = [argument.name for argument in op._schema.arguments]

        def issue(*args: Any) -> Any:
            given = dict(zip(names, args, strict=False))
            group = c10d.ProcessGroup.unbox(given["process_group"])
            tensors = () if kind == "barrier" else args
            self._note(group, kind, tensors, given, is_numbered=True)
            with torch._C._ExcludeDispatchKeyGuard(_KEY):
                return op(*args)

        return issue

    def _waiter(self) -> Callable:
        original, calls, guard = c10d.Work.wait, self._calls, self._guard

        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            call = calls.get(work)
            if call is None:
                return original(work, *args, **kwargs)
            timeout = kwargs.get("timeout", args[0] if args else None)
            until = time.monotonic() + timeout.total_seconds() if timeout else float("inf")
            guard.waiting(call)
            try:
                while time.monotonic() < until:
                    try:
                        return original(work, _SLICE)
                    except RuntimeError:
                        pass  # the slice is over, or the work has failed: told apart below
                    if work.is_completed():
                        return _result(original, work, guard)
                    guard.still_waiting()
                return original(work, timedelta(milliseconds=1))  # raises what the user expects
            finally:
                guard.waiting(None)

        return wait


def _waits_on_host(group: Any, device: str) -> bool:
    """Whether a collective's wait blocks until it is done, and may be cut into slices.

    NCCL's orders streams instead, and one with a timeout would abort the group. A barrier has no
    tensor to tell which of a group's backends it uses, so all of them must agree.
    """
    devices = [torch.device(device)] if device else group._device_types
    backends = {group._get_backend(d).name().lower() for d in devices}
    return bool(backends) and backends <= _HOST_BACKENDS


def _result(wait: Callable, work: Any, guard: "Guard") -> Any:
    """Return the result of a completed work; it may have completed just after a slice ended."""
    try:
        return wait(work)
    except RuntimeError as error:
        explained = guard.explain(error)
        if explained is error:
            raise
        raise explained from error


# ---- std::terminate ---------------------------------------------------------------------------

_Handler = ctypes.CFUNCTYPE(None)
_handlers: list[Any] = []  # C++ may call them at any time, so they are never freed


def park_terminating_threads(undo: ExitStack, on_park: Callable[[], bool]) -> None:
    """Make C++ threads that call `std::terminate` sleep instead of ending the process.

    Args:
        undo: What restores the handler before.
        on_park: Called in such a thread; False lets the process end after all.
    """
    try:
        set_terminate = ctypes.CDLL("libstdc++.so.6")._ZSt13set_terminatePFvvE
    except (OSError, AttributeError):
        return  # another C++ library: the other ranks will report a lost rank
    set_terminate.restype = ctypes.c_void_p
    set_terminate.argtypes = [ctypes.c_void_p]
    before: list[int] = []

    def handle() -> None:
        if threading.current_thread() is not threading.main_thread() and on_park():
            while True:
                time.sleep(1e6)
        _Handler(before[0])()

    _handlers.append(_Handler(handle))
    before.append(set_terminate(ctypes.cast(_handlers[-1], ctypes.c_void_p)))
    undo.callback(set_terminate, before[0])


# ------------------------------------------------------------------------------------------------
# Raising in the training thread from another one, and being told to end.
#
# `PyThreadState_SetAsyncExc` would wait for the next bytecode; a real signal also ends a sleep, a
# read or a lock. `SIGURG` is ignored by default, so that one which comes late does no harm.

_INTERRUPT = signal.SIGURG


def handle_signals(
    undo: ExitStack, on_interrupt: Callable[[], None], on_terminate: Callable[[], None]
) -> bool:
    """Install signal handlers of the main thread, until `undo` is closed.

    Args:
        undo: What puts the handlers before back.
        on_interrupt: Called in the main thread after it was sent `_INTERRUPT`; may raise.
        on_terminate: Called in the main thread on SIGTERM (a launcher ends the ranks when one of
            them fails); may raise instead of ending the process.

    Returns:
        Whether any were installed: outside the main thread Python allows none.
    """
    if threading.current_thread() is not threading.main_thread():
        return False

    def terminate(*_: Any) -> None:
        on_terminate()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)

    handlers: dict[int, Callable] = {_INTERRUPT: lambda *_: on_interrupt()}
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        handlers[signal.SIGTERM] = terminate
    # None: a handler that was not installed from Python, and cannot be put back from here.
    found = {number: signal.getsignal(number) for number in handlers}
    known = {number: before for number, before in found.items() if before is not None}
    for number, before in known.items():
        signal.signal(number, handlers[number])
        undo.callback(signal.signal, number, before)
    return bool(known)


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
        self._watcher: Watcher | None = None
        self._verdict: UnisonError | None = None
        self._decided, self._delivered = threading.Event(), threading.Event()
        self._status, self._note = Status.INSIDE, ""
        self._stack: list[str] = []
        self._waiting: CollectiveCall | None = None
        self._thread = 0
        self._beat = 0
        self._identity = identity()
        self._log: deque[CollectiveCall] = deque()
        self._members: dict[str, list[int]] = {}
        self._journals: dict[str, Journal] = {}
        self._interceptor = Interceptor(self)
        self._undo = ExitStack()
        self._can_interrupt = False

    @property
    def num_collectives(self) -> dict[str, int]:
        """Collectives that this rank has issued in the block, by the name of the group."""
        return dict(self._interceptor.numbers)

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
        rank = dist.get_rank()
        if dist.get_rank(group) < 0:
            raise BadInput(f"rank {rank} is not in the group it guards; enter on its members only")
        number = _num_entered[group] = _num_entered.get(group, 0) + 1
        prefix = f"unison/guard/{group.group_name}/{number}"
        store = dist.distributed_c10d._get_default_store()
        ranks = dist.get_process_group_ranks(group)
        channel = Channel(store, prefix, rank)
        self._watcher = Watcher(channel, self, rank, ranks, self._patience, self._timeout)
        park_terminating_threads(self._undo, self._on_park)
        self._can_interrupt = handle_signals(self._undo, self._on_interrupt, self._on_terminate)
        self._interceptor.attach(self._undo)
        self._watcher.start()

    def _detach(self) -> None:
        global _active
        _active = None
        self._undo.close()
        if self._watcher is not None and self._watcher.is_alive():
            self._watcher.stop()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._delivered.set()  # from here on the verdict is raised below, and not by a signal
        try:
            if self._watcher is not None:
                self._leave(error, trace)
        finally:
            self._status = Status.LEFT if error is None else Status.FAILED
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

    def _leave(self, error: BaseException | None, trace: TracebackType | None) -> None:
        """Say that this rank leaves, and linger so that nobody is missed while it can be told."""
        assert self._watcher is not None
        if error is None:
            self._stack = lines_of(caller(sys._getframe(2))[1])
            self._status, seconds = Status.LEAVING, self._timeout
        else:
            while trace is not None and trace.tb_next is not None:
                trace = trace.tb_next
            self._stack = lines_of(caller(trace.tb_frame if trace else sys._getframe(2))[1])
            self._note = f"{type(error).__name__}: {error}".partition("\n")[0]
            # Long enough for the others to read it; a broken connection deserves an explanation.
            self._status, seconds = Status.FAILED, _GRACE
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

    # ---- told by the interceptor, in the training thread ---------------------------------------

    def issued(self, call: CollectiveCall, group: dist.ProcessGroup) -> None:
        """Take note of a call; the watcher reads it from the log."""
        if self._verdict is not None:
            self._raise()
        if call.group not in self._members:
            self._members[call.group] = dist.get_process_group_ranks(group)
        self._log.append(call)

    def waiting(self, call: CollectiveCall | None) -> None:
        """Take note of what the guarded thread waits for."""
        if threading.get_ident() == self._thread:
            self._waiting = call

    def still_waiting(self) -> None:
        """Raise the verdict, if there is one."""
        if self._verdict is not None:
            self._raise()
        assert self._watcher is not None
        silent = time.monotonic() - self._watcher.ticked_at
        if silent > self._patience + 2 * _GRACE:
            # The watcher hangs in a request: the store's host is stopped, or cut off.
            here = lines_of(self._waiting.stack)[0] if self._waiting else "(unknown)"
            self._verdict = RankLost(
                f"the store has not answered for {silent:.0f} s: what hosts it (rank 0, or the "
                f"launcher) is stopped or cut off; this rank waits at {here}"
            )
            self._raise()

    def explain(self, error: RuntimeError) -> BaseException:
        """Return the verdict that a broken connection announces, or the error itself."""
        assert self._watcher is not None
        self._watcher.hint()
        self._decided.wait(self._patience + _GRACE)
        if self._verdict is None:
            return error
        self._delivered.set()
        return self._verdict

    def _raise(self) -> None:
        assert self._verdict is not None
        self._delivered.set()
        self._has_raised = True
        _keep_groups()  # here and not only in __exit__, which a signal may cut short
        raise self._verdict

    def _on_interrupt(self) -> None:
        if self._verdict is not None and not self._delivered.is_set():
            self._raise()

    def _on_terminate(self) -> None:
        """A launcher ends us, most likely because another rank ended: say which, if we can."""
        if self._watcher is not None and not self._delivered.is_set():
            self._watcher.hint()
            self._decided.wait(_GRACE)
            self._on_interrupt()

    def _on_park(self) -> bool:
        """Hold a thread that would end the process until the ranks know why."""
        assert self._watcher is not None
        self._watcher.hint()
        return self._decided.wait(self._patience + _GRACE)

    # ---- told by the watcher, in its thread -----------------------------------------------------

    def state(self) -> RankState:
        """Return a heartbeat."""
        while self._log:
            call = self._log.popleft()
            if call.group not in self._journals:
                self._journals[call.group] = Journal(self._members[call.group])
            self._journals[call.group].add(call)
        self._beat += 1
        waiting, stack = self._waiting, self._stack
        if self._status is Status.INSIDE:
            frame = sys._current_frames().get(self._thread)
            stack = lines_of(waiting.stack if waiting else caller(frame)[1])
        return RankState(
            beat=self._beat,
            status=self._status,
            note=self._note,
            stack=stack or ["(unknown)"],
            waiting=(waiting.group, waiting.number) if waiting else None,
            identity=self._identity,
            groups={name: GroupState(**j.summary()) for name, j in self._journals.items()},
        )

    def detail(self) -> Detail:
        """Return the recent calls of each group."""
        return {name: journal.detail() for name, journal in self._journals.items()}

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
            self._abort_device_groups()
        print(f"unison.guard: {type(verdict).__name__}: {verdict}", file=sys.stderr)
        sys.stderr.flush()
        os._exit(EXIT_CODE)

    def _abort_device_groups(self) -> None:
        """Break collectives that run on a GPU, so that a thread that waits for it comes back."""
        for group in list(dist.distributed_c10d._world.pg_map):
            if self._interceptor.is_on_device(group.group_name) and hasattr(group, "abort"):
                group.abort()


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
