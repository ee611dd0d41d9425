"""The guard: what every rank says when ranks disagree, and that it changes nothing otherwise."""

import inspect
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.harness import ranks, run_on_ranks
from unison.errors import BadInput
from unison.shard.guard import (
    EXIT_CODE,
    CollectiveMismatch,
    compare_across_ranks,
    guard,
)
from unison.shard.guard.judge import GroupState, Judge, Kind, RankState, Status

ROOT = Path(__file__).parents[2]
TIMEOUT = 4.0


# ---- ranks disagree --------------------------------------------------------------------------


def caught(world, body):
    """Run a body under the guard; return what was raised, and after how long."""
    start = time.monotonic()
    try:
        with guard(timeout=TIMEOUT):
            body(world)
    except CollectiveMismatch as error:
        return str(error), time.monotonic() - start
    return "nothing raised", time.monotonic() - start


def messages(body, size=2):
    """Return the message that all ranks raised, after checking that they raised one."""
    outcomes = run_on_ranks(size, caught, body)
    texts = {text for text, _ in outcomes}
    assert len(texts) == 1, outcomes
    assert max(seconds for _, seconds in outcomes) < TIMEOUT, outcomes
    return texts.pop()


def site(body, text):
    """Return `file:line` of the first line of a function that contains a text."""
    lines, first = inspect.getsourcelines(body)
    at = next(i for i, line in enumerate(lines) if text in line)
    return f"tests/shard/test_guard.py:{first + at} in {body.__name__}"


def rank_0_alone_then_ends(world):
    dist.barrier()
    if world.rank == 0:
        dist.all_reduce(torch.ones(3))


def test_rank_0_alone_while_rank_1_ends():
    text = messages(rank_0_alone_then_ends)
    assert "rank 1 did not call collective number 2 of the default group, which rank 0" in text
    assert f"all_reduce(float32[3], op=SUM) at {site(rank_0_alone_then_ends, 'all_reduce')}" in text
    assert "rank 1: left the guard at" in text
    assert f"number 1, barrier() at {site(rank_0_alone_then_ends, 'barrier')}" in text


def rank_0_alone_then_sleep(world):
    if world.rank == 0:
        dist.all_reduce(torch.ones(3))
    else:
        time.sleep(60)


def test_rank_0_alone_while_rank_1_sleeps():
    text = messages(rank_0_alone_then_sleep)
    assert site(rank_0_alone_then_sleep, "all_reduce") in text
    assert f"not in a collective, at {site(rank_0_alone_then_sleep, 'sleep(60)')}" in text


def rank_0_alone_then_another(world):
    if world.rank == 0:
        dist.all_reduce(torch.ones(3))
    dist.barrier()


def test_rank_0_alone_while_rank_1_calls_another():
    text = messages(rank_0_alone_then_another)
    assert "ranks called different collectives as collective number 1" in text
    assert "rank 0: number 1: all_reduce(float32[3], op=SUM) at " in text
    assert site(rank_0_alone_then_another, "all_reduce") in text
    assert f"rank 1: number 1: barrier() at {site(rank_0_alone_then_another, 'barrier')}" in text


def another_shape(world):
    dist.all_reduce(torch.ones(5 + 3 * world.rank))


def another_dtype(world):
    dtype = torch.float32 if world.rank == 0 else torch.int32
    dist.all_reduce(torch.ones(5, dtype=dtype))
    time.sleep(60)


def another_operation(world):
    op = dist.ReduceOp.SUM if world.rank == 0 else dist.ReduceOp.MAX
    dist.all_reduce(torch.ones(5), op=op)
    time.sleep(60)


def another_root(world):
    dist.broadcast(torch.ones(5), src=world.rank)
    time.sleep(60)


@pytest.mark.parametrize(
    ("body", "first", "second"),
    [
        (another_dtype, "float32[5]", "int32[5]"),
        (another_operation, "op=SUM", "op=MAX"),
        (another_root, "root=0", "root=1"),
    ],
)
def test_differences_that_the_backend_does_not_see(body, first, second):
    text = messages(body)
    assert first in text
    assert second in text
    assert text.count("test_guard.py:") >= 2


