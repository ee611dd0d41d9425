"""Whether a model's pass depends on nothing but its parameters and the samples.

The same bits on any number of ranks need that. Here it is tried out in one process: the samples are
computed as one rank would (one pass, one granule after the other) and as many ranks would (a pass
of its own for each granule, on a copy of the model of its own, the last one first).
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from unison import check
from unison.errors import BadInput, UnsupportedOperation
from unison.shard import PerGranule, auto_shard, batch_mean, deal, units_of

Loss = Callable[[Any, Any], Tensor]
"""(output, batch) -> one loss per sample [samples]."""


@dataclass(frozen=True)
class Purity:
    """What `purity` found.

    Attributes:
        reasons: Why the pass is not pure, one sentence each; empty if it is.
    """

    reasons: tuple[str, ...]

    @property
    def is_pure(self) -> bool:
        """Whether the pass has the same bits however the samples are cut."""
        return not self.reasons

    def __str__(self) -> str:
        if self.is_pure:
            return "pure: the same bits in one pass and in one pass per granule"
        return "not pure:\n" + "\n".join(f"  {reason}" for reason in self.reasons)


def purity(model: nn.Module, batch: Any, *, granule: int = 1, loss: Loss | None = None) -> Purity:
    """Try out whether a model's pass has the same bits however a batch is cut over ranks.

    The model itself is not run and not changed: copies are.

    Args:
        model: Any module; in training mode, if that is how it will run. Sharded or not.
        batch: A tensor, or a tuple (the model's arguments) or dict (keyword arguments) of tensors,
            with samples along dimension 0. Two granules at least, or nothing can be told.
        granule: Samples per granule.
        loss: What is trained: one loss per sample, of the output and the batch. By default the sum
            of each sample's floating-point outputs.

    Returns:
        What differs: outputs, gradients, buffers; or what was refused.

    Raises:
        BadInput: If the process is one of several ranks, or the batch has a single granule.
    """
    check.positive(granule=granule)
    if dist.is_initialized() and dist.get_world_size() > 1:
        raise BadInput("purity looks at one process; call it before the ranks are launched")
    rows = next((len(each) for each in tree_leaves(batch) if isinstance(each, Tensor)), 0)
    if -(-rows // granule) < 2:
        raise BadInput(
            f"expected a batch of two granules or more, found {rows} samples and {granule=}"
        )
    loss = loss or _sum_of_outputs
    try:
        first, second = _copy(model), _copy(model)
        (whole,) = deal([batch], granule=granule)
        together = _run(first, whole, loss)
        cut = list(deal([batch], granule=granule, micro_batch=granule))
        apart = [_run(_copy(model), part, loss)[0] for part in reversed(cut)][::-1]
        for part in list(deal([batch], granule=granule, micro_batch=granule)):
            _run(second, part, loss)
    except UnsupportedOperation as error:
        return Purity((str(error),))
    reasons = [
        f"granule {index} has other outputs after the granules before it than alone on a "
        "model of its own: something goes from one call of the model to the next"
        for index, (a, b) in enumerate(zip(together, apart, strict=True))
        if not all(map(_are_equal, a, b))
    ]
    one, other = (
        {f"gradient of {name}": each.grad for name, each in model.named_parameters()}
        | {f"buffer {name}": each for name, each in model.named_buffers()}
        for model in (first, second)
    )
    reasons += [
        f"the {name} depends on how granules are cut into passes"
        for name in one
        if not _are_equal(one[name], other[name])
    ]
    return Purity(tuple(reasons))


def _copy(model: nn.Module) -> nn.Module:
    """A copy of the model with ordered units."""
    model = copy.deepcopy(model)
    model.zero_grad()
    if not units_of(model):
        auto_shard(model, reducer="ordered", gradient_divisor=1)
    return model


def _run(model: nn.Module, rows: Any, loss: Loss) -> list[list[Tensor]]:
    """Run one pass, forward and backward; returns the tensors of each granule's output."""
    if isinstance(rows, Mapping):
        output = model(**rows)
    else:
        output = model(*rows) if isinstance(rows, tuple | list) else model(rows)
    batch_mean(loss(output, rows)).backward()
    found = [each for each in tree_leaves(output) if isinstance(each, PerGranule)]
    return [list(each) for each in zip(*(each.parts for each in found), strict=True)]


def _are_equal(first: Tensor | None, second: Tensor | None) -> bool:
    if first is None or second is None:
        return first is second
    return torch.equal(first.detach(), second.detach())


def _sum_of_outputs(output: Any, rows: Any) -> Tensor:  # [samples]
    found = [
        each.flatten(1).sum(dim=1) if each.dim() > 1 else each
        for each in tree_leaves(output)
        if isinstance(each, PerGranule) and each.is_floating_point() and each.dim() > 0
    ]
    if not found:
        raise UnsupportedOperation(
            "the model's output has no floating-point value per sample; pass loss= to purity"
        )
    return torch.stack(found).sum(dim=0)
