"""Parameters under `unison.fully_shard`.

While statistics are collected, units compute with tracked parameters, which take no gradients: they
gather and free as in training, and sum nothing.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from unison.capture import Capture
from unison.capture.capture import PLACING
from unison.capture.tracked import Source, Tracked
from unison.errors import BadInput
from unison.kfac.owners.base import Held
from unison.names import canonical_name
from unison.shard.engine import context_of
from unison.shard.unit import Unit, unit_of


class Units:
    """The units of a sharded module; see `Owner`.

    Raises:
        BadInput: Not all trainable parameters are in units.
    """

    def __init__(self, module: nn.Module) -> None:
        root = unit_of(module)
        if root is None:
            raise BadInput(
                "parts of the module are sharded and the module itself is not; call "
                "unison.fully_shard on it too, or unison.auto_shard"
            )
        self.module, self.ranks = module, root.axes.all
        self.num_places = root.axes.shard.size
        self._units = context_of(root).units
        self.device = next(group.device for unit in self._units for group in unit.groups)
        self._names = {id(piece): canonical_name(name) for name, piece in module.named_parameters()}
        found: dict[int, Held] = {}
        for unit in self._units:
            for group in unit.groups:
                of_places = [
                    group.layout.pieces(place, self.num_places) for place in range(self.num_places)
                ]
                for piece, *places in zip(group.pieces, *of_places, strict=True):
                    ranges = tuple((place.start, place.stop) for place in places)
                    shape, name = places[0].slot.shape, self._names[id(piece)]
                    found[id(piece)] = Held(name, piece, shape, ranges)
        trained = [piece for piece in module.parameters() if piece.requires_grad]
        self.held: Sequence[Held] = [found[id(piece)] for piece in trained]

    @contextmanager
    def observing(self) -> Iterator[None]:
        """See `Owner`."""
        self.module.__dict__[PLACING] = self._placing
        try:
            yield
        finally:
            self.module.__dict__.pop(PLACING, None)

    @contextmanager
    def _placing(self, capture: Capture) -> Iterator[None]:
        before = [unit.leaf_source for unit in self._units]
        tracked: dict[Unit, list[list[Tensor]]] = {}

        def leaves(unit: Unit, _: int) -> list[list[Tensor]]:
            if unit not in tracked:
                tracked[unit] = self._leaves(unit, capture)
            return tracked[unit]

        for unit in self._units:
            unit.leaf_source = leaves
        try:
            yield
        finally:
            for unit, source in zip(self._units, before, strict=True):
                unit.leaf_source = source

    def _leaves(self, unit: Unit, capture: Capture) -> list[list[Tensor]]:
        found = []
        for group in unit.groups:
            views = group.leaves.views()
            if group.requires_grad:
                names = [self._names[id(piece)] for piece in group.pieces]
                views = [
                    Tracked.of(view, (Source(name, tuple(view.shape)),), capture)
                    for name, view in zip(names, views, strict=True)
                ]
            found.append(views)
        return found
