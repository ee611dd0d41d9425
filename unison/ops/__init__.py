"""What is known of each operation that uses a parameter, as pure functions and the records made."""

from unison.ops import (
    attention,
    conv,
    cross_entropy,
    einsum,
    embedding,
    experts,
    inplace,
    linear,
    norm,
    recurrent,
    scale,
)
from unison.ops.embedding import is_lookup, looked_up
from unison.ops.layout import Layout
from unison.ops.records import (
    Dense,
    Lookup,
    Product,
    Record,
    in_rows,
    part_of,
    per_sample,
    reshaped,
    transposed,
)
from unison.ops.registry import RULES, Builder, Rule, Tap, rule, rule_of
from unison.ops.streamed import Streamed

# Importing them fills the table.
_FILES = (
    *(attention, conv, cross_entropy, einsum, embedding, experts),
    *(inplace, linear, norm, recurrent, scale),
)

__all__ = [
    "RULES",
    "Builder",
    "Dense",
    "Layout",
    "Lookup",
    "Product",
    "Record",
    "Rule",
    "Streamed",
    "Tap",
    "in_rows",
    "is_lookup",
    "looked_up",
    "part_of",
    "per_sample",
    "reshaped",
    "rule",
    "rule_of",
    "transposed",
]
