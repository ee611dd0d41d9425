"""The leaves of a flat buffer: what a computation sees of the parameters in it.

A leaf is a view of the full buffer in its parameter's own shape that requires gradients. There is
one set of them per granule (see [Note: per granule] in granules.py): each granule's gradient
arrives apart.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor, nn

from unison.errors import UnsupportedOperation
from unison.shard.granules import PerGranule
from unison.shard.layout import Slot

PLAIN = -1  # the leaves of a pass that is not cut into granules
RECOMPUTE = -2  # what code that activation checkpointing runs again sees; see LeafSource in unit.py


class Leaves:
    """The leaves of one flat buffer, by granule.

    Args:
        full: The buffer [padded length]; it may have no memory at the moment.
        slots: The places of the parameters in it.
        requires_grad: Whether gradients are wanted; without, leaves are plain views.
    """

    def __init__(self, full: Tensor, slots: Sequence[Slot], requires_grad: bool) -> None:
        self._full, self._slots, self._requires_grad = full, slots, requires_grad
        self._of_granule: dict[int, list[Tensor]] = {}

    def __iter__(self) -> Iterator[Tensor]:
        """Every leaf there is."""
        return itertools.chain.from_iterable(self._of_granule.values())

    def of(
        self, granule: int, on_gradient: Callable[[int, int, Tensor], None] | None
    ) -> list[Tensor]:
        """The views that one granule computes with, one per parameter.

        Args:
            granule: Which granule; the same one gets the same leaves until `drop`, so that several
                forward passes add up in one gradient.
            on_gradient: Called with (granule, slot index, leaf) when a leaf's gradient is complete.
                None leaves gradients at the leaves, for `take_gradients`.
        """
        if granule not in self._of_granule:
            self._of_granule[granule] = [
                self._make_leaf(index, slot, granule, on_gradient)
                for index, slot in enumerate(self._slots)
            ]
        return self._of_granule[granule]

    def views(self) -> list[Tensor]:
        """The parameters as plain views of the buffer, without gradients."""
        return [self._view(slot) for slot in self._slots]

    def _view(self, slot: Slot) -> Tensor:
        return self._full.detach().as_strided(
            slot.shape, _contiguous_strides(slot.shape), slot.offset
        )

    def _make_leaf(
        self,
        index: int,
        slot: Slot,
        granule: int,
        on_gradient: Callable[[int, int, Tensor], None] | None,
    ) -> Tensor:
        view = self._view(slot)
        if not self._requires_grad:
            return view
        leaf = nn.Parameter(view)
        if on_gradient is not None:
            leaf.register_post_accumulate_grad_hook(lambda leaf: on_gradient(granule, index, leaf))
        return leaf

    def give_gradients_to(self, pieces: Sequence[nn.Parameter]) -> None:
        """Hand the gradients that lie here to the pieces, where both are the same elements."""
        for leaves in self._of_granule.values() if self._requires_grad else ():
            for leaf, piece in zip(leaves, pieces, strict=True):
                gradient = leaf.grad
                if gradient is not None:
                    leaf.grad = None
                    if piece.grad is None:
                        piece.grad = gradient.view(-1)
                    else:
                        piece.grad.add_(gradient.view(-1))

    def take_gradients(self) -> list[tuple[int, list[Tensor | None]]]:
        """Take the gradients that lie here, with the granule of each set that has any."""
        taken = []
        for granule, leaves in self._of_granule.items() if self._requires_grad else ():
            gradients = [leaf.grad for leaf in leaves]
            if any(gradient is not None for gradient in gradients):
                taken.append((granule, gradients))
                for leaf in leaves:
                    leaf.grad = None
        return taken

    def drop(self) -> None:
        """Forget all leaves; the next forward pass makes new ones."""
        self._of_granule.clear()


def per_granule(leaves: list[list[list[Tensor]]]) -> list[list[Tensor]]:
    """From [granule][group][slot] to [group][slot] of tensors that are one value per granule."""
    return [
        [PerGranule.of(list(slots)) for slots in zip(*groups, strict=True)]
        for groups in zip(*leaves, strict=True)
    ]


def tripwire(leaf: Tensor, unit_name: str) -> Tensor:
    """A view of a leaf that raises when a gradient reaches it."""

    def refuse(_: Tensor) -> None:
        raise UnsupportedOperation(
            f"{unit_name} is under reentrant checkpointing, which hides from the ordered reducer "
            "which granule it computes; pass use_reentrant=False to torch.utils.checkpoint"
        )

    view = leaf.detach()
    if leaf.requires_grad:
        view.requires_grad_()
        view.register_post_accumulate_grad_hook(refuse)
    return view


def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
