"""The life of one rank: wait for a task, run it in a fresh process group, answer, wait again."""

import datetime
import faulthandler
import importlib
import os
import pickle
import random
import shutil
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from multiprocessing import connection, parent_process
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from _pytest.config import parse_warning_filter

from tests.harness import rewrite
from tests.harness.isolation import enable_mkldnn, stop_recording
from tests.harness.report import Answer, Outcome
from tests.harness.world import World

STACKS_SIGNAL = signal.SIGUSR1
"""The signal on which a rank writes the Python stacks of all its threads into its stacks file."""

LOOPBACK = "lo" if sys.platform == "linux" else "lo0"

WATCHER = "_exit_with_parent"
"""The function of the one thread whose stack says nothing about the test."""


@dataclass(frozen=True)
class Body:
    """The undecorated body of a `@ranks` test, by name: its module holds the decorated one."""

    module: str
    qualname: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Import the module, find the body and run it."""
        module = importlib.import_module(self.module)
        test = reduce(getattr, self.qualname.split("."), module)
        return test.ranks_body(*args, **kwargs)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Task:
    """One call: the pickled (function, arguments, keyword arguments) and its surroundings."""

    call: bytes
    seed: int
    filters: tuple[str, ...]
    environment: dict[str, str]
    store: str
    timeout: float


@dataclass(frozen=True)
class Close:
    """Leave the process group; sent when every rank has answered, so that no peer still reads."""


def main(pipe: Connection, rank: int, size: int, log: str, stacks: str) -> None:
    """Serve tasks until the parent closes the pipe.

    Args:
        pipe: carries pickled `Task` and `Close` in, pickled `Answer` out.
        rank: this process's rank.
        size: the number of ranks.
        log: the file that takes this rank's stdout and stderr.
        stacks: the file that takes its stacks on `STACKS_SIGNAL`.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which then kills us
    folder = os.path.dirname(log)
    threading.Thread(target=_exit_with_parent, args=(folder,), daemon=True).start()
    with open(stacks, "w") as stacks_file:
        faulthandler.enable(stacks_file)  # for SIGSEGV and its like
        faulthandler.register(STACKS_SIGNAL, file=stacks_file, all_threads=True)
        _redirect_output(log)
        rewrite.install()
        while True:
            try:
                task = pickle.loads(pipe.recv_bytes())
            except EOFError:
                shutil.rmtree(folder, ignore_errors=True)
                return
            step = _leave_group if isinstance(task, Close) else partial(_run, task, rank, size)
            answer = _answer(rank, step)
            sys.stdout.flush()
            sys.stderr.flush()
            pipe.send_bytes(pickle.dumps(answer))


def _exit_with_parent(folder: str) -> None:
    """End this rank when pytest is gone, even while the main thread waits in a collective."""
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    shutil.rmtree(folder, ignore_errors=True)  # the parent can no longer do it
    os._exit(1)


def _redirect_output(log: str) -> None:
    # At the level of file descriptors, because C++ libraries write there too; appending, so that
    # the parent can empty the file between calls.
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def _answer(rank: int, step: Callable[[], Any]) -> Answer:
    """Run `step` and put into an answer whatever comes of it."""
    try:
        value = step()
        try:
            pickled = pickle.dumps(value)
        except Exception as error:
            raise TypeError(
                f"the result of rank {rank} cannot be pickled ({error}); found {type(value)}"
            ) from error
        return Answer(rank, Outcome.RETURNED, time.monotonic(), value=pickled)
    except pytest.skip.Exception as skipped:
        return Answer(rank, Outcome.SKIPPED, time.monotonic(), headline=str(skipped.msg))
    except BaseException as error:
        headline = f"raised {type(error).__name__}"
        return Answer(
            rank, Outcome.RAISED, time.monotonic(), headline=headline, detail=_trim(error)
        )


def _trim(error: BaseException) -> str:
    """Format a traceback from the first frame that is not this file's."""
    start = error.__traceback__
    while start is not None and start.tb_frame.f_code.co_filename == __file__:
        start = start.tb_next
    return "".join(traceback.format_exception(type(error), error, start or error.__traceback__))


def _run(task: Task, rank: int, size: int) -> Any:
    os.environ.clear()
    os.environ.update(task.environment)
    os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    if torch.are_deterministic_algorithms_enabled():  # the setter costs a second of imports
        torch.use_deterministic_algorithms(False)
    random.seed(task.seed)
    np.random.seed(task.seed % 2**32)  # noqa: NPY002 - the code under test may use the old state
    torch.manual_seed(task.seed)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(task.store, size),
        rank=rank,
        world_size=size,
        # Longer than the harness's own limit: its report has the stacks, gloo's does not.
        timeout=datetime.timedelta(seconds=2 * task.timeout + 60),
    )
    with warnings.catch_warnings():
        warnings.resetwarnings()
        for line in task.filters:
            warnings.filterwarnings(*parse_warning_filter(line, escape=False))
        # Unpickled here, under the filters, because it imports the test's module.
        call, args, kwargs = pickle.loads(task.call)
        return call(World(rank, size, task.seed), *args, **kwargs)


def _leave_group() -> None:
    if dist.is_initialized():  # a test may have destroyed the group itself
        dist.destroy_process_group()
    deal = sys.modules.get("unison.shard.deal")
    if deal is not None:
        deal.publish_plan(None)  # of a loader that the test has left
    stop_recording()
    enable_mkldnn()
