"""The guard around code in which nothing is wrong: it sees everything and changes nothing."""

import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.harness import ranks, run_on_ranks
from tests.shard.guard.common import TIMEOUT
from unison.errors import BadInput
from unison.shard.guard import compare_across_ranks, guard


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
