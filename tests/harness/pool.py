"""The parent's side: pools of ranks, one per world size, started once and used by all tests.

[Note: what keeps a pool clean] The processes persist; the process group does not. Every call makes
a new default group over a new store and leaves it when all ranks have answered, so no collective
of one test can meet one of another. Leaving takes gloo some hundredths of a second of waiting: the
parent goes on meanwhile, and asks what came of it before the next call, or when a file's tests are
over. A call in which any rank failed ends the whole pool: with a fork server that has torch
imported already, a new pool of 8 takes less than a tenth of a second.
"""

import atexit
import contextlib
import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from tests.harness import context, worker
from tests.harness.report import Answer, Outcome, RanksFailed

GRACE = 3.0
"""Seconds that the other ranks have to end by themselves once one has failed."""
CLOSE_TIMEOUT = 20.0

PRELOAD = ["tests.harness.preload"]


@dataclass(frozen=True)
class _Rank:
    number: int
    process: ForkServerProcess
    pipe: Connection
    log: Path
    stacks: Path


class Pool:
    """`size` processes that serve calls.

    Args:
        size: the world size.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.calls = 0
        self.leaving: str | None = None
        """The store of a group that ranks were told to leave, and may not have left yet."""
        self.folder = Path(tempfile.mkdtemp(prefix="unison-ranks-"))
        self.ranks: list[_Rank] = []
        try:
            for number in range(size):
                self.ranks.append(self._start(number))
        except BaseException:
            self.kill()
            raise

    def _start(self, number: int) -> _Rank:
        start = multiprocessing.get_context("forkserver")
        start.set_forkserver_preload(PRELOAD)
        log, stacks = self.folder / f"output-{number}", self.folder / f"stacks-{number}"
        ours, theirs = start.Pipe()
        process = start.Process(
            target=worker.main,
            args=(theirs, number, self.size, str(log), str(stacks)),
            name=f"rank {number} of {self.size}",
            # A daemonic process may have no children, and a rank may want DataLoader workers.
            daemon=False,
        )
        process.start()
        theirs.close()  # so that the death of the rank is the end of the file on `ours`
        return _Rank(number, process, ours, log, stacks)

    @property
    def pids(self) -> list[int]:
        """The process ids, in rank order."""
        return [rank.process.pid or 0 for rank in self.ranks]

    def is_alive(self) -> bool:
        """Whether every rank is there to serve."""
        return bool(self.ranks) and all(rank.process.is_alive() for rank in self.ranks)

    def call(self, call: bytes, timeout: float) -> list[Answer]:
        """Run a pickled (function, args, kwargs) on every rank.

        Args:
            call: what `pickle.dumps` made of the triple.
            timeout: seconds after which silent ranks are cut.

        Returns:
            The answers in rank order; none of them has failed.

        Raises:
            RanksFailed: if any rank raised, died or hung; the pool is then dead.
        """
        __tracebackhide__ = True
        self.finish_leaving()  # a pool may be called again without `pool_of`
        self.calls += 1
        test = context.current()
        store = str(self.folder / f"store-{self.calls}")
        task = worker.Task(call, test.seed, test.filters, dict(os.environ), store, timeout)
        with self._killed_on_error():
            for rank in self.ranks:
                rank.log.write_bytes(b"")
            self._send(task)
            answers = self._answers(timeout)
            self._send(worker.Close())
        self.leaving = store
        return answers

    def finish_leaving(self) -> None:
        """Wait until the ranks have left the group of the last call.

        Raises:
            RanksFailed: if one could not; the pool is then dead.
        """
        __tracebackhide__ = True
        store, self.leaving = self.leaving, None
        if store is None or not self.ranks:
            return
        with self._killed_on_error():
            self._answers(CLOSE_TIMEOUT)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(store)

    @contextlib.contextmanager
    def _killed_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:  # Ctrl-C as well: the ranks may be anywhere
            self.kill()
            raise

    def _send(self, message: Any) -> None:
        data = pickle.dumps(message)
        for rank in self.ranks:
            # A rank that died is found in `_answers`, by the end of its pipe.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                rank.pipe.send_bytes(data)

    def _answers(self, timeout: float) -> list[Answer]:
        """Collect an answer of every rank, or raise `RanksFailed`."""
        __tracebackhide__ = True
        answers = self._collect(timeout)
        if any(answer.failed for answer in answers):
            logs = {rank.number: rank.log for rank in self.ranks}
            raise RanksFailed(self.size, [a.with_output(logs[a.rank]) for a in answers])
        return answers

    def _collect(self, timeout: float) -> list[Answer]:
        waiting = {rank.pipe: rank for rank in self.ranks}
        answers: list[Answer] = []
        deadline = time.monotonic() + timeout
        why = f"had not answered after {timeout:g} s (the timeout)"
        while waiting:
            ready = connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                answers.append(_receive(waiting.pop(pipe)))
            if any(answer.failed for answer in answers) and not why.endswith("failure"):
                deadline = min(deadline, time.monotonic() + GRACE)
                why = f"had not answered {GRACE:g} s after the first failure"
        answers += _cut(list(waiting.values()), why)
        return sorted(answers, key=lambda answer: answer.rank)

    def kill(self) -> None:
        """End every rank at once and leave nothing behind; calling it again does nothing."""
        for rank in self.ranks:
            rank.process.kill()
        for rank in self.ranks:
            rank.process.join()
            rank.process.close()
            rank.pipe.close()
        self.ranks = []
        shutil.rmtree(self.folder, ignore_errors=True)


def _receive(rank: _Rank) -> Answer:
    try:
        return pickle.loads(rank.pipe.recv_bytes())
    except (EOFError, ConnectionResetError):
        now = time.monotonic()
        rank.process.join(10)
        code = rank.process.exitcode
        if code is None:
            end = "closed its pipe but still runs"
        elif code < 0:
            end = f"was killed by {signal.Signals(-code).name}"
        else:
            end = f"exited with code {code}"
        return Answer(rank.number, Outcome.DIED, now, headline=end, detail=_stacks(rank))


def _cut(silent: list[_Rank], why: str) -> list[Answer]:
    """Ask silent ranks for their stacks and answer in their place."""
    for rank in silent:
        assert rank.process.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank.process.pid, worker.STACKS_SIGNAL)
    # The handler runs in C at once; two seconds are for a machine with more ranks than cores.
    until = time.monotonic() + 2.0
    while any(not _stacks(rank) for rank in silent) and time.monotonic() < until:
        time.sleep(0.02)
    if silent:
        time.sleep(0.1)  # a file that has begun may not have ended
    now = time.monotonic()
    return [
        Answer(
            rank.number,
            Outcome.HUNG,
            now,
            headline=f"{why}; its Python stacks, innermost call first:",
            detail=_stacks(rank) or "(no stacks: the rank did not react to the signal)",
        )
        for rank in silent
    ]


def _stacks(rank: _Rank) -> str:
    """Read the stacks that a rank has written, less what is the harness's own.

    That is the thread that watches the parent, and the frames outside of the worker's first.
    """
    try:
        text = rank.stacks.read_text(errors="replace")
    except FileNotFoundError:
        return ""
    threads = []
    for thread in text.split("\n\n"):
        lines = thread.splitlines()
        ours = [i for i, line in enumerate(lines) if f'"{worker.__file__}"' in line]
        if worker.WATCHER not in thread:
            threads.append("\n".join(lines[: ours[0] + 1] if ours else lines))
    return "\n\n".join(threads)


_pools: dict[int, Pool] = {}


def pool_of(size: int) -> Pool:
    """Return the living pool of a world size, starting one if there is none."""
    if size < 1:
        raise ValueError(f"a world has at least one rank, found {size=}")
    pool = _pools.get(size)
    if pool is not None:
        pool.finish_leaving()  # before it is asked for: a rank that died of it is not just replaced
    if pool is None or not pool.is_alive():
        if pool is not None:
            pool.kill()
        pool = _pools[size] = Pool(size)
    return pool


def finish_leaving() -> None:
    """Let no pool have ranks that are still in the group of a call that is over."""
    for pool in [*_pools.values()]:
        pool.finish_leaving()


def close_pools() -> None:
    """End all pools; at the end of the session, and again at exit in case it was cut short."""
    while _pools:
        _pools.popitem()[1].kill()


# Registered after multiprocessing's own handler, hence run before it: that one would wait for
# our processes, which do not end by themselves while the pipes are open.
atexit.register(close_pools)
