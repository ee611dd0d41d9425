"""The storage of some of a unit's parameters: one flat buffer, sharded or full.

[Note: sharded and full] Two tensors, never one with two meanings:

* `shard` [shard length] is this rank's part, in the dtype the parameters had, on the device or in
  the host's memory. It always exists. The parameters that the module's `named_parameters()` shows
  and the optimizer updates, the *pieces*, have their memory in it: sharded tensors of the
  parameters' own shapes (see sharded_tensor.py), ordinary parameters where one rank holds all.
* `full` [padded length] holds all ranks' shards, in the dtype they compute in, while a forward or
  backward pass needs them. Its storage is resized to nothing in between, rather than the tensor
  dropped, so that what autograd saved in the forward pass still points to it when it is filled
  again for the backward pass.

Where one rank holds everything, in the dtype and on the device it computes with, `full` *is*
`shard`: nothing is copied and nothing freed.

The computation sees *leaves*, which are views of `full`; see `Leaves`.

[Note: one version per parameter] Autograd counts the writes to a tensor together with its views,
and refuses a backward pass over values that have changed since they were saved. Parameters that
share a buffer must not share that count: a step of a discriminator's weights would forbid the
backward pass of a generator in the same unit. So every piece, and every leaf, has a count of its
own (through `.data`). A gather that fills `full` with other values than the last one counts as a
write to the leaves that differ, so that autograd refuses at any number of ranks what it refuses
in one process.
"""

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.utils._pytree import tree_iter

from unison.errors import BadInput, UnsupportedOperation
from unison.shard.granules import PerGranule
from unison.shard.layout import FlatLayout, Placement, ShardPiece, Slot
from unison.shard.ranks import DONE, Axes, Ranks, Work
from unison.shard.sharded_tensor import ShardedTensor, local_part, shard_of

# ------------------------------------------------------------------------------------------------
# In which dtype a unit computes and sums, and what of it lives in the host's memory.


@dataclass(frozen=True, kw_only=True)
class MixedPrecision:
    """In which dtypes a unit computes, sums gradients and returns.

    The shards, and with them the optimizer's state, keep the dtype the parameters had.

    Attributes:
        param: What parameters are cast to when they are gathered; None keeps their own dtype.
        reduce: In which dtype gradients are summed over granules and ranks. None takes the shards'
            own dtype, and float32 where that is a shorter one.
        output: What the unit's floating-point outputs are cast to; None leaves them.
        buffers: What floating-point buffers are cast to, once; None keeps their own dtype.
        cast_inputs: Whether floating-point inputs are cast to `param`.
    """

    param: torch.dtype | None = None
    reduce: torch.dtype | None = None
    output: torch.dtype | None = None
    buffers: torch.dtype | None = None
    cast_inputs: bool = True

    def __post_init__(self) -> None:
        for name in ("param", "reduce", "output", "buffers"):
            dtype = getattr(self, name)
            if dtype is not None and not (
                isinstance(dtype, torch.dtype) and dtype.is_floating_point
            ):
                raise BadInput(
                    f"{name} of MixedPrecision must be a floating dtype, found {dtype!r}"
                )

    @property
    def casts(self) -> bool:
        """Whether a pass has anything to cast."""
        return self.param is not None or self.output is not None

    def param_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype that parameters whose shards have `dtype` compute in."""
        return self.param if self.param is not None and dtype.is_floating_point else dtype

    def reduce_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which the gradients of such parameters are summed.

        >>> MixedPrecision().reduce_dtype(torch.bfloat16)
        torch.float32
        """
        if self.reduce is not None:
            return self.reduce
        return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype


@dataclass(frozen=True, kw_only=True)
class CPUOffload:
    """What of a unit lives in the host's memory. The optimizer steps where the shards are.

    Attributes:
        parameters: Whether nothing of the shards stays on the device: each gather copies from the
            host. False keeps a copy in the computing dtype on the device, renewed once per step.
        gradients: Whether summed gradients move to the host while the backward pass goes on.
            False moves them at its end, all together.
        pin_memory: Whether the host's buffers are page-locked, so that copies run beside the
            computation (with CUDA only).
    """

    parameters: bool = True
    gradients: bool = True
    pin_memory: bool = True


