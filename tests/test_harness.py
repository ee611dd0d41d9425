"""The harness itself: it runs ranks, and it says exactly what went wrong on them."""

import functools
import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.harness import RanksFailed, World, pool, ranks, run_on_ranks, seed_of
from tests.harness.isolation import isolated
from tests.harness.report import Answer, Outcome, root_cause_first

ROOT = Path(__file__).parents[1]


def rank_and_pid(world: World) -> tuple[int, int]:
    return world.rank, os.getpid()


def random_numbers(world: World) -> list[float]:
    drawn = torch.rand(3, generator=world.generator())
    return [*drawn.tolist(), torch.rand(()).item()]


def surroundings(world: World) -> tuple[int, int, str, bool, str | None]:
    dist.barrier()
    backend = dist.get_backend()
    return dist.get_rank(), torch.get_num_threads(), backend, dist.is_initialized(), _variable()


def _variable() -> str | None:
    return os.environ.get("TRITON_INTERPRET")


def fail_on(world: World, failing: list[int]) -> None:
    print(f"rank {world.rank} was here")
    left, right = world.rank, -1
    if world.rank in failing:
        assert left == right


def fail_while_others_wait(world: World) -> None:
    if world.rank == 1:
        raise ValueError("the root cause")
    world.barrier()


def hang(world: World, hanging: int) -> None:
    if world.rank == hanging:
        time.sleep(600)


def wait_in_a_collective(world: World) -> None:
    if world.rank != 0:
        world.barrier()


def kill_rank_one(world: World) -> None:
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(50):
        dist.all_reduce(torch.ones(1000))


def crash(world: World) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def leave_abruptly(world: World) -> None:
    if world.rank == world.size - 1:
        os._exit(7)


def return_a_function(world: World) -> object:
    return lambda: world.rank


def warn(world: World) -> str:
    warnings.warn("mind the gap", UserWarning, stacklevel=1)
    return "passed"


# What torch says of a CPU without bf16 in a product of bf16 matrices.
NO_BF16 = (
    "mkldnn_matmul failed, switching to BLAS gemm:mkldnn_matmul: mkldnn_matmul bf16 path needs a "
    "cpu with bf16 support\nException raised from mkldnn_matmul"
)


def warn_of_the_machine(world: World | None) -> str:
    for message in (NO_BF16, NO_BF16.partition("gemm:")[2]):
        warnings.warn(message, UserWarning, stacklevel=1)
    return "passed"


def destroy_the_group(world: World) -> None:
    world.barrier()
    dist.destroy_process_group()


def leave_a_mess(world: World) -> None:
    # Work that never meets its partner; the group of the next test must not see it.
    if world.rank == 0:
        dist.isend(torch.ones(3), dst=world.size - 1)
    dist.new_group([0])
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(2)


def failure_of(world_size: int, fn, *args, timeout: float = 30) -> RanksFailed:
    with pytest.raises(RanksFailed) as caught:
        run_on_ranks(world_size, fn, *args, timeout=timeout)
    # Whatever happened, the next call finds ranks that work.
    assert [rank for rank, _ in run_on_ranks(world_size, rank_and_pid)] == list(range(world_size))
    return caught.value


# ---- what works ------------------------------------------------------------------------------


@ranks(1, 2, 3, 8)
def test_a_body_runs_on_every_rank(world: World):
    assert world.gather(world.rank) == list(range(world.size))
    total = torch.tensor(float(world.rank))
    dist.all_reduce(total)
    assert total.item() == world.size * (world.size - 1) / 2


