"""Tests of Triton kernels without a GPU: they run in a process whose Triton interprets kernels.

Triton reads `TRITON_INTERPRET` when it is imported, and pytest's own process may have imported it
already. So there is one other process, started by the first test that needs it. In pytest's own,
Triton compiles.
"""

import atexit
import contextlib
import functools
import importlib
import io
import os
import pickle
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO
from unittest import mock

import numpy
import pytest
import torch
from torch import Tensor

ROOT = Path(__file__).parents[2]


def interpreted(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test where Triton interprets kernels; its arguments are pickled on their way."""

    @functools.wraps(test)
    def run(**arguments: Any) -> None:
        __tracebackhide__ = True
        needs_interpreter()
        trace = _child().call(test.__module__, test.__name__, arguments)
        if trace:
            pytest.fail(trace, pytrace=False)

    run.body = test  # type: ignore[attr-defined]
    return run


def needs_interpreter() -> None:
    """Skip a test where Triton cannot interpret kernels: before 3.9 it does not bear numpy 2.4."""
    triton = pytest.importorskip("triton")
    has_both = [_release(triton) >= (3, 9), _release(numpy) < (2, 4)]
    if not any(has_both):
        pytest.skip(f"triton {triton.__version__} interprets nothing beside numpy >= 2.4")


def _release(package: Any) -> tuple[int, ...]:
    return tuple(int(each) for each in package.__version__.split(".")[:2])


def printed_by(script: str, *arguments: str) -> str:
    """Return what a script prints that compiles kernels."""
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("TRITON_INTERPRET is set: Triton compiles nothing")
    output = io.StringIO()
    with (
        contextlib.redirect_stdout(output),
        mock.patch.object(sys, "argv", ["", *arguments]),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        exec(script, {"__name__": "compiling"})
    return output.getvalue()


class _Child:
    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.kernels.interpreted"],
            cwd=ROOT,
            env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def call(self, *call: Any) -> str:
        """Return the traceback of a test, or nothing if it passed."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        pickle.dump(call, self.process.stdin)
        self.process.stdin.flush()
        try:
            return pickle.load(self.process.stdout)
        except EOFError:
            return f"the interpreting process ended with code {self.process.wait()}"

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


_children: list[_Child] = []


def _child() -> _Child:
    if not _children or _children[-1].process.poll() is not None:
        _children.append(_Child())
    return _children[-1]


@atexit.register
def _end() -> None:
    while _children:
        _children.pop().end()


@contextlib.contextmanager
def as_on_cuda() -> Iterator[None]:
    """Let the library use its kernels for tensors on the CPU."""
    from unison.clip import bounds, measured
    from unison.kernels import factored, multi_tensor
    from unison.kernels.available import TAKEN, is_traced

    def takes(*tensors: Tensor) -> bool:
        return all(each.dtype in TAKEN and not is_traced(each) for each in tensors)

    with contextlib.ExitStack() as stack:
        for module in (bounds, measured, multi_tensor, factored):
            stack.enter_context(mock.patch.object(module, "takes", takes))
        stack.enter_context(mock.patch.object(multi_tensor, "is_on_gpu", return_value=True))
        stack.enter_context(mock.patch.object(torch.cuda, "device", contextlib.nullcontext))
        yield


def _run(module: str, name: str, arguments: dict[str, Any]) -> str:
    try:
        torch.manual_seed(0)
        getattr(importlib.import_module(module), name).body(**arguments)
    except BaseException:
        return traceback.format_exc()
    return ""


def _serve(source: BinaryIO, answers: BinaryIO) -> None:
    while True:
        try:
            call = pickle.load(source)
        except EOFError:
            return
        pickle.dump(_run(*call), answers)
        answers.flush()


def _main() -> None:
    from tests.harness import rewrite

    rewrite.install()
    torch.set_num_threads(1)
    # numpy warns of NaN and infinities, which some tests mean.
    warnings.filterwarnings("ignore", category=RuntimeWarning)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a test prints must not get between answers
    _serve(sys.stdin.buffer, answers)


if __name__ == "__main__":
    _main()
