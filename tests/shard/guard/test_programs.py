"""Guarded programs of which a rank is killed or blocked: every process ends, and says why."""

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.shard.guard.common import TIMEOUT
from unison.shard.guard import EXIT_CODE

ROOT = Path(__file__).parents[3]

HEAD = """
import os, signal, sys, time
import torch, torch.distributed as dist
from unison.shard.guard import guard

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
with guard(timeout=float(os.environ["SECONDS"])):
    dist.barrier()
"""


def launch(tmp_path, body, seconds=TIMEOUT):
    """Run a program on 2 ranks of its own, rank 0 hosting the store; return codes and output."""
    script = tmp_path / "program.py"
    script.write_text(HEAD + textwrap.indent(textwrap.dedent(body), "    "))
    port = str(20000 + os.getpid() % 20000)
    start = time.monotonic()
    processes = []
    for rank in range(2):
        env = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "GLOO_SOCKET_IFNAME": "lo",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "SECONDS": str(seconds),
        }
        command = [sys.executable, str(script)]
        processes.append(
            subprocess.Popen(command, env=env, cwd=tmp_path, text=True, stderr=subprocess.PIPE)
        )
    outputs = [process.communicate(timeout=60)[1] for process in processes]
    assert time.monotonic() - start < 20, "\n".join(outputs)
    return [process.returncode for process in processes], outputs


def line(body, text):
    lines = (HEAD + textwrap.dedent(body)).splitlines()
    return next(i for i, found in enumerate(lines, 1) if text in found)


KILLED = """
    time.sleep(0.8)  # heartbeats
    if rank == {rank}:
        os.kill(os.getpid(), signal.SIGKILL)
    {others}
"""


@pytest.mark.parametrize(
    ("rank", "others"),
    [
        (0, "time.sleep(30)"),
        pytest.param(1, "dist.all_reduce(torch.ones(3))", marks=pytest.mark.full),
    ],
)
def test_a_killed_rank_is_named(tmp_path, rank, others):
    # Rank 0 hosts the store, so that the second rank loses both.
    body = KILLED.format(rank=rank, others=others)
    codes, outputs = launch(tmp_path, body)
    assert codes[rank] == -signal.SIGKILL
    assert codes[1 - rank] == EXIT_CODE
    output = outputs[1 - rank]
    assert re.search(rf"RankLost: rank {rank} is lost: (its process \d+|the store)", output)
    assert f"program.py:{line(body, others)} in" in output
    assert "number 1, barrier() at program.py" in output


@pytest.mark.full
def test_another_shape_does_not_crash(tmp_path):
    # gloo ends the process that receives more than it expects; in processes of its own, because a
    # parked thread of gloo's is left behind.
    body = "dist.all_reduce(torch.ones(5 + 3 * rank))"
    codes, outputs = launch(tmp_path, body)
    assert codes == [EXIT_CODE, EXIT_CODE], "\n".join(outputs)
    for output in outputs:
        assert "rank 0: number 2: all_reduce(float32[5], op=SUM) at program.py:" in output
        assert "rank 1: number 2: all_reduce(float32[8], op=SUM) at program.py:" in output


def test_ranks_that_wait_for_each_other_end(tmp_path):
    # Freeing a group waits for its collectives: without care both would hang after the traceback.
    body = """
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    try:
        dist.all_reduce(torch.ones(3), group=groups[rank])
    finally:
        dist.destroy_process_group()
    """
    codes, outputs = launch(tmp_path, body)
    assert codes == [EXIT_CODE, EXIT_CODE], "\n".join(outputs)
    for output in outputs:
        assert re.search(r"CollectiveMismatch: rank \d did not call collective number 1", output)


@pytest.mark.full
def test_ranks_blocked_outside_of_python_exit(tmp_path):
    # Functional collectives wait in C++, where nothing can be raised.
    body = """
    import torch.distributed._functional_collectives as functional
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    functional.all_reduce(torch.ones(3), "sum", groups[rank]).sum()
    """
    codes, outputs = launch(tmp_path, body)
    assert codes == [EXIT_CODE, EXIT_CODE], "\n".join(outputs)
    for output in outputs:
        assert re.search(r"rank \d did not call collective number 1 of group", output)
        assert output.count(f"program.py:{line(body, 'functional.all')} in") >= 2
