"""The head of a language model in one operation: `unison.linear_cross_entropy`."""

from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from torch import Tensor

from unison.errors import UnsupportedOperation
from unison.kernels.cross_entropy import (
    IGNORE_INDEX,
    ChunkedHead,
    linear_cross_entropy,
    make_head,
    reduced,
    token_losses,
)
from unison.ops.layout import Layout
from unison.ops.records import Dense, Record
from unison.ops.registry import Tap, rule
from unison.ops.streamed import Streamed

# Whether the record of the weight is a `Streamed`, or a `Product` that holds the gradient of all
# logits. A capture makes the latter of the former for who does not ask for streams.
STREAMING = True


@dataclass(eq=False)
class _Use:
    """One use of a head: what its records and its backward pass share.

    Records are made first, where the gradient of the token losses comes by. The reading that makes
    them leaves the gradient of the hidden states here, and the operation's own backward, which is
    next, takes it.

    Attributes:
        ignore_index: As the user gave it.
        chunk: Likewise.
        has_bias: Whether the bias has records.
        needs_hidden: Whether a backward pass of the operation follows. It does not where the
            forward pass is run again for records alone: they are made before the rule returns.
        waiting: The record that was made last, and the gradient of the token losses.
    """

    ignore_index: int
    chunk: int | None
    has_bias: bool
    needs_hidden: bool = False
    waiting: tuple[Streamed, Tensor] | None = None

    def begin(self, layout: Layout, g: Tensor, saved: tuple[Tensor, ...]) -> Streamed:
        """Make a record of the weight, whose first reading makes the rest."""
        hidden, weight, labels, lse, *bias = saved
        head = ChunkedHead(
            hidden=layout.rows(hidden),
            weight=weight,
            bias=bias[0] if bias else None,
            labels=layout.rows(labels, num_features=0),
            ignore_index=self.ignore_index,
            chunk=self.chunk,
        )
        record = Streamed(
            head,
            layout.rows(lse, num_features=0),
            layout.rows(g, num_features=0),
            # Where samples lie elsewhere, rows are in another order than the operation's.
            of_hidden=self.needs_hidden and layout.axis == 0 and layout.index is None,
            of_bias=self.has_bias,
        )
        self.waiting = record, g
        return record

    def hidden_gradient(self, g: Tensor) -> Tensor | None:
        """Hand the gradient of the hidden states over, if it was made of `g`."""
        waiting, self.waiting = self.waiting, None
        if waiting is None or waiting[1] is not g or waiting[0].hidden_gradient is None:
            return None
        record = waiting[0]
        record.finish()
        found, record.hidden_gradient = record.hidden_gradient, None  # the record may live on
        return found


def of_weight(
    layout: Layout, g: Tensor, *saved: Tensor, shape: tuple[int, ...], use: _Use
) -> Record:
    """Record of the weight [vocab, d]."""
    record = use.begin(layout, g, saved)
    # The type `Record` does not list streamed ones: only who asks a capture for them gets them.
    return cast(Record, record) if STREAMING else record.as_product()


def of_bias(layout: Layout, g: Tensor, *saved: Tensor, shape: tuple[int, ...], use: _Use) -> Dense:
    """Record of the bias [vocab], from the reading that the weight's record began."""
    has_begun = use.waiting is not None and use.waiting[1] is g
    record = use.waiting[0] if use.waiting and has_begun else use.begin(layout, g, saved)
    record.finish()
    sums, record.bias_sums = record.bias_sums, None
    assert sums is not None
    return Dense(sums)


@rule(linear_cross_entropy)
def head_losses(
    tap: Tap,
    hidden: Any,
    weight: Any,
    labels: Any,
    *,
    bias: Any = None,
    ignore_index: int = IGNORE_INDEX,
    reduction: str = "none",
    chunk: int | None = None,
) -> Tensor:
    """`unison.linear_cross_entropy`."""
    if tap.tracks(hidden):
        raise UnsupportedOperation(
            "linear_cross_entropy of hidden states that are parameters: they do not depend on the "
            "samples. Use F.linear and F.cross_entropy"
        )
    head = make_head(
        hidden, tap.plain(weight), labels, tap.plain(bias), ignore_index, reduction, chunk
    )
    use = _Use(ignore_index, chunk, has_bias=tap.tracks(bias))
    losses, lse = token_losses(head, use)
    saved = (head.hidden, head.weight, head.labels, lse)
    if head.bias is not None:
        saved = (*saved, head.bias)
    uses = [(weight, partial(of_weight, use=use)), (bias, partial(of_bias, use=use))]
    losses = tap(losses, saved=saved, uses=uses)
    use.needs_hidden = head.hidden.requires_grad
    return reduced(losses, head, reduction)
