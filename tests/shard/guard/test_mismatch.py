"""Ranks that disagree: what every rank says, and where."""

import inspect
import re
import time

import pytest
import torch
import torch.distributed as dist

from tests.harness import run_on_ranks
from tests.shard.guard.common import TIMEOUT
from unison.shard.guard import CollectiveMismatch, guard


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
    return f"tests/shard/guard/test_mismatch.py:{first + at} in {body.__name__}"


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
    assert text.count("test_mismatch.py:") >= 2


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