def skips_in_the_middle(world):
    for step in range(20):
        if step != 11 or world.rank == 0:
            dist.all_reduce(torch.ones(2))
        if step % 5 == 4:
            dist.broadcast(torch.ones(3), src=0)


def test_one_of_twenty_is_skipped():
    text = messages(skips_in_the_middle)
    assert "different collectives as collective number 17" in text
    assert site(skips_in_the_middle, "all_reduce") in text
    assert site(skips_in_the_middle, "broadcast") in text


def skips_between_equals(world):
    dist.all_reduce(torch.ones(2))
    if world.rank == 0:
        dist.all_reduce(torch.ones(2))  # alone
    dist.all_reduce(torch.ones(2))  # together


def test_a_skip_between_equals_says_where_the_lines_part():
    text = messages(skips_between_equals)
    assert "rank 1 did not call collective number 3" in text
    assert "call sites first part at number 2" in text
    assert site(skips_between_equals, "# alone") in text
    assert site(skips_between_equals, "# together") in text


def subgroup_of_three(world):
    pair = dist.new_group([0, 2])
    alone = dist.new_group([1])
    dist.all_reduce(torch.ones(1), group=alone if world.rank == 1 else pair)
    if world.rank == 2:
        dist.all_reduce(torch.ones(1), group=pair)
    dist.barrier()


def test_a_subgroup():
    # Each of two ranks waits for the other, in two groups: either may be found first.
    text = messages(subgroup_of_three, size=3)
    assert re.search(r"rank 2 did not .* which ranks 0, 1|rank 0 did not .* which rank 2", text)
    assert site(subgroup_of_three, "barrier") in text
    assert site(subgroup_of_three, "group=pair)") in text


def fails_on_rank_1(world):
    if world.rank == 1:
        raise ValueError("bad record 17")
    dist.all_reduce(torch.ones(1))


def failure(world):
    try:
        with guard(timeout=TIMEOUT):
            fails_on_rank_1(world)
    except (ValueError, CollectiveMismatch) as error:
        return str(error)


def test_a_rank_that_fails_is_quoted():
    text, own = run_on_ranks(2, failure)
    assert own == "bad record 17"
    assert "left the guard with ValueError: bad record 17 at" in text
    assert site(fails_on_rank_1, "raise") in text


# ---- nothing is wrong ------------------------------------------------------------------------


def many_collectives(world):
    """Every kind that gloo has, with odd shapes, subgroups and async work; return the bits."""
    x = torch.randn(5, 7, generator=world.generator(world.rank))
    n, seen = world.size, []
    subgroup = dist.new_group(list(range(n)))
    for _ in range(20):
        y = x.clone()
        work = dist.all_reduce(y, async_op=True)
        z = x.clone()
        dist.all_reduce(z, op=dist.ReduceOp.MAX, group=subgroup)
        assert work is not None
        work.wait()
        parts = [torch.empty_like(x) for _ in range(n)]
        dist.all_gather(parts, z)
        flat = torch.empty(n * 3)
        dist.all_to_all_single(flat, y.flatten()[: n * 3].clone())
        dist.broadcast(y, src=n - 1)
        seen += [y, z, *parts, flat]
    objects = [None] * n
    dist.all_gather_object(objects, {"rank": world.rank, "long": "x" * world.rank})
    model = nn.parallel.DistributedDataParallel(nn.Linear(7, 3))
    for _ in range(3):
        model(x).square().sum().backward()
    dist.barrier()
    return [*seen, *(p.grad for p in model.parameters())], objects


def with_and_without(world):
    torch.manual_seed(0)
    methods = {name: vars(dist.ProcessGroup)[name] for name in ("allreduce", "barrier", "send")}
    handlers = [signal.getsignal(s) for s in (signal.SIGURG, signal.SIGTERM)]
    plain, objects = many_collectives(world)
    torch.manual_seed(0)
    with guard() as g:
        guarded, others = many_collectives(world)
    counts = g.num_collectives
    assert objects == others
    assert all(torch.equal(a, b) for a, b in zip(plain, guarded, strict=True))
    # Everything is as it was.
    assert all(vars(dist.ProcessGroup)[name] is method for name, method in methods.items())
    assert [signal.getsignal(s) for s in (signal.SIGURG, signal.SIGTERM)] == handlers
    assert len(plain) > 80
    return counts


