"""Losses that keep samples apart."""

import torch
import torch.nn.functional as F
from torch import Tensor

from unison.kernels.available import takes
from unison.kernels.cross_entropy import IGNORE_INDEX, sample_means, statistics


def per_sample_loss(
    logits: Tensor,  # [batch, tokens, vocab]
    labels: Tensor,  # [batch, tokens]
    ignore_index: int = IGNORE_INDEX,
) -> Tensor:  # [batch]
    """Mean cross-entropy of each sample over its own counted tokens, in nats.

    The usual mean over all tokens of a batch couples samples through its denominator: a long sample
    makes the others weigh less. Here a sample's loss depends on that sample alone, which per-sample
    clipping needs. A sample without counted tokens has loss 0.

    `unison.linear_cross_entropy(..., reduction="sample_mean")` is the same from hidden states,
    without the logits.
    """
    return sample_means(_token_losses(logits, labels, ignore_index), labels, ignore_index)


def token_loss_sums(
    logits: Tensor,  # [batch, tokens, vocab]
    labels: Tensor,  # [batch, tokens]
    ignore_index: int = IGNORE_INDEX,
) -> Tensor:  # [batch]
    """Sum of the cross-entropy of each sample over its counted tokens, in nats."""
    return _token_losses(logits, labels, ignore_index).sum(dim=1)


def _token_losses(logits: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    # A compiler makes one kernel of what is below. Without one, ours reads the logits once, where
    # torch would copy them to float32 and keep a copy of their logarithms besides.
    if not torch.compiler.is_compiling() and type(logits) is Tensor and takes(logits):
        return statistics(logits.flatten(0, 1), labels.flatten(), ignore_index)[1].view_as(labels)
    precise = torch.promote_types(logits.dtype, torch.float32)  # a sum of many: never in bf16
    losses = F.cross_entropy(
        logits.flatten(0, 1).to(precise),
        labels.flatten(),
        ignore_index=ignore_index,
        reduction="none",
    )
    return losses.view(labels.shape)