# ------------------------------------------------------------------------------------------------
# The leaves of a flat buffer: what a computation sees of the parameters in it.
#
# A leaf is a view of the full buffer in its parameter's own shape that requires gradients. There
# is one set of them per granule (see [Note: per granule] in granules.py): each granule's gradient
# arrives apart.
#
# [Note: gather on use] The buffer has no memory between the passes, and a gather may be filling
# it. Most of a backward pass announces itself at the outputs of a unit; but a loss may also hang
# on a tensor that a block keeps (a router's aux loss), on a gradient, on something in a list. So
# a leaf notices the operations that it enters, and the autograd node that each of them leaves
# behind waits for the parameters before it runs. Saved-tensor hooks would do too, but where they
# are set torch no longer notices that a saved tensor was changed in place.
#
# Torch notices that (see [Note: one version per parameter]) when the node reads
# what it saved, and names neither the parameter nor a remedy. The same wait therefore looks
# first.

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


# ------------------------------------------------------------------------------------------------
# The flat buffer and its parameters.

PIECE = "_unison_piece"  # on a parameter of a unit that one rank holds whole
RECIPE = "_unison_recipe"  # on a parameter built under `meta_init`: how to make its values


def is_piece(parameter: Tensor) -> bool:
    """Whether a parameter is what a unit holds of one."""
    return isinstance(parameter, ShardedTensor) or hasattr(parameter, PIECE)


class StoragePhase(Enum):
    """What a flat buffer holds at the moment."""

    SHARDED = auto()  # `full` has no memory
    GATHERING = auto()  # a collective is writing `full`
    FULL = auto()  # `full` holds the parameters


@dataclass(frozen=True)
class ParameterUse:
    """One place where a module holds a parameter; a tied parameter has several."""

    module: nn.Module
    attribute: str


@dataclass
class ParameterInfo:
    """A parameter on its way into a flat buffer."""

    name: str
    value: nn.Parameter
    uses: list[ParameterUse] = field(default_factory=list)


