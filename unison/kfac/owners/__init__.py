"""Owners: who holds the parameters and gradients, and how ranks exchange what K-FAC needs.

K-FAC itself knows parameters by name and layers as whole matrices. One file per owner:

* `replicated`: every rank holds the whole module (one process, or several; DDP too).
* `units`: `unison.fully_shard`.
* `fsdp2`: torch's own `fully_shard`.

Beside them, what all owners share: `batches` (dealt batches and granules), `exchange` (gradients to
the layers' owners, steps back), `sums` (factors added up over ranks).
"""

from torch import nn

from unison.errors import UnsupportedOperation
from unison.kfac.owners.base import Held, Owner
from unison.kfac.owners.fsdp2 import FSDP2
from unison.kfac.owners.replicated import Replicated
from unison.kfac.owners.units import Units
from unison.shard.sharded_tensor import fsdp2_modules, is_dtensor
from unison.shard.unit import units_of

__all__ = ["FSDP2", "Held", "Owner", "Replicated", "Units", "owner_of"]


def owner_of(module: nn.Module) -> Owner:
    """Return the owner of a module's parameters.

    Raises:
        UnsupportedOperation: If its parameters are spread in a way that K-FAC does not know.
    """
    if units_of(module):
        return Units(module)
    if fsdp2_modules(module):
        return FSDP2(module)
    for name, parameter in module.named_parameters():
        if is_dtensor(parameter):
            raise UnsupportedOperation(
                f"{name} is cut for tensor parallelism, which K-FAC does not know yet; leave the "
                "module out of the parallel plan, or shard it with unison.fully_shard"
            )
    return Replicated(module)
