"""Settings that hold for the tests of clipping."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread(_leaves_no_trace: None) -> None:
    """Use one thread: the tensors are too small to share. Undone after the test."""
    torch.set_num_threads(1)
