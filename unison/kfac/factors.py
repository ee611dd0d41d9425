"""Sums over tokens that Kronecker factors and diagonals are made of: pure functions of records.

[Note: sums, not means] Everything here is a *sum* over this rank's tokens, with the number of them
beside it. A factor is the sum over all ranks divided by a number of all ranks, once, where it is
used: `A = Σ ãã' / T` by the tokens that a layer saw, `G = Σ gg' / N` by the labels that the loss is
made of, so that A ⊗ G is the mean curvature of a label. In a language model N = T, in a convolution
T is larger. Means of means would weigh a rank, or a micro-batch, with few tokens as much as one
with many.

[Note: expand and reduce] Tokens of one sample share a weight. `expand` counts each as a sample of
its own, which is exact for a loss per token behind linear layers; `reduce` averages a sample's
inputs and adds up its gradients first, which is exact where tokens are averaged before the loss.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from unison.errors import BadInput
from unison.kfac import device
from unison.ops import Dense, Lookup, Product, Record, per_sample
from unison.ops.records import add_rows_

MOST_AT_ONCE = 1 << 24  # elements of per-sample gradients that are held


class KroneckerSums(NamedTuple):
    """Sums of one use of a matrix.

    Attributes:
        a: Σ ãã' [d_in, d_in], with a row and column of the bias where there is one; None if it was
            not asked for.
        g: Σ gg' [d_out, d_out]; None if it was not asked for.
        num_tokens: How many were added, a scalar.
    """

    a: Tensor | None
    g: Tensor | None
    num_tokens: Tensor


def token_weights(mask: Tensor | None, num_tokens: int, name: str) -> Tensor | None:
    """Which tokens of a use count [batch, num_tokens], from which tokens of the loss do.

    Args:
        mask: Of the tokens that the loss is made of [batch, tokens], bool; None if all count.
        num_tokens: How many the use has. As many as the loss has: the same ones. One, or another
            number while a sample's tokens all count or none does: the sample's.
        name: The parameter, for the error.

    Raises:
        BadInput: If it cannot be told which are which.
    """
    if mask is None or mask.shape[1] == num_tokens:
        return mask
    any_of, all_of = mask.any(dim=1), mask.all(dim=1)
    if num_tokens != 1 and mask.shape[1] != 1 and not torch.equal(any_of, all_of):
        raise BadInput(
            f"{name} is used for {num_tokens} tokens per sample, and the mask has "
            f"{mask.shape[1]}: it cannot be told which of them count. Pass kfac.sample the logits "
            "of all tokens, with mask 0 where there is no label, rather than a part of them"
        )
    return any_of[:, None].expand(-1, num_tokens)


def kronecker_sums(
    record: Product,
    weights: Tensor | None,
    *,
    sharing: str,
    has_bias: bool,
    wants_a: bool = True,
    wants_g: bool = True,
) -> KroneckerSums:
    """Sums of ãã' and gg' over the tokens of one use.

    Args:
        record: The use.
        weights: Which tokens count [batch, tokens], bool; None if all do.
        sharing: `"expand"` or `"reduce"`.
        has_bias: Whether ã ends with a 1 for the bias.
        wants_a: Whether to make the sum of ãã'.
        wants_g: Whether to make the sum of gg'.
    """
    # Only what is asked for: the other side may be as large, and is not read.
    widened = _wide_or_half if sharing == "expand" else _wide
    a = _counted(widened(record.a), weights) if wants_a else None  # [batch, tokens, d_in]
    g = _counted(widened(record.g), weights) if wants_g else None  # [batch, tokens, d_out]
    batch, tokens = record.g.shape[:2]
    like = record.g.new_zeros((), dtype=torch.promote_types(record.g.dtype, torch.float32))
    ones = like.new_ones(batch, tokens) if weights is None else weights.to(like.dtype)
    if sharing == "reduce":
        lengths = ones.sum(dim=1)  # [batch]
        ones = (lengths > 0).to(like.dtype)[:, None]
        a = None if a is None else a.sum(dim=1, keepdim=True) / lengths.clamp(min=1)[:, None, None]
        g = None if g is None else g.sum(dim=1, keepdim=True)
    if a is not None and has_bias:
        a = torch.cat([a, ones.unsqueeze(-1).to(a.dtype)], dim=-1)
    return KroneckerSums(_gram(a), _gram(g), ones.sum())


def diagonal_sums(records: Sequence[Record], is_counted: Tensor | None) -> Tensor:
    """Σ_b gradient_b², over samples: what a diagonal is made of [*shape of the parameter].

    Exact: a sample's gradient is the sum over all uses of the parameter, squared after that.

    Args:
        records: All uses of one parameter in a pass.
        is_counted: Which samples count [batch], bool; None if all do.
    """
    first = records[0]
    if len(records) == 1 and isinstance(first, Lookup):
        return _squared_rows(first, is_counted)
    batch = _batch(first)
    total: Tensor | None = None
    numel = torch.Size(first.shape).numel()
    at_once = max(1, MOST_AT_ONCE // max(1, numel))
    for low in range(0, max(batch, 1), at_once):
        part = sum(_multiplied(_samples(each, low, low + at_once)) for each in records)
        assert isinstance(part, Tensor)
        if is_counted is not None:
            keep = is_counted[low : low + at_once].view(-1, *([1] * len(first.shape)))
            part = torch.where(keep, part, 0.0)
        squares = part.square().sum(dim=0)
        total = squares if total is None else total.add_(squares)
    assert total is not None
    return total


def _squared_rows(record: Lookup, is_counted: Tensor | None) -> Tensor:
    """The same for one lookup, without a gradient of the whole table per sample."""
    batch, tokens, features = record.g.shape
    rows = record.shape[0]
    ids = record.ids if is_counted is None else torch.where(is_counted[:, None], record.ids, -1)
    sample = torch.arange(batch, device=ids.device)[:, None].expand(-1, tokens)
    keep = ids >= 0
    # Tokens of one sample with one id are one row of the sample's gradient.
    keys, place = torch.unique((sample * rows + ids)[keep], return_inverse=True)
    g = _wide(record.g)[keep]  # [kept, features]
    of_key = add_rows_(g.new_zeros(len(keys), features), place, g)
    table = g.new_zeros(rows, features)
    return add_rows_(table, keys % rows, of_key.square()).view(record.shape)


def _counted(value: Tensor, weights: Tensor | None) -> Tensor:
    """Zeros for tokens that do not count; selected, since 0 · NaN is NaN."""
    return value if weights is None else torch.where(weights.unsqueeze(-1), value, 0.0)


def _gram(value: Tensor | None) -> Tensor | None:  # [batch, tokens, d] -> [d, d]
    if value is None:
        return None
    rows = value.reshape(-1, value.shape[-1])
    if not device.is_half(rows):
        return rows.T @ rows
    n = rows.shape[1]  # odd for most layers with a bias
    rows = F.pad(rows, (0, device.padding_of(n, rows)))
    return device.wide_product(rows.T, rows)[:n, :n]


def _multiplied(record: Record) -> Tensor:
    """The per-sample gradients [batch, *shape] of a record, float32 at least."""
    if not isinstance(record, Product) or not device.is_half(record.a):
        return per_sample(record)
    left, right = (record.a, record.g) if record.is_transposed else (record.g, record.a)
    found = device.wide_product(left.mT, right.to(left.dtype))
    return found.reshape(len(found), *record.shape)


def _batch(record: Record) -> int:
    return len(record.value) if isinstance(record, Dense) else len(record.g)


def _samples(record: Record, low: int, high: int) -> Record:
    match record:
        case Dense():
            return Dense(record.value[low:high])
        case Lookup():
            return Lookup(record.ids[low:high], record.g[low:high], record.shape)
        case Product():
            a, g = record.a[low:high], record.g[low:high]
            return Product(a, g, record.is_transposed, record.shape)
    raise AssertionError(f"no rule for {record!r}")


def _wide_or_half(value: Tensor) -> Tensor:
    return value if device.is_half(value) else _wide(value)


def _wide(value: Tensor) -> Tensor:
    return value.to(torch.promote_types(value.dtype, torch.float32))
