"""A language model's head: its logits, losses and gradients, one chunk of tokens at a time.

[Note: rows of logits] A chunk's logits are made in the dtype of the inputs, and their gradient is
written over them. A row's length is rounded up in memory: with 50257 elements of two bytes side by
side, no row but the first begins where a GEMM or a vector load wants it, and cuBLAS falls to a
quarter of its speed.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from unison.kernels.cross_entropy.chunks import Chunk, cut, rows_per_chunk
from unison.kernels.cross_entropy.reference import wide_dtype
from unison.kernels.cross_entropy.rows import gradient_, statistics

ROW_MULTIPLE = 16  # elements: what Triton takes for aligned; 32 bytes of bfloat16


@dataclass(frozen=True, eq=False, kw_only=True)
class Head:
    """logits = hidden · weightᵀ + bias, and the label of each token.

    Attributes:
        hidden: [batch, tokens, d].
        weight: [vocab, d].
        bias: [vocab], or None.
        labels: [batch, tokens], int64.
        ignore_index: The label of tokens that do not count.
        chunk: Most tokens whose logits exist at once; None to choose.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    labels: Tensor
    ignore_index: int
    chunk: int | None = None

    @property
    def batch(self) -> int:
        """Number of samples."""
        return self.hidden.shape[0]

    @property
    def tokens(self) -> int:
        """Tokens per sample."""
        return self.hidden.shape[1]

    @property
    def vocab(self) -> int:
        """Length of a token's logits."""
        return self.weight.shape[0]

    def chunks(self) -> Iterator[Chunk]:
        """Cut the tokens into chunks."""
        return cut(self.batch, self.tokens, self._rows)

    def whole_samples(self) -> Iterator[slice]:
        """Cut the samples into runs; one sample is not cut, however long it is."""
        for chunk in cut(self.batch, self.tokens, max(self._rows, self.tokens)):
            yield chunk.samples

    @property
    def _rows(self) -> int:
        return self.chunk or rows_per_chunk(self.vocab, self.hidden.device)

    def empty_logits(self, *shape: int) -> Tensor:
        """Memory for logits [*shape, vocab], rows apart as [Note: rows of logits] says."""
        padded = -(-self.vocab // ROW_MULTIPLE) * ROW_MULTIPLE
        memory = self.hidden.new_empty(*shape, padded)
        # Products of halves on a CPU read what lies between rows, times zero: it must be finite.
        memory[..., self.vocab :] = 0
        return memory[..., : self.vocab]

    def inputs(self, chunk: Chunk) -> Tensor:
        """The hidden states of a chunk [rows, d]."""
        return self.hidden[chunk].flatten(0, 1)

    def logits(self, chunk: Chunk, out: Tensor | None = None) -> Tensor:
        """Make the logits of a chunk [rows, vocab], in new memory unless `out` is given."""
        x = self.inputs(chunk)
        out = self.empty_logits(len(x)) if out is None else out[: len(x)]
        for words in self._runs():
            room, weight = out[:, words], self.weight[words].t()
            if self.bias is None:
                torch.mm(x, weight, out=room)
            else:
                torch.addmm(self.bias[words], x, weight, out=room)
        return out

    def _runs(self) -> Iterator[slice]:
        """Cut the vocabulary where cuBLAS wants it: [Note: rows of logits] holds for sizes too.

        For a length that is not a multiple of 16 bytes it has kernels of three generations ago, ten
        times as slow; a few words more are a product of their own.
        """
        whole = self.vocab // ROW_MULTIPLE * ROW_MULTIPLE
        is_slow = self.hidden.is_cuda and self.hidden.element_size() == 2
        if not is_slow or whole in (0, self.vocab):
            yield slice(0, self.vocab)
            return
        yield slice(0, whole)
        yield slice(whole, self.vocab)

    def losses(self) -> tuple[Tensor, Tensor]:
        """Make losses and log-sum-exps of all tokens: [batch, tokens] each, wide."""
        shape, dtype = self.labels.shape, wide_dtype(self.hidden)
        losses = self.hidden.new_empty(shape, dtype=dtype)
        lse = torch.empty_like(losses)
        room: Tensor | None = None
        for chunk in self.chunks():
            room = self._room(chunk) if room is None else room  # the first is the largest
            logits = self.logits(chunk, room)
            found = statistics(logits, self.labels[chunk].flatten(), self.ignore_index)
            lse[chunk].copy_(found[0].view_as(lse[chunk]))
            losses[chunk].copy_(found[1].view_as(losses[chunk]))
        return losses, lse

    def gradient(self, chunk: Chunk, lse: Tensor, g: Tensor, out: Tensor | None = None) -> Tensor:
        """Make the gradient of a chunk's logits [rows, vocab].

        Args:
            chunk: Which tokens.
            lse: Of all tokens [batch, tokens].
            g: The gradient of all tokens' losses [batch, tokens].
            out: Memory for it, at least as many rows.
        """
        logits = self.logits(chunk, out)
        labels, slope = self.labels[chunk].flatten(), g[chunk].flatten().to(lse.dtype)
        return gradient_(logits, labels, lse[chunk].flatten(), slope, self.ignore_index)

    def hidden_gradient_(self, out: Tensor, chunk: Chunk, logits_gradient: Tensor) -> None:
        """Write the gradient of a chunk's hidden states into that of all, [batch, tokens, d]."""
        room = out[chunk].view(-1, out.shape[-1])
        for i, words in enumerate(self._runs()):
            slope, weight = logits_gradient[:, words], self.weight[words]
            if i == 0:
                torch.mm(slope, weight, out=room)
            else:
                room.addmm_(slope, weight)

    def gradients(
        self, lse: Tensor, g: Tensor, *, of_hidden: bool, of_weight: bool, of_bias: bool
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Make the gradients of hidden states, weight and bias, as far as they are asked for."""
        hidden = self._empty_hidden_gradient() if of_hidden else None
        chunks = list(self.chunks())
        weight = WeightSum(self.weight, num_chunks=len(chunks)) if of_weight else None
        bias = self.weight.new_zeros(self.vocab, dtype=lse.dtype) if of_bias else None
        room: Tensor | None = None
        for chunk in chunks:
            room = self._room(chunk) if room is None else room
            slope = self.gradient(chunk, lse, g, room)
            if hidden is not None:
                self.hidden_gradient_(hidden, chunk, slope)
            if weight is not None:
                weight.add(slope, self.inputs(chunk))
            if bias is not None:
                bias += slope.sum(0, dtype=bias.dtype)
        return (
            hidden,
            None if weight is None else weight.total(),
            None if bias is None else bias.to(self.weight.dtype),
        )

    def _empty_hidden_gradient(self) -> Tensor:
        return self.hidden.new_empty(self.hidden.shape)  # contiguous, whatever the inputs are

    def _room(self, chunk: Chunk) -> Tensor:
        return self.empty_logits(self.labels[chunk].numel())


class WeightSum:
    """Σ over chunks of gᵀ a, in float32 at least and rounded once.

    Args:
        weight: Whose gradient it is [vocab, d].
        num_chunks: How many will be added. One alone needs no memory in a wider dtype.
    """

    def __init__(self, weight: Tensor, num_chunks: int) -> None:
        dtype = weight.dtype if num_chunks == 1 else wide_dtype(weight)
        self._dtype = weight.dtype
        self._total = torch.zeros_like(weight, dtype=dtype)

    def add(self, g: Tensor, a: Tensor) -> None:
        """Add a chunk: g [rows, vocab], a [rows, d]."""
        dtype = self._total.dtype
        if g.dtype == dtype:
            self._total.addmm_(g.t(), a)
        elif g.is_cuda:
            torch.addmm(self._total, g.t(), a, out_dtype=dtype, out=self._total)
        else:  # only CUDA adds halves to floats in one GEMM
            self._total.addmm_(g.to(dtype).t(), a.to(dtype))

    def total(self) -> Tensor:
        """The sum, in the weight's dtype."""
        return self._total.to(self._dtype)
