"""Loss scaling for float16, decided by all ranks together."""

from typing import Any

import torch
from torch import nn

from unison.errors import BadInput
from unison.shard.unit import units_of


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` on the device of a sharded model; torch's own is right for it, too.

    An infinity lies in one rank's part of a gradient, and all ranks learn of it, since parts are
    looked at together (see sharded_tensor.py). `step`, `update` and `unscale_` are collectives:
    every rank calls them.

    Args:
        module: The sharded model.
        device: The kind of device that computes the loss; by default the model's own.
        options: Passed on to `torch.amp.GradScaler`.

    Raises:
        BadInput: If the module is not sharded.
    """

    def __init__(self, module: nn.Module, device: str | None = None, **options: Any) -> None:
        units = units_of(module)
        if not units:
            raise BadInput(
                f"{type(module).__name__} is not sharded; torch.amp.GradScaler is right for it"
            )
        own = next(group.device.type for unit in units for group in unit.groups)
        super().__init__(device or own, **options)
