"""Facts of tensors: whether all of many tensors are still as they were.

[Note: facts at once] To ask hundreds of tensors for their shapes, strides and dtypes takes Python
longer than a small layer takes. Torch has a function in C++ that compares all of that in one call:
what `torch.compile` guards its graphs with. It is nobody's promise, so that it is used where it is
there, and only its yes is believed: it says no, too, where autocast is on and was off before. After
a no, Python compares.
"""

from collections.abc import Iterator, Sequence
from itertools import compress
from operator import attrgetter, eq
from typing import Any

import torch
from torch import Tensor

_MOST_GUARDS = 2  # with and without autocast


class TensorFacts:
    """What is known of tensors without their values: dtype, device, shape, whether trained, ...

    It holds no tensor.

    Args:
        tensors: Each once; of tensors that come twice it says the same, and takes longer.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._is_strided = [each.layout is torch.strided for each in tensors]
        self._facts = [list(each) for each in self._facts_of(tensors)]
        kinds = set(map(type, tensors))
        self._make_guards = _guards_of_torch() if all(map(_is_ordinary, kinds)) else None
        self._guards: list[Any] = []

    def hold_for(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these are as many tensors as the known ones, each like the one in its place.

        Alike in dtype, device, layout, shape, strides and `requires_grad`.
        """
        if len(tensors) != len(self._is_strided):
            return False
        for guards in self._guards:
            if guards.check(*tensors):
                return True
        for now, before in zip(self._facts_of(tensors), self._facts, strict=True):
            if not all(map(eq, now, before)):
                return False
        self._guard(tensors)
        return True

    def _guard(self, tensors: Sequence[Tensor]) -> None:
        """Let the next comparison be one in C++, where all is as it is here."""
        if self._make_guards is None or len(self._guards) == _MOST_GUARDS:
            return
        guards = self._make_guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        if guards.check(*tensors):
            self._guards.append(guards)
        else:
            self._make_guards = None  # a tensor that comes twice, for which it never says yes

    def _facts_of(self, tensors: Sequence[Tensor]) -> Iterator[Iterator[Any]]:
        """Return all facts of tensors.

        Fact by fact, and not tensor by tensor: then no line of Python runs for each. One after the
        other: hundreds of shapes at once would call Python's garbage collector.
        """
        yield map(_is_trained, tensors)
        yield map(_dtype_of, tensors)
        yield map(_device_of, tensors)
        yield map(_layout_of, tensors)
        yield map(_shape_of, tensors)
        yield map(Tensor.stride, compress(tensors, self._is_strided))  # the others have none


_is_trained, _dtype_of = attrgetter("requires_grad"), attrgetter("dtype")
_device_of, _layout_of = attrgetter("device"), attrgetter("layout")
_shape_of = attrgetter("shape")

_FACTS = ("requires_grad", "dtype", "device", "layout", "shape", "stride")


def _is_ordinary(kind: type[Tensor]) -> bool:
    """Whether tensors of a class answer as those of torch's own, which C++ asks."""
    disabled = torch._C._disabled_torch_function_impl
    is_asked = kind is not Tensor and kind.__torch_function__ is not disabled
    return not is_asked and all(getattr(kind, fact) is getattr(Tensor, fact) for fact in _FACTS)


def _guards_of_torch() -> Any:
    """Return torch's class of guards, of which no release promises that it is there."""
    found: Any = torch._C
    for name in ("_dynamo", "guards", "TensorGuards"):
        found = getattr(found, name, None)
    return found
