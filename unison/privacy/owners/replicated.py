"""Every rank holds the whole module: one process, several that hold copies, or torch's DDP.

DDP's own sum is left out: it would add gradients as autograd leaves them, and there are none.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from unison.capture import Capture
from unison.capture.names import places
from unison.capture.tracked import Source, Tracked
from unison.errors import BadInput, UnsupportedOperation
from unison.privacy.owners.base import MakeSums, Owned, RecordsWhole
from unison.privacy.owners.buckets import BucketedSums
from unison.shard.deal import BatchPlan
from unison.shard.flat_group import PLAIN
from unison.shard.granules import PerGranule
from unison.shard.ranks import Ranks, checksum, same_on_every_rank


class Replicated(RecordsWhole):
    """Copies of a module on every rank; see `Owner`.

    Raises:
        BadInput: The ranks hold different parameters.
    """

    can_repeat = True
    runs_together = False

    def __init__(self, module: nn.Module, *, is_ordered: bool) -> None:
        self.module, self.is_ordered = module, is_ordered
        self._ddp = module if isinstance(module, DistributedDataParallel) else None
        self.ranks = Ranks(self._ddp.process_group) if self._ddp else Ranks.of(None)
        _refuse_copies(module)
        self.owned: Sequence[Owned] = _owned_by_all(module)
        _check_same(self.ranks, self.owned)
        held = [(each, each.shape) for each in self.owned]
        self._sums = BucketedSums(held, self.ranks)
        if self._ddp is not None:
            self._synced = self._ddp.require_backward_grad_sync
            self._ddp.require_backward_grad_sync = False

    @property
    def is_alone(self) -> bool:
        """Whether this rank's own sums are all there is; see `Owner`."""
        return self.ranks.size == 1 and not self.is_ordered

    def installed(self, captures: Mapping[int, Capture]) -> AbstractContextManager[Any]:
        """Put tracked parameters in place; see `Owner`."""
        if list(captures) == [PLAIN]:
            return captures[PLAIN].installed()
        return _in_granules(self.module, captures)

    def add(self, make_sums: MakeSums, plan: BatchPlan, granules: Sequence[int]) -> None:
        """Add the clipped sums of a pass; see `Owner`."""
        self._sums.add(make_sums, plan, granules)

    def totals(self) -> Iterator[tuple[Owned, Tensor]]:
        """Hand out the sums over all ranks; see `Owner`."""
        return self._sums.totals()

    def drop(self) -> None:
        """Forget the sums; see `Owner`."""
        self._sums.drop()

    def detach(self) -> None:
        """Leave the module as it was."""
        if self._ddp is not None:
            self._ddp.require_backward_grad_sync = self._synced


def _refuse_copies(module: nn.Module) -> None:
    if isinstance(module, nn.DataParallel):
        raise UnsupportedOperation(
            "nn.DataParallel copies the module in every pass; use one process per device"
        )


def _owned_by_all(module: nn.Module) -> list[Owned]:
    found: dict[str, Owned] = {}
    for place in places(module):
        each = place.parameter
        if each.requires_grad and place.name not in found:
            shape = tuple(each.shape)
            found[place.name] = Owned(place.name, each, shape, 0, each.numel())
    return list(found.values())


def _check_same(ranks: Ranks, owned: Sequence[Owned]) -> None:
    if ranks.size == 1:
        return
    sums = torch.stack([checksum(each.parameter) for each in owned])
    device = owned[0].parameter.device
    if not same_on_every_rank(ranks, sums.to(device)):
        raise BadInput(
            "the ranks hold different parameters; build the module from one seed on every rank, "
            "or broadcast it"
        )


@contextmanager
def _in_granules(module: nn.Module, captures: Mapping[int, Capture]) -> Iterator[None]:
    """Let each granule compute with parameters of its own capture."""
    tracked: dict[int, Tensor] = {}
    with ExitStack() as stack:
        for owner, attribute, parameter, name in places(module):
            if not parameter.requires_grad:
                continue
            if id(parameter) not in tracked:
                source = Source(name, tuple(parameter.shape))
                parts = [Tracked.of(parameter, (source,), capture) for capture in captures.values()]
                tracked[id(parameter)] = PerGranule.of(parts)
            owner.__dict__[attribute] = tracked[id(parameter)]
            stack.callback(owner.__dict__.pop, attribute, None)
        yield
