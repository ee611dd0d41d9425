"""The ranks that train together: how they start, join and agree.

One process is a world of size 1 and runs the same code: its process group has one member, and
every collective is an identity. There is no `if distributed` anywhere above this file.
"""

import gc
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from unison.errors import BadInput, UnisonError
from unison.shard import CollectiveMismatch, RankLost

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
    """

    rank: int
    size: int
    local_rank: int
    node: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this rank writes files and speaks. Never guard a collective with it."""
        return self.rank == 0

    def sum(self, value: Tensor) -> Tensor:
        """Add a tensor over all ranks, in place; every rank must call it."""
        dist.all_reduce(value, op=dist.ReduceOp.SUM)
        return value

    def agree(self, work: Callable[[], T], *, when: bool = True) -> list[T | None]:
        """Run `work` where `when` holds and share the outcome; every rank must call it.

        An error that a user can mend is raised on *all* ranks, with the same message, if any rank
        met it: nobody is left waiting in a collective for a rank that has gone.

        Returns:
            Each rank's result, in rank order (None where `when` did not hold).
        """
        result: T | None = None
        error: UnisonError | None = None
        if when:
            try:
                result = work()
            except UnisonError as met:
                error = met
        outcomes: list[tuple[T | None, UnisonError | None]] = [(None, None)] * self.size
        dist.all_gather_object(outcomes, (result, error))
        for _, met in outcomes:
            if met is not None:
                raise met
        return [result for result, _ in outcomes]


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
    store = None if "WORLD_SIZE" in os.environ else dist.HashStore()
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


# ---- starting ranks ------------------------------------------------------------------------------


class RankFailed(RuntimeError):
    """A rank ended with an error that is not the user's: a bug, or a killed process."""


def was_launched() -> bool:
    """Whether this process is itself a rank that torchrun or a like launcher started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


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
        run_id="unison",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=MONITOR_INTERVAL,
    )
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        outcomes = elastic_launch(launch, _run_one)(work, config, num_ranks)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        raise RankFailed(f"rank {rank} failed:\n{_traceback_of(failure)}") from None
    except SignalException:
        raise KeyboardInterrupt from None
    finally:
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
    except (CollectiveMismatch, RankLost):
        raise  # after these a process cannot end in peace, so no value would come back
    except UnisonError as error:
        return None, error
    except Exception:
        # When this process ends, the others lose their connections to it and break too. The
        # launcher tells of the rank that it finds ended, so it must find this one alone.
        time.sleep(5 * MONITOR_INTERVAL)
        raise


def _traceback_of(failure) -> str:
    details = failure.error_file_data.get("message", {})
    if isinstance(details, dict):
        return details.get("extraInfo", {}).get("py_callstack", "") or failure.message
    return f"{details} (exit code {failure.exitcode})"
