"""Models that return a loss of their own, as those of transformers do when they are given labels.

Such a loss is a mean over all labelled tokens of the batch. Where samples have different numbers of
them, each sample's share depends on the other samples through the denominator: no clipping of
gradients bounds what one sample does to the sum. Whether the loss couples samples in another way is
found out by running the module (`unison.capture.apart`); how many labels count is a matter of every
single batch.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from unison.errors import UnsupportedOperation

IGNORED = -100  # the label that torch's cross-entropy leaves out, unless told otherwise


def refuse_uneven_labels(inputs: Sequence[Tensor]) -> None:
    """Require all samples to have the same number of labels, in whatever holds some.

    Args:
        inputs: What the module was given, samples first [batch, ...].

    Raises:
        UnsupportedOperation: Samples have different numbers of labels that count.
    """
    for labels in inputs:
        if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
            continue
        is_counted = (labels != IGNORED).reshape(len(labels), -1)  # [batch, tokens]
        # A causal model leaves the first token out, another one does not; both must be even.
        for counted in (is_counted, is_counted[:, 1:]):
            per_sample = counted.sum(1)
            if not torch.equal(per_sample, per_sample[:1].expand_as(per_sample)):
                raise UnsupportedOperation(
                    "the model's own loss is a mean over all labelled tokens of the batch, and "
                    "samples have different numbers of them: each sample's gradient then depends "
                    "on the others. Compute unison.per_sample_loss(logits, labels).mean() from "
                    "the model's logits instead"
                )
