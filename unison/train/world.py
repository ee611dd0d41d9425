"""The ranks that train together: how they start, join and agree, and how a model lies on them.

One process is a world of size 1 and runs the same code: its process group has one member, and
every collective is an identity. There is no `if distributed` anywhere above this file.
"""

import gc
import multiprocessing
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import unison
from unison.errors import BadInput, OutOfRoom, Stopped, UnisonError
from unison.shard import CollectiveMismatch, RankLost, find_blocks

T = TypeVar("T")
Config = TypeVar("Config")

# A rank that waits longer than this for the others has lost one of them.
COLLECTIVE_TIMEOUT = timedelta(minutes=10)
MONITOR_INTERVAL = 0.1  # seconds between two looks at the ranks that were started


@dataclass(frozen=True, kw_only=True)
class World:
    """This process's place among the ranks.

    Attributes:
        rank: Index of this process, 0 to `size` - 1.
        size: Number of processes.
        local_rank: Index among the processes on this machine.
        node: Index of this machine.
        device: Where this rank computes.
        signals: Those that ask it to stop; None where nobody listens.
    """

    rank: int
    size: int
    local_rank: int
    node: int
    device: torch.device
    signals: "StopSignals | None" = None

    @property
    def is_main(self) -> bool:
        """Whether this rank writes files and speaks. Never guard a collective with it."""
        return self.rank == 0

    def sum(self, value: Tensor) -> Tensor:
        """Add a tensor over all ranks, in place; every rank must call it."""
        dist.all_reduce(value, op=dist.ReduceOp.SUM)
        return value

    def largest(self, *values: int) -> list[int]:
        """The largest of each value over all ranks; every rank must call it."""
        found = torch.tensor(values)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return found.tolist()

    def agree(self, work: Callable[[], T], *, when: bool = True) -> list[T | None]:
        """Run `work` where `when` holds and share the outcome; every rank must call it.

        An error that a user can mend, a full disk among them, is raised on *all* ranks, with the
        same message, if any rank met it: nobody is left waiting in a collective for a rank that has
        gone. So is `Stopped`, if a signal came to any rank before the first step.

        Returns:
            Each rank's result, in rank order (None where `when` did not hold).
        """
        result: T | None = None
        error: UnisonError | None = None
        try:
            with self.signals.heard() if self.signals else nullcontext():
                result = work() if when else None
        except UnisonError as met:
            error = met
        except OSError as met:
            error = OutOfRoom(f"a file could not be written: {met}; what was complete stays")
        outcomes: list[tuple[T | None, UnisonError | None]] = [(None, None)] * self.size
        dist.all_gather_object(outcomes, (result, error))
        for _, met in outcomes:
            if met is not None:
                raise met
        return [result for result, _ in outcomes]

    def on_main(self, work: Callable[[], T]) -> T:
        """Run `work` on the main rank and return its result on all; see `agree`."""
        result, *_ = self.agree(work, when=self.is_main)
        return result  # type: ignore[return-value]


def pick_device(name: str, local_rank: int) -> torch.device:
    """Turn `"auto"`, `"cpu"` or `"cuda"` into this rank's device."""
    if name == "cuda" and not torch.cuda.is_available():
        raise BadInput(
            "device='cuda' was asked for, but torch sees no CUDA device; use cpu or auto"
        )
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    # More ranks than GPUs share them, which is what tests on one GPU do.
    return torch.device("cuda", local_rank % torch.cuda.device_count())


