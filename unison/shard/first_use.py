"""What is settled before the first pass: the same model, not the same data, the same kernels."""

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter

from unison.shard.flat_group import FlatGroup
from unison.shard.guard import compare_across_ranks
from unison.shard.ranks import Ranks, checksum, same_on_every_rank
from unison.shard.unit import Unit


def check_same_model(units: list[Unit]) -> None:
    """Refuse ranks that hold different models or settings; a collective.

    Raises:
        BadInput: On every rank, naming what differs.
    """
    items: dict[str, object] = {}
    for unit in units:
        items[f"options of {unit.name}"] = unit.options
        for group in unit.groups:
            for slot in group.slots:
                items[f"{unit.name}: {slot.name}"] = (slot.shape, group.dtype, group.requires_grad)
    everyone = units[0].axes.all
    compare_across_ranks("the sharded model", items, everyone.group)
    _check_same_start(units, everyone)


def _check_same_start(units: list[Unit], everyone: Ranks) -> None:
    """Refuse ranks that each kept a part of another model, built from another seed."""
    starts = {
        f"initial values of {unit.name}: {slot.name}": value
        for unit in units
        for group in unit.groups
        for slot, value in zip(group.slots, group.unchanged_start(), strict=True)
    }
    device = next((group.device for unit in units for group in unit.groups), None)
    is_known = torch.tensor([float(None not in starts.values())], device=device)
    if everyone.sum_(is_known).item() == everyone.size:
        compare_across_ranks("the sharded model", starts, everyone.group)


def warn_of_same_data(ranks: Ranks, inputs: Any) -> None:
    """Warn if every rank was handed the very same batch; a collective.

    Ranks that all compute the same samples look like a run on a larger batch and are not one (the
    reference note 000 compared such a run with a single process).
    """
    tensors = [value for value in tree_iter(inputs) if isinstance(value, Tensor)]
    if ranks.size == 1 or not tensors:
        return
    total = torch.stack([checksum(value) for value in tensors]).sum(dim=0)
    # A rank may have no rows: it takes part all the same.
    if same_on_every_rank(ranks, total.to(tensors[0].device)) and int(total[0]) > 0:
        warnings.warn(
            f"all {ranks.size} ranks were fed the same batch, so that they repeat one another's "
            "work; feed the model from unison.deal(loader), or use a DistributedSampler",
            stacklevel=2,
        )


_NARROW = (torch.bfloat16, torch.float16)
_LARGE = 64  # sides of a product that oneDNN takes


def settle_kernels(units: list[Unit]) -> None:
    """Let torch decide before the first pass how it multiplies narrow numbers on this CPU.

    [Note: oneDNN] Where a CPU has no bf16, torch's first product in bfloat16 fails in oneDNN; torch
    then switches oneDNN off *for the rest of the process*, and products in float32 have other bits
    from there on. That must not happen in the middle of a pass, where it would depend on how many
    granules the rank has run before.
    """
    dtypes = {group.compute_dtype for unit in units for group in unit.groups if _is_on_cpu(group)}
    if torch.is_autocast_enabled("cpu"):
        dtypes.add(torch.get_autocast_dtype("cpu"))
    for dtype in dtypes & {*_NARROW}:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "mkldnn_matmul failed": that is what it is for
            multiply(torch.ones(_LARGE, _LARGE, dtype=dtype))


def multiply(x: Tensor) -> None:
    """Multiply a matrix with itself."""
    with torch.no_grad():
        torch.mm(x, x)


def _is_on_cpu(group: FlatGroup) -> bool:
    return group.device.type == "cpu"
