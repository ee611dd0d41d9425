"""Optimizers on shards: groups by original name and shape, and those that cannot work."""

from collections.abc import Iterable
from fnmatch import fnmatch
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from unison import check
from unison.errors import UnsupportedOperation
from unison.names import canonical_name
from unison.shard.dtensors import show_shards
from unison.shard.flat_group import ORIGINAL_SHAPE
from unison.shard.unit import units_of

# They take norms, factors or products over a whole parameter, of which a rank holds a part.
WHOLE_MATRIX = {
    "Adafactor": "row and column means of the whole matrix",
    "LAMB": "the norm of the whole parameter",
    "Lamb": "the norm of the whole parameter",
    "LARS": "the norm of the whole parameter",
    "LBFGS": "inner products over all parameters",
    "Muon": "an orthogonalisation of the whole matrix",
    "SOAP": "eigenvectors of the whole matrix's factors",
    "Shampoo": "roots of the whole matrix's factors",
}


def param_groups(
    module: nn.Module, weight_decay: float, no_decay: Iterable[str] = ()
) -> list[dict[str, Any]]:
    """Optimizer groups with and without weight decay, by *original* name and shape.

    Shards are one-dimensional, so `p.ndim` no longer tells a matrix from a bias; this does.

    Args:
        module: The model, sharded (by unison or by torch's own FSDP2) or not.
        weight_decay: Decay of parameters with two or more dimensions.
        no_decay: Patterns of names (`"*embeddings*"`) that are not decayed either.

    Returns:
        Two groups for a torch optimizer: decayed, and not.
    """
    check.not_negative(weight_decay=weight_decay)
    show_shards(module)
    num_dims = {
        id(piece): len(slot.shape)
        for unit in units_of(module)
        for group in unit.groups
        for slot, piece in zip(group.slots, group.pieces, strict=True)
    }
    patterns = list(no_decay)
    decayed, others = [], []
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        is_matrix = num_dims.get(id(parameter), parameter.ndim) >= 2
        is_exempt = any(fnmatch(canonical_name(name), pattern) for pattern in patterns)
        (decayed if is_matrix and not is_exempt else others).append(parameter)
    return [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]


_is_watching = False


def watch_optimizers() -> None:
    """Refuse, at their first step, optimizers that would be silently wrong on shards."""
    global _is_watching
    if not _is_watching:
        register_optimizer_step_pre_hook(_refuse_whole_matrix)
        _is_watching = True


def _refuse_whole_matrix(optimizer: Optimizer, *_: Any) -> None:
    needs = next(
        (WHOLE_MATRIX[c.__name__] for c in type(optimizer).__mro__ if c.__name__ in WHOLE_MATRIX),
        None,
    )
    if needs is None:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if isinstance(parameter, torch.Tensor) and hasattr(parameter, ORIGINAL_SHAPE):
                raise UnsupportedOperation(
                    f"{type(optimizer).__name__} needs {needs}, and a rank holds only a part; use "
                    "an elementwise optimizer (AdamW, SGD, Adam, RMSprop), or leave the module "
                    "unsharded"
                )
