"""The ranks that train together, and how they agree.

One process is a world of size 1 and runs the same code: its process group has one member, and
every collective is an identity. There is no `if distributed` anywhere above this file.
"""

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from unison.config import Mechanism
from unison.errors import BadInput, UnisonError

T = TypeVar("T")

# A rank that waits longer than this for the others has lost one of them.
COLLECTIVE_TIMEOUT = timedelta(minutes=10)


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


@contextmanager
def num_threads(mechanism: Mechanism) -> Iterator[None]:
    """Compute with the threads that the settings ask for, and put the old number back."""
    before = torch.get_num_threads()
    wanted = 1 if mechanism.reducer == "ordered" else before
    torch.set_num_threads(mechanism.threads or wanted)
    try:
        yield
    finally:
        torch.set_num_threads(before)
