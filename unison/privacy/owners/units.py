"""Parameters under `unison.fully_shard`: units gather them, and each rank keeps its part of sums.

The units go on gathering and freeing parameters as in ordinary training. What they compute with are
tracked tensors, so autograd brings them no gradients; when the coefficients are known, the clipped
sums of one unit after the other are made and summed over ranks, by the units' own reducers.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from unison.capture import Capture
from unison.capture.capture import PLACING
from unison.capture.tracked import Source, Tracked
from unison.errors import BadInput, UnsupportedOperation
from unison.names import canonical_name
from unison.ops import Record
from unison.privacy.owners.base import MakeSums, Owned, RecordsWhole
from unison.privacy.owners.sums import GroupSums, exchange
from unison.shard.deal import BatchPlan
from unison.shard.engine import context_of
from unison.shard.flat_group import PLAIN, RECOMPUTE, FlatGroup
from unison.shard.unit import Unit, unit_of


class Units(RecordsWhole):
    """The units of a sharded module; see `Owner`.

    Raises:
        BadInput: Not all trainable parameters are in units.
    """

    can_repeat = False
    runs_together = True

    def __init__(self, module: nn.Module) -> None:
        root = unit_of(module)
        if root is None:
            raise BadInput(
                "parts of the module are sharded and the module itself is not; call "
                "unison.fully_shard on it too, or unison.auto_shard"
            )
        self.module, self._root = module, root
        self._root.runs_hooks_first = True
        self._units = context_of(root).units
        self.ranks = root.axes.all
        self.is_ordered = root.options.reducer == "ordered"
        names = {id(piece): canonical_name(name) for name, piece in module.named_parameters()}
        self._names: dict[tuple[Unit, int], list[str]] = {}
        self._sums: list[tuple[GroupSums, list[str]]] = []
        self._dtypes: list[tuple[FlatGroup, torch.dtype]] = []  # as they were
        owned: list[Owned] = []
        for unit in self._units:
            for index, group in enumerate(unit.groups):
                if not group.requires_grad:
                    continue
                own = [names[id(piece)] for piece in group.pieces]
                self._names[unit, index] = own
                self._dtypes.append((group, group.reduce_dtype))
                self._sums.append((GroupSums(group), own))
                places = group.piece_places()
                for name, piece, place in zip(own, group.pieces, places, strict=True):
                    owned.append(Owned(name, piece, place.slot.shape, place.start, place.stop))
        self.owned: Sequence[Owned] = owned
        self._by_name = {each.name: each for each in owned}
        module.__dict__[PLACING] = self._placing
        # The backward pass reaches the last units first, and so did their gradients before.
        self._sums.reverse()

    @contextmanager
    def _placing(self, capture: Capture) -> Iterator[None]:
        with self.installed({PLAIN: capture}):
            yield

    @contextmanager
    def installed(self, captures: Mapping[int, Capture]) -> Iterator[None]:
        """Let units compute with tracked parameters; see `Owner`."""
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
        for index, group in enumerate(unit.groups):
            views = group.leaves.views()
            if group.requires_grad:
                names = self._names[unit, index]
                views = [
                    Tracked.of(view, (Source(name, tuple(view.shape)),), capture)
                    for name, view in zip(names, views, strict=True)
                ]
            found.append(views)
        return found

    def add(self, make_sums: MakeSums, plan: BatchPlan, granules: Sequence[int]) -> None:
        """Add the clipped sums of a pass; see `Owner`."""
        names = {id(group): own for group, own in self._sums}

        def take_all(group: GroupSums) -> None:
            for granule in granules:
                sums = make_sums(granule, names[id(group)], group.begun)
                group.take(granule, sums, make_sums.dtype)

        groups = [group for group, _ in self._sums]
        exchange(groups, take_all, is_last=plan.closes_logical_batch)

    def totals(self) -> Iterator[tuple[Owned, Tensor]]:
        """Hand out this rank's parts of the sums; see `Owner`."""
        for group, own in self._sums:
            for name, total in zip(own, group.take_totals(), strict=True):
                yield self._by_name[name], total

    def drop(self) -> None:
        """Forget the sums; see `Owner`."""
        for group, _ in self._sums:
            group.drop()

    def detach(self) -> None:
        """Leave the module as it was."""
        self._root.runs_hooks_first = False
        self.module.__dict__.pop(PLACING, None)
        for group, dtype in self._dtypes:
            group.reduce_dtype = dtype


def capture_of(captures: Mapping[int, Capture], granule: int) -> Capture:
    """The capture of a granule, or one for code that checkpointing runs again."""
    if granule in captures:
        return captures[granule]
    some = next(iter(captures.values()))
    assert granule in (PLAIN, RECOMPUTE)
    # Code that checkpointing runs again: the graph of the first run keeps its own captures, and
    # what is recorded here would be of another granule.
    return Capture(some.module, some.batch, axes=some.axes, on_record=_refuse_record)


def _refuse_record(name: str, record: Record) -> None:
    raise UnsupportedOperation(
        f"{name} is under reentrant checkpointing, which hides from the ordered reducer which "
        "granule it computes; pass use_reentrant=False to torch.utils.checkpoint"
    )
