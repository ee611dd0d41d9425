"""What a test may change in its own process, and gets back as it was."""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist


@contextmanager
def isolated(seed: int) -> Iterator[None]:
    """Seed all generators, then put back torch's global state and the generators' as they were.

    Args:
        seed: for the global generators of torch, numpy and Python.

    Raises:
        AssertionError: if a process group was left initialised; it is destroyed first, so that
            the next test does not inherit it.
    """
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    grad = torch.is_grad_enabled()
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    numpy_state = np.random.get_state()  # noqa: NPY002 - code under test may use the old state
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():  # else `torch.manual_seed` notes a traceback, for later
        torch.cuda.manual_seed_all(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    try:
        yield
    finally:
        stop_recording()
        enable_mkldnn()
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)
        if torch.are_deterministic_algorithms_enabled() != deterministic:
            torch.use_deterministic_algorithms(deterministic)  # costs a second of imports
        torch.set_grad_enabled(grad)
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002
    if dist.is_initialized():
        dist.destroy_process_group()
        raise AssertionError(
            "the test left a process group initialised in pytest's own process; use @ranks, or "
            "call destroy_process_group() in a finally"
        )


def stop_recording() -> None:
    """Let private loops that a test left in the middle follow nobody's operations any more."""
    tape = sys.modules.get("unison.privacy.loss_tape")
    for recorder in [] if tape is None else list(tape._recording):
        recorder.remove()


def enable_mkldnn() -> None:
    """Let matrix products be computed as in a new process.

    Where a CPU has no bf16, torch's first product in bfloat16 warns and switches oneDNN off for the
    rest of the process: float32 products of later tests would have other bits than those of other
    processes.
    """
    torch.backends.mkldnn.set_flags(True)
