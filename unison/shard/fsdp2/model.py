"""The ordered reducer on a model under torch's own FSDP2.

[Note: how FSDP2 is made to keep the order] FSDP2 gathers, frees and reduces as ever. What changes:

* Each module's forward runs granule by granule, on leaves of its own for every granule that share
  the memory of FSDP2's full parameters (module.py, parameter.py).
* Their gradients are added in the canonical tree. When FSDP2 asks for a module's gradients, it
  gets this rank's subtree as the gradient it would have accumulated itself.
* FSDP2 then calls our reduce-scatter, which finishes the tree over ranks (exchange.py).
* FSDP2's hooks see the parts of per-granule values (parts.py).

A gradient under FSDP2 is *one* tensor per parameter and rank, so a rank's granules must form one
subtree. They do when the number of ranks is a power of two and each has as many granules, again a
power of two. Our own engine sends several subtrees and takes any number.

[Note: used flags] A parameter that no rank used must end with no gradient, as it would on one
process. A rank that did not use one sends zeros, so that all ranks exchange the same shapes, and
at the end of the backward pass the ranks add up one flag per parameter. A rank reads them only if
it sent zeros itself.
"""

import itertools
from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import nn

from unison.errors import BadInput
from unison.shard.deal import BatchPlan, current_plan, take_mean_was_used
from unison.shard.engine import NO_TASK, backward_task
from unison.shard.fsdp2.module import OrderedModule
from unison.shard.ranks import Ranks
from unison.shard.tree import aligned_levels


class OrderedModel:
    """What the FSDP2 modules of one model share: the batch and the end of the backward pass.

    Attributes:
        ranks: The ranks of the model's mesh.
        modules: The model's FSDP2 modules, parents first; set by whoever attaches them.
        undo: Gives back the model as it was when closed.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.modules: list[OrderedModule] = []
        self.undo = ExitStack()
        self._plan: BatchPlan | None = None
        self._levels: list[int] = []

    @property
    def closes(self) -> bool:
        """Whether the running pass is the last of the logical batch."""
        return self._plan is not None and self._plan.closes_logical_batch

    def levels(self) -> Sequence[int]:
        """Each rank's level in the tree: it holds the subtree of 2**level granules."""
        return self._levels

    def granules(self, num_granules: int) -> Sequence[int]:
        """Global numbers of the granules of the running pass.

        Raises:
            BadInput: If there is no dealt batch of as many granules, or it does not suit FSDP2.
        """
        # A recompute in the backward pass belongs to the batch of the forward pass, whatever the
        # loader has handed out since.
        plan = self._plan if backward_task() != NO_TASK else current_plan()
        if plan is None or len(plan.granule_ids) != num_granules:
            found = "no dealt batch" if plan is None else f"a plan of {len(plan.granule_ids)}"
            raise BadInput(
                f"expected the plan of a batch of {num_granules} granules, found {found}"
            )
        if plan is not self._plan:
            self._begin_pass(plan)
        return plan.granule_ids

    def _begin_pass(self, plan: BatchPlan) -> None:
        levels = one_subtree_per_rank(plan, self.ranks)
        self._plan, self._levels = plan, levels
        low, high = plan.edges[plan.rank], plan.edges[plan.rank + 1]
        is_first = low == high or plan.granule_ids[0] == low
        for module in self.modules:
            module.begin_pass()
            for parameter in module.parameters if is_first else []:
                parameter.begin_batch(low, high)

    def finish_backward(self) -> None:
        """Sum what is left; FSDP2 calls this at the end of a backward pass, before its own end."""
        take_mean_was_used()  # the sum is never divided, so a batch_mean is always right
        for module in reversed(self.modules):
            module.finish_backward()
        if self.closes:
            self._forget_unused()

    @torch.no_grad()
    def _forget_unused(self) -> None:
        """Leave parameters that no rank used without a gradient; see [Note: used flags]."""
        sent = [parameter for module in self.modules for parameter in module.take_sent()]
        if not sent:
            return
        used = [float(parameter.was_used) for parameter in sent]
        flags = torch.tensor(used, device=sent[0].full.device)
        self.ranks.sum_(flags)
        if all(used):
            return
        for parameter, flag in zip(sent, flags.tolist(), strict=True):
            if flag == 0:
                parameter.forget_unused()


def one_subtree_per_rank(plan: BatchPlan, ranks: Ranks) -> list[int]:
    """The level of every rank's one subtree of a batch.

    Raises:
        BadInput: If the batch was dealt to other ranks, or some rank's granules are not one
            subtree.
    """
    size = len(plan.edges) - 1
    if (plan.rank, size) != (ranks.rank, ranks.size):
        raise BadInput(
            f"the batch was dealt to rank {plan.rank} of {size}, but the model lies on rank "
            f"{ranks.rank} of {ranks.size}; pass the model's mesh to unison.deal(loader, mesh=...)"
        )
    levels = [aligned_levels(low, high) for low, high in itertools.pairwise(plan.edges)]
    if size == 1 or plan.num_granules == 0:
        return [0] * size  # nothing to exchange
    if any(len(each) != 1 for each in levels):
        raise BadInput(
            f"a batch of {plan.num_samples} samples in granules of {plan.granule} makes "
            f"{plan.num_granules} granules, which {size} ranks under FSDP2 cannot sum in order: "
            f"each needs 1, 2, 4, 8, ... of them. Make the batch {size} * {plan.granule} * a power "
            "of two, or shard with unison.fully_shard(reducer='ordered'), which takes any batch"
        )
    return [level for (level,) in levels]


def ordered_model_of(module: nn.Module) -> OrderedModel | None:
    """What `use_ordered_reduction` attached to a model, if anything."""
    return module.__dict__.get(ATTRIBUTE)


ATTRIBUTE = "_unison_ordered_model"  # on the root module
