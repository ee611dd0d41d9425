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
        is_uneven = [(each != each[:1]).any() for each in counts if len(each)]
        self._found = torch.stack(is_uneven).any() if is_uneven else torch.tensor(False)
        self._event: torch.cuda.Event | None = None
        if self._found.is_cuda:
            on_host = torch.empty((), dtype=torch.bool, pin_memory=True)
            on_host.copy_(self._found, non_blocking=True)
            self._found, self._event = on_host, torch.cuda.Event()
            self._event.record()

    def finish(self) -> None:
        """Ask for the answer.

        Raises:
            UnsupportedOperation: Samples have different numbers of labels that count.
        """
        if self._event is not None:
            self._event.synchronize()
        if self._found:
            raise UnsupportedOperation(
                "the model's own loss is a mean over all labelled tokens of the batch, and "
                "samples have different numbers of them: each sample's gradient then depends "
                "on the others. Compute unison.per_sample_loss(logits, labels).mean() from "
                "the model's logits instead"
            )


def _counts(labels: Tensor) -> list[Tensor]:
    """Labels that count, of each sample [batch]; without the first token, too.

    A causal model leaves it out, another one does not: both must be even.
    """
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        return []
    is_counted = (labels != IGNORED).reshape(len(labels), -1)  # [batch, tokens]
    return [is_counted.sum(1), is_counted[:, 1:].sum(1)]
