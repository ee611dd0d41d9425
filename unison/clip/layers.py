"""Layers as the planner sees them: the shapes of a parameter's records, without their data.

And what it can choose for them: norm methods × gradient methods, of which some have names (modes).
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from unison.clip.gradients import GRADIENT_METHODS
from unison.clip.matrix import check_records, matrix_shape, num_terms, tensors_of
from unison.clip.norms import NORM_METHODS
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

    @property
    def num_backwards(self) -> int:
        """Backward passes of the whole model."""
        return GRADIENT_METHODS[self.gradient].num_backwards

    @property
    def num_forwards(self) -> int:
        """Forward passes of the whole model."""
        return GRADIENT_METHODS[self.gradient].num_forwards


# A norm method that forms per-sample gradients goes with the gradient method that uses them.
CHOICES: tuple[Choice, ...] = tuple(
    Choice(norm, gradient)
    for norm in NORM_METHODS
    for gradient in GRADIENT_METHODS
    if NORM_METHODS[norm].is_kept == GRADIENT_METHODS[gradient].needs_kept
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

    def placeholder_records(self) -> list[Record]:
        """Return records of these shapes without data, to ask methods whether they take them."""
        return [_placeholder(use, self.batch) for use in self.uses]


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


def with_shared_inputs(
    layers: Sequence[LayerShape], records: Mapping[str, Sequence[Record | Streamed]]
) -> list[LayerShape]:
    """Return layers that know with how many others they share inputs, as q, k and v do.

    Args:
        layers: From `describe`.
        records: What each was made of, by name; all of them, so that no two lie in one place.
    """

    def place(record: Record | Streamed) -> tuple | None:
        is_product = isinstance(record, Product | Streamed)
        return (record.a.data_ptr(), record.a.shape) if is_product else None

    sharing: dict[tuple | None, set[str]] = defaultdict(set)
    for layer in layers:
        for record in records[layer.name]:
            sharing[place(record)].add(layer.name)
    sharing[None] = {""}  # other records have no input
    return [
        replace(
            layer,
            uses=tuple(
                replace(use, num_sharing=len(sharing[place(record)]))
                for use, record in zip(layer.uses, records[layer.name], strict=True)
            ),
        )
        for layer in layers
    ]


def _placeholder(use: UseShape, batch: int) -> Record:
    shape = (use.rows, use.columns)
    match use.kind:
        case "product":
            left = torch.empty(batch, use.tokens, use.rows, device="meta")
            right = torch.empty(batch, use.tokens, use.columns, device="meta")
            a, g = (left, right) if use.is_transposed else (right, left)
            return Product(a, g, use.is_transposed, shape)
        case "lookup":
            ids = torch.empty(batch, use.tokens, dtype=torch.int64, device="meta")
            g = torch.empty(batch, use.tokens, use.columns, device="meta")
            return Lookup(ids, g, shape)
        case "dense":
            return Dense(torch.empty(batch, *shape, device="meta"))
        case _:
            raise ValueError(f"expected one of {list(KINDS.values())}, found {use.kind!r}")
