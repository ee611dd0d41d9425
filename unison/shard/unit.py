"""A unit: a module whose parameters are gathered, used and freed together."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.profiler import record_function

from unison.errors import BadInput, UnsupportedOperation
from unison.shard.flat_group import FlatGroup, ParameterInfo, Use
from unison.shard.granules import PerGranule
from unison.shard.policies import CPUOffload, MixedPrecision
from unison.shard.ranks import Axes
from unison.shard.reducers import AloneReducer, FastReducer, OrderedReducer, Reducer

UNIT_ATTRIBUTE = "_unison_unit"  # on a module: its unit
TAKEN_BY = "_unison_taken_by"  # on a parameter that was sharded: by which unit


@dataclass(frozen=True, kw_only=True)
class UnitOptions:
    """How a unit is sharded; see `fully_shard` for what the fields mean."""

    reshard_after_forward: bool | int
    reducer: str
    gradient_divisor: float
    precision: MixedPrecision
    offload: CPUOffload | None


Hidden = list[tuple[Use, Tensor | None]]  # what an attribute was before it was shadowed
PLAIN = -1  # the leaves of a pass that is not cut into granules


class Unit:
    """Parameters of one module (those that no unit below it took) and their storage."""

    def __init__(
        self,
        module: nn.Module,
        name: str,
        parameters: list[ParameterInfo],
        axes: Axes,
        options: UnitOptions,
        device: torch.device | None = None,
    ) -> None:
        self.module, self.name, self.axes, self.options = module, name, axes, options
        self.ranks = axes.shard
        self.forward = module.forward  # the user's own
        after_forward = options.reshard_after_forward
        self.groups = [
            FlatGroup(
                members,
                axes,
                device=device or members[0].value.device,
                neighbours=None
                if isinstance(after_forward, bool)
                else axes.shard.neighbours(after_forward),
                precision=options.precision,
                offload=options.offload,
            )
            for members in _by_class(parameters)
        ]
        self.has_children = any(
            unit_of(child) is not None for child in module.modules() if child is not module
        )
        self.loops_over_model = False  # set when mapping single operations turned out impossible
        self._reducers: list[Reducer | None] = [None] * len(self.groups)
        self._arrived: set[tuple[int, int, int]] = set()  # (group, granule, slot)
        self.is_reducing = False
        self.last_granules: list[int] | None = None  # of the last forward pass; None for plain
        self._hidden: Hidden | None = None
        self._install_pieces()

    def __repr__(self) -> str:
        return f"Unit({self.name or 'root'!r}, {len(self.groups)} flat buffers)"

    def _install_pieces(self) -> None:
        for group in self.groups:
            for piece, uses in zip(group.pieces, group.uses, strict=True):
                for use in uses:
                    original = use.module._parameters[use.attribute]
                    assert original is not None
                    # A later unit that meets the original again has found a tie across units.
                    setattr(original, TAKEN_BY, self.name)
                    use.module._parameters[use.attribute] = piece

    def allocate(self, device: torch.device) -> None:
        """Give parameters that were sharded without memory their zeros."""
        for group in self.groups:
            if group.shard.is_meta:
                group.allocate(device)

    def check_untouched(self) -> None:
        """Refuse parameters without values, and those replaced or moved after sharding.

        Raises:
            BadInput: Naming the parameter and what to do instead.
        """
        for group in self.groups:
            if group.shard.is_meta:
                raise BadInput(
                    f"parameter {group.slots[0].name!r} of {self.name!r} was built without memory; "
                    "call unison.materialize(model, seed=...) before using the model"
                )
            for slot, piece, uses in zip(group.slots, group.pieces, group.uses, strict=True):
                is_in_place = all(
                    use.module._parameters.get(use.attribute) is piece for use in uses
                )
                is_in_shard = (
                    piece.untyped_storage().data_ptr() == group.shard.untyped_storage().data_ptr()
                )
                if not (is_in_place and is_in_shard):
                    what = "moved" if is_in_place else "replaced"
                    raise BadInput(
                        f"parameter {slot.name!r} was {what} after fully_shard; move, cast and "
                        "replace parameters before sharding"
                    )
                if piece.requires_grad != group.requires_grad:
                    raise BadInput(
                        f"requires_grad of {slot.name!r} was changed after fully_shard; freeze "
                        "parameters before sharding"
                    )

    # --- parameters during a pass ----------------------------------------------------------------

    def start_gather(self) -> None:
        """Begin to gather the full parameters."""
        with record_function(f"unison::gather {self.name}"):
            for group in self.groups:
                group.start_gather()

    def finish_gather(self) -> None:
        """Have the full parameters."""
        with record_function(f"unison::wait_gather {self.name}"):
            for group in self.groups:
                group.finish_gather()

    def free_after_forward(self) -> None:
        """Give memory back until the backward pass needs the parameters again."""
        for group in self.groups:
            group.free_after_forward()

    @contextmanager
    def parameters_in_place(self, tensors: Sequence[Sequence[Tensor]]) -> Iterator[None]:
        """Let the module's attributes be the given tensors, one sequence per flat group."""
        hidden = self._shadow(tensors)
        try:
            yield
        finally:
            _restore(hidden)

    def _shadow(self, tensors: Sequence[Sequence[Tensor]]) -> "Hidden":
        """Hide the module's pieces behind full parameters; returns what `_restore` takes.

        Python finds an instance's own dictionary before `nn.Module.__getattr__` looks into
        `_parameters`, so a full parameter shadows its piece while `named_parameters()` goes on
        showing pieces.
        """
        hidden: Hidden = []
        for group, of_group in zip(self.groups, tensors, strict=True):
            for uses, tensor in zip(group.uses, of_group, strict=True):
                for use in uses:
                    hidden.append((use, use.module.__dict__.get(use.attribute)))
                    use.module.__dict__[use.attribute] = tensor
        _renew_flat_weights(hidden)
        return hidden

    def begin_backward(self) -> None:
        """Have the full parameters, also for code that activation checkpointing runs again."""
        self.finish_gather()
        if self._hidden is None:
            self._hidden = self._shadow(self._recompute_tensors())

    def _recompute_tensors(self) -> list[list[Tensor]]:
        """What a recompute inside this unit sees.

        Non-reentrant checkpointing uses the values only: the graph keeps the leaves of the forward
        pass. Reentrant checkpointing builds a new graph on what it finds here; that is right for
        the one set of leaves of a plain pass, and refused where each granule has its own.
        """
        if self.last_granules is None:
            return self.leaves(PLAIN)
        if self.has_children and not self.loops_over_model:
            return per_granule([self.leaves(granule) for granule in self.last_granules])
        return [
            [_refuse_gradient(leaf, self.name) for leaf in leaves] for leaves in self.leaves(PLAIN)
        ]

    def free(self) -> None:
        """Give the memory of the full parameters back."""
        if self._hidden is not None:
            _restore(self._hidden)
            self._hidden = None
        for group in self.groups:
            group.free()

    def end_inference(self) -> None:
        """Be ready for parameters to change after a pass without gradients."""
        self.free()
        for group in self.groups:
            group.wait_for_copies()

    def leaves(self, granule: int) -> list[list[Tensor]]:
        """The tensors that a granule computes with, one list per flat group."""

        def receiver(index: int):
            return lambda granule, slot, leaf: self._take_gradient(index, granule, slot, leaf)

        return [group.leaves(granule, receiver(index)) for index, group in enumerate(self.groups)]

    # --- gradients -------------------------------------------------------------------------------

    edges: tuple[int, ...] = ()  # which rank holds which granules, in ordered mode
    # Set by the engine: the last gradient has arrived; one more has come after that.
    on_complete: Callable[["Unit"], None]
    on_late: Callable[["Unit"], None]

    def _take_gradient(self, index: int, granule: int, slot: int, leaf: Tensor) -> None:
        gradient, leaf.grad = leaf.grad, None
        if self.is_reducing:
            # A second gradient of one leaf in one backward pass: reentrant checkpointing makes a
            # backward pass of each part. It is summed by itself, after what is under way.
            self.on_late(self)
            self._arrived.clear()
        if gradient is not None:
            self._reducer(index).add(granule, slot, gradient)
        self._arrived.add((index, granule, slot))
        if len(self._arrived) == sum(group.num_leaves for group in self.groups):
            self.on_complete(self)

    def _reducer(self, index: int) -> Reducer:
        reducer = self._reducers[index]
        if reducer is None:
            group = self.groups[index]
            match self.options.reducer:
                case "fast":
                    is_alone = group.axes.all.size == 1
                    reducer = AloneReducer(group) if is_alone else FastReducer(group)
                case "ordered":
                    reducer = OrderedReducer(group, self.edges)
                case other:
                    raise AssertionError(f"no rule for the reducer {other!r}")
            self._reducers[index] = reducer
        return reducer

    @property
    def can_free_early(self) -> bool:
        """Whether the last gradient's arrival proves that the backward pass is done here.

        A frozen parameter sends no word, yet the way to earlier layers may still lead through it.
        """
        return all(group.requires_grad for group in self.groups)

    def start_reduce(self) -> None:
        """Begin to sum the gradients over ranks; every rank does so for the same units."""
        with record_function(f"unison::reduce {self.name}"):
            for index, group in enumerate(self.groups):
                if group.requires_grad:
                    self._reducer(index).start()
        self.is_reducing = True

    @torch.no_grad()
    def finish_reduce(self) -> None:
        """Give every piece its part of the summed gradient, divided once."""
        with record_function(f"unison::wait_reduce {self.name}"):
            for index, group in enumerate(self.groups):
                if group.requires_grad:
                    parts = self._reducer(index).finish()
                    if self.options.gradient_divisor != 1:
                        torch._foreach_div_(
                            [part for part in parts if part is not None],
                            self.options.gradient_divisor,
                        )
                    group.give_gradients(parts)
        self.forget_gradients()

    def forget_gradients(self) -> None:
        """Be ready for the next logical batch."""
        self._reducers = [None] * len(self.groups)
        self.is_reducing = False

    def abandon(self) -> None:
        """Drop what a broken pass left behind."""
        self.forget_gradients()
        self.end_backward()
        for group in self.groups:
            group.drop_gradients()

    def settle(self) -> None:
        """Have every gradient where its parameter is."""
        for group in self.groups:
            group.settle()

    def end_backward(self) -> None:
        """Be ready for the next pass."""
        self._arrived.clear()
        self.free()
        for group in self.groups:
            group.end_backward()

    def begin_pass(self, edges: tuple[int, ...]) -> None:
        """Be ready for other granules, of this logical batch or of a new one."""
        self.edges = edges
        for group in self.groups:
            group.drop_leaves()

    @property
    def has_gradients(self) -> bool:
        """Whether a backward pass reached this unit since the last reduction."""
        return any(reducer is not None for reducer in self._reducers)


