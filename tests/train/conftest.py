"""What the tests of training share."""

import pytest
import torch

from tests.train.ranks import forked_ranks
from unison.train import loop

__all__ = ["forked_ranks"]


@pytest.fixture(autouse=True)
def _one_thread(_leaves_no_trace: None) -> None:
    """Use one thread: the tensors are too small to share. Undone after the test."""
    torch.set_num_threads(1)


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
