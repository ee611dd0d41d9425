"""The rows of a check: some of a batch, and others in their place.

Rows of a probe must be distinct, or nothing could be told from them; what stands in the place of
others is of the same kind (integers that were there, values that the place can have), so that any
model that takes the batch takes it too.
"""

from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

NUM_PROBED = 4  # rows that go through the model: one kept, one replaced, and both again


class Replacement(Enum):
    """What stands in the place of the rows that are not kept."""

    VALUES = "values far from theirs"
    ROWS = "other rows of the batch"
    COPIES = "copies of one row"
    OUTLIER = "one row of far values"
    ALIKE = "copies of one row of far values"
    OPPOSITE = "copies of one row of opposite values"


def probe_rows(batch: Any, num_rows: int = NUM_PROBED, seed: int = 0) -> Any:
    """Some rows of a batch, the first and the last among them; repeated ones are made others.

    Floating-point values are shuffled within the row and scaled a little, integers shuffled within
    the values that are there, so that they stay of their kind.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    size = len(tensors[0])
    chosen = torch.linspace(0, size - 1, min(size, num_rows)).round().long()
    if seed and size > num_rows:  # another time, others
        inner = 1 + torch.randperm(size - 2, generator=generator)[: num_rows - 2]
        chosen = torch.cat([torch.tensor([0]), inner.sort().values, torch.tensor([size - 1])])
    chosen = chosen[torch.arange(num_rows) % len(chosen)]
    keys = torch.cat([_as_key(leaf[chosen.to(leaf.device)]) for leaf in tensors], 1)
    repeated = torch.tensor(
        [any(torch.equal(key, before) for before in keys[:row]) for row, key in enumerate(keys)]
    )

    def rows(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        found = leaf[chosen.to(leaf.device)]
        if not repeated.any():
            return found
        is_repeated = _rowwise(repeated, found)
        return torch.where(is_repeated, _shuffled(found, generator), found)

    return tree_map(rows, batch)


def _as_key(rows: Tensor) -> Tensor:
    """The values of rows, to be compared [rows, values]."""
    rows = torch.view_as_real(rows) if rows.is_complex() else rows
    return rows.detach().reshape(len(rows), -1).cpu().double().nan_to_num()


def _shuffled(x: Tensor, generator: torch.Generator) -> Tensor:
    """Rows like these: their values in another order, and a little off where that can be."""
    flat = x.reshape(len(x), -1)
    order = torch.rand(flat.shape, generator=generator).argsort(1).to(x.device)
    found = flat.gather(1, order) if flat.shape[1] else flat
    if x.dtype == torch.bool:
        return (torch.rand(x.shape, generator=generator) < 0.5).to(x.device)
    is_constant = x.numel() == 0 or bool((x == x.flatten()[0]).all())
    if x.is_floating_point():
        if is_constant:
            noise = torch.rand(x.shape, generator=generator).to(x.device, x.dtype)
            return x + noise * (1 + x.abs())
        factor = 0.5 + 0.5 * torch.rand(flat.shape, generator=generator)
        return (found * factor.to(x.device, x.dtype)).view_as(x)
    if is_constant and x.numel() and int(x.flatten()[0]) > 0:
        most = int(x.flatten()[0])  # from 1 on: it may be a length
        return torch.randint(1, most + 1, x.shape, generator=generator).to(x.device, x.dtype)
    return found.view_as(x)


def _rowwise(flags: Tensor, like: Tensor) -> Tensor:
    return flags.view(-1, *[1] * (like.ndim - 1)).to(like.device)


def are_distinct(batch: Any) -> bool:
    """Whether no two rows of a batch are equal."""
    rows = torch.cat([_as_key(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)], 1)
    return len(torch.unique(rows, dim=0)) == len(rows)


def with_others(
    batch: Any,
    kept: Tensor,
    how: Replacement,
    largest_power: float,
    generator: torch.Generator,
    is_pinned: bool,
) -> Any:
    """The batch with other rows beside the kept ones.

    Args:
        batch: The rows.
        kept: Which stay as they are [batch].
        how: What stands in the place of the others.
        largest_power: Far values are up to as many powers of ten away; below 1, not at all.
        generator: Draws.
        is_pinned: Whether negative integers stay where they are.
    """
    size = len(kept)
    # Random numbers that are the same for all tensors: rows stay together.
    source = torch.randint(1, size, (size,), generator=generator).add_(torch.arange(size)) % size
    first_kept = int(kept.nonzero()[0])
    powers = torch.rand(size, generator=generator) * largest_power
    powers = powers.round() if largest_power >= 1 else torch.zeros(size)
    if how is Replacement.OUTLIER:
        powers.fill_(largest_power if largest_power >= 1 else 0.0)

    def rows(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if how is Replacement.COPIES:
            other = leaf[first_kept].expand_as(leaf)
        elif how in (Replacement.ALIKE, Replacement.OPPOSITE):
            # Far enough for any threshold; of what has no sign, another row's.
            sign = 1 if how is Replacement.ALIKE else -1
            is_signed = leaf.is_floating_point() or leaf.is_complex()
            row = leaf[first_kept - (not is_signed and sign < 0)]
            other = (sign * 10 ** (largest_power / 2) * row if is_signed else row).expand_as(leaf)
        elif how is Replacement.ROWS:
            other = leaf[source.to(leaf.device)]
        else:
            other = _far(leaf, powers, how, generator)
        if is_pinned and not leaf.is_floating_point() and leaf.dtype != torch.bool:
            valid = leaf[leaf >= 0]
            if valid.numel():
                drawn = torch.randint(valid.numel(), leaf.shape, generator=generator)
                other = torch.where(other < 0, valid[drawn.to(leaf.device)], other)
            other = torch.where(leaf < 0, leaf, other)
        return torch.where(_rowwise(kept, leaf), leaf, other)

    return tree_map(rows, batch)


def _far(leaf: Tensor, powers: Tensor, how: Replacement, generator: torch.Generator) -> Tensor:
    """Values that stood in the same place of some row: each is one that the place can have."""
    if leaf.dtype == torch.bool:
        if powers.any():
            return (torch.rand(leaf.shape, generator=generator) < 0.5).to(leaf.device)
        return leaf.roll(1, 0)
    if how is Replacement.OUTLIER and not leaf.is_floating_point() and powers.any():
        return leaf.amax().expand_as(leaf) if leaf.numel() else leaf
    drawn = torch.randint(len(leaf), leaf.shape, generator=generator).to(leaf.device)
    other = leaf.gather(0, drawn) if leaf.numel() else leaf
    if leaf.is_floating_point() or leaf.is_complex():
        other = other * _rowwise(10.0**powers, leaf).to(leaf.dtype)
    return other
