"""What each method costs where compiled kernels do it: CUDA.

The same methods as in costs.py, without float64: products are multiplied by tensor cores, and
nothing is written but results. The factors say how far a kernel is from a plain GEMM of the same
FLOPs (one H200; bench/NOTES.md has the measurements).

[Note: timed parts] Where methods are timed on the device (calibration.py), every choice is made of
a few parts, which choices share: a norm, a clipped sum, and for a second pass the layer's own GEMM,
with the same overheads as here for what lies between layers.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from unison.clip.costs import (
    BACKWARD_OVERHEAD,
    BYTES_PER_FINGERPRINT,
    FORWARD_OVERHEAD,
    MACHINES,
    Cost,
    product_flops,
    record_bytes,
)
from unison.clip.layers import MODES, Choice, LayerShape, UseShape
from unison.kernels.cross_entropy import rows_per_chunk

GRAM_FACTOR = 1.6
TILE_FACTOR = 1.25
WEIGHTED_FACTOR = 1.5
# Where kernels take many layers at once.
FACTOR_NORM_FACTOR = 1.3
FACTOR_FACTOR = 1.05
ALIGNED = 8  # features of factors that they take
WAITING = MODES["ghost_bk"]
SUM_ITEMSIZE = 4  # clipped sums are float32
STREAMED_ELEMENTS = rows_per_chunk(1, torch.device("cuda"))  # of logits that exist at once


def _work(layer: LayerShape, flops: float, factor: float = 1.0) -> Cost:
    """Return FLOPs of the layer's dtype, as many as take as long on a plain GEMM."""
    total = int(flops * factor)
    return Cost(half_flops=total) if layer.itemsize == 2 else Cost(native_flops=total)


def _kept_itemsize(layer: LayerShape) -> int:
    is_vector = all(use.kind == "dense" for use in layer.uses)
    return 2 if layer.itemsize == 2 and not (is_vector or layer.is_float16) else 4


def waits(layer: LayerShape) -> bool:
    """Whether a layer's factors are taken with others': [Note: factors that wait] in factored.py.

    As far as shapes tell; its tensors could still be strided in ways that kernels do not take.
    """
    if len(layer.uses) != 1 or layer.itemsize != 2:
        return False
    (use,) = layer.uses
    is_aligned = use.rows % ALIGNED == use.columns % ALIGNED == 0
    return use.kind == "product" and not use.is_streamed and is_aligned


def gram_cost(layer: LayerShape) -> Cost:
    """Return the cost of inner products between all tokens of a sample, each pair once."""
    if layer.num_tokens("product") != sum(use.tokens for use in layer.uses):
        return tile_cost(layer)
    rows, columns, tokens = layer.uses[0].rows, layer.uses[0].columns, layer.num_tokens("product")
    flops = layer.batch * tokens * (tokens + min(128, tokens)) * (rows + columns)
    return _work(layer, flops, GRAM_FACTOR) + Cost(moved_bytes=2 * record_bytes(layer))


def tile_cost(layer: LayerShape) -> Cost:
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


def materialize_cost(layer: LayerShape) -> Cost:
    """Return the cost of forming all per-sample gradients, written once and read once."""
    moved = 2 * _kept_itemsize(layer) * layer.batch * layer.numel + record_bytes(layer)
    return _work(layer, product_flops(layer)) + Cost(moved_bytes=moved)


def rank_one_cost(layer: LayerShape) -> Cost:
    """Return the cost of two norms per sample."""
    return Cost(moved_bytes=record_bytes(layer))


def kept_cost(layer: LayerShape) -> Cost:
    """Return the cost of one weighted sum of per-sample gradients, which are kept."""
    size = _kept_itemsize(layer) * layer.batch * layer.numel
    return Cost(moved_bytes=size, kept_bytes=size)


def records_cost(layer: LayerShape) -> Cost:
    """Return the cost of a product over all samples and tokens; the records are kept."""
    cost = _work(layer, product_flops(layer), WEIGHTED_FACTOR)
    remade = sum(_streamed_elements(use) for use in layer.uses)
    if remade:  # once to be measured, once to be added up
        cost += _work(layer, 2 * product_flops(layer))
    chunk = min(layer.batch * remade, STREAMED_ELEMENTS)
    return cost + Cost(
        moved_bytes=record_bytes(layer) + 2 * SUM_ITEMSIZE * layer.numel,
        kept_bytes=record_bytes(layer) - layer.shared_bytes - layer.batch * remade * layer.itemsize,
        transient_bytes=SUM_ITEMSIZE * layer.numel + 2 * chunk * layer.itemsize,
    )


def _streamed_elements(use: UseShape) -> int:
    """Return how many numbers of a sample's records are made again when they are wanted."""
    return use.tokens * use.rows if use.is_streamed else 0


