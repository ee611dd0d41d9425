"""What kernels have to know of many tensors, asked once for all of them.

[Note: asked once] A backward pass leaves hundreds of per-sample gradients, which are measured and
then released. To ask each of them for its shape, its strides and its dtype takes Python as long as
a GPU takes for a layer. Who knows that the tensors are like those of a pass before hands them over
as `Asked`, with the facts that were found then; only their addresses are asked for every time, and
once for all kernels: until then they stay where they are.
"""

import struct
from collections.abc import Iterable, Sequence
from operator import attrgetter

from torch import Tensor

ADDRESS = "<i8"  # int64, its lowest byte first


class Facts:
    """Shapes, strides and dtypes of many tensors: equal for tensors that are alike.

    Args:
        values: The tensors.
    """

    __slots__ = ("_facts", "_hash")

    def __init__(self, values: Sequence[Tensor]) -> None:
        # Fact by fact, and not tensor by tensor: no line of Python runs for each of hundreds.
        self._facts = (
            tuple(map(_shape_of, values)),
            tuple(map(Tensor.stride, values)),
            tuple(map(_dtype_of, values)),
        )
        self._hash = hash(self._facts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Facts) or self._facts != other._facts:
            return False
        other._facts = self._facts  # the next comparison sees at once that they are the same
        return True


_shape_of, _dtype_of = attrgetter("shape"), attrgetter("dtype")


class Asked(list[Tensor]):
    """Tensors of which everything but the addresses is known; see [Note: asked once].

    Args:
        values: The tensors.
        facts: Theirs, or those of tensors that are alike and on the same device.
        is_fast: Whether the kernels take them; see `unison.kernels.many.is_fast`.
        addresses: Theirs, if they are known, as `addresses_of` returns them.
    """

    def __init__(
        self, values: Iterable[Tensor], facts: Facts, is_fast: bool, addresses: bytes | None = None
    ) -> None:
        super().__init__(values)
        self.facts, self.is_fast = facts, is_fast
        self._addresses = addresses

    @property
    def addresses(self) -> bytes:
        """Where they lie; see `addresses_of`."""
        if self._addresses is None:
            self._addresses = _asked_addresses(self)
        return self._addresses


def facts_of(values: Sequence[Tensor]) -> Facts:
    """Return the facts of tensors, asked for unless they are known."""
    return values.facts if isinstance(values, Asked) else Facts(values)


def addresses_of(values: Sequence[Tensor]) -> bytes:
    """Return where tensors lie, as `ADDRESS` one after the other: a key, and a table's column."""
    return values.addresses if isinstance(values, Asked) else _asked_addresses(values)


def _asked_addresses(values: Sequence[Tensor]) -> bytes:
    return struct.pack(f"<{len(values)}q", *map(Tensor.data_ptr, values))
