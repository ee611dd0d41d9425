"""Which rows of a tensor belong to which sample."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from unison.errors import BadInput
from unison.kernels.affine import column_sums


@dataclass(frozen=True)
class Layout:
    """Where the samples of a batch lie in the output of an operation.

    Attributes:
        batch: Number of samples.
        axis: The dimension that holds them. It may be a multiple of `batch` long, where samples and
            tokens were flattened into one dimension, sample by sample.
    """

    batch: int
    axis: int = 0

    def rows(self, value: Tensor, num_features: int = 1) -> Tensor:
        """Bring a tensor to [batch, tokens, *features].

        Args:
            value: Any tensor whose dimension `axis` holds the samples.
            num_features: How many trailing dimensions are features.

        Raises:
            BadInput: If the dimension does not divide into samples.
        """
        leading = value.ndim - num_features
        if self.axis == 0 and leading == 2 and value.shape[0] == self.batch:
            return value
        if not self.axis < leading or (self.batch and value.shape[self.axis] % self.batch):
            raise BadInput(
                f"expected {self.batch} samples along dimension {self.axis}, found a tensor of "
                f"shape {list(value.shape)} with {num_features} dimensions of features"
            )
        features = value.shape[leading:]
        tokens = math.prod(value.shape[:leading]) // max(self.batch, 1)
        return value.movedim(self.axis, 0).reshape(self.batch, tokens, *features)

    def samples(self, value: Tensor) -> Tensor:
        """Bring a tensor to [batch, *its own shape with 1 in the place of the samples].

        Where tokens are flattened into the batch dimension too, they stay in that place.
        """
        rest = value.shape[self.axis] // max(self.batch, 1)
        moved = value.movedim(self.axis, 0)
        split = moved.reshape(self.batch, rest, *moved.shape[1:])
        return split.movedim(1, 1 + self.axis)

    def summed(self, g: Tensor, shape: tuple[int, ...]) -> Tensor:
        """As `reduced`, added in float32 at least, without a wide copy in the usual case."""
        dtype = torch.promote_types(g.dtype, torch.float32)
        leading = g.ndim - len(shape)
        if self.axis == 0 and leading > 0 and self.batch and g.shape[leading:] == shape:
            if len(shape) == 1:
                return column_sums(self.rows(g))
            return self.rows(g, num_features=len(shape)).sum(dim=1, dtype=dtype)
        return self.reduced(g.to(dtype), shape)

    def reduced(self, value: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Add up each sample's elements as a parameter of `shape` was broadcast to them.

        Returns:
            [batch, *shape]

        Raises:
            BadInput: If the parameter has a dimension of its own where the samples are.
        """
        leading = value.ndim - len(shape)
        if self.axis == 0 and leading > 0 and self.batch and value.shape[leading:] == shape:
            return self.rows(value, num_features=len(shape)).sum(dim=1)  # the usual case
        per_sample = self.samples(value)  # [batch, *value.shape with the samples taken out]
        extra = per_sample.ndim - 1 - len(shape)
        if extra > 0:
            per_sample = per_sample.sum(dim=tuple(range(1, 1 + extra)))
        for dim, size in enumerate(shape):
            found = per_sample.shape[1 + dim]
            if found != size:
                if size != 1:
                    raise BadInput(
                        f"a parameter of shape {list(shape)} does not broadcast over samples in "
                        f"dimension {self.axis} of {list(value.shape)}"
                    )
                per_sample = per_sample.sum(dim=1 + dim, keepdim=True)
        return per_sample.reshape(self.batch, *shape)