@contextmanager
def join_world(device_name: str) -> Iterator[World]:
    """Join the ranks that the launcher started, or form a world of one, and leave it at the end."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = pick_device(device_name, local_rank)
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    has_own_gpu = device.type == "cuda" and local_size <= torch.cuda.device_count()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # NCCL refuses two ranks on one GPU; gloo moves CUDA tensors too, only slower.
    backend = "cpu:gloo,cuda:nccl" if has_own_gpu and size > 1 else "gloo"
    store = _store_of_this_start(rank, size) if "WORLD_SIZE" in os.environ else dist.HashStore()
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=size, timeout=COLLECTIVE_TIMEOUT
    )
    world = World(
        rank=rank,
        size=size,
        local_rank=local_rank,
        node=int(os.environ.get("GROUP_RANK", "0")),
        device=device,
    )
    is_bug = False
    try:
        yield world
    except Exception as error:
        is_bug = not isinstance(error, UnisonError)
        raise
    finally:
        # A rank that breaks keeps its connections until its process ends. Were they closed now, the
        # others would fail first, with "connection reset", and hide the cause from the launcher.
        if size == 1 or not is_bug:
            # Modules and their hooks refer to each other, and to process groups. A group that is
            # freed when the interpreter ends can abort the process: its threads want the lock.
            gc.collect()
            dist.destroy_process_group()


def _store_of_this_start(rank: int, size: int) -> dist.Store | None:
    """Where the ranks that were started together find each other; None for torch's own way.

    torchrun keeps one store for all starts of a job. Addresses of ranks that are gone stay in it,
    and gloo tries them. So rank 0 makes up a name for each start, under which all is found; another
    rank takes a name only after rank 0 has answered it, which no earlier one can.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True):
        return None
    where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(*where, is_master=False, timeout=COLLECTIVE_TIMEOUT)
    nonce = secrets.token_hex(8)
    if rank == 0:
        store.set("unison/start", nonce)
        for other in range(1, size):
            asked = store.get(f"{nonce}/{other}").decode()
            store.set(f"{nonce}/{other}/{asked}", "")
        return dist.PrefixStore(nonce, store)
    deadline = time.monotonic() + COLLECTIVE_TIMEOUT.total_seconds()
    while time.monotonic() < deadline:
        name = store.get("unison/start").decode()
        store.set(f"{name}/{rank}", nonce)
        if store.check([f"{name}/{rank}/{nonce}"]):
            return dist.PrefixStore(name, store)
        time.sleep(0.02)
    raise BadInput(f"rank {rank} found no rank 0 of its start in the launcher's store")


# ---- signals -------------------------------------------------------------------------------------

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
GRACE_SECONDS = 30  # as Slurm and torchrun give a process between SIGTERM and SIGKILL
# A launcher passes a signal on to ranks that the terminal has sent it to as well.
ECHO_SECONDS = 1.0
BEFORE_STEPS = "before its next step"


