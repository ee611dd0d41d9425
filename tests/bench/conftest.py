"""What the tests of the benchmarks share."""

import sys

import pytest
import torch

from bench.__main__ import main
from tests.train.ranks import forked_ranks

__all__ = ["forked_ranks"]


@pytest.fixture
def bench(monkeypatch, capsys, _leaves_no_trace):
    """Run `python -m bench` in this process; returns exit code, standard output and error."""
    torch.set_num_threads(1)  # the tensors are too small to share
    monkeypatch.setenv("COLUMNS", "100")

    def run(*args):
        monkeypatch.setattr(sys, "argv", ["bench", *map(str, args)])
        with pytest.raises(SystemExit) as left:
            main()
        out, err = capsys.readouterr()
        return left.value.code or 0, out, err

    return run