def unit_of(module: nn.Module) -> Unit | None:
    """The unit that `fully_shard` made of a module, if any."""
    return module.__dict__.get(UNIT_ATTRIBUTE)


def units_of(module: nn.Module) -> list[Unit]:
    """All units at and below a module, parents first."""
    return [unit for child in module.modules() if (unit := unit_of(child)) is not None]


def _by_class(parameters: list[ParameterInfo]) -> list[list[ParameterInfo]]:
    """Group parameters by dtype, device and requires_grad, each group in the order given."""
    classes: dict[tuple, list[ParameterInfo]] = {}
    for parameter in parameters:
        value = parameter.value
        classes.setdefault((value.dtype, value.device, value.requires_grad), []).append(parameter)
    return list(classes.values())


def _restore(hidden: Hidden) -> None:
    for use, before in reversed(hidden):
        if before is None:
            del use.module.__dict__[use.attribute]
        else:
            use.module.__dict__[use.attribute] = before
    _renew_flat_weights(hidden)


def _renew_flat_weights(hidden: Hidden) -> None:
    """Let recurrent modules, which keep a second list of their parameters, see the same ones."""
    for module in {use.module for use, _ in hidden if isinstance(use.module, nn.RNNBase)}:
        module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]


def _refuse_gradient(value: Tensor, name: str) -> Tensor:
    """A view of a parameter that raises when a gradient reaches it."""

    def refuse(_: Tensor) -> None:
        raise UnsupportedOperation(
            f"{name} is under reentrant checkpointing, which hides from the ordered reducer which "
            "granule it computes; pass use_reentrant=False to torch.utils.checkpoint"
        )

    tripwire = value.detach()
    if value.requires_grad:
        tripwire.requires_grad_()
        tripwire.register_post_accumulate_grad_hook(refuse)
    return tripwire


def per_granule(leaves: list[list[list[Tensor]]]) -> list[list[Tensor]]:
    """From [granule][group][slot] to [group][slot] of tensors that are one value per granule."""
    return [
        [PerGranule.of(list(slots)) for slots in zip(*groups, strict=True)]
        for groups in zip(*leaves, strict=True)
    ]
