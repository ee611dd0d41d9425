"""Launches of Triton kernels at a fraction of what Triton itself takes for them.

[Note: known launches] What Triton compiles depends on the arguments: on dtypes, on whether
addresses and integers are multiples of 16, on integers that are 1 or too long for 32 bits, on the
device. It asks all of them again for every launch, which takes 40 to 80 microseconds of Python, as
long as small kernels run. Here a launch is looked up by a key that says all of that and more (the
integers themselves), and what was compiled for it is handed to the driver.
"""

from collections.abc import Sequence
from functools import reduce
from operator import attrgetter, or_

import torch
import triton
from torch import Tensor

_RUNTIME = getattr(getattr(triton, "knobs", None), "runtime", None)
_MOST_KNOWN = 1024  # shapes that change from call to call must not pile up


class Launcher:
    """Launches one kernel: as Triton does the first time, and at once from then on.

    Triton's interpreter, profilers that listen to its launches, and versions of it that are built
    otherwise get ordinary launches.

    Args:
        kernel: A function compiled by `triton.jit`. It takes tensors, then numbers, then constants.
    """

    def __init__(self, kernel) -> None:
        self._kernel = kernel
        self._known: dict[tuple, tuple] = {}
        self._is_ordinary = False

    def __call__(
        self,
        grid: tuple[int, int],
        tensors: tuple[Tensor, ...],
        numbers: tuple[int | float, ...],
        **constants,
    ) -> None:
        """Launch the kernel on the current stream of the first tensor's device.

        Args:
            grid: Programs along each axis.
            tensors: The kernel's first arguments.
            numbers: Those that follow, each of the same type in all calls.
            constants: The others by name, with Triton's options.
        """
        if self._is_ordinary or not tensors[0].is_cuda:
            self._kernel[grid](*tensors, *numbers, **constants)
            return
        device = tensors[0].get_device()
        if device == torch._C._cuda_getDevice():
            self._launch(device, grid, tensors, numbers, constants)
        else:
            with torch.cuda.device(device):
                self._launch(device, grid, tensors, numbers, constants)

    def prepared(
        self,
        grid: tuple[int, int],
        numbers: tuple[int | float, ...],
        *,
        asked: Sequence[int] | None = None,
        **constants,
    ) -> "Prepared":
        """Return a launch that is given its tensors only: for one that comes again and again.

        Args:
            grid: Programs along each axis.
            numbers: The kernel's arguments after the tensors.
            asked: Which tensors to ask for their dtypes, if the others have the same ones as
                these whenever these do; all of them unless given.
            constants: The kernel's other arguments by name, with Triton's options.
        """
        return Prepared(self, grid, numbers, constants, asked)

    def known(self, device: int, tensors, numbers, constants) -> tuple | None:
        """Return what was compiled for such a launch; None if it takes an ordinary one."""
        if self._is_ordinary:
            return None
        addresses = [x.data_ptr() for x in tensors]
        return self._known.get(_key(device, tensors, addresses, numbers, constants))

    def refused(self) -> None:
        """Launch as Triton does from now on: not the driver that this was written for."""
        self._is_ordinary = True

    def _launch(self, device: int, grid, tensors, numbers, constants) -> None:
        addresses = [x.data_ptr() for x in tensors]
        key = _key(device, tensors, addresses, numbers, constants)
        known = self._known.get(key)
        if known is None or _is_observed():
            compiled = self._kernel[grid](*tensors, *numbers, **constants)
            self._remember(key, compiled, len(tensors) + len(numbers), constants)
            return
        run, function, metadata, rest = known
        stream = torch._C._cuda_getCurrentRawStream(device)
        try:
            run(*grid, 1, stream, function, metadata, None, None, None, *addresses, *numbers, *rest)
        except TypeError:  # it refused the arguments; what the GPU has to say is not caught
            self.refused()
            self._kernel[grid](*tensors, *numbers, **constants)

    def _remember(self, key: tuple, compiled, num_given: int, constants) -> None:
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        try:
            # The driver counts constants too, in the order of the kernel's arguments.
            rest = tuple([constants[name] for name in self._kernel.arg_names[num_given:]])
            self._known[key] = compiled.run, compiled.function, compiled.packed_metadata, rest
        except (AttributeError, KeyError):
            self._is_ordinary = True


class Prepared:
    """A launch of which all but the tensors is given: those alone are asked about every time.

    Args:
        launcher: Of its kernel; it does all launches but those to the driver.
        grid: Programs along each axis.
        numbers: The kernel's arguments after the tensors.
        constants: The others by name, with Triton's options.
        asked: Which tensors to ask for their dtypes; None for all.
    """

    __slots__ = ("_asked", "_constants", "_grid", "_known", "_launcher", "_numbers")

    def __init__(self, launcher: Launcher, grid, numbers, constants, asked=None) -> None:
        self._launcher, self._grid = launcher, grid
        self._numbers, self._constants, self._asked = numbers, constants, asked
        # By device, dtypes and alignments: no more than these few.
        self._known: dict[tuple, tuple] = {}

    def __call__(self, *tensors: Tensor) -> None:
        """Launch the kernel on the current stream of the first tensor's device."""
        device = tensors[0].get_device()
        addresses = [x.data_ptr() for x in tensors]
        asked = tensors if self._asked is None else [tensors[i] for i in self._asked]
        key = (device, *map(_dtype_of, asked), _alignments(addresses))
        known = self._known.get(key)
        if known is None or device != torch._C._cuda_getDevice() or _is_observed():
            self._launch(key, device, tensors)
            return
        run, before, after = known
        stream = torch._C._cuda_getCurrentRawStream(device)
        try:
            run(*self._grid, 1, stream, *before, *addresses, *after)
        except TypeError:  # it refused the arguments; what the GPU has to say is not caught
            self._launcher.refused()
            self._known.clear()
            self._launch(key, device, tensors)

    def _launch(self, key: tuple, device: int, tensors: tuple[Tensor, ...]) -> None:
        """Let the launcher do it, and remember what it knows then."""
        self._launcher(self._grid, tensors, self._numbers, **self._constants)
        known = self._launcher.known(device, tensors, self._numbers, self._constants)
        if known is not None:
            run, function, metadata, rest = known
            before = (function, metadata, None, None, None)
            self._known[key] = run, before, (*self._numbers, *rest)


_dtype_of = attrgetter("dtype")


def _alignments(addresses: Sequence[int]) -> tuple[int, ...]:
    """Return how far each address is above a multiple of 16; nothing if all are multiples."""
    return tuple([each % 16 for each in addresses]) if reduce(or_, addresses) % 16 else ()


def _key(device: int, tensors, addresses, numbers, constants) -> tuple:
    """Return all that Triton compiles by, and more."""
    return (
        device,
        numbers,
        *[x.dtype for x in tensors],
        *[address % 16 for address in addresses],
        *constants.items(),
    )


def _is_observed() -> bool:
    """Whether somebody wants to hear of launches, as Triton's profiler does."""
    if _RUNTIME is None:
        return True  # nobody knows
    enter, leave = _RUNTIME.launch_enter_hook, _RUNTIME.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
