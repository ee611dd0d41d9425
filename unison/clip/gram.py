"""Inner products of per-sample gradients, from records: no per-sample gradient is ever formed.

‖Σ_uses G‖² = Σ_uses ‖G‖² + 2 Σ_pairs ⟨G, G'⟩, and each inner product has a form that is linear in
the size of the records:

* Product and Product: Σ_ts ⟨left_t, left_s⟩⟨right_t, right_s⟩
* Lookup and Lookup: Σ_rows ‖Σ_{t: id_t = row} g_t‖²
* Lookup and Product: Σ_ts left_s[id_t] ⟨right_s, g_t⟩
* Dense V and Product: Σ_t left_tᵀ V right_t
* Dense V and Lookup: Σ_t ⟨V[id_t], g_t⟩
* Dense and Dense: their inner product

All sums are float64, and that is not a luxury: where tokens cancel, n² is a small difference of
numbers of size S² (see bounds.py), and a float32 sum would leave an error of 2⁻¹²·S in n.
Every function takes a slice of the batch small enough for float64 tiles; all return [batch].
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from unison.clip.matrix import (
    ROWS_PER_TILE,
    TOKENS_PER_TILE,
    check_records,
    factors,
    matrix_shape,
    num_per_tile,
    num_terms,
    plain_arithmetic,
    spans,
    take,
    tensors_of,
)
from unison.ops import Dense, Lookup, Product, Record
from unison.ops.records import add_rows_

_FEATURES_PER_TILE = 4096


def gram_squared_norms(records: Sequence[Record]) -> Tensor:
    """Return ‖Σ_uses gradient_b‖² by inner products of tokens: [batch], float64.

    Only the lower triangle of token tiles is computed; tiles off the diagonal count twice. Extra
    memory is a few tiles, whatever the number of tokens.
    """
    batch = check_records(records)
    features = sum(min(size, _FEATURES_PER_TILE) for size in matrix_shape(records))
    device = tensors_of(records[0])[0].device
    total = torch.zeros(batch, dtype=torch.float64, device=device)
    tile = min(TOKENS_PER_TILE, max(num_terms(record) for record in records))
    bytes_per_sample = 16 * tile * (features + tile)  # two float64 tiles of each kind
    with plain_arithmetic(device):
        for samples in spans(batch, num_per_tile(bytes_per_sample, device)):
            total[samples] = _squared_norms([take(record, samples) for record in records])
    return total


def _squared_norms(records: Sequence[Record]) -> Tensor:  # [batch]
    products = [record for record in records if isinstance(record, Product)]
    lookups = [record for record in records if isinstance(record, Lookup)]
    denses = [_as_matrix(record, records) for record in records if isinstance(record, Dense)]
    parts = []
    if products:
        parts.append(_of_products(products))
    if lookups:
        parts.append(lookup_squared_norms(lookups))
    if denses:
        parts.append(_of_denses(denses))
    parts += [2 * _lookup_product(lookup, p) for lookup in lookups for p in products]
    parts += [2 * _dense_product(dense, p) for dense in denses for p in products]
    parts += [2 * _dense_lookup(dense, lookup) for dense in denses for lookup in lookups]
    return torch.stack(parts).sum(0)


def _of_products(products: Sequence[Product]) -> Tensor:  # [batch]
    """Return ‖Σ_t left_t right_tᵀ‖² over the tokens of all products, joined on the token axis."""
    tiles = [
        (left[:, tokens], right[:, tokens])
        for left, right in map(factors, products)
        for tokens in spans(left.shape[1], TOKENS_PER_TILE)
    ]
    total = products[0].a.new_zeros(len(products[0].a), dtype=torch.float64)
    for i, (left, right) in enumerate(tiles):
        for j, (other_left, other_right) in enumerate(tiles[: i + 1]):
            gram = _inner_products(left, other_left)  # [batch, tile, other tile]
            gram.mul_(_inner_products(right, other_right))
            total += (1 if i == j else 2) * gram.sum(-1).sum(-1)
    return total


def _inner_products(x: Tensor, y: Tensor) -> Tensor:
    """Return ⟨x_t, y_s⟩ of x [batch, t, features] and y [batch, s, features]: [batch, t, s]."""
    gram = x.new_zeros(len(x), x.shape[1], y.shape[1], dtype=torch.float64)
    for part in spans(x.shape[2], _FEATURES_PER_TILE):
        gram.baddbmm_(x[..., part].double(), y[..., part].double().mT)
    return gram


def lookup_squared_norms(lookups: Sequence[Lookup]) -> Tensor:
    """Return ‖gradient of a table‖², rows that were looked up several times added first: [batch].

    O(tokens · features): sorting gives every distinct id of a sample a slot, and gradients are
    added into slots. Padding (negative ids) counts for nothing.
    """
    ids = torch.cat([lookup.ids for lookup in lookups], 1)  # [batch, tokens]
    batch, tokens = ids.shape
    columns = lookups[0].g.shape[-1]
    in_order, order = ids.sort(dim=1)
    is_new = torch.ones_like(in_order)
    is_new[:, 1:] = in_order[:, 1:] != in_order[:, :-1]
    # The slot of a token is the number of distinct ids before its own: below `tokens`.
    slots = torch.empty_like(ids).scatter_(1, order, is_new.cumsum(1) - 1)
    slots += tokens * torch.arange(batch, device=ids.device).unsqueeze(1)
    is_padding = (ids < 0).unsqueeze(-1)  # [batch, tokens, 1]
    total = torch.zeros(batch, dtype=torch.float64, device=ids.device)
    for features in spans(columns, num_per_tile(16 * batch * tokens, ids.device)):
        g = torch.cat([lookup.g[..., features].double() for lookup in lookups], 1)
        g = g.masked_fill_(is_padding, 0.0)  # [batch, tokens, features in the tile]
        sums = torch.zeros_like(g.flatten(0, 1))  # [batch * tokens, features in the tile]
        add_rows_(sums, slots.flatten(), g.flatten(0, 1))
        total += sums.view_as(g).square_().sum(-1).sum(-1)
    return total


def _lookup_product(lookup: Lookup, product: Product) -> Tensor:  # [batch]
    """Return Σ_ts left_s[id_t] ⟨right_s, g_t⟩: what tying an embedding to a head adds, halved."""
    left, right = factors(product)  # [batch, s, rows], [batch, s, columns]
    total = right.new_zeros(len(right), dtype=torch.float64)
    for looked_up in spans(lookup.ids.shape[1], TOKENS_PER_TILE):
        index = lookup.ids[:, looked_up].clamp(min=0).unsqueeze(1)  # [batch, 1, t]
        g = _without_padding(lookup, looked_up)  # [batch, t, columns]
        for tokens in spans(left.shape[1], TOKENS_PER_TILE):
            weights = _inner_products(right[:, tokens], g)  # [batch, s, t]
            picked = left[:, tokens].gather(2, index.expand(-1, weights.shape[1], -1))
            total += weights.mul_(picked).sum(-1).sum(-1)
    return total


def _of_denses(denses: Sequence[Tensor]) -> Tensor:  # [batch]
    """Return ‖Σ V‖² of matrices V [batch, rows, columns]."""
    total = denses[0].new_zeros(len(denses[0]), dtype=torch.float64)
    for rows in spans(denses[0].shape[1], ROWS_PER_TILE):
        together = torch.stack([dense[:, rows].double() for dense in denses]).sum(0)
        total += together.square_().sum(-1).sum(-1)
    return total


def _dense_product(dense: Tensor, product: Product) -> Tensor:  # [batch]
    """Return Σ_t left_tᵀ V right_t with V [batch, rows, columns]."""
    left, right = factors(product)
    total = dense.new_zeros(len(dense), dtype=torch.float64)
    for tokens in spans(left.shape[1], TOKENS_PER_TILE):
        right_tile = right[:, tokens].double()  # [batch, t, columns]
        for rows in spans(dense.shape[1], ROWS_PER_TILE):
            seen = right_tile @ dense[:, rows].double().mT  # [batch, t, rows in the tile]
            total += seen.mul_(left[:, tokens, rows].double()).sum(-1).sum(-1)
    return total


def _dense_lookup(dense: Tensor, lookup: Lookup) -> Tensor:  # [batch]
    """Return Σ_t ⟨V[id_t], g_t⟩ with V [batch, rows, columns]."""
    total = dense.new_zeros(len(dense), dtype=torch.float64)
    for tokens in spans(lookup.ids.shape[1], TOKENS_PER_TILE):
        g = _without_padding(lookup, tokens)  # [batch, t, columns]
        index = lookup.ids[:, tokens].clamp(min=0).unsqueeze(-1)  # [batch, t, 1]
        looked_up = dense.gather(1, index.expand(-1, -1, dense.shape[2]))  # [batch, t, columns]
        total += g.mul_(looked_up.double()).sum(-1).sum(-1)
    return total


def _without_padding(lookup: Lookup, tokens: slice) -> Tensor:
    """Return g of some tokens in float64, zero where the id is negative: [batch, t, columns]."""
    is_padding = (lookup.ids[:, tokens] < 0).unsqueeze(-1)  # [batch, t, 1]
    return lookup.g[:, tokens].double().masked_fill(is_padding, 0.0)


def _as_matrix(dense: Dense, records: Sequence[Record]) -> Tensor:
    """Return the per-sample gradients as matrices [batch, rows, columns]."""
    return dense.value.reshape(len(dense.value), *matrix_shape(records))
