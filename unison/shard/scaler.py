"""Loss scaling for float16, decided by all ranks together."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unison.errors import BadInput
from unison.shard.gradient import allow_rank_decisions
from unison.shard.unit import units_of


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` for a sharded model.

    An infinity lies in one rank's part of a gradient. That rank alone would skip its step and
    lower its scale, and the model would fall apart; here all ranks learn of it. `step`, `update`
    and `unscale_` are collectives: every rank calls them.

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
        self._ranks = units[0].axes.all
        own = next(group.device.type for unit in units for group in unit.groups)
        super().__init__(device or own, **options)

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        with allow_rank_decisions():
            found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        # A rank whose pieces are all empty found nothing; it goes along with the others.
        flag = found_inf.clone()
        for value in found.values():
            flag = torch.maximum(flag, value.to(flag.device))
        self._ranks.max_(flag)
        if not found:
            return {flag.device: flag}
        return {device: value.copy_(flag) for device, value in found.items()}
