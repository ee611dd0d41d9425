"""Owners: who holds the parameters, and how the clipped sums of ranks become one.

Clipping writes the sums of one rank and does not know who owns the parameters. One file per owner:

* `replicated`: every rank holds the whole module (one process, or several; DDP too).
* `units`: `unison.fully_shard`.
* `fsdp2`: torch's own `fully_shard`.
* `tensor_parallel`: torch's own `parallelize_module`, alone or beside a data axis.
"""

from collections.abc import Iterator

from torch import nn

from unison.privacy.owners.base import Owned, Owner
from unison.privacy.owners.fsdp2 import FSDP2
from unison.privacy.owners.replicated import Replicated
from unison.privacy.owners.tensor_parallel import TensorParallel, is_tensor_parallel
from unison.privacy.owners.units import Units
from unison.shard.sharded_tensor import fsdp2_modules
from unison.shard.unit import units_of

__all__ = [
    "FSDP2",
    "Owned",
    "Owner",
    "Replicated",
    "TensorParallel",
    "Units",
    "full_shapes",
    "owner_of",
]


def owner_of(module: nn.Module, *, is_ordered: bool) -> Owner:
    """Return the owner of a module's parameters.

    Args:
        module: The user's module, sharded or not.
        is_ordered: Whether sums must not depend on the number of ranks, for owners that can do
            either; sharded modules know.
    """
    if units_of(module):
        return Units(module)
    if fsdp2_modules(module):
        return FSDP2(module, is_ordered=is_ordered)
    if is_tensor_parallel(module):
        return TensorParallel(module, is_ordered=is_ordered)
    return Replicated(module, is_ordered=is_ordered)


def full_shapes(module: nn.Module) -> Iterator[tuple[int, ...]]:
    """The shapes of the trainable parameters as they are without sharding."""
    for parameter in module.parameters():
        if parameter.requires_grad:
            yield tuple(parameter.shape)
