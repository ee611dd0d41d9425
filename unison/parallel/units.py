"""Parameters under `unison.fully_shard`: units gather them, and each rank keeps its part of sums.

The units go on gathering and freeing parameters as in ordinary training. What they compute with are
tracked tensors, so autograd brings them no gradients; when the coefficients are known, the clipped
sums of one unit after the other are made and summed over ranks, by the units' own reducers.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn

from unison.capture import Capture
from unison.capture.tracked import Source, Tracked
from unison.errors import BadInput
from unison.names import canonical_name
from unison.parallel.adapter import GroupSums, ParallelAdapter, ShardedParam, capture_of
from unison.shard.engine import context_of
from unison.shard.unit import Unit, unit_of


class Units(ParallelAdapter):
    """The units of a sharded module.

    Raises:
        BadInput: Not all trainable parameters are in units.
    """

    def __init__(self, module: nn.Module, *, is_ordered: bool) -> None:
        root = unit_of(module)
        if root is None:
            raise BadInput(
                "parts of the module are sharded and the module itself is not; call "
                "unison.fully_shard on it too, or unison.auto_shard"
            )
        super().__init__(module, is_ordered=root.options.reducer == "ordered")
        self._root, self._units = root, context_of(root).units
        self.ranks, self.num_places = root.axes.all, root.axes.shard.size
        self.device = next(group.device for unit in self._units for group in unit.groups)
        self._names = {id(piece): canonical_name(name) for name, piece in module.named_parameters()}
        found: dict[int, ShardedParam] = {}
        for unit in self._units:
            for group in unit.groups:
                if not group.requires_grad:
                    continue
                every = [group.layout.pieces(i, self.num_places) for i in range(self.num_places)]
                params = []
                for piece, *places in zip(group.pieces, *every, strict=True):
                    name, shape = self._names[id(piece)], places[0].slot.shape
                    ranges = tuple((place.start, place.stop) for place in places)
                    params.append(ShardedParam(name, piece, shape, ranges, root.axes.shard.rank))
                found.update({id(each.parameter): each for each in params})
                self._sums.append(GroupSums(params, group.axes, group.layout, group.device))
        self.params = [found[id(piece)] for piece in module.parameters() if id(piece) in found]
        # The backward pass reaches the last units first, and so did their gradients before.
        self._sums.reverse()

    def attach(self) -> None:
        """See `ParallelAdapter`."""
        self._root.runs_hooks_first = True
        self._undo.callback(setattr, self._root, "runs_hooks_first", False)
        self._let_captures_place(self._undo)

    @contextmanager
    def installed(self, captures: Mapping[int, Capture]) -> Iterator[None]:
        """Let units compute with tracked parameters; see `ParallelAdapter`."""
        before = [unit.leaf_source for unit in self._units]
        tracked: dict[tuple[Unit, int], list[list[Tensor]]] = {}

        def leaves(unit: Unit, granule: int) -> list[list[Tensor]]:
            if (unit, granule) not in tracked:
                tracked[unit, granule] = self._leaves(unit, capture_of(captures, granule))
            return tracked[unit, granule]

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
