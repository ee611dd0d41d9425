"""The leaves of a flat buffer: what a computation sees of the parameters in it.

A leaf is a view of the full buffer in its parameter's own shape that requires gradients. There is
one set of them per granule (see [Note: per granule] in granules.py): each granule's gradient
arrives apart.

[Note: gather on use] The buffer has no memory between the passes, and a gather may be filling it.
Most of a backward pass announces itself at the outputs of a unit; but a loss may also hang on a
tensor that a block keeps (a router's aux loss), on a gradient, on something in a list. So a leaf
notices the operations that it enters, and the autograd node that each of them leaves behind waits
for the parameters before it runs. Saved-tensor hooks would do too, but where they are set torch no
longer notices that a saved tensor was changed in place.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from unison.errors import UnsupportedOperation
from unison.shard.granules import PerGranule
from unison.shard.layout import Slot
from unison.shard.sharded_tensor import ShardedTensor

PLAIN = -1  # the leaves of a pass that is not cut into granules
RECOMPUTE = -2  # what code that activation checkpointing runs again sees; see LeafSource in unit.py


class _Watched(Tensor):
    """A view of the buffer that notices which operations it enters; see [Note: gather on use].

    Attributes:
        before_read: Called when the backward pass of such an operation begins.
    """

    before_read: Callable[[], None]

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, and let its backward pass wait for the parameters."""
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            if torch.compiler.is_compiling():  # one node for all of it: see `watch_compiled`
                return result
            if not isinstance(result, Tensor | tuple | list) or not torch.is_grad_enabled():
                return result
            sources = {id(each.before_read): each for each in _watched_in((args, kwargs))}
            for source in sources.values():
                if isinstance(result, Tensor):
                    result = _watch(result, source)
                else:
                    result = type(result)(_watch(each, source) for each in result)
            return result


def _watched_in(values: Any) -> Iterator[_Watched]:
    for value in values.values() if isinstance(values, dict) else values or ():
        if isinstance(value, _Watched):
            yield value
        elif isinstance(value, tuple | list | dict):
            yield from _watched_in(value)


def _watch(result: Any, source: _Watched) -> Any:
    """Let what an operation returned wait for the parameters in its backward pass."""
    if not isinstance(result, Tensor) or result.grad_fn is None:
        return result
    wait = source.before_read
    result.grad_fn.register_prehook(lambda _: wait())
    is_view = result.untyped_storage()._cdata == source.untyped_storage()._cdata
    if is_view and not isinstance(result, _Watched):
        result = result.as_subclass(_Watched)
        result.before_read = wait
    return result


def watch_compiled(output: Any, wait: Callable[[], None]) -> None:
    """Let compiled code that made a module's output wait in its backward pass.

    What torch.compile compiles is one node of autograd, also of what a module keeps beside its
    output. It is looked for near the output.

    Args:
        output: Of the module, with tensors in it.
        wait: Called when the backward pass of compiled code begins.
    """
    seen: set[Any] = set()
    nodes = [
        value.grad_fn
        for value in tree_iter(output)
        if type(value) is Tensor and value.grad_fn is not None
    ]
    for _ in range(_STEPS_TO_COMPILED):
        for node in nodes:
            if node.name().startswith("CompiledFunction"):
                node.register_prehook(lambda _: wait())
        seen.update(nodes)
        nodes = [
            below
            for node in nodes
            for below, _ in node.next_functions
            if below is not None and below not in seen and below.name() not in _LEAVES
        ][:_STEPS_TO_COMPILED]


_STEPS_TO_COMPILED = 3
_LEAVES = ("torch::autograd::AccumulateGrad",)


class _Leaf(_Watched, nn.Parameter):
    """A watched leaf."""


class Leaves:
    """The leaves of one flat buffer, by granule.

    Args:
        full: The buffer [padded length]; it may have no memory at the moment.
        slots: The places of the parameters in it.
        requires_grad: Whether gradients are wanted; without, leaves are plain views.
        before_read: Called before a backward pass reads them.
    """

    def __init__(
        self,
        full: Tensor,
        slots: Sequence[Slot],
        requires_grad: bool,
        before_read: Callable[[], None],
    ) -> None:
        self._full, self._slots, self._requires_grad = full, slots, requires_grad
        self._before_read = before_read
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
        leaf = torch.Tensor._make_subclass(_Leaf, view, True)
        leaf.before_read = self._before_read
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
                    give_gradient(piece, gradient)

    def take_gradients(self) -> list[tuple[int, list[Tensor | None]]]:
        """Take the gradients that lie here, with the granule of each set that has any."""
        taken = []
        with torch._C.DisableTorchFunctionSubclass():  # quick: leaves watch what is done to them
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


def give_gradient(piece: nn.Parameter, gradient: Tensor) -> None:
    """Add a gradient to a piece's own, as a backward pass that ends at the piece would.

    Hooks on the piece run: by autograd itself, which costs a backward pass, where there are any.
    """
    num_own = 1 if isinstance(piece, ShardedTensor) else 0  # see FlatGroup
    if len(piece._backward_hooks or ()) > num_own or piece._post_accumulate_grad_hooks:
        torch.autograd.backward([piece], [gradient])
    elif piece.grad is None:
        piece.grad = gradient
    else:
        piece.grad.add_(gradient)


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