@pytest.mark.parametrize("above", ["x", "y"])
@ranks(1, 3)
@pytest.mark.parametrize("below", [(1, 2), None], ids=["pair", "none"])
def test_parametrisation_and_fixtures_stack(world: World, below, tmp_path, above):
    assert above in "xy"
    assert below in [(1, 2), None]
    (tmp_path / str(world.rank)).write_text(above)
    world.barrier()
    assert sorted(p.name for p in tmp_path.iterdir()) == [str(r) for r in range(world.size)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_results_come_in_rank_order_from_the_same_processes(world_size):
    first = run_on_ranks(world_size, rank_and_pid)
    assert [rank for rank, _ in first] == list(range(world_size))
    assert [pid for _, pid in first] == pool.pool_of(world_size).pids
    assert run_on_ranks(world_size, rank_and_pid) == first
    assert len({pid for _, pid in first}) == world_size
    assert os.getpid() not in dict(first).values()


def test_every_rank_of_every_world_draws_the_same_numbers():
    drawn = [numbers for size in (1, 2, 3) for numbers in run_on_ranks(size, random_numbers)]
    assert drawn == [drawn[0]] * 6


@ranks(1, 2)
def test_a_generator_can_be_sent_and_is_the_test_s_own(world: World, gen):
    drawn = torch.rand(3, generator=gen).tolist()
    assert world.gather(drawn) == [drawn] * world.size
    assert drawn != random_numbers(world)[:3]  # parametrised: its node id has the world size


def test_surroundings_of_a_rank(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert run_on_ranks(2, surroundings) == [(r, 1, "gloo", True, "1") for r in range(2)]
    monkeypatch.delenv("TRITON_INTERPRET")
    assert run_on_ranks(2, _partial_surroundings())[1][-1] is None


def _partial_surroundings():
    return functools.partial(surroundings)


def test_a_test_may_leave_the_group_or_a_mess():
    before = run_on_ranks(2, rank_and_pid)
    run_on_ranks(2, destroy_the_group)
    run_on_ranks(2, leave_a_mess)
    assert [r[:3] for r in run_on_ranks(2, surroundings)] == [(0, 1, "gloo"), (1, 1, "gloo")]
    assert run_on_ranks(2, rank_and_pid) == before


# ---- what fails ------------------------------------------------------------------------------


def test_an_assertion_shows_rank_traceback_values_and_output():
    message = str(failure_of(3, fail_on, [2]))
    assert message.startswith("rank 2 of a world of 3 failed")
    assert "rank 2 raised AssertionError" in message
    assert "assert left == right" in message  # the source line
    assert "assert 2 == -1" in message  # its values, by assertion rewriting
    assert "in fail_on" in message
    assert "worker.py" not in message
    assert "rank 2 was here" in message
    assert "rank 0 was here" not in message


def test_all_failing_ranks_are_shown():
    failure = failure_of(3, fail_on, [0, 1, 2])
    assert sorted(answer.rank for answer in failure.failures) == [0, 1, 2]
    assert str(failure).count("raised AssertionError") == 3


def test_the_root_cause_comes_before_the_ranks_that_wait_for_it(monkeypatch):
    monkeypatch.setattr(pool, "GRACE", 0.5)
    start = time.monotonic()
    failure = failure_of(3, fail_while_others_wait, timeout=60)
    assert time.monotonic() - start < 20  # the others are cut after the grace, not the timeout
    assert failure.failures[0].rank == 1
    assert "ValueError: the root cause" in failure.failures[0].detail
    assert [a.outcome for a in failure.failures[1:]] == [Outcome.HUNG] * 2
    assert all("in barrier" in a.detail for a in failure.failures[1:])


@pytest.mark.parametrize("size", [1, 3])
def test_a_hang_is_cut_and_its_stack_shown(size):
    start = time.monotonic()
    failure = failure_of(size, hang, size - 1, timeout=1)
    assert time.monotonic() - start < 10
    assert [a.rank for a in failure.failures] == [size - 1]
    assert f"rank {size - 1} had not answered after 1 s (the timeout)" in str(failure)
    assert "in hang" in str(failure)
    assert "_exit_with_parent" not in str(failure)


def test_ranks_that_wait_for_a_peer_that_has_left_are_named():
    failure = failure_of(3, wait_in_a_collective, timeout=1)
    assert sorted(a.rank for a in failure.failures) == [1, 2]
    assert str(failure).count("in wait_in_a_collective") == 2


def test_a_killed_rank_is_reported_first():
    failure = failure_of(2, kill_rank_one)
    assert failure.failures[0].rank == 1
    assert "rank 1 was killed by SIGKILL" in str(failure)


def test_a_crash_shows_where():
    message = str(failure_of(1, crash))
    assert "rank 0 was killed by SIGSEGV" in message
    assert "in crash" in message


def test_a_rank_that_exits_is_reported():
    assert "rank 1 exited with code 7" in str(failure_of(2, leave_abruptly))


def test_a_result_that_cannot_be_pickled_is_reported():
    assert "the result of rank 0 cannot be pickled" in str(failure_of(1, return_a_function))


def test_warnings_are_errors_in_the_ranks():
    assert "UserWarning: mind the gap" in str(failure_of(1, warn))


def test_what_torch_says_of_the_machine_fails_no_test():
    assert warn_of_the_machine(None) == "passed"
    assert run_on_ranks(2, warn_of_the_machine) == ["passed"] * 2


@pytest.mark.filterwarnings("ignore:mind the gap")
def test_a_mark_that_allows_a_warning_reaches_the_ranks():
    assert run_on_ranks(1, warn) == ["passed"]


def test_a_function_that_cannot_be_sent_is_refused():
    with pytest.raises(TypeError, match="define the function at module level"):
        run_on_ranks(1, lambda world: None)
    with pytest.raises(TypeError, match="inside the body"):
        run_on_ranks(1, hang, (i for i in range(3)))


def test_echoes_of_a_lost_peer_come_after_the_cause_even_if_earlier():
    echo = Answer(0, Outcome.RAISED, 1.0, detail="RuntimeError: Connection closed by peer [::1]")
    late = Answer(1, Outcome.RAISED, 3.0, detail="ValueError: second")
    cause = Answer(2, Outcome.RAISED, 2.0, detail="ValueError: first")
    waiting = Answer(3, Outcome.HUNG, 0.0)
    assert root_cause_first([waiting, echo, late, cause]) == [cause, late, echo, waiting]
    assert "rank 0 " in str(RanksFailed(4, [waiting, echo, late, cause]))


# ---- the decorator ---------------------------------------------------------------------------

# Decorated here, but not named test_*: the tests below call them, as pytest would.


@ranks(2, timeout=20)
def body_that_fails(world: World, what: int):
    assert world.rank + what == 0


@ranks(2)
def body_that_skips(world: World, skipping: list[int]):
    if world.rank in skipping:
        pytest.skip("not today")


def test_a_failing_body_fails_the_test_with_the_ranks_report():
    with pytest.raises(pytest.fail.Exception, match=r"rank 1 of a world of 2 failed") as caught:
        body_that_fails(world_size=2, what=0)
    assert "assert (1 + 0) == 0" in str(caught.value)
    assert caught.value.__context__ is None  # or pytest would show the report twice


def test_ranks_skip_together_or_fail():
    with pytest.raises(pytest.skip.Exception, match="not today"):
        body_that_skips(world_size=2, skipping=[0, 1])
    with pytest.raises(pytest.fail.Exception, match=r"ranks \[1\] skipped"):
        body_that_skips(world_size=2, skipping=[1])


def test_bad_uses_of_the_decorator_are_refused():
    with pytest.raises(ValueError, match="one or more world sizes"):
        ranks()
    with pytest.raises(ValueError, match="one or more world sizes"):
        ranks(2, 0)
    with pytest.raises(TypeError, match="must take `world` as its first parameter"):
        ranks(2)(lambda dim: None)


# ---- the end ---------------------------------------------------------------------------------

ORPHANS = """
from tests.harness import pool, run_on_ranks
from tests.test_harness import hang, rank_and_pid
pool.PRELOAD = ["torch.distributed", "pytest"]
run_on_ranks(2, rank_and_pid)
print(*pool.pool_of(2).pids, pool.pool_of(2).folder, flush=True)
run_on_ranks(2, hang, 0)
"""


@pytest.mark.full
def test_ranks_end_with_their_parent():
    parent = subprocess.Popen(
        [sys.executable, "-c", ORPHANS],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with parent:
        assert parent.stdout is not None
        *pids, folder = parent.stdout.readline().split()
        pids = [int(pid) for pid in pids]
        assert len(pids) == 2
        assert all(_runs(pid) for pid in pids)
        time.sleep(0.2)  # let rank 0 begin to hang
        parent.kill()
    assert _end(pids)
    assert not Path(folder).exists()


def test_ctrl_c_ends_the_ranks():
    pids = [pid for _, pid in run_on_ranks(2, rank_and_pid)]
    # A shell that runs the tests in the background has them ignore the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            run_on_ranks(2, hang, 0, timeout=20)
    finally:
        timer.join()
        signal.signal(signal.SIGINT, before)
    assert _end(pids)
    assert len(run_on_ranks(2, rank_and_pid)) == 2


def _end(pids: list[int]) -> bool:
    """Say whether all processes end within some seconds."""
    until = time.monotonic() + 10
    while any(_runs(pid) for pid in pids) and time.monotonic() < until:
        time.sleep(0.05)
    return not any(_runs(pid) for pid in pids)


def _runs(pid: int) -> bool:
    """Say whether a process runs; a zombie does not, it only waits for init to notice."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def test_a_test_that_leaves_a_group_fails_and_the_next_one_does_not_notice():
    with pytest.raises(AssertionError, match="left a process group initialised"), isolated(0):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert not dist.is_initialized()


def test_global_state_is_put_back():
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    with isolated(5):
        first = [torch.rand(()).item(), random.random()]
        torch.set_default_dtype(torch.float64)
        torch.set_num_threads(threads + 1)
        torch.set_grad_enabled(False)
    assert (torch.get_default_dtype(), torch.get_num_threads()) == (torch.float32, threads)
    assert torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), state)
    with isolated(5):
        assert [torch.rand(()).item(), random.random()] == first


def test_gen_hangs_on_the_node_id_alone(gen, request):
    assert gen.initial_seed() == seed_of(request.node.nodeid)


def test_long_tests_are_there():
    """A line of `long_tests.txt` whose test has gone would say nothing."""
    root = Path(__file__).parent
    for line in (root / "long_tests.txt").read_text().splitlines():
        if line.startswith("#"):
            continue
        file, _, rest = line.partition("::")
        name = rest.partition(" ")[0].partition("[")[0]
        assert f"def {name}(" in (root.parent / file).read_text(), line
