"""What a module was called with: which tensors hold the samples, and the same call with others."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from unison.capture.parts import is_in_parts
from unison.errors import BadInput
from unison.privacy.dealing import plain_leaf


@dataclass(frozen=True, eq=False)
class Inputs:
    """The arguments of a forward pass over some samples.

    Attributes:
        leaves: All that the arguments are made of; of what has several granules, the first.
        spec: How.
        places: Which leaves hold the samples.
        dim: Their dimension of the samples.
    """

    leaves: Sequence[Any]
    spec: TreeSpec
    places: tuple[int, ...]
    dim: int

    @classmethod
    def of(cls, args: tuple, kwargs: dict[str, Any], num_rows: int, dim: int) -> "Inputs":
        """Find the tensors that hold one entry per row of the batch.

        Raises:
            BadInput: If there is none: the module was given something else than the batch.
        """
        leaves, spec = tree_flatten((args, kwargs))
        leaves = [plain_leaf(leaf) for leaf in leaves]
        places = tuple(place for place, leaf in enumerate(leaves) if _holds(leaf, num_rows, dim))
        if not places:
            shapes = [list(leaf.shape) for leaf in leaves if isinstance(leaf, Tensor)]
            raise BadInput(
                f"the loader handed out {num_rows} samples, and the module was given tensors of "
                f"shapes {shapes}, none of which has that many in dimension {dim}. Give it the "
                "whole batch (max_physical_batch_size= cuts large ones), and make_private("
                "batch_first=False) if samples lie in dimension 1"
            )
        return cls(leaves, spec, places, dim)

    @property
    def kind(self) -> tuple:
        """All but the number of samples and their values."""
        kinds = []
        for place in self.places:
            leaf = self.leaves[place]
            shape = leaf.shape
            kinds.append((place, shape[: self.dim] + shape[self.dim + 1 :], leaf.dtype))
        return (str(self.spec), *kinds)

    @property
    def device(self) -> torch.device:
        """Where the samples lie."""
        return self.leaves[self.places[0]].device

    @property
    def samples(self) -> tuple[Tensor, ...]:
        """The tensors that hold the samples, samples first; gradients do not reach the user's."""
        return tuple(self.leaves[place].detach().movedim(self.dim, 0) for place in self.places)

    def run(self, module: nn.Module, samples: Sequence[Tensor]) -> Any:
        """Call a module as before, with other samples."""
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, samples, strict=True):
            leaves[place] = tensor.movedim(0, self.dim)
        args, kwargs = tree_unflatten(leaves, self.spec)
        return module(*args, **kwargs)


def _holds(leaf: Any, num_samples: int, dim: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.ndim > dim and leaf.shape[dim] == num_samples


class OutputDims:
    """Which dimension of each part of a module's output holds the samples.

    A sequence-first network may take [time, samples, features] and return [samples, classes]: what
    changes with the number of samples is known once the module has run with two of them.

    Args:
        dim: Where they lie in the inputs, and in outputs as long as nothing else is known.
    """

    def __init__(self, dim: int) -> None:
        self._dim = dim
        self._shapes: dict[int, list[tuple[int, ...]]] = {}  # by number of samples

    def of(self, output: Any, num_samples: int) -> list[int | None]:
        """The dimension in each leaf of an output; None if there is none."""
        leaves = tree_leaves(output)
        shapes = [tuple(leaf.shape) if isinstance(leaf, Tensor) else () for leaf in leaves]
        self._shapes.setdefault(num_samples, shapes)
        for other, known in self._shapes.items():
            if other != num_samples and len(known) == len(shapes):
                return [
                    _changed(now, num_samples, then, other)
                    for now, then in zip(shapes, known, strict=True)
                ]
        return [self._dim for _ in leaves]


def _changed(
    now: tuple[int, ...], num_now: int, then: tuple[int, ...], num_then: int
) -> int | None:
    if len(now) != len(then):
        return None
    dims = [d for d, (a, b) in enumerate(zip(now, then, strict=True)) if a != b]
    is_one = len(dims) == 1 and (now[dims[0]], then[dims[0]]) == (num_now, num_then)
    return dims[0] if is_one else None


def probe_losses(output: Any, num_samples: int, dims: Sequence[int | None]) -> Tensor | None:
    """Make one number per sample of a module's output [samples], to send back one by one.

    Stands in for a loss that is not known yet. Every element has a weight of its own, so that
    normalised outputs, which sum to a constant, have a gradient too. All terms are positive: in a
    sum of millions that cancel, rounding would look as if samples mixed.

    Args:
        output: What the module returned.
        num_samples: The number of samples.
        dims: Where they lie in each leaf of the output.

    Returns:
        None if no part of the output holds the samples.
    """
    total = None
    for leaf, dim in zip(tree_leaves(output), dims, strict=True):
        if dim is not None and _holds(leaf, num_samples, dim) and leaf.is_floating_point():
            whole = leaf.full_tensor() if is_in_parts(leaf) else leaf
            rows = whole.movedim(dim, 0).reshape(num_samples, -1)
            rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
            weights = 1.5 + torch.arange(rows.shape[1], device=rows.device).cos()
            part = ((rows + 1).square() * weights).mean(1)
            total = part if total is None else total + part
    return total
