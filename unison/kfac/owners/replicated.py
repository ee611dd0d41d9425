"""Every rank holds the whole module: one process, several that hold copies, or torch's DDP."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from unison.capture.tracked import places
from unison.errors import UnsupportedOperation
from unison.kfac.owners.base import Held
from unison.shard.ranks import Ranks


class Replicated:
    """Copies of a module on every rank; see `Owner`.

    Under DDP a pass for statistics runs the module inside, past DDP's own sums.
    """

    num_places = 1

    def __init__(self, module: nn.Module) -> None:
        if isinstance(module, nn.DataParallel):
            raise UnsupportedOperation(
                "nn.DataParallel copies the module in every pass; use one process per device"
            )
        if isinstance(module, DistributedDataParallel):
            self.module: nn.Module = module.module
            self.ranks = Ranks(module.process_group)
        else:
            self.module, self.ranks = module, Ranks.of(None)
        found: dict[str, Held] = {}
        for place in places(module):
            each = place.parameter
            if each.requires_grad and place.name not in found:
                shape = tuple(each.shape)
                found[place.name] = Held(place.name, each, shape, ((0, each.numel()),))
        self.held: Sequence[Held] = list(found.values())
        self.device = next((each.parameter.device for each in self.held), torch.device("cpu"))

    @contextmanager
    def observing(self) -> Iterator[None]:
        """A capture puts tracked parameters in place by itself; see `Owner`."""
        yield