class StopSignals:
    """SIGTERM and Ctrl-C: a request that all ranks honour together. A context manager.

    While steps are taken that is after the step at hand. Before, one process has nothing to wait
    for, and the first signal raises `Stopped`; of several ranks the one that got it must not leave
    the others waiting, so that it raises within `heard`, whose errors ranks share. A second signal
    raises `KeyboardInterrupt`, and so do GRACE_SECONDS.

    Args:
        is_alone: Whether there is one rank.

    Attributes:
        number: The signal that came; 0 for none.
        is_stepping: Whether steps are being taken.
    """

    def __init__(self, *, is_alone: bool = True) -> None:
        self.number, self.is_stepping, self._since = 0, False, 0.0
        self._may_raise = is_alone
        self._before: dict[signal.Signals, Any] = {}

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Raise `Stopped` for a signal that comes here, or has come, unless steps are taken."""
        before, self._may_raise = self._may_raise, True
        try:
            if self.number and not self.is_stepping:
                raise self.stopped(BEFORE_STEPS, self.number)
            yield
        finally:
            self._may_raise = before

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():  # no other one may have handlers
            for number in STOP_SIGNALS:
                self._before[number] = signal.signal(number, self._take)
        return self

    def __exit__(self, *_: object) -> None:
        if signal.SIGALRM in self._before:
            signal.alarm(0)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _take(self, number: int, frame: object) -> None:
        now = time.monotonic()
        if self.number and number != signal.SIGALRM:
            if was_launched() and now - self._since < ECHO_SECONDS:
                return
            # Should the process hang where Python does not see it, the next one ends it.
            signal.signal(number, signal.SIG_DFL)
        if self.number:
            raise KeyboardInterrupt
        self.number, self._since = number, now
        if self._may_raise and not self.is_stepping:
            raise self.stopped(BEFORE_STEPS, number)
        self._before[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._take)
        signal.alarm(GRACE_SECONDS)

    @staticmethod
    def stopped(when: str, number: int) -> Stopped:
        """The error that ends a run."""
        return Stopped(f"stopped by {signal.Signals(number).name} {when}", number)


@contextmanager
def after_stop_signal(work: Callable[[], None], *, seconds: float) -> Iterator[None]:
    """Call `work` in a thread if this goes on for some seconds after a stop signal.

    Python runs handlers in the main thread. Where that waits in a collective for a machine that has
    vanished, a signal of the launcher's would not be heard before the launcher ends the process.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reading, writing = socket.socketpair()
    writing.setblocking(False)
    is_over = threading.Event()

    def watch() -> None:
        while (number := reading.recv(1)) and number[0] not in STOP_SIGNALS:
            pass
        if number and not is_over.wait(seconds):
            work()

    before = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
    thread = threading.Thread(target=watch, name="stop signals", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        signal.set_wakeup_fd(before)
        writing.close()
        thread.join()
        reading.close()


# ---- how a model lies on the ranks ---------------------------------------------------------------

DEFAULT_REPLICAS = 2


class Parallel:
    """A model as the ranks hold it: sharded, copied, or alone.

    Args:
        model: The model, which may have been built without memory.
        shard: One of `unison.config.SHARDINGS`.
        reducer: How gradients are summed.
        world_size: Number of ranks.
        replicas: Copies of the sharded model, for `"hybrid"`.
        device: Where it computes; by default where it is.
        fill: Gives a model that was built without memory its values; called once it is known what
            of it this rank holds.
        sums_gradients: Whether what holds the model sums the ranks' gradients. In a private run
            `PrivacyEngine` does.

    Attributes:
        model: The model itself, whose parameters the optimizer takes.
        module: What is called: the model, or what torch wrapped around it. Keep no reference to it.
        gradient_scale: What a loss of `unison.batch_mean` is multiplied with before its backward
            pass: DDP divides the summed gradient by the number of ranks, and this undoes it.
    """

    def __init__(
        self,
        model: nn.Module,
        shard: str,
        *,
        reducer: str,
        world_size: int,
        replicas: int | None = None,
        device: torch.device | None = None,
        fill: Callable[[], object] = lambda: None,
        sums_gradients: bool = True,
    ) -> None:
        self.model = model
        self.gradient_scale = 1
        self._sums_gradients, self._is_ordered = sums_gradients, reducer == "ordered"
        self._is_sharded = shard in ("full", "zero2", "hybrid", "fsdp2")
        self.module: nn.Module = model
        device_type = (device or next(model.parameters()).device).type
        match shard:
            case "full" | "zero2" | "hybrid":
                mesh = None
                if shard == "hybrid":
                    replicas = replicas or DEFAULT_REPLICAS
                    if world_size % replicas:
                        raise BadInput(
                            f"replicas={replicas} must divide the number of ranks, {world_size}; "
                            "pass another --replicas or --nproc"
                        )
                    shape, names = (replicas, world_size // replicas), ("replicate", "shard")
                    mesh = init_device_mesh(device_type, shape, mesh_dim_names=names)
                unison.auto_shard(
                    model,
                    mesh=mesh,
                    reshard_after_forward=shard != "zero2",
                    reducer=reducer,
                    gradient_divisor=1,
                )
                fill()
            case "fsdp2":
                shard_with_fsdp2(model, init_device_mesh(device_type, (world_size,)), reducer, fill)
            case "ddp":
                fill()
                self.module = DistributedDataParallel(model)
                if sums_gradients:
                    self.gradient_scale = world_size
            case _:
                if world_size > 1:
                    raise BadInput(
                        f"shard {shard!r} is for one rank, found {world_size}; use full, zero2, "
                        "hybrid, fsdp2 or ddp"
                    )
                fill()

    def __call__(self, *args: Any) -> Tensor:
        """Run the model's forward."""
        return self.module(*args)

    def passes_on(self, is_last: bool) -> AbstractContextManager:
        """Around a backward pass: whether ranks sum their gradients in it."""
        module, waits = self.module, self._sums_gradients and not is_last
        if waits and isinstance(module, DistributedDataParallel):
            return module.no_sync()
        return nullcontext()

    def release(self) -> None:
        """Let go of what torch wrapped around the model, while the ranks are still connected.

        DDP holds the process group; freed after the ranks have parted, the group's destructor waits
        for threads that wait for the interpreter.
        """
        self.module = self.model

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> float:
        """Bound the gradient's norm and return what it was; every rank must call this."""
        if self._is_sharded:
            return unison.clip_grad_norm_(self.model, max_norm).item()
        if self._is_ordered:  # to the bit as on shards
            norm = unison.grad_norm(self.model)
            factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
            for gradient in [p.grad for p in self.model.parameters() if p.grad is not None]:
                gradient.mul_(factor.to(gradient.device, gradient.dtype))
            return norm.item()
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm).item()


def shard_with_fsdp2(
    model: nn.Module, mesh: DeviceMesh, reducer: str, fill: Callable[[], object]
) -> None:
    """Put the repeated blocks of a model, then the model, under torch's own `fully_shard`.

    Gradients are summed and not divided: `unison.batch_mean` has divided by the global batch.
    """
    from torch.distributed.fsdp import FSDPModule, fully_shard  # it takes a second to import

    for part in (*find_blocks(model), model):
        fully_shard(part, mesh=mesh)
    fill()
    if reducer == "ordered":
        unison.use_ordered_reduction(model)
        return
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # Otherwise a factor other than the world size becomes a kind of reduction that gloo
            # does not have.
            module.set_force_sum_reduction_for_comms(True)


# ---- starting ranks ------------------------------------------------------------------------------


RESTARTS = ("RESTART_COUNT", "MAX_RESTARTS")  # as torchrun tells its ranks


class RankFailed(RuntimeError):
    """A rank ended with an error that is not the user's: a bug, or a killed process."""


def was_launched() -> bool:
    """Whether this process is itself a rank that torchrun or a like launcher started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_same_launch(name: str | None) -> bool:
    """Whether the launcher of this rank began a run of which it is known under this name.

    torchrun starts ranks again when one was lost or came. Jobs without --rdzv-id are all called
    "none": of those only a rank that counts a restart belongs to the one that began.
    """
    if name is None or name != os.environ.get("TORCHELASTIC_RUN_ID"):
        return False
    return name != "none" or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def may_start_again() -> bool:
    """Whether the launcher of this rank would start it again, were it to fail now."""
    count, most = (os.environ.get(f"TORCHELASTIC_{name}", "0") for name in RESTARTS)
    return int(count) < int(most)


def run_on_local_ranks(work: Callable[[Config], T], config: Config, *, num_ranks: int) -> T:
    """Run `work(config)` on `num_ranks` new processes of this machine and return rank 0's result.

    Args:
        work: A module-level function; it joins the world by itself.
        config: Its argument; must be picklable.
        num_ranks: How many processes to start.

    Raises:
        BadInput: If the ranks cannot be started from here.
        UnisonError: What the ranks met, if a user can mend it.
        RankFailed: If a rank failed otherwise, with that rank's traceback.
    """
    if was_launched():
        raise BadInput(
            "--nproc starts ranks, but this process is already a rank (torchrun started it); "
            "leave --nproc out"
        )
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    launch = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=f"unison-{secrets.token_hex(8)}",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=MONITOR_INTERVAL,
        # Of SIGTERM and Ctrl-C the ranks make a clean end themselves; the launcher would write its
        # log over their bar, and take the second one for the first.
        signals_to_handle="SIGHUP,SIGQUIT",
    )
    others = {process.pid for process in multiprocessing.active_children()}
    signals: list[int] = []

    def pass_on(number: int, frame: object) -> None:
        signals.append(number)
        is_last = len(signals) > 1
        for process in multiprocessing.active_children():
            if process.pid is not None and process.pid not in others:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL if is_last else number)
        if is_last:
            raise KeyboardInterrupt
        signal.signal(signal.SIGALRM, pass_on)
        signal.alarm(GRACE_SECONDS + 5)  # ranks that hang where they see no signal

    handlers = {
        number: signal.getsignal(number)
        for number in (*STOP_SIGNALS, signal.SIGALRM, signal.SIGHUP, signal.SIGQUIT)
    }
    try:
        for number in STOP_SIGNALS:
            signal.signal(number, pass_on)
        outcomes = elastic_launch(launch, _run_one)(work, config, num_ranks)
    except ChildFailedError as error:
        if signals:  # ranks that had not begun, or could not go on
            raise StopSignals.stopped("before its ranks had ended", signals[0]) from None
        rank, failure = error.get_first_failure()
        said = failure.error_file_data.get("message", {})
        if isinstance(said, dict):
            said = said.get("extraInfo", {}).get("py_callstack", "") or failure.message
        else:
            said = f"{said} (exit code {failure.exitcode})"
        _, found, sentence = said.strip().rpartition(f"{OutOfRoom.__name__}: ")
        if found and "\n" not in sentence:
            raise OutOfRoom(sentence) from None
        raise RankFailed(f"rank {rank} failed:\n{said}") from None
    except SignalException:
        raise KeyboardInterrupt from None
    finally:
        if signals:
            signal.alarm(0)
        for number, handler in handlers.items():  # the launcher leaves its own behind
            signal.signal(number, handler)
    result, met = outcomes[0]
    if met is not None:
        raise met
    return result


def _run_one(
    work: Callable[[Config], T], config: Config, num_ranks: int
) -> tuple[T | None, UnisonError | None]:
    """The life of one rank; an error that every rank agreed on comes back as a value."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // num_ranks))
    try:
        return work(config), None
    except (CollectiveMismatch, RankLost, OutOfRoom):
        raise  # after these a process cannot end in peace, so no value would come back
    except UnisonError as error:
        return None, error
    except Exception:
        # When this process ends, the others lose their connections to it and break too. The
        # launcher tells of the rank that it finds ended, so it must find this one alone.
        time.sleep(5 * MONITOR_INTERVAL)
        raise
