"""What kernels have to know of many tensors, asked once for all of them.

[Note: asked once] A backward pass leaves hundreds of per-sample gradients, which are measured and
then released. To ask each of them for its shape, its strides and its dtype takes Python as long as
a GPU takes for a layer. Who knows that the tensors are like those of a pass before hands them over
as `Asked`, with the facts that were found then; only their addresses are asked for every time.
"""

from collections.abc import Iterable, Sequence
from operator import attrgetter

from torch import Tensor


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
        return self is other or (isinstance(other, Facts) and self._facts == other._facts)


_shape_of, _dtype_of = attrgetter("shape"), attrgetter("dtype")


class Asked(list[Tensor]):
    """Tensors of which everything but the addresses is known; see [Note: asked once].

    Args:
        values: The tensors.
        facts: Theirs, or those of tensors that are alike and on the same device.
        is_fast: Whether the kernels take them; see `unison.kernels.many.is_fast`.
    """

    def __init__(self, values: Iterable[Tensor], facts: Facts, is_fast: bool) -> None:
        super().__init__(values)
        self.facts, self.is_fast = facts, is_fast


def facts_of(values: Sequence[Tensor]) -> Facts:
    """Return the facts of tensors, asked for unless they are known."""
    return values.facts if isinstance(values, Asked) else Facts(values)
