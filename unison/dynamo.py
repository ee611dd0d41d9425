"""What torch.compile has made, and what compiles for it.

Dynamo itself is imported where it is used: that takes a second.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import GraphModule

DynamoBackend = Callable[[GraphModule, list[Any]], Callable[..., Any]]
"""(graph, examples of its inputs) -> what runs it; as `torch.compile(backend=)` takes it."""

ORIGINAL = "_torchdynamo_orig_callable"  # of a function that torch.compile made: what it was


def backend_of(options: Mapping[str, Any]) -> DynamoBackend:
    """The backend that torch.compile would use, with its mode and options.

    Args:
        options: Arguments of `torch.compile`.
    """
    return backend_in(torch.compile(_nothing, **options))


def backend_in(compiled: Callable[..., Any]) -> DynamoBackend:
    """The backend of a function that torch.compile made."""
    cells = dict(zip(compiled.__code__.co_freevars, compiled.__closure__ or (), strict=True))
    return torch._dynamo.eval_frame.innermost_backend(cells["callback"].cell_contents)


def _nothing() -> None:
    pass


def pinned(backend: DynamoBackend) -> DynamoBackend:
    """The same backend, which chooses nothing by timing: each choice has bits of its own.

    Inductor tries several kernels and takes the fastest, which is another one from run to run.
    """
    config = getattr(backend, "config", None)
    if type(backend).__name__ != "_TorchCompileInductorWrapper" or not isinstance(config, dict):
        return backend
    made: Any = copy.copy(backend)
    made.config = {**config, "deterministic": True}
    return made
