"""What is known of each operation that uses a parameter, as pure functions and the records made."""

from unison.ops import attention, cross_entropy, elementwise, embedding, linear, norm, recurrent
from unison.ops.cross_entropy import Streamed
from unison.ops.embedding import is_lookup, looked_up
from unison.ops.records import (
    Dense,
    Layout,
    Lookup,
    Product,
    Record,
    in_rows,
    part_of,
    per_sample,
    plain_record,
    reshaped,
    transposed,
)
from unison.ops.registry import RULES, Builder, Rule, Tap, rule, rule_of

# Importing them fills the table.
_FILES = (attention, cross_entropy, elementwise, embedding, linear, norm, recurrent)
