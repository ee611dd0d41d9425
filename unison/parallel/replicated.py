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
from unison.capture.tracked import Source, Tracked, places
from unison.errors import BadInput, UnsupportedOperation
from unison.parallel.adapter import ParallelAdapter, ShardedParam, in_buckets
from unison.shard.flat_group import PLAIN
from unison.shard.granules import PerGranule
from unison.shard.ranks import Ranks, checksum, same_on_every_rank
from unison.shard.sharded_tensor import local_part


class Replicated(ParallelAdapter):
    """Copies of a module on every rank.

    Under DDP, passes for statistics run the module inside, past DDP's own sums.
    """

    can_repeat = True
    runs_together = False

    def __init__(self, module: nn.Module, *, is_ordered: bool) -> None:
        if isinstance(module, nn.DataParallel):
            raise UnsupportedOperation(
                "nn.DataParallel copies the module in every pass; use one process per device"
            )
        self._ddp = module if isinstance(module, DistributedDataParallel) else None
        super().__init__(self._ddp.module if self._ddp else module, is_ordered=is_ordered)
        self.ranks = Ranks(self._ddp.process_group) if self._ddp else Ranks.of(None)
        trained = trained_params(self.module)
        self.params = [ShardedParam.whole(name, each) for name, each in trained.items()]
        self.device = next((each.device for each in trained.values()), torch.device("cpu"))
        self._sums = in_buckets(self.params, self.ranks)

    @property
    def is_alone(self) -> bool:
        """Whether this rank's own sums are all there is."""
        return self.ranks.size == 1 and not self.is_ordered

    def attach(self) -> None:
        """See `ParallelAdapter`.

        Raises:
            BadInput: The ranks hold different parameters.
        """
        if not are_equal(self.ranks, self.params):
            raise BadInput(
                "the ranks hold different parameters; build the module from one seed on every "
                "rank, or broadcast it"
            )
        if self._ddp is not None:
            before = self._ddp.require_backward_grad_sync
            self._undo.callback(setattr, self._ddp, "require_backward_grad_sync", before)
            self._ddp.require_backward_grad_sync = False

    @contextmanager
    def observing(self) -> Iterator[None]:
        """A capture puts tracked parameters in place by itself."""
        yield

    def installed(self, captures: Mapping[int, Capture]) -> AbstractContextManager[Any]:
        """See `ParallelAdapter`."""
        if list(captures) == [PLAIN]:
            return captures[PLAIN].installed()
        return self._in_granules(captures)

    @contextmanager
    def _in_granules(self, captures: Mapping[int, Capture]) -> Iterator[None]:
        """Let each granule compute with parameters of its own capture."""
        tracked: dict[int, Tensor] = {}
        with ExitStack() as stack:
            for owner, attribute, parameter, name in places(self.module.named_modules()):
                if not parameter.requires_grad:
                    continue
                if id(parameter) not in tracked:
                    sources = (Source(name, tuple(parameter.shape)),)
                    parts = [Tracked.of(parameter, sources, each) for each in captures.values()]
                    tracked[id(parameter)] = PerGranule.of(parts)
                owner.__dict__[attribute] = tracked[id(parameter)]
                stack.callback(owner.__dict__.pop, attribute, None)
            yield


def trained_params(module: nn.Module) -> dict[str, Any]:
    """Each trainable parameter once, by its canonical name."""
    found: dict[str, Any] = {}
    for place in places(module.named_modules()):
        if place.parameter.requires_grad:
            found.setdefault(place.name, place.parameter)
    return found


def are_equal(ranks: Ranks, params: Sequence[ShardedParam]) -> bool:
    """Whether ranks hold the same bytes of these parameters; a collective."""
    if ranks.size == 1 or not params:
        return True
    sums = torch.stack([checksum(local_part(each.parameter.detach())) for each in params])
    return same_on_every_rank(ranks, sums.to(params[0].parameter.device))
