"""Per-sample squared norms and clipped sums: several ways to the same numbers, in two tables.

Every method returns ‖Σ_uses gradient_b‖² [batch] in float64, cross terms between uses included.
They differ in FLOPs, in memory, and in the records they take; `NORM_METHODS` is the one place that
says which. To add a method, add a function and a line there; the tests run over the table.

`gram` forms no per-sample gradient, but inner products of them.
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

The clipped sum Σ_b c_b · gradient_b is made from records, or from per-sample gradients that were
kept. Sums are float64, and stay it until they meet the noise: [Note: proved sensitivity] in
bounds.py says why. Products go through GEMMs over few samples at a time, (c·left)ᵀ right: no
per-sample gradient is formed.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from unison import check
from unison.clip.bounds import (
    MOST_TERMS_TOGETHER,
    ROWS_PER_TILE,
    TOKENS_PER_TILE,
    SampleNorms,
    bounded,
    check_records,
    matrix_shape,
    matrix_shapes,
    num_terms,
    tensors_of,
    widest_dtype,
)
from unison.errors import BadInput, UnsupportedOperation
from unison.kernels.available import num_per_tile, plain_arithmetic, spans
from unison.kernels.multi_tensor import squared_norms, weighted_sum
from unison.ops import Dense, Lookup, Product, Record
from unison.ops.records import add_rows_, factors, shape_of, take
from unison.torch_internals import machine_of

_FEATURES_PER_TILE = 4096


def gram_squared_norms(records: Sequence[Record]) -> Tensor:
    """Return ‖Σ_uses gradient_b‖² by inner products of tokens: [batch], float64.

    Only the lower triangle of token tiles is computed; tiles off the diagonal count twice. Extra
    memory is a few tiles, whatever the number of tokens.
    """
    first = tensors_of(records[0])[0]
    batch, device = len(first), first.device
    features = sum(min(size, _FEATURES_PER_TILE) for size in matrix_shape(records))
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
    denses = [
        record.value.reshape(len(record.value), *matrix_shape(records))
        for record in records
        if isinstance(record, Dense)
    ]
    parts = []
    if products:
        parts.append(_of_products(products))
    if lookups:
        parts.append(lookup_squared_norms(lookups))
    if denses:
        squares = denses[0].new_zeros(len(denses[0]), dtype=torch.float64)
        for rows in spans(denses[0].shape[1], ROWS_PER_TILE):
            together = torch.stack([dense[:, rows].double() for dense in denses]).sum(0)
            squares += together.square_().sum(-1).sum(-1)
        parts.append(squares)
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


def measure(
    records: Sequence[Record], method: str, out: Tensor | None = None
) -> tuple[SampleNorms, Sequence[Record]]:
    """Return bounded norms, and the records from which the clipped sum is to be computed.

    The latter are the given ones, except that `materialize` returns the per-sample gradients it has
    formed. Its bound holds for these only, which is why they are returned together.

    Args:
        records: The uses of one parameter.
        method: A name in `NORM_METHODS`.
        out: Where `materialize` may put per-sample gradients: `needed_to_keep` says how much.

    Raises:
        UnsupportedOperation: if the method does not take these records.
    """
    check.one_of(NORM_METHODS, method=method)
    check_records(records)
    why, squared_norms_of = refusal(method, records), NORM_METHODS[method]
    if why is not None:
        raise UnsupportedOperation(f"norm method {method!r} cannot be used here: {why}")
    if squared_norms_of is None:
        value, squared = materialize(records, out)
        records = [Dense(value)]
    else:
        squared = squared_norms_of(records)
    return bounded(records, squared), records


def tile_squared_norms(records: Sequence[Record]) -> Tensor:
    """Return squared norms by forming per-sample gradients a few rows at a time: [batch], float64.

    The plain-torch reference of a kernel that squares tiles of products on chip. Extra memory is
    one tile [samples, rows in the tile, columns] and the tokens that go into it.
    """
    first = tensors_of(records[0])[0]
    batch, (num_rows, num_columns) = len(first), matrix_shape(records)
    total = torch.zeros(batch, dtype=torch.float64, device=first.device)
    height = min(ROWS_PER_TILE, max(16, num_per_tile(8 * num_columns, first.device)))
    bytes_per_sample = 16 * (height * num_columns + TOKENS_PER_TILE * (height + num_columns))
    with plain_arithmetic(first.device):
        for samples in spans(batch, num_per_tile(bytes_per_sample, first.device)):
            uses = [take(record, samples) for record in records]
            lookups = [use for use in uses if isinstance(use, Lookup)]
            if len(lookups) == len(uses):  # mostly empty rows: tiles of them would be a waste
                total[samples] = lookup_squared_norms(lookups)
                continue
            for rows in spans(num_rows, height):
                tile = first.new_zeros(
                    samples.stop - samples.start,
                    rows.stop - rows.start,
                    num_columns,
                    dtype=torch.float64,
                )
                for use in uses:
                    _add_rows(tile, use, rows)
                total[samples] += tile.square_().sum(-1).sum(-1)
    return total


def per_sample_gradients(records: Sequence[Record]) -> Tensor:
    """Return the per-sample gradients themselves: [batch, *shape], float32 or wider.

    A single `Dense` record that is wide enough is returned as it is, not copied.
    """
    return materialize(records)[0]


def needed_to_keep(records: Sequence[Record]) -> tuple[tuple[int, ...], torch.dtype] | None:
    """Return shape and dtype of what `materialize` has to allocate; None if it needs nothing."""
    if len(records) == 1 and isinstance(records[0], Dense):
        return None
    return (check_records(records), *shape_of(records[0])), widest_dtype(records)


def materialize(records: Sequence[Record], out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Form the per-sample gradients, and square them while they are in cache.

    Args:
        records: The uses of one parameter.
        out: Where to put the gradients [batch, *shape], of the dtype of `needed_to_keep`.

    Returns:
        The gradients [batch, *shape], float32 or wider, and their squared norms [batch], float64.
    """
    batch = check_records(records)
    needed = needed_to_keep(records)
    first = tensors_of(records[0])[0]
    with plain_arithmetic(first.device):
        if needed is None:
            value = first.to(widest_dtype(records))
            return value, squared_norms(value.reshape(batch, math.prod(value.shape[1:])))
        shape, dtype = needed
        total = first.new_empty(shape, dtype=dtype) if out is None else out
        assert (total.shape, total.dtype) == (shape, dtype)
        squared = torch.zeros(batch, dtype=torch.float64, device=first.device)
        size = num_per_tile(dtype.itemsize * math.prod(shape[1:]), first.device)
        for samples in spans(batch, size):
            part = total[samples]
            uses = [take(record, samples) for record in records]
            if len(uses) == 1 and isinstance(uses[0], Product) and first.dtype == dtype:
                left, right = factors(uses[0])  # the usual case: written, not added to zeros
                torch.bmm(left.mT, right.to(dtype), out=part.view(len(left), *matrix_shape(uses)))
            else:
                part.zero_()
                for use in uses:
                    matrices = part.view(len(part), *matrix_shape([use]))
                    _add_rows(matrices, use, slice(0, matrices.shape[1]))
            squared[samples] = squared_norms(part.view(len(part), -1))
    return total, squared


