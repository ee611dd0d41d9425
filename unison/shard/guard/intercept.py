"""The places where a collective is seen, and where waiting for one can be left.

[Note: what is intercepted]
- *Issued from Python*: the methods of torch's `ProcessGroup` class are replaced while the guard is
  on. All of `torch.distributed` ends there, however its functions were imported, and so do FSDP2
  and `unison.shard`. It costs a few microseconds.
- *Issued from C++* (DDP's reducer, functional collectives, DTensor): these call the operations
  `c10d::allreduce_` and so on, for which a kernel is added at the key `ADInplaceOrView`. It is
  below autograd, so that it runs inside a backward pass, and it does nothing for collectives. A
  Python kernel costs about 0.1 ms, so the methods above switch the key off for their own calls.
- *Waiting*: `Work.wait` is replaced by waits of a tenth of a second where the backend waits on the
  host (gloo), so that a Python exception can be raised in between. The backend's own wait ends such
  a slice at once when the work is done, so nothing is slower.
- *Crashing*: a message longer than expected makes gloo call `std::terminate` from its own thread,
  microseconds after a collective of another shape was issued. While the guard is on, that thread
  is parked, so that the ranks live to say what they called.
"""

import ctypes
import sys
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from unison.shard.guard.records import Call, caller, specs_of

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


class Listener(Protocol):
    """What the interceptor tells, and asks."""

    def issued(self, call: Call, group: dist.ProcessGroup) -> None:
        """Take note of a call that is about to start; may raise instead."""

    def waiting(self, call: Call | None) -> None:
        """Take note that this thread waits for a call, or no longer does."""

    def still_waiting(self) -> None:
        """Asked ten times a second during a wait; may raise."""

    def explain(self, error: RuntimeError) -> BaseException:
        """Return what to raise in place of a backend's own error."""
        ...


class Interceptor:
    """Replaces methods of torch's classes, and puts them back."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._replaced: list[tuple[type, str, object]] = []
        self.numbers: dict[str, int] = {}
        self._on_host: dict[tuple[str, str], bool] = {}
        self._calls: weakref.WeakKeyDictionary[Any, Call] = weakref.WeakKeyDictionary()
        self._library: torch.library.Library | None = None

    def attach(self) -> None:
        """Begin to see collectives."""
        for name in (*_KINDS, *_POINT_TO_POINT):
            if name in vars(c10d.ProcessGroup):  # the names vary with torch's version
                self._replace(c10d.ProcessGroup, name, self._issuer(name))
        self._replace(c10d.Work, "wait", self._waiter())
        self._library = torch.library.Library("c10d", "IMPL")
        for name in _KINDS:
            packet = getattr(torch.ops.c10d, name if name == "barrier" else f"{name}_", None)
            if packet is not None and hasattr(c10d.ProcessGroup, "unbox"):
                kernel = self._kernel(packet.default, _KINDS[name])
                self._library.impl(packet.default, kernel, "ADInplaceOrView")

    def detach(self) -> None:
        """Put everything back."""
        while self._replaced:
            owner, name, original = self._replaced.pop()
            setattr(owner, name, original)
        if self._library is not None:
            self._library._destroy()
            self._library = None

    def is_on_device(self, group: str) -> bool:
        """Whether a group was seen to work on a GPU, where waiting only orders streams."""
        return any(name == group and not is_host for (name, _), is_host in self._on_host.items())

    def _replace(self, owner: type, name: str, by: Callable) -> None:
        # What the class holds is a descriptor; what getattr gives would not bind when put back.
        self._replaced.append((owner, name, vars(owner)[name]))
        setattr(owner, name, by)

    def _note(
        self, group: Any, kind: str, tensors: tuple[Any, ...], options: Any, is_numbered: bool
    ) -> Call:
        name = group.group_name
        specs, device = specs_of(tensors)
        on_host = self._on_host.get((name, device))
        if on_host is None:
            on_host = self._on_host[name, device] = _waits_on_host(group, device)
        number = self.numbers.get(name, 0) + is_numbered
        # Frame 0 is this one; what lies between it and the user's is skipped by its file.
        api, stack = caller(sys._getframe(1))
        call = Call(name, number, kind, specs, options, api, stack, on_host)
        if is_numbered:
            self._listener.issued(call, group)
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
        original, calls, listener = c10d.Work.wait, self._calls, self._listener

        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            call = calls.get(work)
            if call is None:
                return original(work, *args, **kwargs)
            timeout = kwargs.get("timeout", args[0] if args else None)
            until = time.monotonic() + timeout.total_seconds() if timeout else float("inf")
            listener.waiting(call)
            try:
                while time.monotonic() < until:
                    try:
                        return original(work, _SLICE)
                    except RuntimeError:
                        pass  # the slice is over, or the work has failed: told apart below
                    if work.is_completed():
                        return _result(original, work, listener)
                    listener.still_waiting()
                return original(work, timedelta(milliseconds=1))  # raises what the user expects
            finally:
                listener.waiting(None)

        return wait


def _waits_on_host(group: Any, device: str) -> bool:
    """Whether a collective's wait blocks until it is done, and may be cut into slices.

    NCCL's orders streams instead, and one with a timeout would abort the group. A barrier has no
    tensor to tell which of a group's backends it uses, so all of them must agree.
    """
    devices = [torch.device(device)] if device else group._device_types
    backends = {group._get_backend(d).name().lower() for d in devices}
    return bool(backends) and backends <= _HOST_BACKENDS


def _result(wait: Callable, work: Any, listener: Listener) -> Any:
    """Return the result of a completed work; it may have completed just after a slice ended."""
    try:
        return wait(work)
    except RuntimeError as error:
        explained = listener.explain(error)
        if explained is error:
            raise
        raise explained from error


# ---- std::terminate ---------------------------------------------------------------------------

_Handler = ctypes.CFUNCTYPE(None)
_handlers: list[Any] = []  # C++ may call them at any time, so they are never freed


def park_terminating_threads(on_park: Callable[[], bool]) -> Callable[[], None]:
    """Make C++ threads that call `std::terminate` sleep instead of ending the process.

    Args:
        on_park: Called in such a thread; False lets the process end after all.

    Returns:
        A function that restores the handler before.
    """
    try:
        set_terminate = ctypes.CDLL("libstdc++.so.6")._ZSt13set_terminatePFvvE
    except (OSError, AttributeError):
        return lambda: None  # another C++ library: the other ranks will report a lost rank
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

    def restore() -> None:
        set_terminate(before[0])

    return restore
