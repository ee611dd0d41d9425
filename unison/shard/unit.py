"""A unit: a module whose parameters are gathered, used and freed together."""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.profiler import record_function

from unison.errors import BadInput, UnsupportedOperation
from unison.shard.flat_group import (
    PLAIN,
    RECOMPUTE,
    CPUOffload,
    FlatGroup,
    MixedPrecision,
    NamedParameter,
    Use,
    per_granule,
    take_over,
    tripwire,
)
from unison.shard.granules import RefusedTensor
from unison.shard.ranks import Ranks
from unison.shard.reducers import FastReducer, OrderedReducer
from unison.torch_internals import has_values

# ------------------------------------------------------------------------------------------------
# The attributes at which a unit's modules hold its parameters.
#
# [Note: shadowing] Python finds an instance's own dictionary before `nn.Module.__getattr__` looks
# into `_parameters`. So a full parameter that is put into the dictionary shadows its piece, while
# `named_parameters()` goes on showing pieces.

Places = list[tuple[nn.Module, str, int, int]]
"""Where modules hold parameters: (module, attribute, flat group, slot in it) of each use."""

Hidden = list[tuple[nn.Module, str, Tensor | None]]
"""What attributes were before they were shadowed: (module, attribute, its own value if any)."""


def places_of(uses: Sequence[Sequence[Sequence[Use]]]) -> Places:
    """Where parameters are seen, given the uses of each flat group's parameters."""
    return [
        (*use, group, slot)
        for group, of_group in enumerate(uses)
        for slot, of_slot in enumerate(of_group)
        for use in of_slot
    ]


@contextmanager
def shadowed(places: Places, tensors: Sequence[Sequence[Tensor]]) -> Iterator[None]:
    """Let attributes be the given tensors, one sequence per flat group."""
    hidden = shadow(places, tensors)
    try:
        yield
    finally:
        restore(hidden)


def shadow(places: Places, tensors: Sequence[Sequence[Tensor]]) -> Hidden:
    """Hide the pieces behind full parameters; returns what `restore` takes."""
    hidden: Hidden = []
    for module, name, group, slot in places:
        hidden.append((module, name, vars(module).get(name)))
        vars(module)[name] = tensors[group][slot]
    _renew_flat_weights(hidden)
    return hidden


def restore(hidden: Hidden) -> None:
    """Undo `shadow`."""
    for module, name, before in hidden:
        if before is None:
            del vars(module)[name]
        else:
            vars(module)[name] = before
    _renew_flat_weights(hidden)


def _renew_flat_weights(hidden: Hidden) -> None:
    """Let recurrent modules, which keep a second list of parameters, see the same ones."""
    for module in {module for module, _, _ in hidden if isinstance(module, nn.RNNBase)}:
        module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]


SETTINGS = ("reshard_after_forward", "reducer", "gradient_divisor", "precision", "offload")
UNIT_ATTRIBUTE = "_unison_unit"  # on a module: its unit
TAKEN_BY = "_unison_taken_by"  # on a parameter that was sharded: by which unit


Versions = list[tuple[int, ...]]
"""How often each parameter had been written, one tuple per flat group."""

Written = list[list[tuple[int, int | None]]]
"""What tells a write to full parameters, per flat group; see `FlatGroup.written`."""

LeafSource = Callable[["Unit", int], list[list[Tensor]]]
"""(unit, granule) -> what the granule computes with, one list of tensors per flat group.

Set where somebody else than autograd makes the gradients of parameters: the tensors take none, and
the unit sums none."""


