"""Layers as the planner sees them, and what norm and gradient methods cost on them.

A layer is the shapes of a parameter's records, without their data; what can be chosen for it are
norm methods × gradient methods, of which some have names (modes). Costs are FLOPs and bytes.

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

On CUDA compiled kernels do the same without float64: products are multiplied by tensor cores, and
nothing is written but results. Factors say how far a kernel is from a plain GEMM of the same FLOPs
(one H200; bench/NOTES.md has the measurements).

[Note: timed parts] Where methods are timed on the device (calibration.py), every choice is made of
a few parts, which choices share: a norm, a clipped sum, and for a second pass the layer's own GEMM,
with the same overheads as here for what lies between layers.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from unison.clip.bounds import (
    ROWS_PER_TILE,
    TOKENS_PER_TILE,
    check_records,
    matrix_shape,
    num_terms,
    tensors_of,
)
from unison.clip.norms import GRADIENT_METHODS, NORM_METHODS
from unison.kernels.cross_entropy import rows_per_chunk
from unison.ops import Dense, Lookup, Product, Record, Streamed


@dataclass(frozen=True)
class Choice:
    """A norm method and a gradient method that go together.

    Attributes:
        norm: A name in `NORM_METHODS`.
        gradient: A name in `GRADIENT_METHODS`.
    """

    norm: str
    gradient: str

    def __str__(self) -> str:
        return f"{self.norm}+{self.gradient}"

    @cached_property
    def num_backwards(self) -> int:
        """Backward passes of the whole model."""
        return GRADIENT_METHODS[self.gradient][0]

    @cached_property
    def num_forwards(self) -> int:
        """Forward passes of the whole model."""
        return GRADIENT_METHODS[self.gradient][1]

    @cached_property
    def is_kept(self) -> bool:
        """Whether per-sample gradients are formed and kept."""
        return self.gradient == "kept"


# A norm method that forms per-sample gradients goes with the gradient method that uses them.
CHOICES: tuple[Choice, ...] = tuple(
    Choice(norm, gradient)
    for norm in NORM_METHODS
    for gradient in GRADIENT_METHODS
    if (norm == "materialize") == (gradient == "kept")
)

AUTO = "auto"
MODES: dict[str, Choice] = {
    "grad_materialize": Choice("materialize", "kept"),
    "ghost": Choice("gram", "second_backward"),
    "ghost_bk": Choice("gram", "records"),
    "flash_fuse": Choice("tile", "second_backward"),
    "flash_fuse_bk": Choice("tile", "records"),
    "recompute_bk": Choice("tile", "recomputed"),
}


KINDS: dict[type, str] = {
    Product: "product",
    Streamed: "product",
    Lookup: "lookup",
    Dense: "dense",
}


DrawTensor = Callable[[tuple[int, ...], int | None], Tensor]


@dataclass(frozen=True, kw_only=True)
class UseShape:
    """One use of a parameter.

    Attributes:
        kind: `"product"`, `"lookup"` or `"dense"`.
        tokens: Tokens per sample; 1 for dense.
        rows: Rows of the parameter as a matrix (d_out, or the table's length).
        columns: Its columns (d_in, or the table's features).
        is_transposed: Whether rows and columns are the other way round, as in x @ W.
        is_streamed: Whether g can be made again, a few samples at a time, and need not be kept.
            Uses that differ in nothing else are the same to a method.
        num_sharing: Parameters whose products have the same input, this one among them: who keeps
            it keeps it once. Likewise.
    """

    kind: str
    tokens: int
    rows: int
    columns: int
    is_transposed: bool = False
    is_streamed: bool = field(default=False, compare=False)
    num_sharing: int = field(default=1, compare=False)

    @property
    def input_features(self) -> int:
        """Features of what went in."""
        return self.rows if self.is_transposed else self.columns


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """One parameter and its uses by one physical batch: all that the planner knows of it.

    Attributes:
        name: The parameter's full name.
        batch: Samples in the batch.
        itemsize: Bytes per element of the records.
        uses: Several for tied weights and for layers called several times.
        is_checkpointed: Whether it runs forward in the backward pass too.
        is_repeatable: Whether a second forward pass meets all of its uses again.
        is_float16: Whether some records are float16: where they are multiplied by kernels, what is
            kept of them is float32, for float16 would overflow.
        freed_per_sample: Bytes that ordinary training has freed when the first gradient of this
            layer comes, per sample of the batch; 0 if it is not known.
        is_variable: Whether values decide how often it is used, and by how many tokens.
    """

    name: str
    batch: int
    itemsize: int
    uses: tuple[UseShape, ...]
    is_checkpointed: bool = False
    is_repeatable: bool = True
    is_float16: bool = False
    freed_per_sample: int = 0
    is_variable: bool = False

    @property
    def is_mixed(self) -> bool:
        """Whether it has uses of several kinds, as a head that is tied to an embedding."""
        return len({use.kind for use in self.uses}) > 1

    @property
    def factor_bytes(self) -> int:
        """Bytes of the inputs and outputs of its products, and of the outputs of its lookups."""
        found = 0
        for use in self.uses:
            inputs = use.rows if use.kind == "product" else 0
            found += use.tokens * (inputs + use.columns)
        return self.batch * self.itemsize * found - self.shared_bytes

    @property
    def shared_bytes(self) -> int:
        """Bytes of its inputs that are counted with other layers: each counts an even part."""
        shared = [use for use in self.uses if use.num_sharing > 1]
        elements = sum(
            use.tokens * use.input_features * (use.num_sharing - 1) // use.num_sharing
            for use in shared
        )
        return self.batch * self.itemsize * elements

    @property
    def freed_bytes(self) -> int:
        """Bytes that ordinary training has freed when this layer comes."""
        return self.batch * self.freed_per_sample

    @property
    def numel(self) -> int:
        """Elements of the parameter."""
        return self.uses[0].rows * self.uses[0].columns

    def num_tokens(self, kind: str) -> int:
        """Return the tokens per sample of all uses of one kind."""
        return sum(use.tokens for use in self.uses if use.kind == kind)

    def records(self, draw: DrawTensor | None = None) -> list[Record]:
        """Return records of these shapes.

        Args:
            draw: Makes a tensor of a shape, of row numbers below its second argument if that is
                given. Without it they have no data: to ask methods whether they take them.
        """
        draw = draw or (lambda shape, _: torch.empty(shape, device="meta"))
        found: list[Record] = []
        for use in self.uses:
            size, shape = (self.batch, use.tokens), (use.rows, use.columns)
            match use.kind:
                case "product":
                    left, right = draw((*size, use.rows), None), draw((*size, use.columns), None)
                    a, g = (left, right) if use.is_transposed else (right, left)
                    found.append(Product(a, g, use.is_transposed, shape))
                case "lookup":
                    ids, g = draw(size, use.rows), draw((*size, use.columns), None)
                    found.append(Lookup(ids, g, shape))
                case "dense":
                    found.append(Dense(draw((self.batch, *shape), None)))
                case _:
                    raise ValueError(f"expected one of {list(KINDS.values())}, found {use.kind!r}")
        return found


def describe(name: str, records: Sequence[Record | Streamed]) -> LayerShape:
    """Return what the planner has to know of a parameter with these records."""
    uses = []
    for record in records:
        rows, columns = matrix_shape([record])
        use = UseShape(
            kind=KINDS[type(record)],
            tokens=num_terms(record),
            rows=rows,
            columns=columns,
            is_transposed=isinstance(record, Product) and record.is_transposed,
            is_streamed=isinstance(record, Streamed),
        )
        uses.append(use)
    tensors = [tensor for record in records for tensor in tensors_of(record)]
    itemsize = max(tensor.element_size() for tensor in tensors)
    return LayerShape(
        name=name,
        batch=check_records(records),
        itemsize=itemsize,
        uses=tuple(uses),
        is_float16=any(tensor.dtype == torch.float16 for tensor in tensors),
    )


def without_values(record: Record | Streamed) -> Record | Streamed:
    """Return a record of the same shapes on the meta device; one that comes in pieces as it is.

    A model's records take more than its training has: of each, `describe` needs no more than this.
    """
    if isinstance(record, Streamed):
        return record
    values = [(each.name, getattr(record, each.name)) for each in fields(record)]
    made = {key: each.detach().to("meta") for key, each in values if isinstance(each, Tensor)}
    return replace(record, **made)


def with_shared_inputs(
    layers: Sequence[LayerShape], inputs: Mapping[str, Sequence[Any]]
) -> list[LayerShape]:
    """Return layers that know with how many others they share inputs, as q, k and v do.

    Args:
        layers: From `describe`.
        inputs: What tells the input of each of a layer's uses from others, by name; None for a use
            that is no product.
    """
    # How many layers have each input; records of other kinds have none.
    sharing = Counter(place for layer in layers for place in set(inputs[layer.name]))
    sharing[None] = 1
    return [
        replace(
            layer,
            uses=tuple(
                replace(use, num_sharing=sharing[place])
                for use, place in zip(layer.uses, inputs[layer.name], strict=True)
            ),
        )
        for layer in layers
    ]


# --- costs ----------------------------------------------------------------------------------------


# Sustained rates per second of what a `Cost` counts. Rough on purpose: the choice changes only
# where two methods cost nearly the same. A few cores with AVX-512; a data-centre GPU, whose float32
# (not TF32) and float64 rates are about equal, and where alone halves are multiplied as such.
MACHINES: dict[str, dict[str, float]] = {
    "cpu": {"native_flops": 1.6e11, "double_flops": 0.8e11, "moved_bytes": 1.5e10},
    "cuda": {
        **{"native_flops": 5e13, "double_flops": 5e13, "half_flops": 6e14},
        "moved_bytes": 3.5e12,
    },
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
BYTES_TO_FILL, BYTES_TO_READ = 4, 8
# Samples × tokens after which `records` has read and written its float64 result once.
TOKENS_PER_RESULT = 4096

# Of kernels: how far they are from a plain GEMM; the latter two take many layers at once.
GRAM_FACTOR, TILE_FACTOR, WEIGHTED_FACTOR = 1.6, 1.25, 1.5
FACTOR_NORM_FACTOR, FACTOR_FACTOR = 1.3, 1.05
ALIGNED = 8  # features of factors that they take
WAITING = MODES["ghost_bk"]
SUM_ITEMSIZE = 4  # clipped sums are float32
STREAMED_ELEMENTS = rows_per_chunk(1, torch.device("cuda"))  # of logits that exist at once


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

    def seconds(self, machine: str) -> float:
        """Return the estimated time: arithmetic and memory one after the other."""
        return sum(getattr(self, what) / rate for what, rate in MACHINES[machine].items())

    def __add__(self, other: "Cost") -> "Cost":
        names = [each.name for each in fields(self)]
        found = {name: getattr(self, name) + getattr(other, name) for name in names}
        found["transient_bytes"] = max(self.transient_bytes, other.transient_bytes)
        return Cost(**found)


def waits(layer: LayerShape) -> bool:
    """Whether a layer's factors are taken with others': [Note: factors that wait] in measured.py.

    As far as shapes tell; its tensors could still be strided in ways that kernels do not take.
    """
    if len(layer.uses) != 1 or layer.itemsize != 2:
        return False
    (use,) = layer.uses
    is_aligned = use.rows % ALIGNED == use.columns % ALIGNED == 0
    return use.kind == "product" and not use.is_streamed and is_aligned


def product_flops(layer: LayerShape) -> int:
    """Return F: the FLOPs of one weight-gradient GEMM."""
    return 2 * layer.batch * layer.num_tokens("product") * layer.numel


def record_bytes(layer: LayerShape) -> int:
    """Return the bytes of all records of a batch."""
    found = 0
    for use in layer.uses:
        match use.kind:
            case "product":
                found += use.tokens * (use.rows + use.columns) * layer.itemsize
            case "lookup":
                found += use.tokens * (use.columns * layer.itemsize + 8)
            case _:
                found += use.rows * use.columns * layer.itemsize
    return layer.batch * found


def fingerprint_bytes(layer: LayerShape) -> int:
    """Return what could be moved while fingerprints of a layer's inputs are taken, twice."""
    inputs = [use.tokens * use.input_features for use in layer.uses if use.kind == "product"]
    return 2 * BYTES_PER_FINGERPRINT * layer.batch * sum(inputs)


def _work(layer: LayerShape, machine: str, flops: float) -> Cost:
    """Return FLOPs in the layer's dtype; on a CPU halves are multiplied as float32."""
    is_half = machine != "cpu" and layer.itemsize == 2
    return Cost(half_flops=int(flops)) if is_half else Cost(native_flops=int(flops))


def method_costs(layer: LayerShape, machine: str) -> dict[str, Cost]:
    """Return what each norm method and each gradient method costs on a layer, and `"forward"`.

    The latter is the layer's part of a forward pass without a graph.
    """
    found = (_torch_costs if machine == "cpu" else _kernel_costs)(layer)
    flops, moved = product_flops(layer), record_bytes(layer)
    inputs = [use.tokens * use.input_features for use in layer.uses if use.kind == "product"]
    input_bytes = layer.batch * layer.itemsize * sum(inputs) - layer.shared_bytes
    # A second forward pass keeps g alone of products. Lookups hardly hold anything else, and dense
    # records are no larger.
    saved = input_bytes if layer.is_repeatable else 0
    if machine == "cpu":
        made = layer.batch * layer.itemsize * max(inputs, default=0)
    else:
        made = saved // max(1, len(inputs))
    records = found["records"]
    forward = _work(layer, machine, FORWARD_OVERHEAD * flops) + Cost(moved_bytes=2 * moved)
    again = records + forward + Cost(moved_bytes=fingerprint_bytes(layer))
    backward = _work(layer, machine, BACKWARD_OVERHEAD * flops) + Cost(moved_bytes=2 * moved)
    twice = records + backward + (forward if layer.is_checkpointed else Cost())
    recomputed = replace(
        again,
        kept_bytes=records.kept_bytes - saved,
        transient_bytes=records.transient_bytes + made,
    )
    twice = replace(twice, kept_bytes=0)
    return {**found, "forward": forward, "recomputed": recomputed, "second_backward": twice}


def _torch_costs(layer: LayerShape) -> dict[str, Cost]:
    """Return the costs of methods in plain torch, on a CPU."""
    flops, moved, numel = product_flops(layer), record_bytes(layer), layer.numel
    size = layer.batch * numel
    rows, columns, tokens = layer.uses[0].rows, layer.uses[0].columns, layer.num_tokens("product")
    looked_up, num_dense = layer.num_tokens("lookup"), layer.num_tokens("dense")
    tile = min(TOKENS_PER_TILE, max(1, tokens))
    pairs = (
        tokens * (tokens + tile) * (rows + columns)  # tiles on the diagonal are computed whole
        + 2 * looked_up * (columns + tokens * columns)
        + 2 * num_dense * rows * columns * (1 + tokens)
    )
    visits = max(1, tokens // TOKENS_PER_TILE)  # of a token by other tiles, half of them saved
    gram = Cost(
        double_flops=layer.batch * pairs,
        moved_bytes=visits * moved + 16 * layer.batch * tokens * tile,
        transient_bytes=16 * tile * (tile + rows + columns),
    )
    passes = 1 + -(-tokens // TOKENS_PER_TILE)
    tiles = Cost(
        double_flops=flops + 2 * size,
        moved_bytes=16 * size * passes + moved * -(-rows // ROWS_PER_TILE),
        transient_bytes=16 * min(rows, ROWS_PER_TILE) * columns,
    )
    is_table = looked_up == sum(use.tokens for use in layer.uses)
    if [use.kind for use in layer.uses] == ["dense"]:
        formed = Cost(double_flops=2 * size, moved_bytes=BYTES_TO_READ * size)
    else:
        written = (BYTES_TO_FILL + BYTES_TO_READ) * size
        formed = Cost(native_flops=flops, double_flops=2 * size, moved_bytes=moved + written)
    features = sum(use.rows + use.columns for use in layer.uses)
    num_results = -(-layer.batch * tokens // TOKENS_PER_RESULT)
    return {
        "gram": gram,
        "tile": gram if is_table else tiles,
        "materialize": formed,
        "rank_one": Cost(double_flops=2 * layer.batch * features, moved_bytes=moved),
        "kept": Cost(
            double_flops=2 * size,
            moved_bytes=BYTES_TO_READ * size + 12 * numel,
            kept_bytes=BYTES_TO_FILL * size,
            transient_bytes=12 * numel,
        ),
        "records": Cost(
            double_flops=flops,
            moved_bytes=3 * moved + numel * (12 + 16 * num_results),
            kept_bytes=moved - layer.shared_bytes,
            transient_bytes=12 * numel,
        ),
    }


def _kernel_costs(layer: LayerShape) -> dict[str, Cost]:
    """Return the costs of methods where compiled kernels do them, on CUDA."""
    flops, moved = product_flops(layer), record_bytes(layer)
    kinds = {use.kind for use in layer.uses}
    is_float32 = layer.itemsize != 2 or kinds == {"dense"} or layer.is_float16
    kept = (4 if is_float32 else 2) * layer.numel  # bytes of one sample
    size = layer.batch * kept
    tile = _work(layer, "cuda", flops * TILE_FACTOR) + Cost(moved_bytes=2 * moved)
    if len(kinds) > 1 or kinds == {"dense"}:  # formed whole, for a few samples at a time
        tile += Cost(moved_bytes=2 * size, transient_bytes=max(kept, 64 << 20))
    gram = tile
    if kinds == {"product"}:
        tokens, sides = layer.num_tokens("product"), layer.uses[0].rows + layer.uses[0].columns
        pairs = layer.batch * tokens * (tokens + min(128, tokens)) * sides
        gram = _work(layer, "cuda", pairs * GRAM_FACTOR) + Cost(moved_bytes=2 * moved)
    records = _work(layer, "cuda", flops * WEIGHTED_FACTOR)
    # Numbers of a sample's records that are made again: to be measured, and to be added up.
    remade = layer.batch * sum(use.tokens * use.rows for use in layer.uses if use.is_streamed)
    if remade:
        records += _work(layer, "cuda", 2 * flops)
    records += Cost(
        moved_bytes=moved + 2 * SUM_ITEMSIZE * layer.numel,
        kept_bytes=moved - layer.shared_bytes - remade * layer.itemsize,
        transient_bytes=SUM_ITEMSIZE * layer.numel
        + 2 * min(remade, STREAMED_ELEMENTS) * layer.itemsize,
    )
    return {
        "gram": gram,
        "tile": tile,
        "materialize": _work(layer, "cuda", flops) + Cost(moved_bytes=2 * size + moved),
        "rank_one": Cost(moved_bytes=moved),
        "kept": Cost(moved_bytes=size + 2 * SUM_ITEMSIZE * layer.numel, kept_bytes=size),
        "records": records,
    }


def choice_cost(layer: LayerShape, choice: Choice, machine: str, costs: Mapping[str, Cost]) -> Cost:
    """Return the cost of a norm method and a gradient method together, of `method_costs`."""
    cost = costs[choice.norm] + costs[choice.gradient]
    if machine == "cpu" or not (choice == WAITING and waits(layer)):
        return cost
    # The same work by kernels that are nearer to a plain GEMM, and no less for one than for many.
    gram = costs["gram"].half_flops
    faster = gram * FACTOR_NORM_FACTOR / GRAM_FACTOR + product_flops(layer) * FACTOR_FACTOR
    slower = gram + costs["records"].half_flops
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
        total += fingerprint_bytes(layer) / MACHINES["cuda"]["moved_bytes"]
    return total