def test_same_bits_and_everything_seen():
    counts = run_on_ranks(2, with_and_without)
    assert counts[0] == counts[1]
    # 80 calls, two gathers of objects, DDP's own from C++ (checks, broadcasts, 3 buckets), barrier.
    assert counts[0]["0"] >= 80 + 2 + 3 + 1
    assert sorted(counts[0].values())[0] == 20


@ranks(1, 2)
def test_leaving_early_nesting_and_reuse(world):
    with guard(timeout=TIMEOUT) as first:
        with pytest.raises(BadInput, match="already on"), guard():
            pass
        dist.all_reduce(torch.ones(1))
    with pytest.raises(BadInput, match="used before"), first:
        pass
    with pytest.raises(BadInput, match="timeout must be above 0"):
        guard(timeout=0)
    with guard(timeout=0.5):
        # The others leave while rank 0 is still inside, longer than they wait for it.
        time.sleep(0.8 if world.rank == 0 else 0)
    world.barrier()


def test_without_a_process_group():
    with guard() as g:
        assert g.num_collectives == {}
    compare_across_ranks("settings", {"lr": 0.1})


# ---- compare_across_ranks --------------------------------------------------------------------


@ranks(1, 3)
def test_compare_across_ranks(world):
    items = {f"layers.{i}.weight": ((3, i), torch.float32) for i in range(9)}
    compare_across_ranks("parameters", items)
    if world.size == 1:
        return
    own = {
        **items,
        "layers.4.weight": ((3, 4), torch.float16 if world.rank == 1 else torch.float32),
    }
    with pytest.raises(
        BadInput, match=r"layers\.4\.weight: ranks 0, 2 have .*float32.; rank 1 has"
    ):
        compare_across_ranks("parameters", own)
    missing = dict(items)
    if world.rank == 2:
        del missing["layers.0.weight"]
    with pytest.raises(BadInput, match=r"layers\.0\.weight: .*; rank 2 has absent"):
        compare_across_ranks("parameters", missing)
    turned = dict(reversed(items.items())) if world.rank == 0 else items
    with pytest.raises(BadInput, match=r"item 0: rank 0 has layers\.8\.weight; ranks 1, 2 have"):
        compare_across_ranks("parameters", turned)


# ---- programs --------------------------------------------------------------------------------

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
    outputs = [process.communicate(timeout=30)[1] for process in processes]
    assert time.monotonic() - start < 20
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
    ("rank", "others"), [(0, "time.sleep(30)"), (1, "dist.all_reduce(torch.ones(3))")]
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


# ---- the judge, alone ------------------------------------------------------------------------


def state(last, status=Status.INSIDE, marks=None):
    group = GroupState([0, 1], last, marks or {}, "barrier()", ["a.py:1 in f"], 0.0)
    return RankState(
        1, status, "", ["a.py:2 in f"], None, ["", "1", ""], {"0": group} if last else {}
    )


def test_the_judge_waits_for_a_slow_rank_and_not_for_one_that_left():
    judge = Judge(patience=5.0)
    assert judge.examine({0: state(3), 1: state(2)}, 0.0) is None
    assert judge.examine({0: state(4), 1: state(3)}, 4.0) is None  # it moved
    assert judge.examine({0: state(4), 1: state(3)}, 8.0) is None
    late = judge.examine({0: state(4), 1: state(3)}, 9.5)
    assert late is not None
    assert (late.kind, late.ranks, late.number) == (Kind.SKIPPED, (1,), 4)
    gone = Judge(5.0).examine({0: state(1), 1: state(0, Status.LEFT)}, 0.0)
    assert gone is not None
    assert (gone.kind, gone.ranks, gone.number) == (Kind.SKIPPED, (1,), 1)


def test_the_judge_compares_at_common_numbers():
    far = state(900, marks={64: "a", 899: "x", 900: "y"})
    assert Judge(5.0).examine({0: far, 1: state(64, marks={63: "q", 64: "a"})}, 0.0) is None
    found = Judge(5.0).examine({0: far, 1: state(64, marks={63: "q", 64: "b"})}, 0.0)
    assert found is not None
    assert (found.kind, found.number) == (Kind.MISMATCH, 64)
