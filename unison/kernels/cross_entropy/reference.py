"""Cross-entropy of rows of logits, in plain torch: blocks of rows, in float32 at least."""

from collections.abc import Iterator

import torch
from torch import Tensor

# A block is converted to float32: on a CPU it should stay near the cache, and elsewhere be small
# beside the logits.
_ELEMENTS_PER_BLOCK = 1 << 20


def statistics(logits: Tensor, labels: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Return log-sum-exp and loss of each row of `logits` [rows, vocab]: both [rows], wide.

    Args:
        logits: [rows, vocab], rows of any stride.
        labels: [rows], int64. A label outside of the vocabulary has loss NaN.
        ignore_index: The label of rows that have loss 0.
    """
    lse = logits.new_empty(len(logits), dtype=wide_dtype(logits))
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


def gradient(
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


def wide_dtype(value: Tensor) -> torch.dtype:
    """The dtype of sums: float32, or float64 for float64."""
    return torch.promote_types(value.dtype, torch.float32)


def _labels(labels: Tensor, vocab: int, ignore_index: int) -> tuple[Tensor, Tensor, Tensor]:
    """Labels that can be looked up, which of them count, and which are in the vocabulary."""
    is_known = (labels >= 0) & (labels < vocab)
    return labels.clamp(0, vocab - 1), labels != ignore_index, is_known


def _blocks(logits: Tensor) -> Iterator[slice]:
    size = max(1, _ELEMENTS_PER_BLOCK // max(1, logits.shape[1]))
    for start in range(0, len(logits), size):
        yield slice(start, min(len(logits), start + size))
