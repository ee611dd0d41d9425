"""Labels for profilers."""

from contextlib import AbstractContextManager, nullcontext

from torch.autograd import profiler

_NO_LABEL = nullcontext()


def labelled(phase: str, unit: str) -> AbstractContextManager:
    """Mark a phase of a unit in a running profile; costs nothing where no profiler runs."""
    return profiler.record_function(f"{phase} {unit}") if is_profiling() else _NO_LABEL


def is_profiling() -> bool:
    """Whether torch's profiler, or its NVTX emitter, is on."""
    return profiler._is_profiler_enabled