def rank_one_squared_norms(records: Sequence[Record]) -> Tensor:
    """Return ‖a‖²‖g‖² of a product with one token per sample: [batch], float64."""
    (product,) = records
    assert isinstance(product, Product)
    with plain_arithmetic(product.a.device):
        a, g = product.a.squeeze(1).double(), product.g.squeeze(1).double()  # [batch, features]
        return a.square().sum(-1) * g.square().sum(-1)


def _add_rows(tile: Tensor, record: Record, rows: slice) -> None:
    """Add some rows of the samples' gradients to `tile` [batch, rows in the tile, columns]."""
    dtype = tile.dtype
    match record:
        case Product():
            left, right = factors(record)
            # Tokens are cut only where a cast would copy them.
            is_cast = left.dtype != dtype or right.dtype != dtype
            size = TOKENS_PER_TILE if is_cast else max(1, left.shape[1])
            for tokens in spans(left.shape[1], size):
                tile.baddbmm_(left[:, tokens, rows].mT.to(dtype), right[:, tokens].to(dtype))
        case Lookup(ids=ids, g=g):
            batch, height, columns = tile.shape
            is_here = (ids >= rows.start) & (ids < rows.stop)  # [batch, tokens]
            index = (ids - rows.start).masked_fill(~is_here, 0)
            index = index + height * torch.arange(batch, device=ids.device).unsqueeze(1)
            g = g.to(dtype).masked_fill(~is_here.unsqueeze(-1), 0.0)
            add_rows_(tile.view(batch * height, columns), index.flatten(), g.flatten(0, 1))
        case Dense(value=value):
            columns = tile.shape[2]
            num_rows = math.prod(shape_of(record)) // max(1, columns)
            tile += value.reshape(len(value), num_rows, columns)[:, rows]


NORM_METHODS: dict[str, Callable[[Sequence[Record]], Tensor] | None] = {
    "gram": gram_squared_norms,
    "tile": tile_squared_norms,
    "materialize": None,  # forms per-sample gradients, from which the clipped sum must be taken
    "rank_one": rank_one_squared_norms,
}
"""Records of one parameter to ‖Σ_uses gradient_b‖² [batch], float64; see `measure`."""


def refusal(method: str, records: Sequence[Record]) -> str | None:
    """Return why a norm method cannot take some records; None if it can."""
    if method == "rank_one":
        if len(records) != 1 or not isinstance(records[0], Product):
            kinds = [type(record).__name__ for record in records]
            return f"it needs one Product, found {kinds}; use 'gram'"
        if records[0].a.shape[1] != 1:
            return f"it needs one token per sample, found {records[0].a.shape[1]}; use 'gram'"
    shapes = sorted(matrix_shapes(records))
    if len(shapes) > 1 and method != "materialize":
        return f"uses see the parameter as matrices of different shapes {shapes}; use 'materialize'"
    return None


