"""Models that return a loss of their own, as those of transformers do when they are given labels.

Such a loss is a mean over all labelled tokens of the batch. Where samples have different numbers of
them, each sample's share depends on the other samples through the denominator: no clipping of
gradients bounds what one sample does to the sum.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from unison.errors import UnsupportedOperation
from unison.privacy.gate import passes_gate

IGNORED = -100  # the label that torch's cross-entropy leaves out, unless told otherwise


@dataclass(frozen=True, eq=False)
class OwnLoss:
    """A loss among a module's outputs, made of labels that it was given.

    Attributes:
        place: Which of the outputs that can have a gradient it is.
        labels: [batch, tokens, ...].
    """

    place: int
    labels: Tensor

    def refuse_uneven(self) -> None:
        """Require all samples to have the same number of labelled tokens.

        Raises:
            UnsupportedOperation: They do not.
        """
        is_counted = (self.labels != IGNORED).flatten(1)  # [batch, tokens]
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


def own_loss_of(output: Any, kwargs: Mapping[str, Any]) -> OwnLoss | None:
    """Find a loss that a module made itself of the `labels` that it was given."""
    labels = kwargs.get("labels")
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if not isinstance(loss, Tensor) or not isinstance(labels, Tensor) or labels.ndim < 2:
        return None
    gated = [leaf for leaf in tree_leaves(output) if passes_gate(leaf)]
    for place, leaf in enumerate(gated):
        if leaf is loss:
            return OwnLoss(place, labels)
    return None
