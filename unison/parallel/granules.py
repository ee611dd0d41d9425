"""Dealt batches: which rows of a pass are which samples, and the granules they come in."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unison.errors import BadInput
from unison.parallel.exchange import wire_device
from unison.rng import BatchDraws
from unison.rng.draw_mode import current_draws
from unison.shard.deal import BatchPlan, current_plan, without_plan
from unison.shard.granules import PerGranule, draws_of, num_granules_of, plan_of, split
from unison.shard.ranks import Ranks


@dataclass(frozen=True, eq=False)
class BatchRows:
    """The rows of one pass, cut as they are computed.

    Attributes:
        granules: Global number of each granule; None for a pass that comes whole.
        edges: Rank r holds the granules [edges[r], edges[r + 1]) of the logical batch.
        first_ids: Global number of each part's first row.
        is_real: Which rows of each part are samples [rows]; None if all are.
    """

    granules: tuple[int, ...] | None
    edges: tuple[int, ...]
    first_ids: tuple[int, ...]
    is_real: tuple[Tensor | None, ...]


def rows_of(inputs: Any, num_rows: int, ranks: Ranks, num_before: int) -> tuple[BatchRows, int]:
    """Say which rows a pass has; a collective where batches are not dealt.

    Args:
        inputs: What the module was called with.
        num_rows: Rows of this rank, or of one granule.
        ranks: Everyone; without a plan, their rows are numbered rank after rank.
        num_before: Rows of all ranks in earlier batches of the same step.

    Returns:
        The rows, and `num_before` for the next pass.

    Raises:
        BadInput: If the batch is in granules and no plan says which.
    """
    num_granules, plan = num_granules_of(inputs), plan_of(inputs) or current_plan()
    if num_granules:
        if plan is None or len(plan.granule_ids) != num_granules:
            raise BadInput(
                f"expected the plan of a batch of {num_granules} granules, found another one or "
                "none; call the model with the batch that unison.deal handed out last"
            )
        is_real = (plan.sample_ids >= 0).split(plan.granule)
        first = tuple(num_before + granule * plan.granule for granule in plan.granule_ids)
        return BatchRows(plan.granule_ids, plan.edges, first, tuple(is_real)), _after(
            plan, num_before
        )
    if plan is not None and not plan.is_granular and len(plan.sample_ids) == num_rows:
        real, first = plan.sample_ids >= 0, num_before + plan.granule_ids[0] * plan.granule
        return BatchRows(None, (), (first,), (real,)), _after(plan, num_before)
    counts = torch.zeros(ranks.size, dtype=torch.int64)
    counts[ranks.rank] = num_rows
    if ranks.size > 1:
        counts = ranks.sum_(counts.to(wire_device(ranks))).cpu()
    before = num_before + int(counts[: ranks.rank].sum())
    return BatchRows(None, (), (before,), (None,)), num_before + int(counts.sum())


def draws_of_pass(inputs: Any) -> BatchDraws | None:
    """The random numbers that a pass over these inputs draws; None if they are torch's own."""
    num_granules = num_granules_of(inputs)
    return draws_of(plan_of(inputs), num_granules) if num_granules else current_draws()


def _after(plan: BatchPlan, num_before: int) -> int:
    """Rows in batches that are complete; the passes of one batch number its rows themselves."""
    return num_before + plan.num_samples if plan.closes_logical_batch else num_before


def parts_of(value: Any, num_parts: int) -> list[Any]:
    """A nested value cut into its granules; whole if there is one part and no granules."""
    if num_granules_of(value) == 0 and num_parts == 1:
        return [without_plan(value)]
    return split(value, num_parts)


def joined(parts: Sequence[Tensor], like: Tensor) -> Tensor:
    """The inverse of `parts_of` for a tensor."""
    return PerGranule.of(list(parts)) if isinstance(like, PerGranule) else parts[0]


def tensors_of(value: Tensor) -> list[Tensor]:
    """The tensors of a value, one per granule."""
    return value.parts if isinstance(value, PerGranule) else [without_plan(value)]


def requires_grad(value: Any) -> bool:
    """Whether a value is a tensor that gradients reach; of granules, whether the granules are."""
    return isinstance(value, Tensor) and all(each.requires_grad for each in tensors_of(value))
