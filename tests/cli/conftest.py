"""What the tests of the command line share."""

import sys

import pytest
import torch

from tests.train.ranks import forked_ranks
from unison.cli import main

__all__ = ["forked_ranks"]


@pytest.fixture(autouse=True)
def _one_thread(_leaves_no_trace: None) -> None:
    """Use one thread: the tensors are too small to share. Undone after the test."""
    torch.set_num_threads(1)


@pytest.fixture
def unison(monkeypatch, capsys):
    """Run the command line in this process; returns exit code, standard output and error."""

    def run(*args):
        monkeypatch.setattr(sys, "argv", ["unison", *map(str, args)])
        with pytest.raises(SystemExit) as left:
            main()
        out, err = capsys.readouterr()
        return left.value.code or 0, out, err

    return run
