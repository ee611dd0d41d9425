"""How parameters lie on ranks: one adapter for each way, for private training and for K-FAC.

Who trains knows parameters by name. An adapter (`ParallelAdapter`, adapter.py) says what of each is
here, and does what the way of lying on ranks needs:

| file | way | what this rank holds | sums are |
|---|---|---|---|
| adapter.py, `ParallelAdapter` | one process, copies, DDP | everything | all-reduced in buckets |
| adapter.py, `Units` | `unison.fully_shard` | a run of elements | reduce-scattered per flat group |
| fsdp2.py | torch's own `fully_shard` | a run of rows | reduce-scattered per FSDP2 group |
| tensor_parallel.py | `parallelize_module` | a part along a dimension | added over the data axis |

What an adapter answers:

* *What is here?* `params`: a `ShardedParam` each, with its full shape and the elements that every
  place holds. `ShardedParam.gradient` and `write_gradients` read and write the local part.
* *Who trains together?* `everyone`; `ranks` hold other samples; `num_places` share one copy.
* *How does a capture see parameters?* `installed(captures)`, while the adapter is attached: for
  good (`attach`: private training, which keeps autograd from bringing gradients) or for a block
  (`observing`: K-FAC). Units and FSDP2 go on gathering and freeing around it.
* *How do the sums of ranks become one?* `add` for each pass, granule by granule, then `totals`.
  They are integers, so no order of additions shows.

* *Who else trains a parameter?* `find_shared`, of what trains privately and what takes curvature.

Beside the adapters: exchange.py (lists of tensors from rank to rank, sums that end on the owners of
a layer, which rows of a pass are which samples).

To add a way of lying on ranks: one file with one subclass, and one line in `adapter_class`.
"""

from torch import nn

from unison.parallel.adapter import (
    MakeSums,
    ParallelAdapter,
    ShardedParam,
    Units,
    curvatures,
    find_shared,
    private_trainings,
    write_gradients,
)
from unison.parallel.fsdp2 import FSDP2
from unison.parallel.tensor_parallel import TensorParallel
from unison.shard.sharded_tensor import fsdp2_modules
from unison.shard.unit import units_of
from unison.torch_internals import is_dtensor


def adapter_class(module: nn.Module) -> type[ParallelAdapter]:
    """Return which adapter takes a module, sharded or not."""
    if units_of(module):
        return Units
    if fsdp2_modules(module):
        return FSDP2
    if any(is_dtensor(parameter) for parameter in module.parameters()):
        return TensorParallel
    return ParallelAdapter


def adapter_of(module: nn.Module, *, is_ordered: bool = False) -> ParallelAdapter:
    """Make the adapter of a module; nothing of the module is changed yet.

    Args:
        module: The user's module, sharded or not.
        is_ordered: Whether sums must not depend on the number of ranks, for ways that can do
            either; sharded modules know.

    Raises:
        BadInput: Not all trainable parameters lie on ranks in the same way.
        UnsupportedOperation: Some lie in a way that is not known.
    """
    return adapter_class(module)(module, is_ordered=is_ordered)
