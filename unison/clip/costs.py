"""What each norm and gradient method costs on a layer, in FLOPs and bytes.

For one Product with B samples of T tokens, F = 2·B·T·rows·columns is one weight-gradient GEMM:

| method            | FLOPs                  | bytes beside reading the records         |
|-------------------|------------------------|------------------------------------------|
| `gram`            | B·T²·(rows + columns)  | tokens again for every tile they meet    |
| `tile`            | F                      | a float64 tile per 256 tokens            |
| `materialize`     | F                      | per-sample gradients written, read       |
| `rank_one`        | 2·B·(rows + columns)   | –                                        |
| `kept`            | 2·B·rows·columns       | per-sample gradients read again          |
| `records`         | F                      | the result, once per few thousand tokens |
| `recomputed`      | F, and F for the output| the same, and a twice for fingerprints   |
| `second_backward` | F, and F for the input | the same                                 |

A layer under activation checkpointing runs forward in every backward pass: F more for
`second_backward`. What is kept from the layer's backward to the end of the pass:

| method            | bytes kept                                                        |
|-------------------|-------------------------------------------------------------------|
| `kept`            | per-sample gradients: 4·B·rows·columns                            |
| `records`         | a and g: B·T·(rows + columns) elements                            |
| `recomputed`      | g: B·T·rows elements; lookups and dense records as they are       |
| `second_backward` | –                                                                 |

The plain weight gradient (F) is never computed, so `materialize` with `kept` replaces it and pays
in bytes. Estimates are functions of shapes and of the named machine alone: the same on every rank
and in every run.
"""

from collections.abc import Callable
from dataclasses import dataclass

