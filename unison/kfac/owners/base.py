"""What an owner of parameters does for K-FAC."""

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from unison.shard.ranks import Ranks
from unison.shard.sharded_tensor import local_part

Range = tuple[int, int]


@dataclass(frozen=True, eq=False)
class Held:
    """A trainable parameter, and which of its elements each rank holds.

    Attributes:
        name: Its canonical name.
        parameter: What the optimizer holds on this rank.
        shape: Of the whole parameter.
        ranges: The elements [start, stop) of the flattened whole at each place; all ranks are
            copies of these places, `replica * num_places + place`.
    """

    name: str
    parameter: nn.Parameter
    shape: tuple[int, ...]
    ranges: tuple[Range, ...]

    @property
    def numel(self) -> int:
        """Elements of the whole."""
        return math.prod(self.shape)

    @property
    def has_gradient(self) -> bool:
        """Whether there is a gradient on this rank."""
        return self.parameter.grad is not None

    def gradient(self, shape: Sequence[int] = (-1,)) -> Tensor:
        """This rank's part of the gradient in some shape, or flat; zeros where there is none."""
        gradient = self.parameter.grad
        if type(gradient) is Tensor and gradient.shape == shape:  # the usual one, in every step
            return gradient.detach()
        if gradient is None:
            return torch.zeros_like(local_part(self.parameter.detach())).reshape(shape)
        with torch._C.DisableTorchFunctionSubclass():
            return local_part(gradient.detach()).reshape(shape)


def write_all(pairs: Iterable[tuple[Held, Tensor]]) -> None:
    """Put other values into this rank's parts of gradients, where there are any.

    Args:
        pairs: Parameters, and the values of this rank's part, in any shape.
    """
    parts, values = [], []
    with torch._C.DisableTorchFunctionSubclass():
        for held, value in pairs:
            gradient = held.parameter.grad
            if gradient is not None:
                is_plain = type(gradient) is Tensor
                part = gradient.detach() if is_plain else local_part(gradient.detach())
                parts.append(part)
                values.append(value if value.shape == part.shape else value.reshape(part.shape))
        if parts:
            torch._foreach_copy_(parts, values)


class Owner(Protocol):
    """Holds the parameters of a module.

    Attributes:
        module: What to run a pass of, under a capture.
        ranks: All ranks that train together; each has other samples.
        num_places: Over how many of them one copy of the parameters is spread.
        device: Where the module computes and ranks exchange; parameters may lie elsewhere.
        held: Every trainable parameter, in the model's order.
    """

    module: nn.Module
    ranks: Ranks
    num_places: int
    device: torch.device
    held: Sequence[Held]

    def observing(self) -> AbstractContextManager[None]:
        """Let captures be installed in the module; around everything that runs under one."""
        ...


def by_name(owner: Owner) -> Mapping[str, Held]:
    """What an owner holds, by name."""
    return {each.name: each for each in owner.held}
