"""Cross-entropy of a linear map's outputs, which never exist for a whole batch.

`linear_cross_entropy` is what users call. It is made of chunks of tokens (`ChunkedHead`), and these
of two operations on rows of logits, `statistics` and `gradient_`: Triton on CUDA
(cross_entropy_triton.py), plain torch elsewhere. The backend is chosen by device and dtype alone:
the backends round differently, and a step must not.

[Note: what is kept] Between forward and backward only the inputs and one number per token are kept,
the log-sum-exp of its logits. The backward pass makes the logits again, chunk by chunk: a third
GEMM beside the two that it needs anyway, for logits [batch, tokens, vocab] that never exist.

[Note: rows of logits] A chunk's logits are made in the dtype of the inputs, and their gradient is
written over them. A row's length is rounded up in memory: with 50257 elements of two bytes side by
side, no row but the first begins where a GEMM or a vector load wants it, and cuBLAS falls to a
quarter of its speed.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from unison import check
from unison.errors import BadInput, UnsupportedOperation
from unison.kernels.available import TAKEN, has_triton, plain_arithmetic, spans, wide_dtype

IGNORE_INDEX = -100
REDUCTIONS = ("none", "sample_mean")
ROW_MULTIPLE = 16  # elements: what Triton takes for aligned; 32 bytes of bfloat16


# --- rows of logits -------------------------------------------------------------------------------


def _uses_triton(logits: Tensor) -> bool:
    return logits.is_cuda and logits.dtype in TAKEN and has_triton()


def _kernels() -> Any:
    return import_module("unison.kernels.cross_entropy_triton")


@torch.library.custom_op("unison::cross_entropy_statistics", mutates_args=())
def statistics(logits: Tensor, labels: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Return log-sum-exp and loss of each row, float32 or float64: [rows] each.

    Losses have a gradient.

    Args:
        logits: [rows, vocab], elements of a row side by side.
        labels: [rows], int64, contiguous.
        ignore_index: The label of rows that have loss 0.
    """
    if labels.device.type == "cpu":  # a GPU would have to be waited for; there the loss is NaN
        vocab = logits.shape[1]
        is_unknown = ((labels < 0) | (labels >= vocab)) & (labels != ignore_index)
        if bool(is_unknown.any()):
            found = int(labels[is_unknown][0])
            raise BadInput(
                f"expected labels from 0 to {vocab - 1}, or {ignore_index} where a token does not "
                f"count, found {found}"
            )
    make = _kernels().statistics if _uses_triton(logits) else statistics_reference
    return make(logits, labels, ignore_index)


@statistics.register_fake
def _(logits: Tensor, labels: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    rows, dtype = logits.shape[0], wide_dtype(logits.dtype)
    return logits.new_empty(rows, dtype=dtype), logits.new_empty(rows, dtype=dtype)


def _write_gradient(
    logits: Tensor, labels: Tensor, lse: Tensor, g: Tensor, ignore_index: int, out: Tensor
) -> None:
    make = _kernels().gradient if _uses_triton(logits) else gradient_reference
    make(logits, labels, lse, g, ignore_index, out)


@torch.library.custom_op("unison::cross_entropy_gradient_", mutates_args=("logits",))
def _gradient_(logits: Tensor, labels: Tensor, lse: Tensor, g: Tensor, ignore_index: int) -> None:
    _write_gradient(logits, labels, lse, g, ignore_index, logits)


@_gradient_.register_fake
def _(logits: Tensor, labels: Tensor, lse: Tensor, g: Tensor, ignore_index: int) -> None:
    return None


@torch.library.custom_op("unison::cross_entropy_gradient", mutates_args=())
def _gradient(logits: Tensor, labels: Tensor, lse: Tensor, g: Tensor, ignore_index: int) -> Tensor:
    out = logits.new_empty(logits.shape)
    _write_gradient(logits, labels, lse, g, ignore_index, out)
    return out


@_gradient.register_fake
def _(logits: Tensor, labels: Tensor, lse: Tensor, g: Tensor, ignore_index: int) -> Tensor:
    return logits.new_empty(logits.shape)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: tuple[Tensor, Tensor]) -> None:
    logits, labels, ctx.ignore_index = inputs
    ctx.save_for_backward(logits, labels, output[0])
    ctx.mark_non_differentiable(output[0])


def _backward(ctx: Any, _: Tensor, g: Tensor) -> tuple[Tensor, None, None]:
    return _gradient(*ctx.saved_tensors, g, ctx.ignore_index), None, None


