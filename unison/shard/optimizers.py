"""Optimizers of sharded parameters: groups by name and shape, and what a first step looks at."""

import weakref
from collections.abc import Iterable
from fnmatch import fnmatch
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from unison import check
from unison.errors import BadInput
from unison.names import canonical_name
from unison.shard.dtensors import show_shards
from unison.shard.flat_group import PIECE
from unison.shard.sharded_tensor import ShardedTensor
from unison.shard.unit import TAKEN_BY


def param_groups(
    module: nn.Module, weight_decay: float, no_decay: Iterable[str] = ()
) -> list[dict[str, Any]]:
    """Optimizer groups with and without weight decay, by name and number of dimensions.

    Args:
        module: The model, sharded (by unison or by torch's own FSDP2) or not.
        weight_decay: Decay of parameters with two or more dimensions.
        no_decay: Patterns of names (`"*embeddings*"`) that are not decayed either.

    Returns:
        Two groups for a torch optimizer: decayed, and not.
    """
    check.not_negative(weight_decay=weight_decay)
    show_shards(module)
    patterns = list(no_decay)
    decayed, others = [], []
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        is_exempt = any(fnmatch(canonical_name(name), pattern) for pattern in patterns)
        (decayed if parameter.ndim >= 2 and not is_exempt else others).append(parameter)
    return [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]


_is_watching = False
_seen: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def watch_optimizers() -> None:
    """Look at every optimizer before its first step: it may hold what is trained no longer."""
    global _is_watching
    if not _is_watching:
        register_optimizer_step_pre_hook(_look_once)
        _is_watching = True


def _look_once(optimizer: Optimizer, *_: Any) -> None:
    if optimizer not in _seen:
        _check_parameters(optimizer)
        if any(_is_piece(each) for group in optimizer.param_groups for each in group["params"]):
            _adopt_flat_state(optimizer)
            optimizer.register_load_state_dict_post_hook(_adopt_flat_state)
        _seen.add(optimizer)


def _is_piece(parameter: Tensor) -> bool:
    return isinstance(parameter, ShardedTensor) or hasattr(parameter, PIECE)


def _check_parameters(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            owner = getattr(parameter, TAKEN_BY, None)
            if owner is not None:
                raise BadInput(
                    f"{type(optimizer).__name__} was made before fully_shard: it holds a parameter "
                    f"of shape {list(parameter.shape)} that {owner} has taken and that is trained "
                    "no longer; make the optimizer after sharding, from module.parameters()"
                )


def _adopt_flat_state(optimizer: Optimizer) -> None:
    """Take over state of one dimension, as it was while pieces had one."""
    for parameter, state in optimizer.state.items():
        if not _is_piece(parameter):
            continue
        for key, value in state.items():
            if type(value) is not Tensor or value.ndim != 1:
                continue
            if isinstance(parameter, ShardedTensor) and value.shape == parameter.local.shape:
                state[key] = ShardedTensor(value, parameter.placement)
            elif value.shape != parameter.shape and value.numel() == parameter.numel():
                state[key] = value.view(parameter.shape)
