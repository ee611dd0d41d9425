"""What each method costs where compiled kernels do it: CUDA.

The same methods as in costs.py, without float64: products are multiplied by tensor cores, and
nothing is written but results. The factors say how far a kernel is from a plain GEMM of the same
FLOPs (one H200; bench/NOTES.md has the measurements).
"""

from collections.abc import Callable

from unison.clip.costs import (
    BACKWARD_OVERHEAD,
    FORWARD_OVERHEAD,
    Cost,
    input_features,
    product_flops,
    record_bytes,
)
from unison.clip.layers import Layer

GRAM_FACTOR = 1.6
TILE_FACTOR = 1.25
WEIGHTED_FACTOR = 1.5
SUM_ITEMSIZE = 4  # clipped sums are float32


def _work(layer: Layer, flops: float, factor: float = 1.0) -> Cost:
    """Return FLOPs of the layer's dtype, as many as take as long on a plain GEMM."""
    total = int(flops * factor)
    return Cost(half_flops=total) if layer.itemsize == 2 else Cost(native_flops=total)


def _kept_itemsize(layer: Layer) -> int:
    is_vector = all(use.kind == "dense" for use in layer.uses)
    return 2 if layer.itemsize == 2 and not is_vector else 4


def gram_cost(layer: Layer) -> Cost:
    """Return the cost of inner products between all tokens of a sample, each pair once."""
    if layer.num_tokens("product") != sum(use.tokens for use in layer.uses):
        return tile_cost(layer)
    rows, columns, tokens = layer.uses[0].rows, layer.uses[0].columns, layer.num_tokens("product")
    flops = layer.batch * tokens * (tokens + min(128, tokens)) * (rows + columns)
    return _work(layer, flops, GRAM_FACTOR) + Cost(moved_bytes=2 * record_bytes(layer))


def tile_cost(layer: Layer) -> Cost:
    """Return the cost of per-sample products that are squared on chip.

    Uses of several kinds are formed whole, for a few samples at a time.
    """
    products = product_flops(layer)
    cost = _work(layer, products, TILE_FACTOR) + Cost(moved_bytes=2 * record_bytes(layer))
    kinds = {use.kind for use in layer.uses}
    if len(kinds) == 1 and kinds != {"dense"}:
        return cost
    formed = _kept_itemsize(layer) * layer.batch * layer.numel
    some = _kept_itemsize(layer) * layer.numel
    return cost + Cost(moved_bytes=2 * formed, transient_bytes=max(some, 64 << 20))


def materialize_cost(layer: Layer) -> Cost:
    """Return the cost of forming all per-sample gradients, written once and read once."""
    moved = 2 * _kept_itemsize(layer) * layer.batch * layer.numel + record_bytes(layer)
    return _work(layer, product_flops(layer)) + Cost(moved_bytes=moved)


def rank_one_cost(layer: Layer) -> Cost:
    """Return the cost of two norms per sample."""
    return Cost(moved_bytes=record_bytes(layer))


def kept_cost(layer: Layer) -> Cost:
    """Return the cost of one weighted sum of per-sample gradients, which are kept."""
    size = _kept_itemsize(layer) * layer.batch * layer.numel
    return Cost(moved_bytes=size, kept_bytes=size)


def records_cost(layer: Layer) -> Cost:
    """Return the cost of a product over all samples and tokens; the records are kept."""
    cost = _work(layer, product_flops(layer), WEIGHTED_FACTOR)
    return cost + Cost(
        moved_bytes=record_bytes(layer) + 2 * SUM_ITEMSIZE * layer.numel,
        kept_bytes=record_bytes(layer),
        transient_bytes=SUM_ITEMSIZE * layer.numel,
    )


def recomputed_cost(layer: Layer) -> Cost:
    """Return the cost of `records`, and of this layer's part of another forward pass."""
    again, forward = records_cost(layer), forward_cost(layer)
    inputs = [use.tokens * input_features(use) for use in layer.uses if use.kind == "product"]
    num_inputs = layer.batch * sum(inputs)
    saved_bytes = num_inputs * layer.itemsize if layer.is_repeatable else 0
    return Cost(
        native_flops=again.native_flops + forward.native_flops,
        half_flops=again.half_flops + forward.half_flops,
        moved_bytes=again.moved_bytes + forward.moved_bytes + 64 * num_inputs,
        kept_bytes=again.kept_bytes - saved_bytes,
        transient_bytes=again.transient_bytes + saved_bytes // max(1, len(inputs)),
    )


def forward_cost(layer: Layer) -> Cost:
    """Return the cost of this layer's part of a forward pass without a graph."""
    return _work(layer, product_flops(layer), FORWARD_OVERHEAD) + Cost(
        moved_bytes=2 * record_bytes(layer)
    )


def second_backward_cost(layer: Layer) -> Cost:
    """Return the cost of `records`, and of this layer's part of another pass; nothing is kept."""
    again = records_cost(layer)
    forward = forward_cost(layer) if layer.is_checkpointed else Cost()
    work = _work(layer, product_flops(layer), BACKWARD_OVERHEAD)
    return Cost(
        native_flops=again.native_flops + work.native_flops + forward.native_flops,
        half_flops=again.half_flops + work.half_flops + forward.half_flops,
        moved_bytes=again.moved_bytes + 2 * record_bytes(layer) + forward.moved_bytes,
        transient_bytes=again.transient_bytes,
    )


NORM_COSTS: dict[str, Callable[[Layer], Cost]] = {
    "gram": gram_cost,
    "tile": tile_cost,
    "materialize": materialize_cost,
    "rank_one": rank_one_cost,
}
GRADIENT_COSTS: dict[str, Callable[[Layer], Cost]] = {
    "kept": kept_cost,
    "records": records_cost,
    "recomputed": recomputed_cost,
    "second_backward": second_backward_cost,
}
