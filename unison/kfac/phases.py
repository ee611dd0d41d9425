"""The phases of a K-FAC step, by name: for profilers, and for benchmarks that time them.

| phase | what |
|---|---|
| statistics | the pass under the capture: forward, backward, and inside of it |
| labels | labels drawn from the model, and their gradient |
| products | sums of ãã' and gg' over tokens, and diagonals |
| factors | sums over ranks, averages |
| inverses | of this rank's layers |
| gradients | to the owners of layers |
| graft | the other optimizer's step |
| apply | products with the inverses, lengths |
| write | steps to where the gradients are |
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from torch.profiler import record_function

_observers: list[Callable[[str], AbstractContextManager[object]]] = []


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Be in a phase."""
    with record_function(f"unison.kfac: {name}"):
        if not _observers:
            yield
            return
        with _observers[-1](name):
            yield


@contextmanager
def observed(observer: Callable[[str], AbstractContextManager[object]]) -> Iterator[None]:
    """Enter a context for every phase inside."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)
