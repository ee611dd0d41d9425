"""The head of a language model in one operation: `unison.linear_cross_entropy`.

[Note: made while it is read] The gradient of a language model's logits, [batch, tokens, vocab], is
the largest tensor of a training step. A `Streamed` record keeps what it is made of instead, and
makes it for a few samples at a time, as often as it is asked to. Making a piece costs a GEMM, and
the backward pass makes the same pieces for the gradient of the hidden states. So the *first*
reading serves both: whoever is given the record reads `first_chunks()` there and then, and what the
backward pass needs is left behind. What nobody has read by then, the backward pass reads itself
(`finish`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from unison.errors import UnsupportedOperation
from unison.kernels.available import plain_arithmetic
from unison.kernels.cross_entropy import (
    IGNORE_INDEX,
    ChunkedHead,
    TokenChunk,
    linear_cross_entropy,
    make_head,
    reduced,
    token_losses,
)
from unison.ops.records import Dense, Layout, Product, Record, rows_of
from unison.ops.registry import Tap, rule

Piece = tuple[slice, Product]  # the samples, and their part of the record


class Streamed:
    """Σ_t g_t a_tᵀ per sample, a matrix [vocab, d], with g made when it is read.

    It keeps references alone: hidden states, weight, labels, and two numbers per token.

    Args:
        head: What the logits are made of.
        lse: Log-sum-exp of each token's logits [batch, tokens].
        g: The gradient of the token losses [batch, tokens].
        of_hidden: Whether the first reading makes the gradient of the hidden states.
        of_bias: Whether it makes per-sample gradients of the bias.

    Attributes:
        a: What went in [batch, tokens, d].
        g: The gradient of the token losses [batch, tokens], 0 for tokens that do not count. A
            sample whose row of it is 0 has no gradient.
        shape: The parameter's shape, (vocab, d).
        hidden_gradient: Of the hidden states [batch, tokens, d], complete once the first reading
            is; None if it was not asked for.
        bias_sums: Each sample's gradient of the bias [batch, vocab], float32 at least; likewise.
    """

    is_transposed = False

    def __init__(
        self,
        head: ChunkedHead,
        lse: Tensor,
        g: Tensor,
        *,
        of_hidden: bool = False,
        of_bias: bool = False,
    ) -> None:
        self._head, self._lse = head, lse
        self.a = head.hidden
        self.g = g.masked_fill(head.labels == head.ignore_index, 0.0)
        self.shape = tuple(head.weight.shape)
        self.hidden_gradient = self.a.new_empty(self.a.shape) if of_hidden else None
        sums = (len(self.a), self.shape[0])
        self.bias_sums = self.a.new_zeros(sums, dtype=lse.dtype) if of_bias else None
        self._versions = self._versions_now()
        self._whole: Tensor | None = None  # where the first reading puts its pieces, if anywhere
        # None once it is over: a generator of a method holds its object, and so itself.
        self._first = self._first_pieces() if of_hidden or of_bias else None
        self._is_begun = False

    def chunks(self) -> Iterator[Piece]:
        """Make the record piece by piece: runs of samples in order, each with all its tokens.

        A piece is its reader's, and lives as long as somebody holds it: let go of one before asking
        for the next, and only one exists.

        Raises:
            UnsupportedOperation: If what it is made of was written to in the meantime.
        """
        for chunk in self._head.chunks(least=self.a.shape[1]):
            yield chunk[0], self._piece(chunk)

    def first_chunks(self) -> Iterator[Piece]:
        """The same, serving the backward pass too: see [Note: made while it is read].

        To be read before whoever is given the record returns. Later, or for a second reader, it is
        the same as `chunks()`.
        """
        if self._first is None or self._is_begun:
            return self.chunks()
        self._is_begun = True
        return self._first

    def finish(self) -> None:
        """Read what is left of the first reading."""
        rest, self._first = self._first, None
        for _ in rest or ():
            pass

    def as_product(self) -> Product:
        """Make all of it at once: [batch, tokens, vocab] exists then, in the inputs' dtype."""
        whole = self._head.empty_logits(*self.a.shape[:2])
        if self._first is None or self._is_begun:
            for chunk in self._head.chunks(least=self.a.shape[1]):
                self._piece(chunk, whole)
        else:
            self._whole = whole
            self.finish()
            self._whole = None
        return Product(self.a, whole, self.is_transposed, self.shape)

    def _first_pieces(self) -> Iterator[Piece]:
        for chunk in self._head.chunks(least=self.a.shape[1]):
            piece = self._piece(chunk, self._whole)
            with plain_arithmetic(self.a.device):  # before a reader may write to it
                if self.hidden_gradient is not None:
                    self._head.hidden_gradient_(self.hidden_gradient, chunk, piece.g.flatten(0, 1))
                if self.bias_sums is not None:
                    sums = self.bias_sums[chunk[0]]
                    torch.sum(piece.g, 1, dtype=sums.dtype, out=sums)
            yield chunk[0], piece
            del piece  # else two would exist while the next is made

    def _piece(self, chunk: TokenChunk, whole: Tensor | None = None) -> Product:
        if self._versions_now() != self._versions:
            raise UnsupportedOperation(
                "hidden states, weight or labels of linear_cross_entropy were written to before "
                "its record was read: read it in the backward pass"
            )
        a = self.a[chunk[0]]
        out = None if whole is None else whole[chunk[0]].flatten(0, 1)
        with plain_arithmetic(a.device):
            g = self._head.gradient(chunk, self._lse, self.g, out)
        return Product(a, g.unflatten(0, a.shape[:2]), self.is_transposed, self.shape)

    def _versions_now(self) -> list[int]:
        found = (self._head.hidden, self._head.weight, self._head.labels)
        return [each._version for each in found if not each.is_inference()]


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
            hidden=rows_of(layout, hidden),
            weight=weight,
            bias=bias[0] if bias else None,
            labels=rows_of(layout, labels, num_features=0),
            ignore_index=self.ignore_index,
            chunk=self.chunk,
        )
        record = Streamed(
            head,
            rows_of(layout, lse, num_features=0),
            rows_of(layout, g, num_features=0),
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
    # The type `Record` does not list streamed ones: only who asks a capture for them gets them.
    return cast(Record, use.begin(layout, g, saved))


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