from unison.clip.layers import Choice, LayerShape, UseShape
from unison.clip.matrix import ROWS_PER_TILE, TOKENS_PER_TILE


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Sustained rates of a kind of machine, as plain-torch methods see them.

    Attributes:
        name: As in `MACHINES`.
        native_flops: FLOP/s of float32 GEMMs; on a CPU halves are multiplied as float32 too.
        double_flops: FLOP/s of float64 GEMMs, in which plain torch accumulates norms and sums.
        bandwidth: Bytes per second to and from memory.
        half_flops: FLOP/s of bfloat16 GEMMs, where kernels multiply halves as such.
    """

    name: str
    native_flops: float
    double_flops: float
    bandwidth: float
    half_flops: float = 1.0


# Rough on purpose: the choice changes only where two methods cost nearly the same. A few cores with
# AVX-512; a data-centre GPU, whose float32 (not TF32) and float64 rates are about equal.
MACHINES: dict[str, Machine] = {
    machine.name: machine
    for machine in (
        Machine(name="cpu", native_flops=1.6e11, double_flops=0.8e11, bandwidth=1.5e10),
        Machine(
            name="cuda", native_flops=5e13, double_flops=5e13, bandwidth=3.5e12, half_flops=6e14
        ),
    )
}

# A second pass runs attention, norms and elementwise operations again too, which cost more backward
# than forward.
FORWARD_OVERHEAD = 1.1
BACKWARD_OVERHEAD = 1.3
# To take a fingerprint takes as long as moving this many bytes per number would (measured).
BYTES_PER_FINGERPRINT = 32
# Per-sample gradients are kept in float32: written, squared while they are in cache, read once more
# for the clipped sum. Squaring and adding is float64, which on a CPU takes as long as moving twice
# the bytes at the bandwidth above would (measured).
KEPT_ITEMSIZE = 4
BYTES_TO_FILL = KEPT_ITEMSIZE
BYTES_TO_READ = 2 * KEPT_ITEMSIZE
# Samples × tokens after which `records` has read and written its float64 result once.
TOKENS_PER_RESULT = 4096


@dataclass(frozen=True, kw_only=True)
class Cost:
    """FLOPs and bytes; the costs of a norm method and of a gradient method add.

    Attributes:
        native_flops: FLOPs in float32.
        double_flops: FLOPs in float64.
        half_flops: FLOPs of halves by tensor cores.
        moved_bytes: Read from and written to memory.
        kept_bytes: Held from this layer's backward to the end of the whole backward pass.
        transient_bytes: Held while this layer is worked on, at most.
    """

    native_flops: int = 0
    double_flops: int = 0
    half_flops: int = 0
    moved_bytes: int = 0
    kept_bytes: int = 0
    transient_bytes: int = 0

    @property
    def flops(self) -> int:
        """All FLOPs."""
        return self.native_flops + self.double_flops + self.half_flops

    def seconds(self, machine: Machine) -> float:
        """Return the estimated time: arithmetic and memory one after the other."""
        return (
            self.native_flops / machine.native_flops
            + self.double_flops / machine.double_flops
            + self.half_flops / machine.half_flops
            + self.moved_bytes / machine.bandwidth
        )

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(
            native_flops=self.native_flops + other.native_flops,
            double_flops=self.double_flops + other.double_flops,
            half_flops=self.half_flops + other.half_flops,
            moved_bytes=self.moved_bytes + other.moved_bytes,
            kept_bytes=self.kept_bytes + other.kept_bytes,
            transient_bytes=max(self.transient_bytes, other.transient_bytes),
        )


def gram_cost(layer: LayerShape) -> Cost:
    """Return the cost of inner products between all tokens of a sample, each pair once."""
    rows, columns, tokens = layer.uses[0].rows, layer.uses[0].columns, layer.num_tokens("product")
    looked_up, num_dense = layer.num_tokens("lookup"), layer.num_tokens("dense")
    tile = min(TOKENS_PER_TILE, max(1, tokens))
    flops = (
        tokens * (tokens + tile) * (rows + columns)  # tiles on the diagonal are computed whole
        + 2 * looked_up * (columns + tokens * columns)
        + 2 * num_dense * rows * columns * (1 + tokens)
    )
    visits = max(1, tokens // TOKENS_PER_TILE)  # of a token by other tiles, half of them saved
    return Cost(
        double_flops=layer.batch * flops,
        moved_bytes=visits * record_bytes(layer) + 16 * layer.batch * tokens * tile,
        transient_bytes=16 * tile * (tile + rows + columns),
    )


def tile_cost(layer: LayerShape) -> Cost:
    """Return the cost of per-sample products, a float64 tile of rows at a time."""
    rows, columns = layer.uses[0].rows, layer.uses[0].columns
    if layer.num_tokens("lookup") == sum(use.tokens for use in layer.uses):
        return gram_cost(layer)
    passes = 1 + -(-layer.num_tokens("product") // TOKENS_PER_TILE)
    return Cost(
        double_flops=product_flops(layer) + 2 * layer.batch * layer.numel,
        moved_bytes=16 * layer.batch * layer.numel * passes
        + record_bytes(layer) * -(-rows // ROWS_PER_TILE),
        transient_bytes=16 * min(rows, ROWS_PER_TILE) * columns,
    )


def materialize_cost(layer: LayerShape) -> Cost:
    """Return the cost of forming all per-sample gradients, written once and read once."""
    if [use.kind for use in layer.uses] == ["dense"]:
        size = layer.batch * layer.numel
        return Cost(double_flops=2 * size, moved_bytes=BYTES_TO_READ * size)
    return Cost(
        native_flops=product_flops(layer),
        double_flops=2 * layer.batch * layer.numel,
        moved_bytes=record_bytes(layer)
        + (BYTES_TO_FILL + BYTES_TO_READ) * layer.batch * layer.numel,
    )


def rank_one_cost(layer: LayerShape) -> Cost:
    """Return the cost of two norms per sample."""
    features = sum(use.rows + use.columns for use in layer.uses)
    return Cost(double_flops=2 * layer.batch * features, moved_bytes=record_bytes(layer))


def kept_cost(layer: LayerShape) -> Cost:
    """Return the cost of one weighted sum of per-sample gradients, which are kept."""
    size = layer.batch * layer.numel
    return Cost(
        double_flops=2 * size,
        moved_bytes=BYTES_TO_READ * size + 12 * layer.numel,
        kept_bytes=KEPT_ITEMSIZE * size,
        transient_bytes=12 * layer.numel,
    )


def records_cost(layer: LayerShape) -> Cost:
    """Return the cost of one GEMM over all samples and tokens; the records are kept."""
    tokens = layer.batch * layer.num_tokens("product")
    return Cost(
        double_flops=product_flops(layer),
        moved_bytes=3 * record_bytes(layer)
        + layer.numel * (12 + 16 * -(-tokens // TOKENS_PER_RESULT)),
        kept_bytes=record_bytes(layer) - layer.shared_bytes,
        transient_bytes=12 * layer.numel,
    )


def recomputed_cost(layer: LayerShape) -> Cost:
    """Return the cost of `records`, and of this layer's part of another forward pass.

    Of products only g is kept. Lookups hardly hold anything else, and dense records are no larger.
    """
    again, forward = records_cost(layer), forward_cost(layer)
    inputs = [use.tokens * use.input_features for use in layer.uses if use.kind == "product"]
    num_inputs = layer.batch * sum(inputs)
    largest = layer.batch * layer.itemsize * max(inputs, default=0)
    inputs_bytes = num_inputs * layer.itemsize - layer.shared_bytes
    saved_bytes = inputs_bytes if layer.is_repeatable else 0
    return Cost(
        native_flops=forward.native_flops,
        double_flops=again.double_flops,
        moved_bytes=again.moved_bytes
        + forward.moved_bytes
        + 2 * BYTES_PER_FINGERPRINT * num_inputs,
        kept_bytes=again.kept_bytes - saved_bytes,
        transient_bytes=again.transient_bytes + largest,
    )


def forward_cost(layer: LayerShape) -> Cost:
    """Return the cost of this layer's part of a forward pass without a graph."""
    return Cost(
        native_flops=int(FORWARD_OVERHEAD * product_flops(layer)),
        moved_bytes=2 * record_bytes(layer),
    )


def second_backward_cost(layer: LayerShape) -> Cost:
    """Return the cost of `records`, and of this layer's part of another pass; nothing is kept."""
    again = records_cost(layer)
    forward = forward_cost(layer) if layer.is_checkpointed else Cost()
    return Cost(
        native_flops=int(BACKWARD_OVERHEAD * product_flops(layer)) + forward.native_flops,
        double_flops=again.double_flops,
        moved_bytes=again.moved_bytes + 2 * record_bytes(layer) + forward.moved_bytes,
        transient_bytes=again.transient_bytes,
    )


def product_flops(layer: LayerShape) -> int:
    """Return F: the FLOPs of one weight-gradient GEMM."""
    return 2 * layer.batch * layer.num_tokens("product") * layer.numel


def record_bytes(layer: LayerShape) -> int:
    """Return the bytes of all records of a batch."""
    return layer.batch * sum(_bytes_per_sample(use, layer.itemsize) for use in layer.uses)


def _bytes_per_sample(use: UseShape, itemsize: int) -> int:
    match use.kind:
        case "product":
            return use.tokens * (use.rows + use.columns) * itemsize
        case "lookup":
            return use.tokens * (use.columns * itemsize + 8)
        case "dense":
            return use.rows * use.columns * itemsize
        case _:
            raise ValueError(f"expected 'product', 'lookup' or 'dense', found {use.kind!r}")


# One line per entry of NORM_METHODS and GRADIENT_METHODS.
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
    return NORM_COSTS[choice.norm](layer) + GRADIENT_COSTS[choice.gradient](layer)