# --- clipped sums ---------------------------------------------------------------------------------

# Samples × tokens of one GEMM, at most MOST_TERMS_TOGETHER: it reads and writes the whole result,
# so it should be long.
_LEAST_TOKENS_PER_GEMM = 1024
_ROWS_PER_GEMM = 1024


def from_records(records: Sequence[Record], coefficients: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return Σ_b c_b · gradient_b over all uses of one parameter: [*shape], float64.

    Guarantees:
        With coefficients from `unison.clip.bounds`, the share of every sample has norm at
        most C. A sample with coefficient 0 is selected out, not multiplied: its values may be NaN.

    Args:
        records: The uses of the parameter.
        coefficients: One per sample [batch], at least 0; float64, or they were rounded already.
        shape: The parameter's shape.
    """
    check_records(records, coefficients)
    if len(records) == 1 and isinstance(records[0], Dense):
        return _of_dense(records[0], coefficients).view(shape)
    total = torch.zeros(shape, dtype=torch.float64, device=tensors_of(records[0])[0].device)
    for record in records:
        add_clipped(total, record, coefficients)
    return total


def add_clipped(total: Tensor, record: Record, coefficients: Tensor) -> None:
    """Add Σ_b c_b · gradient_b of one use to `total` [*shape], which is float64.

    For uses that come one by one.
    """
    check_records([record], coefficients)
    if tuple(total.shape) != shape_of(record) or total.dtype != torch.float64:
        raise BadInput(
            f"expected a float64 total of shape {list(shape_of(record))}, found {total.dtype} "
            f"{list(total.shape)}"
        )
    coefficients = coefficients.to(device=total.device, dtype=torch.float64)
    with plain_arithmetic(total.device):
        match record:
            case Product():
                _add_product(total, record, coefficients)
            case Lookup():
                _add_lookup(total, record, coefficients)
            case Dense():
                total.view(-1).add_(_of_dense(record, coefficients))


def _of_dense(dense: Dense, coefficients: Tensor) -> Tensor:  # [numel], float64
    values = dense.value.reshape(len(dense.value), math.prod(shape_of(dense)))
    coefficients = coefficients.to(device=values.device, dtype=torch.float64)
    out = values.new_empty(values.shape[1], dtype=torch.float64)
    return weighted_sum(values, coefficients, out)


def _add_product(total: Tensor, product: Product, coefficients: Tensor) -> None:
    left, right = factors(product)  # [batch, tokens, rows], [batch, tokens, columns]
    batch, tokens, _ = left.shape
    num_rows, num_columns = matrix_shape([product])
    matrix = total.view(num_rows, num_columns)
    wanted = num_per_tile(8 * num_columns, total.device)
    length = min(MOST_TERMS_TOGETHER, max(_LEAST_TOKENS_PER_GEMM, wanted))
    for samples in spans(batch, max(1, length // max(1, tokens))):
        c = coefficients[samples]
        for part in spans(tokens, length):
            inputs = _selected(right[samples, part], c).flatten(0, 1)  # [tokens, columns]
            for rows in spans(num_rows, _ROWS_PER_GEMM):
                scaled = _selected(left[samples, part, rows], c).mul_(c.view(-1, 1, 1))
                # Apart from the total: then no other GEMM's rounding knows of these samples.
                matrix[rows] += scaled.flatten(0, 1).mT @ inputs


def _add_lookup(total: Tensor, lookup: Lookup, coefficients: Tensor) -> None:
    table = total.view(matrix_shape([lookup]))
    batch, tokens = lookup.ids.shape
    for samples in spans(batch, max(1, MOST_TERMS_TOGETHER // max(1, tokens))):
        c = coefficients[samples]
        ids = lookup.ids[samples]  # [samples, tokens]
        g = _selected(lookup.g[samples], c).mul_(c.view(-1, 1, 1))
        g = g.masked_fill_((ids < 0).unsqueeze(-1), 0.0)
        add_rows_(table, ids.clamp(min=0).flatten(), g.flatten(0, 1))


def _selected(x: Tensor, coefficients: Tensor) -> Tensor:
    """Return a float64 copy of x [batch, ...], with zeros for samples whose coefficient is 0."""
    wide = x.to(torch.float64, copy=True)
    is_out = coefficients == 0
    # On a CPU it costs nothing to look whether there is one; a GPU would have to be waited for.
    if machine_of(x.device) == "cpu" and not is_out.any():
        return wide
    return wide.masked_fill_(is_out.view(-1, *[1] * (x.ndim - 1)), 0.0)


# Where the clipped sum comes from, and the backward and forward passes of the whole model that it
# takes. The records of a second pass are used as they come and dropped, layer after layer.
GRADIENT_METHODS: dict[str, tuple[int, int]] = {
    "kept": (1, 1),  # from the per-sample gradients that the norm method has formed
    "records": (1, 1),
    "recomputed": (1, 2),  # makes anew what went into the products, instead of keeping it
    "second_backward": (2, 1),  # makes the records anew
}
