"""What ranks check together before the first pass: the same model, and not the same data."""

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter

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
