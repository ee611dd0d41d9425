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

Torch notices that (see [Note: one version per parameter] in flat_group.py) when the node reads what
it saved, and names neither the parameter nor a remedy. The same wait therefore looks first.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from unison.errors import UnsupportedOperation
from unison.shard.granules import PerGranule
from unison.shard.sharded_tensor import ShardedTensor

PLAIN = -1  # the leaves of a pass that is not cut into granules
RECOMPUTE = -2  # what code that activation checkpointing runs again sees; see LeafSource in unit.py


@dataclass(frozen=True, eq=False)
class _LeafOrigin:
    """What a watched tensor is a view of: one parameter in the buffer.

    Attributes:
        base: The parameter as a plain view, which counts the writes to it.
        group: The flat group, whose unit has the parameters before a backward pass reads them.
        slot: The parameter's number in it.
    """

    base: Tensor
    group: Any
    slot: int


class _BufferView(Tensor):
    """A view of the buffer that notices which operations it enters; see [Note: gather on use]."""

    source: _LeafOrigin

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
            watched = list(_watched_in((args, kwargs)))
            if isinstance(result, Tensor):
                return _watch(result, watched)
            return type(result)(_watch(each, watched) for each in result)


def _watched_in(values: Any) -> Iterator[_BufferView]:
    for value in values.values() if isinstance(values, dict) else values or ():
        if isinstance(value, _BufferView):
            yield value
        elif isinstance(value, tuple | list | dict):
            yield from _watched_in(value)


def _watch(result: Any, watched: list[_BufferView]) -> Any:
    """Let what an operation returned wait for the parameters in its backward pass."""
    if not isinstance(result, Tensor) or result.grad_fn is None:
        return result
    read = [(each.source, each.source.base._version) for each in watched]

    def before_read(_: Any) -> None:
        for source, _version in read:
            source.group.unit.reach()
        for source, version in read:
            if source.base._version != version and _reads_changed(source.base):
                source.group.unit.refuse_changed(source.group, source.slot)

    result.grad_fn.register_prehook(before_read)
    for each in watched:
        is_view = result.untyped_storage()._cdata == each.untyped_storage()._cdata
        if is_view and not isinstance(result, _BufferView):
            result = result.as_subclass(_BufferView)
            result.source = each.source
    return result


def _reads_changed(parameter: Tensor) -> bool:
    """Whether the backward pass that has come to a node reads a parameter that was changed.

    Not every node reads what it was given: the gradient of a sum, or of a first layer's weight,
    needs no value of the parameter.
    """
    return _leads_to(torch._C._current_autograd_node(), parameter, _STEPS_TO_LEAF)[1]


def _leads_to(node: Any, parameter: Tensor, num_steps: int) -> tuple[bool, bool]:
    """Whether a node leads to a parameter's leaf, and whether one on the way has stale values."""
    if node is None or num_steps == 0:
        return False, False
    if node.name() in _LEAVES:
        is_it = node.variable.untyped_storage()._cdata == parameter.untyped_storage()._cdata
        return is_it and node.variable.storage_offset() == parameter.storage_offset(), False
    below = [_leads_to(each, parameter, num_steps - 1) for each, _ in node.next_functions]
    if not any(leads for leads, _ in below):
        return False, False
    return True, any(is_stale for _, is_stale in below) or _has_stale_values(node)


def _has_stale_values(node: Any) -> bool:
    """Whether torch would refuse to read what a node saved, as it was changed in place."""
    for name in dir(node):
        if name.startswith("_saved_") or name == "saved_tensors":
            try:
                getattr(node, name)
            except RuntimeError as error:
                if "modified by an inplace operation" in str(error):
                    return True
                raise
    return False


class ChangedParameter(Tensor):
    """Stands for a parameter that a recompute may not see: it was changed since its first pass."""

    refuse: Callable[[], NoReturn]

    @staticmethod
    def of(base: Tensor, refuse: Callable[[], NoReturn]) -> "ChangedParameter":
        """Stand for a parameter; every torch function calls `refuse`."""
        made = torch.Tensor._make_subclass(ChangedParameter, base)
        made.refuse = refuse
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Refuse."""
        next(
            each for each in tree_iter((args, kwargs)) if isinstance(each, ChangedParameter)
        ).refuse()


def watch_compiled(output: Any, inputs: Any, wait: Callable[[], None]) -> None:
    """Let compiled code that made a module's output wait in its backward pass.

    What torch.compile compiles is one node of autograd, also of what a module keeps beside its
    output. It is looked for near the output.

    Args:
        output: Of the module, with tensors in it.
        inputs: Of the module. What made them is another's: a wait there would gather the module's
            parameters again when it is through with them.
        wait: Called when the backward pass of compiled code begins.
    """
    seen = set(_nodes_of(inputs))
    nodes = [node for node in _nodes_of(output) if node not in seen]
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


def _nodes_of(values: Any) -> list[Any]:
    """The nodes of autograd that have made the tensors in nested values."""
    tensors = [value for value in tree_iter(values) if type(value) is Tensor]
    return [value.grad_fn for value in tensors if value.grad_fn is not None]


_STEPS_TO_COMPILED = 3
_STEPS_TO_LEAF = 5  # a function of torch leaves a few nodes behind: linear's are view, mm, t
_LEAVES = ("torch::autograd::AccumulateGrad",)


class _Leaf(_BufferView, nn.Parameter):
    """A watched leaf."""


class Leaves:
    """The leaves of one flat buffer, by granule.

    Args:
        bases: The parameters as plain views of the buffer, which may have no memory at the moment.
        requires_grad: Whether gradients are wanted; without, leaves are plain views.
        group: The flat group they are of.
    """

    def __init__(self, bases: Sequence[Tensor], requires_grad: bool, group: Any) -> None:
        self.bases, self._requires_grad = bases, requires_grad
        self._sources = [_LeafOrigin(base, group, slot) for slot, base in enumerate(bases)]
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
                self._make_leaf(index, granule, on_gradient) for index in range(len(self.bases))
            ]
        return self._of_granule[granule]

    def views(self) -> list[Tensor]:
        """The parameters as plain views of the buffer, without gradients."""
        return [base.detach() for base in self.bases]

    def _make_leaf(
        self,
        index: int,
        granule: int,
        on_gradient: Callable[[int, int, Tensor], None] | None,
    ) -> Tensor:
        view = self.bases[index].detach()
        if not self._requires_grad:
            return view
        leaf = torch.Tensor._make_subclass(_Leaf, view, True)
        leaf.source = self._sources[index]
        if on_gradient is not None:
            leaf.register_post_accumulate_grad_hook(lambda leaf: on_gradient(granule, index, leaf))
        return leaf

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
