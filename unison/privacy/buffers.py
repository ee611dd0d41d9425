"""Buffers, watched in every pass: what the forward pass writes there is saved without noise."""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

from torch import Tensor, nn

from unison.errors import UnsupportedOperation


class BufferWatch:
    """Refuses buffers that a pass writes to, unless it is known that they hold nothing of the data.

    Whether values depend on the batch is found out where the module is checked; here versions are
    compared, which takes microseconds, so that what is written in a later pass for the first time
    is refused before that pass is released. (Writing through `.data` leaves no version; the check
    compares values, and sees it.)

    Args:
        is_allowed: Whether a buffer of this name may be written.
    """

    def __init__(self, is_allowed: Callable[[str], bool]) -> None:
        self._is_allowed = is_allowed
        self._modules: Sequence[tuple[str, nn.Module]] = ()
        self._before: list[tuple[Any, int]] = []

    def begin(self, modules: Sequence[tuple[str, nn.Module]]) -> None:
        """Note the versions of all buffers.

        Args:
            modules: All modules, by name.
        """
        self._modules = modules
        self._before = _versions(modules)

    def check(self) -> None:
        """Compare them.

        Raises:
            UnsupportedOperation: Naming a buffer that was written.
        """
        now = _versions(self._modules)
        if len(now) == len(self._before) and all(map(_is_same, now, self._before)):
            return
        known = {id(value): version for value, version in self._before}
        for name, value in _named(self._modules):
            if known.get(id(value)) != _version(value) and not self._is_allowed(name):
                raise UnsupportedOperation(
                    f"this pass wrote to the buffer {name!r}, which is saved with the model and "
                    "gets no noise; passes that were checked did not. Keep statistics of the data "
                    "out of buffers, or say that it may be published: make_private("
                    f"public_buffers=[{name!r}])"
                )


def _versions(modules: Sequence[tuple[str, nn.Module]]) -> list[tuple[Any, int]]:
    held: Iterable[Any] = chain.from_iterable(each._buffers.values() for _, each in modules)
    return [(value, _version(value)) for value in held if value is not None]


def _version(value: Tensor) -> int:
    return 0 if value.is_inference() else value._version


def _is_same(first: tuple[Any, int], second: tuple[Any, int]) -> bool:
    return first[0] is second[0] and first[1] == second[1]


def _named(modules: Sequence[tuple[str, nn.Module]]) -> Iterable[tuple[str, Tensor]]:
    for path, module in modules:
        for key, value in module._buffers.items():
            if value is not None:
                yield f"{path}.{key}" if path else key, value
