"""Launches of Triton kernels at a fraction of what Triton itself takes for them.

[Note: known launches] What Triton compiles depends on the arguments: on dtypes, on whether
addresses and integers are multiples of 16, on integers that are 1 or too long for 32 bits, on the
device. It asks all of them again for every launch, which takes 40 to 80 microseconds of Python, as
long as small kernels run. Here a launch is looked up by a key that says all of that and more (the
integers themselves), and what was compiled for it is handed to the driver.
"""

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

    def _launch(self, device: int, grid, tensors, numbers, constants) -> None:
        addresses = [x.data_ptr() for x in tensors]
        key = (
            device,
            numbers,
            *[x.dtype for x in tensors],
            *[address % 16 for address in addresses],
            *constants.items(),
        )
        known = self._known.get(key)
        if known is None or _is_observed():
            compiled = self._kernel[grid](*tensors, *numbers, **constants)
            self._remember(key, compiled, len(tensors) + len(numbers), constants)
            return
        run, function, metadata, rest = known
        stream = torch._C._cuda_getCurrentRawStream(device)
        try:
            run(*grid, 1, stream, function, metadata, None, None, None, *addresses, *numbers, *rest)
        except Exception:  # not the driver that this was written for: it refused the arguments
            self._is_ordinary = True
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


def _is_observed() -> bool:
    """Whether somebody wants to hear of launches, as Triton's profiler does."""
    if _RUNTIME is None:
        return True  # nobody knows
    enter, leave = _RUNTIME.launch_enter_hook, _RUNTIME.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
