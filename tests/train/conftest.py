"""What the tests of training share."""

import multiprocessing
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch.distributed.launcher import api

from tests.harness.pool import PRELOAD
from unison.train import loop


@pytest.fixture(autouse=True)
def _one_thread(_leaves_no_trace: None) -> None:
    """Use one thread: the tensors are too small to share. Undone after the test."""
    torch.set_num_threads(1)


@pytest.fixture
def forked_ranks() -> Iterator[None]:
    """Let `run_on_local_ranks` fork its ranks where torch is imported, not start interpreters.

    For tests that are not about how ranks start and end.
    """
    multiprocessing.set_forkserver_preload(PRELOAD)
    quick = partial(api.LaunchConfig, start_method="forkserver")
    with pytest.MonkeyPatch.context() as patch:  # not the test's, which it may undo
        patch.setattr(api, "LaunchConfig", quick)
        yield


@pytest.fixture
def stop_at(monkeypatch):
    """Let the step of a number fail."""

    def stop(number, error):
        original = loop.train_step

        def train_step(*args, step, **kwargs):
            if step == number:
                raise error
            return original(*args, step=step, **kwargs)

        monkeypatch.setattr(loop, "train_step", train_step)

    yield stop
    monkeypatch.undo()