class FlatGroup:
    """Parameters of one unit that share dtype and `requires_grad`.

    Attributes:
        axes: The ranks: `axes.shard` share this buffer, `axes.replicas` hold the same part.
        dtype: Of the shard, the pieces and their gradients.
        compute_dtype: Of `full` and the leaves.
        reduce_dtype: In which gradients are summed.
        device: Where the parameters compute.
        leaves: What a computation sees of `full`.
        recipes: How to make each parameter's initial values, where it was built without memory.
    """

    unit: Any  # whose parameters they are; set when the unit takes its groups

    def __init__(
        self,
        parameters: list[ParameterInfo],
        axes: Axes,
        *,
        device: torch.device,
        neighbours: Ranks | None = None,
        precision: MixedPrecision | None = None,
        offload: CPUOffload | None = None,
        is_ordered: bool = False,
    ) -> None:
        first = parameters[0].value
        precision = precision or MixedPrecision()
        self.axes, self.ranks = axes, axes.shard
        self._neighbours = neighbours  # who shares the parameters between forward and backward
        self._offload, self._is_ordered = offload, is_ordered
        self.dtype = first.dtype
        self.compute_dtype = precision.param_dtype(self.dtype)
        self.reduce_dtype = precision.reduce_dtype(self.dtype)
        self.requires_grad = first.requires_grad
        self.uses = [parameter.uses for parameter in parameters]
        self.recipes = [getattr(parameter.value, RECIPE, None) for parameter in parameters]
        self.layout = FlatLayout.of((p.name, tuple(p.value.shape)) for p in parameters)
        self._make_memory(device)
        self.pieces = [self._make_piece(index) for index in range(len(parameters))]
        for parameter, piece in zip(parameters, self.pieces, strict=True):
            if not parameter.value.is_meta:
                piece.data.copy_(parameter.value.detach())
        self._start = [
            _sum_of_bits(parameter.value.detach())
            for parameter in parameters
            if axes.all.size > 1 and not parameter.value.is_meta
        ]
        self._start_versions = self.versions

    def _make_memory(self, device: torch.device) -> None:
        """Give the buffers memory on a device, the shard zeros; `full` stays empty."""
        self.device = device
        is_hosted = self._offload is not None and device.type != "meta"
        self.shard = torch.zeros(
            self.layout.shard_length(self.ranks.size),
            dtype=self.dtype,
            device="cpu" if is_hosted else device,
            pin_memory=is_hosted and self._pins,
        )
        self.is_alias = (
            self.ranks.size == 1
            and self.compute_dtype == self.dtype
            and (self._offload is None or device.type == "meta")
        )
        self._parts = [
            self.shard.data.narrow(0, own.shard_offset, own.numel) for own in self.piece_places()
        ]
        if self.is_alias:
            self.full = self.shard.detach()
            views = [
                part.view(slot.shape) for part, slot in zip(self._parts, self.slots, strict=True)
            ]
            self.phase = StoragePhase.FULL
        else:
            self.full = torch.empty(
                self.layout.padded_length(self.ranks.size), dtype=self.compute_dtype, device=device
            )
            views = [
                self.full.data.narrow(0, slot.offset, slot.numel).view(slot.shape)
                for slot in self.slots
            ]
            self._full_bytes = self.full.untyped_storage().nbytes()
            self.full.untyped_storage().resize_(0)
            self.phase = StoragePhase.SHARDED
        self._work: Work = DONE
        self.gathered_versions: tuple[int, ...] = ()  # what `full` holds, or held last
        self._kept_versions: tuple[int, ...] = ()
        self._resident_versions: tuple[int, ...] = ()
        self._sent: Tensor | None = None  # what a running gather reads
        self._kept: Tensor | None = None  # what neighbours hold between forward and backward
        self._resident: Tensor | None = None  # the device's copy of a shard that lives on the host
        self.leaves = Leaves(views, self.requires_grad, self)
        self._moving: list[tuple[nn.Parameter, Tensor]] = []  # gradients on their way to the host

    @property
    def _pins(self) -> bool:
        is_asked = self._offload is not None and self._offload.pin_memory
        return is_asked and torch.cuda.is_available()

    def _make_piece(self, index: int) -> nn.Parameter:
        size = self.ranks.size
        of_ranks = [self.layout.pieces(rank, size)[index] for rank in range(size)]
        slot, local = self.slots[index], self._parts[index]
        if size == 1:
            whole = nn.Parameter(local.view(slot.shape), requires_grad=self.requires_grad)
            setattr(whole, PIECE, True)
            return whole
        place = Placement(
            slot.name,
            slot.shape,
            tuple((each.start, each.stop) for each in of_ranks),
            self.ranks,
            self.device,
            self._is_ordered,
        )
        piece = nn.Parameter(ShardedTensor(local, place), requires_grad=self.requires_grad)
        if self.requires_grad:  # autograd begins the gradient of `piece.sum()` with a plain tensor
            piece.register_hook(_OwnPart(place))
        return piece

    def allocate(self, device: torch.device) -> None:
        """Give parameters that were sharded without memory their zeros; the pieces stay the same.

        An optimizer that was made before goes on holding the right parameters.
        """
        self._make_memory(device)
        for index, piece in enumerate(self.pieces):
            made = self._make_piece(index)
            take_over(piece, made)
            torch.utils.swap_tensors(piece, made)

    def copied(self, memo: dict[int, Any]) -> "FlatGroup":
        """The buffers of a copy of the module, whose parameters they become."""
        made = copy.copy(self)
        made.uses = [
            [ParameterUse(copy.deepcopy(use.module, memo), use.attribute) for use in uses]
            for uses in self.uses
        ]
        made._make_memory(self.device)
        made.pieces = [copy.deepcopy(piece, memo) for piece in self.pieces]
        for index, piece in enumerate(made.pieces):
            own = made._make_piece(index)
            with torch.no_grad():
                own.copy_(piece)
            vars(own).update(vars(piece))
            torch.utils.swap_tensors(piece, own)
        made._start_versions = ()  # what it starts with is another's state
        return made

    def is_in_shard(self, index: int) -> bool:
        """Whether a piece still has its memory in the shard."""
        return local_part(self.pieces[index]).data_ptr() == self._parts[index].data_ptr()

    def unchanged_start(self) -> list[int | None]:
        """A sum over the bits of each whole parameter, as it was sharded and still is.

        Ranks that built their models from different seeds would each keep a part of another model.
        None where nothing can be said: values were loaded or drawn after sharding.
        """
        if not self._start or self.versions != self._start_versions:
            return [None] * len(self.slots)
        return torch.stack(self._start).tolist()

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The places of the parameters."""
        return self.layout.slots

    @property
    def versions(self) -> tuple[int, ...]:
        """How often each piece has been written; see [Note: one version per parameter]."""
        return tuple([part._version for part in self._parts])

    @property
    def full_bytes(self) -> int:
        """Bytes of `full` while it has memory of its own."""
        return 0 if self.is_alias else self._full_bytes

    def piece_places(self) -> list[ShardPiece]:
        """What this rank holds of each parameter."""
        return self.layout.pieces(self.ranks.rank, self.ranks.size)

    def written(self, *, by_values: bool) -> tuple[list[int], list[int]]:
        """What tells a write to the full parameters: counters, and sums of bits if asked.

        Writes through `.data` or numpy do not count, so now and then the values are looked at.
        """
        bases = self.leaves.bases
        sums = [int(_sum_of_bits(base)) for base in bases] if by_values else []
        return [base._version for base in bases], sums

    # --- gather and free -------------------------------------------------------------------------

    def start_gather(self) -> None:
        """Begin to fill `full`, unless it holds, or is getting, the current values."""
        versions = self.versions
        if self.phase is not StoragePhase.SHARDED:
            if self.is_alias or self.gathered_versions == versions:
                return
            self.free()  # an optimizer stepped since: what is there is stale
        self.full.untyped_storage().resize_(self._full_bytes)
        if self.gathered_versions and self.gathered_versions != versions:
            increment_version(
                [
                    view
                    for view, old, new in zip(
                        self.leaves.bases, self.gathered_versions, versions, strict=True
                    )
                    if old != new
                ]
            )
        self.gathered_versions = versions
        # Through `.data`, which has a version counter of its own: to autograd this write is no
        # change, since it restores what was saved.
        if self._kept is not None and self._kept_versions == versions:
            assert self._neighbours is not None
            self._work = self._neighbours.gather(self.full.data, self._kept)
        else:
            self._sent = self._part_to_send()
            self._work = self.ranks.gather(self.full.data, self._sent)
        self.phase = StoragePhase.GATHERING

    def _part_to_send(self) -> Tensor:
        """This rank's part as a gather takes it: on the device, in the computing dtype."""
        shard = self.shard.detach()
        if self._offload is not None and not self._offload.parameters:
            if self._resident is None or self._resident_versions != self.versions:
                self._resident = self._on_device(shard)
                self._resident_versions = self.versions
            return self._resident
        if self.ranks.size == 1:
            return shard  # a gather of one rank is a copy, which casts and moves by itself
        if self._offload is None and self.compute_dtype == self.dtype:
            return shard
        return self._on_device(shard)

    def _on_device(self, shard: Tensor) -> Tensor:
        copy = torch.empty(len(shard), dtype=self.compute_dtype, device=self.device)
        return copy.copy_(shard, non_blocking=True)

    def finish_gather(self) -> None:
        """Wait until `full` holds the parameters."""
        self.start_gather()
        if self.phase is StoragePhase.GATHERING:
            self._end_work()
            self.phase = StoragePhase.FULL

    def _end_work(self) -> None:
        self._work.wait()
        self._work, self._sent = DONE, None

    def free(self) -> None:
        """Give the memory of `full` back."""
        if self.is_alias:
            return
        if self.phase is StoragePhase.GATHERING:
            self._end_work()
        if not self.full.untyped_storage().resizable():
            raise UnsupportedOperation(
                f"numpy (or DLPack) shares the memory of gathered parameters, of "
                f"{self.slots[0].name!r} or another beside it, which is freed now; make a copy "
                "first: parameter.detach().clone().numpy()"
            )
        self.full.untyped_storage().resize_(0)
        self.phase = StoragePhase.SHARDED

    def free_after_forward(self) -> None:
        """Give memory back until the backward pass, keeping a larger part where that was asked."""
        if self._neighbours is not None and self.phase is StoragePhase.FULL and self.ranks.size > 1:
            parts = self.full.detach().view(self._neighbours.size, -1)
            self._kept = parts[self._neighbours.rank].clone()
            self._kept_versions = self.gathered_versions
        self.free()

    def end_backward(self) -> None:
        """Give all memory back that only this step needed."""
        self._kept = None
        # An optimizer may write past the version counter; a copy is not trusted beyond a step.
        self._resident_versions = ()
        self.free()

    # --- gradients -------------------------------------------------------------------------------

    def give_gradients(self, parts: list[Tensor | None]) -> None:
        """Add the summed gradients to those of the pieces, or start to move them to the host.

        Args:
            parts: This rank's part of each parameter's gradient [elements of the piece], on the
                device, in the dtype of the sum; None for a parameter that no rank used.
        """
        for piece, part in zip(self.pieces, parts, strict=True):
            if part is not None and self._offload is None:
                self._add_gradient(piece, part.to(self.dtype))
            elif part is not None:
                moved = self._on_host(part) if self._offload.gradients else part  # type: ignore[union-attr]
                self._moving.append((piece, moved))

    def _on_host(self, part: Tensor) -> Tensor:
        host = torch.empty(len(part), dtype=self.dtype, device="cpu", pin_memory=self._pins)
        return host.copy_(part, non_blocking=True)

    def settle(self) -> None:
        """Have every gradient where its piece is; called when the backward pass ends."""
        if self._offload is None or self.device.type == "meta":
            return
        arrived = [
            (piece, part if self._offload.gradients else self._on_host(part))
            for piece, part in self._moving
        ]
        self.wait_for_copies()
        self._moving = []
        for piece, part in arrived:
            self._add_gradient(piece, part)

    def wait_for_copies(self) -> None:
        """Let the host wait for copies from and to it, before either side is written."""
        if self._offload is not None and self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def drop_gradients(self) -> None:
        """Forget gradients that lie at leaves or are on their way."""
        self._moving = []
        self.leaves.take_gradients()

    def _add_gradient(self, piece: nn.Parameter, part: Tensor) -> None:
        if isinstance(piece, ShardedTensor):
            give_gradient(piece, ShardedTensor(part, piece.placement))
        else:
            give_gradient(piece, part.view(piece.shape))


@dataclass(frozen=True)
class _OwnPart:
    """A hook on a piece: of a gradient that is whole, this rank's elements."""

    placement: Placement

    def __call__(self, gradient: Tensor) -> Tensor:
        return shard_of(gradient, self.placement)


def take_over(original: nn.Parameter, piece: nn.Parameter) -> None:
    """Give a piece what users have put on the parameter: attributes and hooks."""
    vars(piece).update(
        {key: value for key, value in vars(original).items() if key not in (RECIPE, "__deepcopy__")}
    )
    for hook in (original._backward_hooks or {}).values():
        if not isinstance(hook, _OwnPart):
            piece.register_hook(hook)
    for hook in (original._post_accumulate_grad_hooks or {}).values():
        piece.register_post_accumulate_grad_hook(hook)


def _sum_of_bits(value: Tensor) -> Tensor:
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    real = torch.view_as_real(value) if value.is_complex() else value
    return real.contiguous().view(-1).view(kinds[real.element_size()]).sum(dtype=torch.int64)
