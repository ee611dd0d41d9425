"""What tensors without memory answer while a module is built: they are on the CPU, like any other.

See [Note: pretence] in recorder.py. Requests for values that do not depend on random draws are
served by evaluating the tape.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from unison.shard.deferred.recorder import CPU, Recorder
from unison.shard.deferred.tape import leaves

Answer = Callable[..., Any]  # called with the recorder, then as the method would be


def _to(recorder: Recorder, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`Tensor.to` without the device: there is only one here."""
    other = kwargs.pop("other", None)
    kwargs.pop("device", None)
    names = ["dtype", "non_blocking", "copy"]
    if args and isinstance(args[0], Tensor):
        other, args, names = args[0], args[1:], names[1:]
    elif args and not isinstance(args[0], torch.dtype):  # a device, or None for one
        args = args[1:]
    kwargs.update(zip(names, args, strict=False))
    dtype = kwargs.pop("dtype", None) or (tensor if other is None else other).dtype
    return tensor.to(dtype=dtype, **kwargs)


def _new_tensor(recorder: Recorder, tensor: Tensor, data: Any, **kwargs: Any) -> Tensor:
    kwargs.pop("device", None)
    return torch.tensor(data, **{"dtype": tensor.dtype, **kwargs})


def _as_tensor(index: Any) -> Any:
    """A list of numbers in an index as a tensor, as torch makes one itself, on the right device."""
    if isinstance(index, tuple):
        return tuple(_as_tensor(part) for part in index)
    is_array = hasattr(index, "__array__") and not isinstance(index, Tensor)
    is_numbers = isinstance(index, list | range) and all(
        isinstance(leaf, int | Tensor) for leaf in leaves(list(index))
    )
    return torch.tensor(index) if is_array or is_numbers else index


def _get(recorder: Recorder, tensor: Tensor, index: Any) -> Tensor:
    return tensor[_as_tensor(index)]


def _set(recorder: Recorder, tensor: Tensor, index: Any, value: Any) -> None:
    tensor[_as_tensor(index)] = value


def _with_values(method: Callable[..., Any], name: str) -> Answer:
    def answer(recorder: Recorder, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        return method(recorder.values(tensor, f"Tensor.{name}"), *args, **kwargs)

    return answer


def _itself(recorder: Recorder, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return tensor


ANSWERS: dict[Any, Answer] = {
    Tensor.device.__get__: lambda recorder, tensor: CPU,  # type: ignore[attr-defined]
    Tensor.is_meta.__get__: lambda recorder, tensor: False,  # type: ignore[attr-defined]
    Tensor.is_cpu.__get__: lambda recorder, tensor: True,  # type: ignore[attr-defined]
    Tensor.get_device: lambda recorder, tensor: -1,
    Tensor.__repr__: lambda recorder, tensor, **_: object.__repr__(tensor),
    Tensor.__getitem__: _get,
    Tensor.__setitem__: _set,
    Tensor.to: _to,
    Tensor.cpu: _itself,
    Tensor.cuda: _itself,
    Tensor.new_tensor: _new_tensor,
    Tensor.tolist: _with_values(Tensor.tolist, "tolist"),
    Tensor.numpy: _with_values(Tensor.numpy, "numpy"),
    Tensor.__array__: _with_values(Tensor.__array__, "__array__"),
}

# Functions that make a tensor of given values; on the meta device they would forget them.
MAKES_FROM_VALUES = {torch.tensor, torch.as_tensor, torch.asarray}


class Pretence(TorchFunctionMode):
    """Answers for tensors without memory."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Answer, or let torch do so."""
        kwargs = kwargs or {}
        answer = ANSWERS.get(func)
        if answer is None and func not in MAKES_FROM_VALUES:
            return func(*args, **kwargs)
        # Without torch functions, so that a `torch.device` context does not interfere either.
        with torch._C.DisableTorchFunction(), self._recorder.keeping_refusals():
            if func in MAKES_FROM_VALUES:
                return func(*args, **{k: v for k, v in kwargs.items() if k != "device"})
            if answer is not None and args[0].is_meta:
                return answer(self._recorder, *args, **kwargs)
            return func(*args, **kwargs)
