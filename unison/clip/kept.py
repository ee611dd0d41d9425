"""Per-sample gradients that are kept to the end of a pass: all of them are measured at once.

[Note: known sets] A maker (`unison.clip.quick`) makes tensors of the same shapes, strides and
dtypes in every pass, on the same device: it compares all that they depend on. So what was made by
the same makers, and few tensors more that are looked at, is a set like one of a pass before.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple

from torch import Tensor

from unison.kernels.many import Asked, Facts, is_fast

_MOST_KNOWN = 16  # sets; each has a few facts of every parameter


class KeptSet(NamedTuple):
    """What is known of a set of kept gradients.

    Attributes:
        names: Of their parameters, in order of names.
        pick: Returns the gradients in that order.
        facts: Of them.
        is_fast: Whether kernels take them.
        numel: Elements of the largest, over all samples.
    """

    names: Sequence[str]
    pick: Callable[[Mapping[str, Tensor]], Sequence[Tensor]]
    facts: Facts
    is_fast: bool
    numel: int

    def asked(self, found: Mapping[str, Tensor]) -> Asked:
        """Return gradients of such a set in order of names."""
        return Asked(self.pick(found), self.facts, self.is_fast)


_known: dict[Hashable, KeptSet] = {}


def set_of(
    makers: Sequence[Hashable], found: Mapping[str, Tensor], others: Mapping[str, Tensor]
) -> KeptSet:
    """Return what is known of a set of kept gradients.

    Args:
        makers: Who made all of them but the others, in the order in which they did.
        found: All, at least one, by name.
        others: Those of them that no maker made.
    """
    looked_at = [(name, x.shape, x.stride(), x.dtype, x.device) for name, x in others.items()]
    key = (tuple(makers), tuple(found), tuple(looked_at))
    known = _known.get(key)
    if known is None:
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        known = _known[key] = _set_of(found)
    return known


def _set_of(found: Mapping[str, Tensor]) -> KeptSet:
    names = sorted(found)
    values = [found[name] for name in names]
    # Of a single name it would return the value, not a sequence of it.
    pick = itemgetter(*names) if len(names) > 1 else lambda some: [some[names[0]]]
    numel = max(value.numel() for value in values)
    return KeptSet(names, pick, Facts(values), is_fast(values), numel)


class SharesByName(dict[str, tuple[Tensor, Tensor]]):
    """What clipped sums are made of: X [n, *shape] and weights [n], by name.

    Attributes:
        asked: All X in the order of the names, where kernels know them already.
    """

    asked: Asked | None = None