class Unit:
    """Parameters of one module (those that no unit below it took) and their storage.

    See `fully_shard` for what its settings mean.
    """

    # Sees gradients before and after they are summed: `Tracer` in verify/trace.py.
    observer: Any = None

    def __init__(
        self,
        module: nn.Module,
        parameters: list[NamedParameter],
        ranks: Ranks,
        device: torch.device | None = None,
        *,
        reshard_after_forward: bool | int,
        reducer: str,
        gradient_divisor: float,
        precision: MixedPrecision,
        offload: CPUOffload | None,
    ) -> None:
        self.module, self.name = module, type(module).__name__  # until it has its path
        self.ranks = ranks
        self.reshard_after_forward, self.reducer = reshard_after_forward, reducer
        self.gradient_divisor, self.precision, self.offload = gradient_divisor, precision, offload
        self.forward = self.inner = module.forward  # the user's own; and what a pass calls
        self.compiled: Callable[..., Any] | None = None  # what the user had compiled of it
        self.is_inside = False  # while compiled code of the module runs, see engine.py
        # Whether hooks of the module run before its parameters are gathered even where it is
        # compiled in place: private training decides there what passes compute with.
        self.runs_hooks_first = False
        self.loops_over_model = False  # set when mapping single operations turned out impossible
        self.has_children = any(
            unit_of(child) is not None for child in module.modules() if child is not module
        )
        self.requires_sync = True  # see `set_requires_gradient_sync`
        self._num_passes = 0
        kinds: dict[tuple, list[NamedParameter]] = {}
        for each in parameters:
            kind = (each[1].dtype, each[1].device, each[1].requires_grad)
            kinds.setdefault(kind, []).append(each)
        groups = [FlatGroup(members, self, device) for members in kinds.values()]
        self._take_groups(groups)
        for members, group in zip(kinds.values(), groups, strict=True):
            for (_, original, uses), piece in zip(members, group.pieces, strict=True):
                take_over(original, piece)
                # A later unit that meets the original again has found a tie across units.
                setattr(original, TAKEN_BY, self.name)
                for holder, attribute in uses:
                    holder._parameters[attribute] = piece

    def _take_groups(self, groups: list[FlatGroup]) -> None:
        self.groups = groups
        self._reducers: dict[FlatGroup, FastReducer | OrderedReducer] = {}
        self.is_reducing = False
        self.leaf_source: LeafSource | None = None
        # And then: is told that a backward pass is through with the unit.
        self.on_complete: Callable[[Unit], None] | None = None
        # In the running backward pass: which parameters this rank used, and parts of the others.
        self.used: set[tuple[FlatGroup, int]] = set()
        self._unused: list[tuple[FlatGroup, int, Tensor]] = []
        self.places = places_of([group.uses for group in self.groups])
        self.last_granules: list[int] | None = None  # of the last forward pass; None for plain
        self._hidden: Hidden | None = None  # in a backward pass, behind the full parameters
        self._hidden_by_user: Hidden | None = None  # and after `unshard`
        self._shown: Written | None = None  # what the user was shown by `unshard`
        # What the parameters were in the last forward pass, or in the one that a backward pass
        # has come to; see `FlatGroup.versions`.
        self.forward_versions: Versions | None = None
        for group in self.groups:
            group.unit = self
        # Whether nothing is gathered or freed: this rank holds all as it computes with it.
        self.is_whole = all(group.is_alias for group in self.groups)

    @property
    def is_plain(self) -> bool:
        """Whether its module is as good as unsharded; see [Note: one rank] in engine.py."""
        is_alone = self.ranks.size == 1 and self.gradient_divisor == 1
        is_cast = self.precision.param is not None or self.precision.output is not None
        is_fast = self.reducer == "fast" and not is_cast
        return is_alone and is_fast and self.is_whole and self.leaf_source is None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Unit":
        """The unit of a copy of the module: the same ranks, memory of its own."""
        made = memo[id(self)] = copy.copy(self)
        made.module = copy.deepcopy(self.module, memo)
        is_own = isinstance(self.forward, MethodType) and self.forward.__self__ is self.module
        forward = self.forward.__func__.__get__(made.module) if is_own else self.forward  # type: ignore[union-attr]
        made.forward = made.inner = forward
        made.compiled, made.context, made.observer = None, None, None
        made.is_inside = made.runs_hooks_first = False
        made._take_groups([group.copied(memo) for group in self.groups])
        return made

    def __repr__(self) -> str:
        return f"Unit({self.name or 'root'!r}, {len(self.groups)} flat buffers)"

    def allocate(self, device: torch.device) -> None:
        """Give parameters that were sharded without memory their zeros."""
        for group in self.groups:
            if group.shard.is_meta:
                group.allocate(device)
        self.is_whole = all(group.is_alias for group in self.groups)

    def check_untouched(self) -> None:
        """Refuse parameters without values, and those changed otherwise than by their values.

        Raises:
            BadInput: Naming the parameter and what to do instead.
        """
        for group in self.groups:
            if group.shard.is_meta and has_values():
                raise BadInput(
                    f"parameter {group.slots[0].name!r} of {self.name!r} was built without memory; "
                    "call unison.materialize(model, seed=...) before using the model"
                )
        self._check_in_shard()
        for group in self.groups:
            is_trained = [piece.requires_grad for piece in group.pieces]
            changed = [i for i, now in enumerate(is_trained) if now != group.was_trained]
            # Gradients have one buffer; and what has been added up there belongs to an open step.
            if changed and (len(changed) < len(is_trained) or group in self._reducers):
                others = "trains" if group.was_trained else "has frozen"
                raise BadInput(
                    f"requires_grad of {group.slots[changed[0]].name!r} was changed after "
                    f"fully_shard; change it before sharding, or, between two steps, of all "
                    f"{len(is_trained)} parameters in {group.dtype} that {self.name!r} {others}"
                )
            group.was_trained = group.requires_grad

    def _check_in_shard(self) -> None:
        for name, what in self.take_back():
            raise BadInput(
                f"parameter {name!r} was {what} after fully_shard; move, cast and "
                "replace parameters before sharding"
            )

    def take_back(self, *, was_applied: bool = False) -> list[tuple[str, str]]:
        """Undo copies that moved nothing, and take values assigned; see `FlatGroup.take_back`.

        Returns:
            Each parameter that was replaced or moved after sharding, and which of the two.
        """
        found = []
        for group in self.groups:
            for index, (slot, piece) in enumerate(zip(group.slots, group.pieces, strict=True)):
                uses = group.uses[index]
                is_in_place = all(module._parameters.get(name) is piece for module, name in uses)
                if not is_in_place or not group.take_back(index, was_applied=was_applied):
                    found.append((slot.name, "moved" if is_in_place else "replaced"))
        return found

    # --- parameters during a pass ----------------------------------------------------------------

    def start_gather(self) -> None:
        """Begin to gather the full parameters."""
        if self.is_whole:
            return
        with record_function(f"unison::gather {self.name}"):
            for group in self.groups:
                group.start_gather()

    def finish_gather(self) -> None:
        """Have the full parameters."""
        if self.is_whole:
            return
        with record_function(f"unison::wait_gather {self.name}"):
            for group in self.groups:
                group.finish_gather()

    def show_full(self) -> None:
        """Let the module's attributes be its full parameters until they are freed."""
        if not self.is_plain and self._hidden_by_user is None:
            self._check_in_shard()
            self.finish_gather()
            self.forward_versions = self.versions
            self._hidden_by_user = shadow(self.places, self.leaves(PLAIN))
            self._shown = [group.written(by_values=False) for group in self.groups]

    def reshard(self) -> None:
        """Free what `show_full` gathered."""
        shown = self._shown
        try:
            self.check_not_written(shown)
        finally:
            self.free()

    # [Note: writes in forward] A write to a full parameter (an Embedding's max_norm, an
    # initialisation by the first batch) goes to the gathered copy, and is gone when that is freed;
    # ranks would write different values besides. Where this rank holds the whole parameter it is
    # right, unless granules would see one another's.

    def note_written(self) -> Written | None:
        """What tells, after a pass, that it wrote to parameters; None if it may."""
        if self.is_whole and self.reducer != "ordered":
            return None
        if self._shown is not None:
            return self._shown
        self._num_passes += 1
        is_looked_at = self._num_passes & (self._num_passes - 1) == 0  # passes 1, 2, 4, 8, ...
        by_values = is_looked_at and has_values()
        return [group.written(by_values=by_values) for group in self.groups]

    def check_not_written(self, before: Written | None) -> None:
        """Refuse a write to full parameters, which would be lost.

        Args:
            before: From `note_written`.

        Raises:
            UnsupportedOperation: Naming the parameter and the remedy.
        """
        for group, noted in zip(self.groups, before or (), strict=False):
            now = group.written(by_values=noted[0][1] is not None)
            for slot, (old, new) in enumerate(zip(noted, now, strict=True)):
                if old != new:
                    raise UnsupportedOperation(
                        f"parameter {self.path(group, slot)!r} was written in forward (or after "
                        "unshard), where it is a gathered copy, so that the write would be lost; "
                        "write to it outside, under torch.no_grad() (nn.Embedding(max_norm=): "
                        "after optimizer.step(); initialisation by data: before fully_shard)"
                    )

    def free_after_forward(self) -> None:
        """Give memory back until the backward pass needs the parameters again."""
        self.show_pieces()
        for group in self.groups:
            group.free_after_forward()

    def begin_backward(self) -> None:
        """Have the full parameters, also for code that activation checkpointing runs again."""
        self.finish_gather()
        if self._hidden is None:
            tensors = [list(of_group) for of_group in self._recompute_tensors()]
            for index, slot in self._changed():  # which a recompute must not see
                group = self.groups[index]
                refuse = partial(self.refuse_changed, group, slot)
                tensors[index][slot] = RefusedTensor.of(group.bases[slot], refuse)
            self._hidden = shadow(self.places, tensors)

    @property
    def versions(self) -> Versions:
        """Which values the full parameters have, one tuple per flat group."""
        return [group.gathered_versions for group in self.groups]

    def check_unchanged(self) -> None:
        """Refuse to compute again with other values than the forward pass had.

        Raises:
            UnsupportedOperation: Naming the parameter and the remedy.
        """
        for index, slot in self._changed():
            self.refuse_changed(self.groups[index], slot)

    def _changed(self) -> list[tuple[int, int]]:
        """The (group, slot) of parameters that were written since the forward pass."""
        before, now = self.forward_versions, self.versions
        if before is None or before == now:
            return []
        return [
            (index, slot)
            for index, (old, new) in enumerate(zip(before, now, strict=True))
            for slot in range(len(new))
            if old[slot] != new[slot]
        ]

    def refuse_changed(self, group: FlatGroup, slot: int) -> NoReturn:
        """Refuse a backward pass over values of a parameter that has changed since."""
        path = self.path(group, slot)
        raise UnsupportedOperation(
            f"parameter {path!r} was changed after the forward pass whose backward pass needs "
            "its values; call backward() before optimizer.step() or load_state_dict(), or run the "
            "forward pass again"
        )

    def path(self, group: FlatGroup, slot: int) -> str:
        """A parameter's name in the model."""
        name = group.slots[slot].name
        return name if self.name == "root" else f"{self.name}.{name}"

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
        if self.leaf_source is not None:
            return self.leaves(RECOMPUTE)
        return [[tripwire(leaf, self.name) for leaf in leaves] for leaves in self.leaves(PLAIN)]

    def show_pieces(self) -> None:
        """Let the module's attributes be the pieces again."""
        for hidden in (self._hidden, self._hidden_by_user):  # the last one first
            if hidden is not None:
                restore(hidden)
        self._hidden = self._hidden_by_user = self._shown = None

    def free(self) -> None:
        """Give the memory of the full parameters back."""
        self.show_pieces()
        for group in self.groups:
            group.free()

    def leaves(self, granule: int) -> list[list[Tensor]]:
        """The tensors that a granule computes with, one list per flat group."""
        if self.leaf_source is not None:
            return self.leaf_source(self, granule)
        # The tree takes gradients one by one, so that it holds few of many granules at a time. The
        # fast reducer takes a unit's gradients all together, which costs fewer calls.
        is_ordered = self.reducer == "ordered"
        return [
            group.leaves(granule, partial(self._receive, group) if is_ordered else None)
            for group in self.groups
        ]

    # --- gradients -------------------------------------------------------------------------------

    edges: tuple[int, ...] = ()  # which rank holds which granules, in ordered mode
    context: Any = None  # what the units of one model share; see engine.py

    def reach(self) -> None:
        """Have the parameters for a backward pass, which need not come through the outputs."""
        if self._hidden is None or any(group.phase != "full" for group in self.groups):
            self.begin_backward()
            self.context.reached(self)

    def _receive(self, group: FlatGroup, granule: int, slot: int, leaf: Tensor) -> None:
        gradient, leaf.grad = leaf.grad, None
        if self.is_reducing:
            self.context.finish_reduce()
        if gradient is not None and group.requires_grad:  # not frozen since the forward pass
            self._show(group, granule, [(slot, gradient)])
            reducer = self._reducer(group)
            assert isinstance(reducer, OrderedReducer)
            reducer.put(granule, slot, gradient)

    def _show(
        self, group: FlatGroup, granule: int, gradients: Iterable[tuple[int, Tensor | None]]
    ) -> None:
        """Let an observer see gradients; those of a ghost are of no granule of the batch."""
        if self.observer is None:
            return
        own = self.edges[self.ranks.rank :]
        if granule != PLAIN and not own[0] <= granule < own[1]:
            return
        for slot, gradient in gradients:
            if gradient is not None:
                self.observer.see_gradient(group.pieces[slot], granule, gradient)

    def _reducer(self, group: FlatGroup) -> FastReducer | OrderedReducer:
        if group not in self._reducers:
            like = torch.empty(0, dtype=group.reduce_dtype, device=group.device)
            about = group.layout, group.ranks, like
            is_ordered = self.reducer == "ordered"
            made = OrderedReducer(*about, self.edges) if is_ordered else FastReducer(*about)
            self._reducers[group] = made
        return self._reducers[group]

    @property
    def trainable(self) -> list[FlatGroup]:
        """The groups whose parameters get gradients."""
        return [group for group in self.groups if group.requires_grad]

    @property
    def has_late_gradients(self) -> bool:
        """Whether gradients came after the unit's sum was started.

        Reentrant checkpointing makes a backward pass of each part, so that a unit may have several.
        """
        return (not self.is_reducing and bool(self._reducers)) or self.has_untaken_gradients

    @property
    def has_untaken_gradients(self) -> bool:
        """Whether gradients lie at the leaves."""
        return any(group.has_gradients for group in self.groups)

    def hold_gradients(self) -> None:
        """Add the gradients at the leaves to those of earlier passes; they are summed later."""
        self._collect_gradients()
        for group in self.trainable:
            if group in self._reducers:
                group.show_held(self._reducers[group].used)

    def _collect_gradients(self) -> None:
        for group in self.groups:
            if not group.requires_grad:
                group.drop_gradients()  # frozen since the forward pass
                continue
            for slot in group.take_cleared():
                reducer = self._reducer(group)
                assert isinstance(reducer, FastReducer)  # only that one holds
                reducer.forget(slot)
            for granule, gradients in group.take_gradients():
                self._show(group, granule, enumerate(gradients))
                self._reducer(group).take(granule, gradients)

    def start_reduce(self) -> None:
        """Begin to sum the gradients over ranks; every rank does so for the same units."""
        with record_function(f"unison::reduce {self.name}"):
            self._collect_gradients()
            for group in self.trainable:
                group.hide_held()
                self._reducer(group).start()
        self.is_reducing = True

    @torch.no_grad()
    def finish_reduce(self) -> None:
        """Give every piece its part of the summed gradient, divided once.

        Parts of parameters that this rank did not use wait for `give_unused`.
        """
        with record_function(f"unison::wait_reduce {self.name}"):
            for group in self.trainable:
                reducer = self._reducer(group)
                parts = reducer.finish()
                if self.gradient_divisor != 1:
                    present = [part for part in parts if part is not None]
                    torch._foreach_div_(present, self.gradient_divisor)
                if self.observer is not None:
                    for piece, part in zip(group.pieces, parts, strict=True):
                        if part is not None:
                            self.observer.see_sum(piece, part)
                given = []
                for slot, (part, is_used) in enumerate(zip(parts, reducer.used, strict=True)):
                    if part is not None and is_used:
                        self.used.add((group, slot))
                        given.append((slot, part))
                    elif part is not None:
                        self._unused.append((group, slot, part))
                group.give_gradients(given)
        self.forget_gradients()

    @torch.no_grad()
    def give_unused(self, used_by_any: set[tuple[FlatGroup, int]]) -> None:
        """Decide about the parts of parameters that this rank did not use.

        Args:
            used_by_any: The (group, slot) of parameters that some rank used.
        """
        for group, slot, part in self._unused:
            if (group, slot) in used_by_any:
                group.give_gradients([(slot, part)])
        self.used, self._unused = set(), []

    def forget_gradients(self) -> None:
        """Be ready for the next logical batch."""
        for group in self.groups:
            group.hide_held()
        self._reducers = {}
        self.is_reducing = False

    def abandon(self) -> None:
        """Drop what a broken pass left behind."""
        self.forget_gradients()
        self.end_backward()
        self.used, self._unused = set(), []
        for group in self.groups:
            group.drop_gradients()

    def end_backward(self) -> None:
        """Be ready for the next pass."""
        self.show_pieces()
        for group in self.groups:
            group.end_backward()

    def begin_pass(self, edges: tuple[int, ...]) -> None:
        """Be ready for other granules, of this logical batch or of a new one."""
        self.edges = edges
        for group in self.groups:
            group.drop_leaves()


def unit_of(module: nn.Module) -> Unit | None:
    """The unit that `fully_shard` made of a module, if any."""
    return module.__dict__.get(UNIT_ATTRIBUTE)


def units_of(module: nn.Module) -> list[Unit]:
    """All units at and below a module, parents first."""
    return [unit for child in module.modules() if (unit := unit_of(child)) is not None]
