"""What autograd holds for the backward pass, and how much of it has been let go at a moment.

Memory that ordinary training has freed by then is memory that clipping may use: per-sample
gradients of the last layers lie where their activations were.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class _Held:
    """A tensor that autograd has saved; the count knows when it is gone."""

    __slots__ = ("_saved", "key", "num_bytes", "tensor")

    def __init__(self, saved: "SavedBytes", tensor: Tensor, key: int, num_bytes: int) -> None:
        # Without its graph: some operations save their own output (log_softmax), whose graph holds
        # this object. Nobody could free such a circle, nor the module that the graph leads to.
        self._saved, self.tensor, self.key, self.num_bytes = saved, tensor.detach(), key, num_bytes
        saved._holds[key] += 1
        if saved._holds[key] == 1:
            saved.held += num_bytes

    def __del__(self) -> None:
        saved = self._saved
        saved._holds[self.key] -= 1
        if saved._holds[self.key] == 0:
            saved.held -= self.num_bytes
            saved.freed += self.num_bytes


class SavedBytes:
    """Counts bytes of saved tensors, those that share memory once.

    Args:
        but: Tensors that live on anyway: parameters and buffers.

    Attributes:
        held: Bytes that are saved now.
        freed: Bytes that were saved and are not any more.
    """

    def __init__(self, but: Iterable[Tensor]) -> None:
        self.held = self.freed = 0
        self._holds: Counter[int] = Counter()
        self._others = {key for key, _ in map(_memory, but) if key}

    @contextmanager
    def counted(self) -> Iterator["SavedBytes"]:
        """Count what operations in this block save, until it is freed, here or later."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
            yield self

    def _pack(self, tensor: Tensor) -> "Tensor | _Held":
        key, num_bytes = _memory(tensor)
        return tensor if not key or key in self._others else _Held(self, tensor, key, num_bytes)


def _unpack(packed: "Tensor | _Held") -> Tensor:
    return packed.tensor if isinstance(packed, _Held) else packed


def _memory(tensor: Tensor) -> tuple[int, int]:
    """Return where a tensor's memory begins and its length; 0 if it has none of its own."""
    try:
        storage = tensor.untyped_storage()
        return storage.data_ptr(), storage.nbytes()
    except (NotImplementedError, RuntimeError):  # a wrapper around other tensors
        return 0, 0
