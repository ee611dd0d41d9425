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


class LabelCheck:
    """Requires all samples to have the same number of labels, in whatever holds some.

    The answer is asked for when the backward pass has ended: until then a GPU goes on with it.

    Args:
        inputs: What the module was given, samples first [batch, ...].
    """

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        counts = [each for labels in inputs for each in _counts(labels)]
        self._is_uneven = [_on_host((each != each[:1]).any()) for each in counts]

    def finish(self) -> None:
        """Ask for the answer.

        Raises:
            UnsupportedOperation: Samples have different numbers of labels that count.
        """
        for _, event in self._is_uneven:
            if event is not None:
                event.synchronize()
        if any(found for found, _ in self._is_uneven):
            raise UnsupportedOperation(
                "the model's own loss is a mean over all labelled tokens of the batch, and "
                "samples have different numbers of them: each sample's gradient then depends "
                "on the others. Compute unison.per_sample_loss(logits, labels).mean() from "
                "the model's logits instead"
            )


def _on_host(answer: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """A copy of a truth on the host, and what to wait for before it is read."""
    if not answer.is_cuda:
        return answer, None
    copy = torch.empty((), dtype=torch.bool, pin_memory=True)
    with torch.cuda.device(answer.device):
        copy.copy_(answer, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
    return copy, event


def _counts(labels: Tensor) -> list[Tensor]:
    """Labels that count, of each sample [batch]; without the first token, too.

    A causal model leaves it out, another one does not: both must be even.
    """
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        return []
    is_counted = (labels != IGNORED).unsqueeze(-1).flatten(1)  # [batch, tokens]
    return [is_counted.sum(1), is_counted[:, 1:].sum(1)]