def recomputed_cost(layer: LayerShape) -> Cost:
    """Return the cost of `records`, and of this layer's part of another forward pass."""
    again, forward = records_cost(layer), forward_cost(layer)
    inputs = [use.tokens * use.input_features for use in layer.uses if use.kind == "product"]
    num_inputs = layer.batch * sum(inputs)
    inputs_bytes = num_inputs * layer.itemsize - layer.shared_bytes
    saved_bytes = inputs_bytes if layer.is_repeatable else 0
    return Cost(
        native_flops=again.native_flops + forward.native_flops,
        half_flops=again.half_flops + forward.half_flops,
        moved_bytes=again.moved_bytes + forward.moved_bytes + _fingerprint_bytes(layer),
        kept_bytes=again.kept_bytes - saved_bytes,
        transient_bytes=again.transient_bytes + saved_bytes // max(1, len(inputs)),
    )


def _fingerprint_bytes(layer: LayerShape) -> int:
    """Return what could be moved while fingerprints of a layer's inputs are taken, twice."""
    inputs = [use.tokens * use.input_features for use in layer.uses if use.kind == "product"]
    return 2 * BYTES_PER_FINGERPRINT * layer.batch * sum(inputs)


def forward_cost(layer: LayerShape) -> Cost:
    """Return the cost of this layer's part of a forward pass without a graph."""
    return _work(layer, product_flops(layer), FORWARD_OVERHEAD) + Cost(
        moved_bytes=2 * record_bytes(layer)
    )


def second_backward_cost(layer: LayerShape) -> Cost:
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


NORM_COSTS: dict[str, Callable[[LayerShape], Cost]] = {
    "gram": gram_cost,
    "tile": tile_cost,
    "materialize": materialize_cost,
    "rank_one": rank_one_cost,
}
GRADIENT_COSTS: dict[str, Callable[[LayerShape], Cost]] = {
    "kept": kept_cost,
    "records": records_cost,
    "recomputed": recomputed_cost,
    "second_backward": second_backward_cost,
}


def choice_cost(layer: LayerShape, choice: Choice) -> Cost:
    """Return the cost of a norm method and a gradient method together."""
    cost = NORM_COSTS[choice.norm](layer) + GRADIENT_COSTS[choice.gradient](layer)
    if not (choice == WAITING and waits(layer)):
        return cost
    # The same work by kernels that are nearer to a plain GEMM, and no less for one than for many.
    gram, product = gram_cost(layer).half_flops, _work(layer, product_flops(layer)).half_flops
    faster = gram * FACTOR_NORM_FACTOR / GRAM_FACTOR + product * FACTOR_FACTOR
    slower = gram + records_cost(layer).half_flops
    return replace(cost, half_flops=cost.half_flops - slower + int(faster))


# Parts of choices, beside the norm methods: see [Note: timed parts].
KEPT, RECORDS, PLAIN_RECORDS, FORWARD = "kept", "records", "plain_records", "forward"
FACTOR_NORMS, FACTORS = "factor_norms", "factors"  # gram and records, of many layers at once


def parts_of(layer: LayerShape, choice: Choice) -> dict[str, float]:
    """Return the parts that a choice of methods is made of, and how often it takes each."""
    is_product = all(use.kind == "product" for use in layer.uses)
    norm = "tile" if choice.norm == "gram" and not is_product else choice.norm
    if choice.gradient == "kept":
        return {norm: 1.0, KEPT: 1.0}
    if choice == WAITING and waits(layer):
        return {FACTOR_NORMS: 1.0, FACTORS: 1.0}
    # Whose norm has no kernel is added up in plain torch too, in float64.
    parts = {norm: 1.0, PLAIN_RECORDS if choice.norm == "rank_one" else RECORDS: 1.0}
    again = 0.0
    if choice.gradient == "recomputed" or layer.is_checkpointed:
        again += FORWARD_OVERHEAD
    if choice.gradient == "second_backward":
        again += BACKWARD_OVERHEAD
    has_product = any(use.kind == "product" for use in layer.uses)
    if choice.gradient != "records" and has_product:
        parts[FORWARD] = again
    return parts


def timed_seconds(layer: LayerShape, choice: Choice, timed: Mapping[str, float]) -> float | None:
    """Return how long a choice takes, of parts that were timed; None if one of them was not."""
    parts = parts_of(layer, choice)
    if not parts.keys() <= timed.keys():
        return None
    total = sum(count * timed[name] for name, count in parts.items())
    if choice.gradient == "recomputed":  # fingerprints are not timed
        total += _fingerprint_bytes(layer) / MACHINES["cuda"].bandwidth
    return total
