"""What is kept to the end of a pass, gradients or their factors: all of it is measured at once.

[Note: known sets] A maker (`unison.clip.quick`) makes tensors of the same shapes, strides and
dtypes in every pass, on the same device: it compares all that they depend on. So what was made by
the same makers, and few tensors more that are looked at, is a set like one of a pass before.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unison.clip.bounds import NormTable, SampleNorms
from unison.clip.factored import Factors, groups_of
from unison.clip.measured import bound
from unison.clip.sum_grid import SumGrid
from unison.kernels.multi_tensor import (
    DeviceTableCache,
    TensorBatch,
    TensorMeta,
    is_fast,
    squares,
)

_MOST_KNOWN = 16  # sets; each has a few facts of every parameter


class SharesByName(dict[str, tuple[Tensor, Tensor]]):
    """What clipped sums are made of: X [n, *shape] and weights [n], by name.

    Attributes:
        asked: All X in the order of the names, where kernels know them already.
    """

    asked: TensorBatch | None = None


class Found(NamedTuple):
    """What is kept of a pass, by name.

    Attributes:
        gradients: Per-sample gradients [samples, *shape].
        factors: Of others that are not formed.
    """

    gradients: Mapping[str, Tensor]
    factors: Mapping[str, Factors]


class KeptSet:
    """What is known of all that is kept of a pass, and of all that is like it.

    Args:
        found: At least one of either.
    """

    def __init__(self, found: Found) -> None:
        gradients = sorted(found.gradients)
        values = [found.gradients[name] for name in gradients]
        self._gradients, self._pick = gradients, _picker(gradients)
        self._facts, self._is_fast = TensorMeta(values), is_fast(values)
        self._numel = max((value.numel() for value in values), default=0)
        self._groups = groups_of(found.factors)
        measured = [*gradients, *[name for group in self._groups for name in group.names]]
        self.names = sorted(measured)
        self._pick_all = _picker(self.names)
        self._all_facts: dict[bool, tuple[TensorMeta, bool]] = {}  # of shares, on a grid or not
        place = {name: i for i, name in enumerate(measured)}
        # Of every name: which of those that are measured one after the other it is.
        self._order = torch.tensor([place[name] for name in self.names])
        self._is_in_order = measured == self.names
        self._orders = DeviceTableCache(most=1)

    def asked(self, found: Found) -> TensorBatch:
        """Return the per-sample gradients of such a set in order of names."""
        return TensorBatch(self._pick(found.gradients), self._facts, self._is_fast)

    def measure(self, found: Found, asked: TensorBatch, num_samples: int) -> NormTable:
        """Return the norms of all parameters, in order of names.

        Args:
            found: What is kept.
            asked: Of it, what `asked` returns.
            num_samples: Samples in the batch.
        """
        parts: list[SampleNorms] = []
        if asked:
            numel = self._numel // max(1, num_samples)
            parts.append(bound(squares(asked), num_samples, numel))
        parts += [group.measure(found.factors) for group in self._groups]
        squared = _joined([each.squared for each in parts])
        upper = _joined([each.upper for each in parts])
        if not self._is_in_order:
            order = self._orders.table((), squared.device, lambda _: self._order)
            squared, upper = squared[order], upper[order]
        return NormTable(self.names, squared, upper)

    def shares(
        self,
        found: Found,
        asked: TensorBatch,
        coefficients: Mapping[str, Tensor],
        grid: SumGrid | None = None,
    ) -> SharesByName:
        """Return what all clipped sums are made of, in order of names.

        Args:
            found: What is kept.
            asked: Of it, what `asked` returned when it was measured.
            coefficients: [samples] of every parameter.
            grid: To which the shares of samples are rounded whose factors are added up here.
        """
        if not self._groups:
            weights = [coefficients[name] for name in self.names]
            made = SharesByName(zip(self.names, zip(asked, weights, strict=True), strict=True))
            made.asked = asked
            return made
        values = dict(zip(self._gradients, asked, strict=True))
        weights = {name: coefficients[name] for name in self._gradients}
        for group in self._groups:
            of_group = [coefficients[name] for name in group.names]
            sums = group.sums(found.factors, of_group, grid)
            values.update(zip(group.names, sums, strict=True))
            weight = (grid or SumGrid(1.0)).weight(of_group[0].device)
            weights.update(dict.fromkeys(group.names, weight))
        in_order = self._pick_all(values)
        facts = self._all_facts.get(grid is None)
        if facts is None:
            facts = self._all_facts[grid is None] = TensorMeta(in_order), is_fast(in_order)
        made = SharesByName(
            zip(self.names, zip(in_order, self._pick_all(weights), strict=True), strict=True)
        )
        made.asked = TensorBatch(in_order, *facts)
        return made


def _picker(names: Sequence[str]) -> Callable[[Mapping[str, Any]], Sequence[Any]]:
    """Return what picks the values of these names."""
    if len(names) > 1:
        return itemgetter(*names)
    # Of a single name that would return the value, not a sequence of it.
    return lambda some: [some[name] for name in names]


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


_known: dict[Hashable, KeptSet] = {}


def set_of(makers: Sequence[Hashable], found: Found, others: Found) -> KeptSet:
    """Return what is known of all that is kept of a pass.

    Args:
        makers: Who made all of it but the others, in the order in which they did.
        found: All, at least one.
        others: Those of them that no maker made.
    """
    looked_at = [
        *_looked_at(others.gradients.items()),
        *_looked_at((name, each.left) for name, each in others.factors.items()),
        *_looked_at((name, each.right) for name, each in others.factors.items()),
        *[each.shape for each in others.factors.values()],
    ]
    key = (tuple(makers), tuple(found.gradients), tuple(found.factors), tuple(looked_at))
    known = _known.get(key)
    if known is None:
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        known = _known[key] = KeptSet(found)
    return known


def _looked_at(tensors: Iterable[tuple[str, Tensor]]) -> list[tuple]:
    return [(name, x.shape, x.stride(), x.dtype, x.device) for name, x in tensors]