statistics.register_autograd(_backward, setup_context=_keep)


def gradient_(logits: Tensor, labels: Tensor, lse: Tensor, g: Tensor, ignore_index: int) -> Tensor:
    """Put g · (softmax − onehot) in the place of the logits, and return them.

    Args:
        logits: [rows, vocab], elements of a row side by side.
        labels: [rows], int64, contiguous.
        lse: [rows], as `statistics` returned it.
        g: The gradient of each row's loss [rows], of the dtype of `lse`, contiguous.
        ignore_index: The label of rows that become 0, whatever they hold.
    """
    _gradient_(logits, labels, lse, g, ignore_index)
    return logits


# --- the reference for rows of logits, in plain torch ---------------------------------------------


# A block is converted to float32: on a CPU it should stay near the cache, and elsewhere be small
# beside the logits.
_ELEMENTS_PER_BLOCK = 1 << 20


def statistics_reference(
    logits: Tensor, labels: Tensor, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """Return log-sum-exp and loss of each row of `logits` [rows, vocab]: both [rows], wide.

    Args:
        logits: [rows, vocab], rows of any stride.
        labels: [rows], int64. A label outside of the vocabulary has loss NaN.
        ignore_index: The label of rows that have loss 0.
    """
    lse = logits.new_empty(len(logits), dtype=wide_dtype(logits.dtype))
    losses = torch.empty_like(lse)
    for rows in _blocks(logits):
        wide = logits[rows].to(lse.dtype)
        top = wide.amax(1)  # [rows]
        # A row of -inf has no largest element to take away.
        base = top.masked_fill(top == -torch.inf, 0.0)
        log_total = (wide - base.unsqueeze(1)).exp_().sum(1).log_()
        label, is_counted, is_known = _labels(labels[rows], wide.shape[1], ignore_index)
        picked = wide.gather(1, label.unsqueeze(1)).squeeze(1)
        # Not lse - picked, which cancels where the label has nearly all of the probability.
        found = (log_total + (top - picked)).masked_fill_(~is_known, torch.nan)
        losses[rows] = found.masked_fill_(~is_counted, 0.0)
        lse[rows] = top + log_total
    return lse, losses


def gradient_reference(
    logits: Tensor, labels: Tensor, lse: Tensor, g: Tensor, ignore_index: int, out: Tensor
) -> None:
    """Put g · (softmax(logits) − onehot(label)) into `out` [rows, vocab].

    Args:
        logits: [rows, vocab], rows of any stride.
        labels: [rows], int64. A label outside of the vocabulary makes its row NaN.
        lse: [rows], as `statistics` returned it.
        g: The gradient of each row's loss [rows], of the dtype of `lse`.
        ignore_index: The label of rows that become 0, whatever they hold.
        out: Of the shape and dtype of the logits; it may be the logits.
    """
    for rows in _blocks(logits):
        label, is_counted, is_known = _labels(labels[rows], logits.shape[1], ignore_index)
        wide = (logits[rows].to(lse.dtype) - lse[rows].unsqueeze(1)).exp_()
        ones = torch.ones_like(label, dtype=wide.dtype)
        wide.scatter_add_(1, label.unsqueeze(1), -ones.unsqueeze(1))
        wide.mul_(g[rows].masked_fill(~is_known, torch.nan).unsqueeze(1))
        out[rows] = wide.masked_fill_(~is_counted.unsqueeze(1), 0.0).to(out.dtype)


def _labels(labels: Tensor, vocab: int, ignore_index: int) -> tuple[Tensor, Tensor, Tensor]:
    """Labels that can be looked up, which of them count, and which are in the vocabulary."""
    is_known = (labels >= 0) & (labels < vocab)
    return labels.clamp(0, vocab - 1), labels != ignore_index, is_known


def _blocks(logits: Tensor) -> list[slice]:
    return spans(len(logits), max(1, _ELEMENTS_PER_BLOCK // max(1, logits.shape[1])))


# --- chunks of tokens -----------------------------------------------------------------------------

# Elements of a chunk of logits. On a GPU its GEMM should fill the chip, on a CPU it should not be
# far from the cache. Functions of the device alone: chunks change rounding, and free memory must
# not.
_ELEMENTS = {"cpu": 1 << 22}
_ELEMENTS_ELSEWHERE = 1 << 27

TokenChunk = tuple[slice, slice]
"""Some tokens of some samples, all of them or one sample: an index of [batch, tokens, ...]."""


def rows_per_chunk(vocab: int, device: torch.device) -> int:
    """Return how many tokens' logits exist at once, unless the user says so: at least one."""
    return max(1, _ELEMENTS.get(device.type, _ELEMENTS_ELSEWHERE) // max(1, vocab))


def cut(batch: int, tokens: int, rows: int) -> Iterator[TokenChunk]:
    """Cut a batch into whole samples, or into runs of one sample's tokens if it is too long.

    Args:
        batch: Number of samples.
        tokens: Tokens per sample.
        rows: Most tokens in a chunk.

    >>> [(samples.start, samples.stop) for samples, _ in cut(5, 10, 25)]
    [(0, 2), (2, 4), (4, 5)]
    >>> [(samples.start, part.start, part.stop) for samples, part in cut(2, 10, 6)]
    [(0, 0, 5), (0, 5, 10), (1, 0, 5), (1, 5, 10)]
    """
    if tokens == 0:
        return
    if tokens <= rows:
        yield from ((samples, slice(0, tokens)) for samples in _even(batch, rows // tokens))
        return
    for sample in range(batch):
        yield from ((slice(sample, sample + 1), part) for part in _even(tokens, rows))


def _even(total: int, most: int) -> list[slice]:
    """Cut range(total) into as few runs as can be, and those as even as can be."""
    count = -(-total // most)
    return spans(total, max(1, -(-total // max(1, count))))


@dataclass(frozen=True, eq=False)
class ChunkedHead:
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

    def chunks(self, *, least: int = 0) -> Iterator[TokenChunk]:
        """Cut the tokens into chunks, of at least so many where a sample must stay whole."""
        batch, tokens, _ = self.hidden.shape
        rows = self.chunk or rows_per_chunk(len(self.weight), self.hidden.device)
        return cut(batch, tokens, max(rows, least))

    def empty_logits(self, *shape: int) -> Tensor:
        """Memory for logits [*shape, vocab], rows apart as [Note: rows of logits] says."""
        vocab = len(self.weight)
        memory = self.hidden.new_empty(*shape, -(-vocab // ROW_MULTIPLE) * ROW_MULTIPLE)
        # Products of halves on a CPU read what lies between rows, times zero: it must be finite.
        memory[..., vocab:] = 0
        return memory[..., :vocab]

    def logits(self, chunk: TokenChunk, out: Tensor | None = None) -> Tensor:
        """Make the logits of a chunk [rows, vocab], in new memory unless `out` is given."""
        x = self.hidden[chunk].flatten(0, 1)
        out = self.empty_logits(len(x)) if out is None else out[: len(x)]
        for words in self._runs():
            room, weight = out[:, words], self.weight[words].t()
            if self.bias is None:
                torch.mm(x, weight, out=room)
            else:
                torch.addmm(self.bias[words], x, weight, out=room)
        return out

    def _runs(self) -> list[slice]:
        """Cut the vocabulary where cuBLAS wants it: [Note: rows of logits] holds for sizes too.

        For a length that is not a multiple of 16 bytes it has kernels of three generations ago, ten
        times as slow; a few words more are a product of their own.
        """
        vocab = len(self.weight)
        whole = vocab // ROW_MULTIPLE * ROW_MULTIPLE
        is_slow = self.hidden.is_cuda and self.hidden.element_size() == 2
        if not is_slow or whole in (0, vocab):
            return [slice(0, vocab)]
        return [slice(0, whole), slice(whole, vocab)]

    def losses(self) -> tuple[Tensor, Tensor]:
        """Make losses and log-sum-exps of all tokens: [batch, tokens] each, wide."""
        losses = self.hidden.new_empty(self.labels.shape, dtype=wide_dtype(self.hidden.dtype))
        lse = torch.empty_like(losses)
        room: Tensor | None = None
        for chunk in self.chunks():
            logits = self.logits(chunk, room)
            room = logits if room is None else room  # the first is the largest
            found = statistics(logits, self.labels[chunk].flatten(), self.ignore_index)
            lse[chunk].copy_(found[0].view_as(lse[chunk]))
            losses[chunk].copy_(found[1].view_as(losses[chunk]))
        return losses, lse

    def gradient(
        self, chunk: TokenChunk, lse: Tensor, g: Tensor, out: Tensor | None = None
    ) -> Tensor:
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

    def hidden_gradient_(self, out: Tensor, chunk: TokenChunk, logits_gradient: Tensor) -> None:
        """Write the gradient of a chunk's hidden states into that of all, [batch, tokens, d]."""
        room = out[chunk].view(-1, out.shape[-1])
        for i, words in enumerate(self._runs()):
            slope, weight = logits_gradient[:, words], self.weight[words]
            if i == 0:
                torch.mm(slope, weight, out=room)
            else:
                room.addmm_(slope, weight)

    def gradients(self, lse: Tensor, g: Tensor, wanted: tuple[bool, ...]) -> list[Tensor | None]:
        """Make the gradients of hidden states, weight and bias, of those that are wanted."""
        chunks = list(self.chunks())
        # Added in float32 at least and rounded once; one chunk alone needs no wider memory.
        dtype = self.weight.dtype if len(chunks) == 1 else lse.dtype
        # Contiguous, whatever the inputs are.
        hidden = self.hidden.new_empty(self.hidden.shape) if wanted[0] else None
        weight = torch.zeros_like(self.weight, dtype=dtype) if wanted[1] else None
        bias = self.weight.new_zeros(len(self.weight), dtype=lse.dtype) if wanted[2] else None
        room: Tensor | None = None
        for chunk in chunks:
            slope = self.gradient(chunk, lse, g, room)
            room = slope if room is None else room  # the first is the largest
            if hidden is not None:
                self.hidden_gradient_(hidden, chunk, slope)
            if weight is not None:
                _add_product_(weight, slope, self.hidden[chunk].flatten(0, 1))
            if bias is not None:
                bias += slope.sum(0, dtype=bias.dtype)
        sums = [None if each is None else each.to(self.weight.dtype) for each in (weight, bias)]
        return [hidden, *sums]


def _add_product_(total: Tensor, g: Tensor, a: Tensor) -> None:
    """Add gᵀ a of a chunk to `total` [vocab, d]: g [rows, vocab], a [rows, d]."""
    dtype = total.dtype
    if g.dtype == dtype:
        total.addmm_(g.t(), a)
    elif g.is_cuda:
        torch.addmm(total, g.t(), a, out_dtype=dtype, out=total)
    else:  # only CUDA adds halves to floats in one GEMM
        total.addmm_(g.to(dtype).t(), a.to(dtype))


# --- linear map and cross-entropy in one ----------------------------------------------------------


def linear_cross_entropy(
    hidden: Tensor,  # [batch, tokens, d]
    weight: Tensor,  # [vocab, d]
    labels: Tensor,  # [batch, tokens]
    *,
    bias: Tensor | None = None,  # [vocab]
    ignore_index: int = IGNORE_INDEX,
    reduction: str = "none",
    chunk: int | None = None,
) -> Tensor:
    """Cross-entropy of `hidden @ weight.T + bias`, without holding the logits of all tokens.

    Logits exist for one chunk of tokens at a time, in the dtype of the inputs; sums over the
    vocabulary are float32 (float64 for float64 inputs). Under autocast the inputs are cast as for
    `F.linear`. In a model that is trained privately, the head's weight may be tied and is clipped
    like any other.

    Args:
        hidden: What goes into the head [batch, tokens, d].
        weight: The head's weight [vocab, d].
        labels: The token to predict at each position [batch, tokens].
        bias: The head's bias [vocab].
        ignore_index: The label of tokens that do not count: loss 0 and no gradient.
        reduction: `"none"` for one loss per token, `"sample_mean"` for one per sample: the mean
            over its own counted tokens, as `unison.per_sample_loss` has it.
        chunk: Most tokens whose logits exist at once; chosen from the shapes unless given. It
            changes rounding only.

    Returns:
        Losses in nats, float32 at least: [batch, tokens] or [batch].

    Raises:
        BadInput: If shapes, dtypes or options do not fit, or on a CPU a label is not in the
            vocabulary (elsewhere its loss is NaN).
        UnsupportedOperation: In a backward pass with `create_graph=True`.
    """
    given = hidden, weight, labels
    options: dict[str, Any] = {"bias": bias, "ignore_index": ignore_index}
    options |= {"reduction": reduction, "chunk": chunk}
    if has_torch_function((*given, bias)):
        return handle_torch_function(linear_cross_entropy, (*given, bias), *given, **options)
    head = make_head(*given, **options)
    return reduced(token_losses(head)[0], head, reduction)


def make_head(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    reduction: str,
    chunk: int | None,
) -> ChunkedHead:
    """Check the arguments of `linear_cross_entropy`, and cast them as autocast asks."""
    check.one_of(REDUCTIONS, reduction=reduction)
    if chunk is not None:
        check.positive(chunk=chunk)
    if any(hasattr(each, "device_mesh") for each in (hidden, weight, bias)):
        raise UnsupportedOperation(
            "linear_cross_entropy of a DTensor: its vocabulary or its tokens lie on several "
            "ranks. Redistribute it and use to_local(), or compute the logits"
        )
    fits = (
        hidden.ndim == 3
        and weight.ndim == 2
        and weight.shape[0] > 0
        and weight.shape[1] == hidden.shape[2]
        and labels.shape == hidden.shape[:2]
        and not labels.is_floating_point()
        and (bias is None or bias.shape == weight.shape[:1])
    )
    if not fits:
        found = {"hidden": hidden, "weight": weight, "labels": labels, "bias": bias}
        there = {name: each for name, each in found.items() if each is not None}
        shapes = [f"{name} {list(each.shape)} {each.dtype}" for name, each in there.items()]
        raise BadInput(
            "expected hidden [batch, tokens, d], weight [vocab, d], labels [batch, tokens] of "
            f"integers and bias [vocab], found {', '.join(shapes)}"
        )
    hidden, weight, bias = map(as_autocast, (hidden, weight, bias))
    dtypes = {each.dtype for each in (hidden, weight, bias) if each is not None}
    if len(dtypes) > 1 or not hidden.is_floating_point():
        raise BadInput(
            "expected hidden, weight and bias of one floating-point dtype, found "
            f"{sorted(map(str, dtypes))}; convert them, or use autocast"
        )
    return ChunkedHead(hidden, weight, bias, labels.long(), ignore_index, chunk)


def token_losses(head: ChunkedHead, shared: Any = None) -> tuple[Tensor, Tensor]:
    """Make losses, with a graph, and log-sum-exps of all tokens: [batch, tokens] each.

    Args:
        head: What the logits are made of.
        shared: Who may have made the gradient of the hidden states already, from the same chunks:
            its `hidden_gradient(g)` gives it away, if it is that of the token gradients g.
    """
    return _TokenLosses.apply(  # type: ignore[return-value]
        head.hidden, head.weight, head.bias, head.labels, head.ignore_index, head.chunk, shared
    )


def reduced(losses: Tensor, head: ChunkedHead, reduction: str) -> Tensor:
    """Token losses [batch, tokens] as asked for."""
    is_mean = reduction == "sample_mean"
    return sample_means(losses, head.labels, head.ignore_index) if is_mean else losses


def sample_means(losses: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    """Mean of each sample's losses [batch, tokens] over its counted tokens; 0 if there is none."""
    return losses.sum(dim=1) / (labels != ignore_index).sum(dim=1).clamp(min=1)


class _TokenLosses(torch.autograd.Function):
    """See [Note: what is kept]."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor]:
        head, ctx.shared = ChunkedHead(*given[:-1]), given[-1]
        with plain_arithmetic(head.hidden.device):
            losses, lse = head.losses()
        ctx.save_for_backward(head.hidden, head.weight, head.bias, head.labels, lse)
        ctx.ignore_index, ctx.chunk = head.ignore_index, head.chunk
        ctx.mark_non_differentiable(lse)
        return losses, lse

    @staticmethod
    def backward(ctx: Any, g: Tensor, _: Tensor) -> tuple:  # type: ignore[override]
        if torch.is_grad_enabled():
            raise UnsupportedOperation(
                "linear_cross_entropy has no second derivative (create_graph=True); compute "
                "F.cross_entropy of the logits instead"
            )
        hidden, weight, bias, labels, lse = ctx.saved_tensors  # asked for once: see `Capture`
        wanted = ctx.needs_input_grad[:3]
        made = None if ctx.shared is None else ctx.shared.hidden_gradient(g)
        if made is not None:
            assert wanted == (True, False, False), "the capture makes the records of the others"
            return made.view_as(hidden), None, None, None, None, None, None
        head = ChunkedHead(hidden, weight, bias, labels, ctx.ignore_index, ctx.chunk)
        with plain_arithmetic(hidden.device):
            return *head.gradients(lse, g, wanted), None, None, None, None


def as_autocast(value: Any) -> Any:
    """Cast what autocast would cast for `F.linear`, where it is on; None stays None."""
    if value is None:
        return None
    kind = value.device.type
    # Compiled by torch 2.11 too, which does not follow `is_autocast_available`.
    if value.is_meta or not torch.is_autocast_enabled(kind):
        return value
    is_cast = value.is_floating_point() and value.dtype != torch.float64
    return value.to(torch.get_autocast_dtype(kind)) if is_cast else value
