"""Losses that keep samples apart."""

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE_INDEX = -100


def per_sample_loss(
    logits: Tensor,  # [batch, tokens, vocab]
    labels: Tensor,  # [batch, tokens]
    ignore_index: int = IGNORE_INDEX,
) -> Tensor:  # [batch]
    """Mean cross-entropy of each sample over its own counted tokens, in nats.

    The usual mean over all tokens of a batch couples samples through its denominator: a long sample
    makes the others weigh less. Here a sample's loss depends on that sample alone, which per-sample
    clipping needs. A sample without counted tokens has loss 0.
    """
    sums = token_loss_sums(logits, labels, ignore_index)
    return sums / (labels != ignore_index).sum(dim=1).clamp(min=1)


def token_loss_sums(
    logits: Tensor,  # [batch, tokens, vocab]
    labels: Tensor,  # [batch, tokens]
    ignore_index: int = IGNORE_INDEX,
) -> Tensor:  # [batch]
    """Sum of the cross-entropy of each sample over its counted tokens, in nats."""
    precise = torch.promote_types(logits.dtype, torch.float32)  # a sum of many: never in bf16
    losses = F.cross_entropy(
        logits.flatten(0, 1).to(precise),
        labels.flatten(),
        ignore_index=ignore_index,
        reduction="none",
    )
    return losses.view(labels.shape).sum(dim=1)
