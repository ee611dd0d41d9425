"""Local ranks from one call: results, agreed errors, and a rank that breaks."""

import os
import signal

import pytest
import torch

import unison
from unison.errors import BadInput, Diverged
from unison.train.world import RankFailed, join_world, run_on_local_ranks


def add_up(config):
    with join_world("cpu") as world:
        sums = world.agree(lambda: world.rank + config)
        assert world.agree(lambda: "seen", when=world.rank == 1) == [None, "seen"]
        return sums, world.size


def one_rank_finds_fault(_):
    def check():
        if world.rank == 1:
            raise Diverged("rank 1 saw a NaN")

    with join_world("cpu") as world:
        world.agree(check)


def one_rank_breaks(_):
    with join_world("cpu") as world:
        if world.rank == 1:
            raise ZeroDivisionError("a bug on purpose")
        world.agree(lambda: None)


def one_rank_calls_alone(_):
    with join_world("cpu") as world, unison.guard():
        if world.rank == 0:
            world.sum(torch.ones(1))


@pytest.mark.full
def test_result_of_rank_0_comes_back():
    before = signal.getsignal(signal.SIGINT)
    assert run_on_local_ranks(add_up, 10, num_ranks=2) == ([10, 11], 2)
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.full
@pytest.mark.usefixtures("forked_ranks")
def test_error_of_one_rank_is_the_error_of_all():
    with pytest.raises(Diverged, match="rank 1 saw a NaN"):
        run_on_local_ranks(one_rank_finds_fault, None, num_ranks=2)


def test_bug_on_one_rank_shows_its_traceback():
    with pytest.raises(RankFailed, match=r"(?s)rank 1 failed:.*one_rank_breaks.*a bug on purpose"):
        run_on_local_ranks(one_rank_breaks, None, num_ranks=2)


@pytest.mark.usefixtures("forked_ranks")
def test_guard_names_the_collective_that_one_rank_called_alone():
    """Note 000, bug 3."""
    with pytest.raises(RankFailed, match=r"(?s)rank 1 did not call .*one_rank_calls_alone"):
        run_on_local_ranks(one_rank_calls_alone, None, num_ranks=2)


def test_ranks_do_not_start_ranks(monkeypatch):
    monkeypatch.setitem(os.environ, "RANK", "0")
    monkeypatch.setitem(os.environ, "WORLD_SIZE", "2")
    with pytest.raises(BadInput, match="leave --nproc out"):
        run_on_local_ranks(add_up, 1, num_ranks=2)
