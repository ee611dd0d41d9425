"""The memory of gradients: one for many of them, and known to kernels before it is there."""

from collections.abc import Sequence
from operator import itemgetter

import numpy as np
import torch
from torch import Tensor

from unison.capture.facts import TensorFacts
from unison.kernels.multi_tensor import ADDRESS, TensorBatch, TensorMeta


class Gradients(TensorBatch):
    """Gradients that a `Cut` has made.

    Attributes:
        home: Device of the tensors that they are like; None if there are several.
    """

    home: torch.device | None = None


class Cut:
    """How memories are cut into gradients.

    Tensors that are alike in all dimensions but the first are pieces of one memory, which are made
    at once, in their shapes. A vector is followed by a piece for nobody, where the next would begin
    at no multiple of 64; a matrix whose next would is made as a vector.

    Args:
        like: Tensors of the gradients' shapes and dtypes.
    """

    def __init__(self, like: Sequence[Tensor]) -> None:
        self._like = TensorFacts(like)
        devices = {each.device for each in like}
        self._home = devices.pop() if len(devices) == 1 else None
        self._shapes = [each.shape for each in like]
        groups: dict[tuple, list[int]] = {}
        for i, each in enumerate(like):
            shape = each.shape
            is_whole = len(shape) > 1 and shape.numel() > 0 and shape.numel() % _ALIGNED == 0
            groups.setdefault((each.dtype, tuple(shape[1:]) if is_whole else ()), []).append(i)
        # Of each memory: dtype, shape, lengths of its pieces along the first dimension.
        self._memories: list[tuple[torch.dtype, tuple[int, ...], list[int]]] = []
        places = [0] * len(like)  # of each gradient: which of all pieces it is
        self._made_flat: list[int] = []  # gradients whose shape is not their piece's
        memory_of = [0] * len(like)
        num_pieces = 0
        for (dtype, rest), which in groups.items():
            sizes: list[int] = []
            for i in which:
                shape = self._shapes[i]
                if not rest and len(shape) != 1:
                    self._made_flat.append(i)
                places[i], memory_of[i] = num_pieces + len(sizes), len(self._memories)
                sizes.append(shape[0] if rest else shape.numel())
                if not rest and shape.numel() % _ALIGNED:
                    sizes.append(-shape.numel() % _ALIGNED)
            self._memories.append((dtype, (sum(sizes), *rest), sizes))
            num_pieces += len(sizes)
        # Of a single place it would return the piece, not a sequence of it.
        self._pick = itemgetter(*places) if len(places) > 1 else lambda pieces: pieces[:1]
        self._memory_of = np.array(memory_of, np.int64)
        # What kernels have to know of the gradients: facts, and where they lie in their memories,
        # known when they were made for the first time; and where they lay the last time.
        self._facts: tuple[TensorMeta, np.ndarray] | None = None
        self._last: tuple[list[int], bytes] = ([], b"")

    def is_for(self, like: Sequence[Tensor]) -> bool:
        """Whether these are tensors like those that it was made for."""
        return self._like.hold_for(like)

    def empty(self, device: torch.device) -> Gradients:
        """Return the gradients, with nothing in them."""
        pieces: list[Tensor] = []
        begins = []
        for dtype, shape, sizes in self._memories:
            memory = torch.empty(shape, dtype=dtype, device=device)
            begins.append(memory.data_ptr())
            pieces += torch.unsafe_split_with_sizes(memory, sizes)  # views, unknown to autograd
        gradients = list(self._pick(pieces))
        for i in self._made_flat:
            gradients[i] = gradients[i].view(self._shapes[i])
        if self._facts is None:
            offsets = [each.storage_offset() * each.element_size() for each in gradients]
            self._facts = TensorMeta(gradients), np.array(offsets, ADDRESS)
        facts, offsets = self._facts
        if begins != self._last[0]:
            # To ask hundreds of tensors for their addresses takes longer.
            addresses = np.array(begins, ADDRESS)[self._memory_of] + offsets
            self._last = begins, addresses.tobytes()
        made = Gradients(gradients, facts, False, self._last[1])
        made.home = self._home
        return made


_ALIGNED = 64  # elements: where a gradient begins
_MOST_KNOWN = 16
_known: list[Cut] = []


def empty_gradients(like: Sequence[Tensor], device: torch.device) -> Gradients:
    """Return tensors of the same shapes and dtypes as these."""
    known = next((each for each in _known if each.is_for(like)), None)
    if known is None:
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        known = Cut(like)
        _known.append(known)
    return known.empty(device)
