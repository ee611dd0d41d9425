"""A record that is made piece by piece: a product whose gradient is too large to exist at once.

[Note: made while it is read] The gradient of a language model's logits, [batch, tokens, vocab], is
the largest tensor of a training step. A `Streamed` record keeps what it is made of instead, and
makes it for a few samples at a time, as often as it is asked to. Making a piece costs a GEMM, and
the backward pass makes the same pieces for the gradient of the hidden states. So the *first*
reading serves both: whoever is given the record reads `first_chunks()` there and then, and what the
backward pass needs is left behind. What nobody has read by then, the backward pass reads itself
(`finish`).
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from unison.errors import UnsupportedOperation
from unison.kernels.cross_entropy import ChunkedHead, TokenChunk, plain_arithmetic
from unison.ops.records import Product

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
        sums = (self.batch, head.vocab)
        self.bias_sums = self.a.new_zeros(sums, dtype=lse.dtype) if of_bias else None
        self._versions = self._versions_now()
        self._whole: Tensor | None = None  # where the first reading puts its pieces, if anywhere
        # None once it is over: a generator of a method holds its object, and so itself.
        self._first = self._first_pieces() if of_hidden or of_bias else None
        self._is_begun = False

    @property
    def batch(self) -> int:
        """Number of samples."""
        return self._head.batch

    @property
    def tokens(self) -> int:
        """Tokens per sample."""
        return self._head.tokens

    def chunks(self) -> Iterator[Piece]:
        """Make the record piece by piece: runs of samples in order, each with all its tokens.

        A piece is its reader's, and lives as long as somebody holds it: let go of one before asking
        for the next, and only one exists.

        Raises:
            UnsupportedOperation: If what it is made of was written to in the meantime.
        """
        for samples in self._head.whole_samples():
            yield samples, self._piece(samples)

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
        whole = self._head.empty_logits(self.batch, self.tokens)
        if self._first is None or self._is_begun:
            for samples in self._head.whole_samples():
                self._piece(samples, whole)
        else:
            self._whole = whole
            self.finish()
            self._whole = None
        return Product(self.a, whole, self.is_transposed, self.shape)

    def _first_pieces(self) -> Iterator[Piece]:
        for samples in self._head.whole_samples():
            piece = self._piece(samples, self._whole)
            self._leave_behind(samples, piece.g)  # before a reader may write to it
            yield samples, piece
            del piece  # else two would exist while the next is made

    def _leave_behind(self, samples: slice, g: Tensor) -> None:
        with plain_arithmetic(g.device):
            if self.hidden_gradient is not None:
                chunk = self._chunk_of(samples)
                self._head.hidden_gradient_(self.hidden_gradient, chunk, g.flatten(0, 1))
            if self.bias_sums is not None:
                torch.sum(g, 1, dtype=self.bias_sums.dtype, out=self.bias_sums[samples])

    def _piece(self, samples: slice, whole: Tensor | None = None) -> Product:
        if self._versions_now() != self._versions:
            raise UnsupportedOperation(
                "hidden states, weight or labels of linear_cross_entropy were written to before "
                "its record was read: read it in the backward pass"
            )
        out = None if whole is None else whole[samples].flatten(0, 1)
        with plain_arithmetic(self.a.device):
            g = self._head.gradient(self._chunk_of(samples), self._lse, self.g, out)
        a = self.a[samples]
        return Product(a, g.unflatten(0, (len(a), self.tokens)), self.is_transposed, self.shape)

    def _chunk_of(self, samples: slice) -> TokenChunk:
        return TokenChunk(samples, slice(0, self.tokens))

    def _versions_now(self) -> list[int]:
        found = (self._head.hidden, self._head.weight, self._head.labels)
        return [each._version for each in found if not each.is_inference()]
