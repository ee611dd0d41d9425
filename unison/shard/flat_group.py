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

The computation sees *leaves*, which are views of `full`; see `FlatGroup.leaves`.

[Note: one version per parameter] Autograd counts the writes to a tensor together with its views,
and refuses a backward pass over values that have changed since they were saved. Parameters that
share a buffer must not share that count: a step of a discriminator's weights would forbid the
backward pass of a generator in the same unit. So every piece, and every leaf, has a count of its
own (through `.data`). A gather that fills `full` with other values than the last one counts as a
write to the leaves that differ, so that autograd refuses at any number of ranks what it refuses
in one process.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.utils._pytree import tree_iter

from unison.errors import BadInput, UnsupportedOperation
from unison.shard.granules import PerGranule, refuse_reentrant
from unison.shard.layout import FlatLayout, Placement
from unison.shard.ranks import DONE, Ranks, Work
from unison.shard.sharded_tensor import HeldGradient, ShardedTensor, local_part, shard_of
from unison.torch_internals import GATHERED, has_values

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


class _BufferView(Tensor):
    """A view of the buffer that notices which operations it enters; see [Note: gather on use].

    Attributes:
        origin: What it is a view of: the parameter as a plain view, which counts the writes to it,
            the flat group, and the parameter's number in that.
    """

    origin: tuple[Tensor, "FlatGroup", int]

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
    read = [(*each.origin, each.origin[0]._version) for each in watched]

    def before_read(_: Any) -> None:
        for _, group, _, _ in read:
            group.unit.reach()
        for base, group, slot, version in read:
            # Not every node reads what it was given: the gradient of a sum, or of a first layer's
            # weight, needs no value of the parameter.
            if (
                base._version != version
                and _leads_to(torch._C._current_autograd_node(), base, _STEPS_TO_LEAF)[1]
            ):
                group.unit.refuse_changed(group, slot)

    result.grad_fn.register_prehook(before_read)
    for each in watched:
        is_view = result.untyped_storage()._cdata == each.untyped_storage()._cdata
        if is_view and not isinstance(result, _BufferView):
            result = result.as_subclass(_BufferView)
            result.origin = each.origin
    return result


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


def per_granule(leaves: list[list[list[Tensor]]]) -> list[list[Tensor]]:
    """From [granule][group][slot] to [group][slot] of tensors that are one value per granule."""
    return [
        [PerGranule.of(list(slots)) for slots in zip(*groups, strict=True)]
        for groups in zip(*leaves, strict=True)
    ]


def tripwire(leaf: Tensor, unit_name: str) -> Tensor:
    """A view of a leaf that raises when a gradient reaches it."""
    view = leaf.detach().requires_grad_(leaf.requires_grad)
    if leaf.requires_grad:
        view.register_post_accumulate_grad_hook(lambda _: refuse_reentrant(unit_name))
    return view


# ------------------------------------------------------------------------------------------------
# The flat buffer and its parameters.

PIECE = "_unison_piece"  # on a parameter of a unit that one rank holds whole
RECIPE = "_unison_recipe"  # on a parameter built under `meta_init`: how to make its values


def is_piece(parameter: Tensor) -> bool:
    """Whether a parameter is what a unit holds of one."""
    return isinstance(parameter, ShardedTensor) or hasattr(parameter, PIECE)


Use = tuple[nn.Module, str]
"""A module and the attribute at which it holds a parameter; a tied parameter has several."""

NamedParameter = tuple[str, nn.Parameter, list[Use]]
"""A parameter on its way into a flat buffer: its name in the unit, and where modules hold it."""


class FlatGroup:
    """Parameters of one unit that share dtype and `requires_grad`.

    Attributes:
        ranks: Everyone: `ranks.shard` share this buffer, `ranks.replicas` hold the same part.
        dtype: Of the shard, the pieces and their gradients.
        compute_dtype: Of `full` and the leaves.
        reduce_dtype: In which gradients are summed.
        device: Where the parameters compute.
        parts: This rank's elements of each parameter, as plain views of the shard, or in memory of
            their own (see `_leave_shard`).
        phase: What `full` holds: nothing, what a collective is writing, or the parameters.
        bases: The parameters as plain views of `full`, which may have no memory at the moment.
        recipes: How to make each parameter's initial values, where it was built without memory.
    """

    unit: Any  # whose parameters they are
    phase: Literal["sharded", "gathering", "full"]

    def __init__(
        self,
        parameters: list[NamedParameter],
        unit: Any,
        device: torch.device | None = None,
    ) -> None:
        names, values, uses = zip(*parameters, strict=True)
        first: nn.Parameter = values[0]
        self.unit, self.ranks, self._offload = unit, unit.ranks, unit.offload
        self._neighbours: Ranks | None = None  # who shares parameters until the backward pass
        if not isinstance(unit.reshard_after_forward, bool):
            self._neighbours = self.ranks.shard.neighbours(unit.reshard_after_forward)
        self.dtype = first.dtype
        self.compute_dtype = unit.precision.param_dtype(self.dtype)
        self.reduce_dtype = unit.precision.reduce_dtype(self.dtype)
        self.was_trained = first.requires_grad  # when the last forward pass began
        self.uses: tuple[list[Use], ...] = uses
        self.recipes = [getattr(value, RECIPE, None) for value in values]
        shapes = zip(names, [value.shape for value in values], strict=True)
        self.layout = FlatLayout.of(shapes, self.ranks.shard.size)
        self.slots = self.layout.slots
        self._make_memory(device or first.device)
        self.pieces = [self._make_piece(index) for index in range(len(values))]
        for piece in self.pieces:
            piece.requires_grad_(first.requires_grad)
        real = [value.detach() for value in values if not first.is_meta]
        for piece, value in zip(self.pieces, real, strict=False):
            if isinstance(piece, ShardedTensor):
                placement = piece.placement
                value = value.reshape(-1)[placement.start : placement.stop]
            local_part(piece.data).copy_(value)
        self._attributes = [vars(piece) for piece in self.pieces]
        self._start = [_sum_of_bits(value) for value in real if self.ranks.size > 1]
        self._start_versions = self.versions

    def _make_memory(self, device: torch.device) -> None:
        """Give the buffers memory on a device, the shard zeros; `full` stays empty."""
        self.device = device
        # A plan's host has no memory either.
        is_planned = device.type == "meta" and not has_values()
        is_hosted = self._offload is not None and (device.type != "meta" or is_planned)
        self._host = torch.device("meta" if is_planned else "cpu")
        self.shard = torch.zeros(
            self.layout.shard_length,
            dtype=self.dtype,
            device=self._host if is_hosted else device,
            pin_memory=is_hosted and self._pins,
        )
        is_one_dtype = self.compute_dtype == self.dtype
        self.is_alias = self.ranks.shard.size == 1 and is_one_dtype and not is_hosted
        # Each through a `.data` of its own: see [Note: one version per parameter].
        pieces = self.layout.pieces[self.ranks.shard.rank]
        self.parts = [self.shard.data.narrow(0, at, stop - start) for start, stop, at in pieces]
        if self.is_alias:
            self.full = self.shard.detach()
            flat = self.parts
            self.full_bytes = 0
            self.phase = "full"
        else:
            length, dtype = self.layout.padded_length, self.compute_dtype
            self.full = torch.empty(length, dtype=dtype, device=device)
            flat = [self.full.data.narrow(0, slot.offset, slot.numel) for slot in self.slots]
            self.full_bytes = self.full.untyped_storage().nbytes()
            self.full.untyped_storage().resize_(0)
            self.phase = "sharded"
        self._work: Work = DONE
        self.gathered_versions: tuple[int, ...] = ()  # what `full` holds, or held last
        self._sent: Tensor | None = None  # what a running gather reads
        # By the versions they have: what neighbours hold between forward and backward, and the
        # device's copy of a shard that lives on the host.
        self._kept: dict[tuple[int, ...], Tensor] = {}
        self._resident: dict[tuple[int, ...], Tensor] = {}
        self.bases = [each.view(slot.shape) for each, slot in zip(flat, self.slots, strict=True)]
        # By granule, and by whether they require gradients: a graph that was made before all were
        # frozen, or while they were, keeps the leaves that it has.
        self._leaves: dict[tuple[int, bool], list[Tensor]] = {}
        self._moving: list[tuple[nn.Parameter, Tensor]] = []  # gradients on their way to the host
        self._outside: set[int] = set()  # pieces with memory of their own, see `_leave_shard`
        self._held: dict[int, HeldGradient] = {}  # at `.grad` of a piece whose gradient is held

    @property
    def _pins(self) -> bool:
        is_asked = self._offload is not None and self._offload.pin_memory
        return is_asked and torch.cuda.is_available()

    def _make_piece(self, index: int) -> nn.Parameter:
        size, slot, local = self.ranks.shard.size, self.slots[index], self.parts[index]
        is_trainable = local.is_floating_point() or local.is_complex()  # if not now, then later
        if size == 1:
            whole = nn.Parameter(local.view(slot.shape), requires_grad=is_trainable)
            setattr(whole, PIECE, True)
            return whole
        place = Placement(
            slot.name,
            slot.shape,
            self.layout.ranges[index],
            self.ranks.shard,
            self.device,
            self.unit.reducer == "ordered",
        )
        piece = nn.Parameter(ShardedTensor(local.detach(), place), requires_grad=is_trainable)
        if is_trainable:  # autograd begins the gradient of `piece.sum()` with a plain tensor
            piece.register_hook(partial(shard_of, placement=place))
        return piece

    def allocate(self, device: torch.device) -> None:
        """Give the pieces new memory, zeros if they had none; they stay the same objects.

        An optimizer that was made before goes on holding the right parameters.
        """
        self._make_memory(device)
        for index, piece in enumerate(self.pieces):
            made = self._make_piece(index)
            if not piece.is_meta:
                made.data.copy_(piece.detach())
            take_over(piece, made)
            made.requires_grad_(piece.requires_grad)
            torch.utils.swap_tensors(piece, made)
        self._attributes = [vars(piece) for piece in self.pieces]

    def take_back(self, index: int, *, was_applied: bool) -> bool:
        """Have a piece's memory be the group's again, if it is not, with its values of now.

        `model.to("cpu:0")`, which accelerate and transformers' Trainer call, copies although
        nothing moves. The piece stays the same object, as optimizers hold it: a plain one gets the
        copy as its `.data` and goes on counting its writes together with `parts`; a sharded one is
        swapped with its copy, which has none of its hooks and attributes.

        Args:
            index: Which piece.
            was_applied: Whether all pieces were copied, as by `model.to`, and none assigned to.

        Returns:
            False if the piece was moved, cast or laid out otherwise: nothing has changed then.
        """
        piece, part = self.pieces[index], self.parts[index]
        own = local_part(piece)
        if own.data_ptr() == part.data_ptr() and vars(piece) is self._attributes[index]:
            return True
        own = own.detach()
        base = part if isinstance(piece, ShardedTensor) else part.view(self.slots[index].shape)
        is_same = (own.dtype, own.device, own.shape) == (base.dtype, base.device, base.shape)
        # Of a plain piece that was swapped nobody would count the writes; the attribute tells.
        if not (is_same and own.stride() == base.stride() and is_piece(piece)):
            return False
        is_real = has_values() and not own.is_meta
        is_other = is_real and not torch.equal(_bits(own), _bits(base))
        if isinstance(piece, ShardedTensor):
            if is_other:
                base.copy_(own)
            piece.local = part.detach()
            # The dictionaries of hooks are the Python object's still: autograd is shown them again.
            for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
                setattr(piece, name, getattr(piece, name))
            vars(piece).update(self._attributes[index])
            self._attributes[index] = vars(piece)
        elif is_other or (is_real and not was_applied):
            self._leave_shard(index, own.clone())
            if is_other:
                increment_version(part)
        else:
            piece.data = base
        return True

    def _leave_shard(self, index: int, value: Tensor) -> None:
        """Give a plain piece other memory than the shard's, which the user may have kept.

        `kept = p.data; p.data = average; ...; p.data = kept`: what is kept is a view of the shard.
        """
        views = [self.pieces[index], self.parts[index]]
        if self.is_alias:
            views += [self.bases[index], *(leaves[index] for leaves in self._leaves.values())]
        with torch._C.DisableTorchFunctionSubclass():
            for view in views:
                view.data = value.view(view.shape)
        self._outside.add(index)
        if len(self._outside) == len(self.pieces):  # nothing is left there: give the memory back
            self.shard = self.shard.new_zeros(1).expand(len(self.shard))
            self.full = self.shard if self.is_alias else self.full

    def copied(self, memo: dict[int, Any]) -> "FlatGroup":
        """The buffers of a copy of the module, whose parameters they become."""
        made = copy.copy(self)
        made.uses = copy.deepcopy(self.uses, memo)
        made.pieces = [copy.deepcopy(piece, memo) for piece in self.pieces]
        made.allocate(self.device)
        made._start_versions = ()  # what it starts with is another's state
        return made

    def unchanged_start(self) -> list[int | None]:
        """A sum over the bits of each whole parameter, as it was sharded and still is.

        Ranks that built their models from different seeds would each keep a part of another model.
        None where nothing can be said: values were loaded or drawn after sharding.
        """
        if not self._start or self.versions != self._start_versions:
            return [None] * len(self.slots)
        return torch.stack(self._start).tolist()

    @property
    def requires_grad(self) -> bool:
        """Whether its parameters are trained: all or none, unless a forward pass would refuse."""
        return any(piece.requires_grad for piece in self.pieces)

    @property
    def versions(self) -> tuple[int, ...]:
        """How often each piece has been written; see [Note: one version per parameter]."""
        return tuple([part._version for part in self.parts])

    def written(self, *, by_values: bool) -> list[tuple[int, int | None]]:
        """What tells a write to each full parameter: a counter, and a sum of bits if asked.

        Writes through `.data` or numpy do not count, so now and then the values are looked at.
        """
        return [
            (base._version, int(_sum_of_bits(base)) if by_values else None) for base in self.bases
        ]

    # --- gather and free -------------------------------------------------------------------------

    def start_gather(self) -> None:
        """Begin to fill `full`, unless it holds, or is getting, the current values."""
        versions = self.versions
        if self.phase != "sharded":
            if self.is_alias or self.gathered_versions == versions:
                return
            self.free()  # an optimizer stepped since: what is there is stale
        self.full.untyped_storage().resize_(self.full_bytes)
        if self.gathered_versions and self.gathered_versions != versions:
            before_and_now = zip(self.bases, self.gathered_versions, versions, strict=True)
            increment_version([base for base, old, new in before_and_now if old != new])
        self.gathered_versions = versions
        # Through `.data`, which has a version counter of its own: to autograd this write is no
        # change, since it restores what was saved.
        kept = self._kept.get(versions)
        if kept is not None:
            assert self._neighbours is not None
            self._work = self._neighbours.gather(self.full.data, kept)
        else:
            self._sent = self._part_to_send()
            self._work = self.ranks.shard.gather(self.full.data, self._sent)
        self.phase = "gathering"

    def _part_to_send(self) -> Tensor:
        """This rank's part as a gather takes it: on the device, in the computing dtype."""
        shard, offload = self.shard.detach(), self._offload
        if self._outside:
            shard = shard.clone(memory_format=torch.contiguous_format)
            for (start, stop, at), part in zip(self.layout.pieces[0], self.parts, strict=True):
                shard[at : at + stop - start] = part
        is_resident = offload is not None and not offload.parameters
        if is_resident and self.versions in self._resident:
            return self._resident[self.versions]
        is_sendable = offload is None and self.compute_dtype == self.dtype
        # A gather of one rank is a copy, which casts and moves by itself.
        if not is_resident and (is_sendable or self.ranks.shard.size == 1):
            return shard
        sent = torch.empty(len(shard), dtype=self.compute_dtype, device=self.device)
        sent.copy_(shard, non_blocking=True)
        if is_resident:
            self._resident = {self.versions: sent}
        return sent

    def finish_gather(self) -> None:
        """Wait until `full` holds the parameters."""
        self.start_gather()
        if self.phase == "gathering":
            self._work.wait()
            self._work, self._sent = DONE, None
            self.phase = "full"

    def free(self) -> None:
        """Give the memory of `full` back."""
        if self.is_alias:
            return
        if self.phase == "gathering":
            self._work.wait()
            self._work, self._sent = DONE, None
        if not self.full.untyped_storage().resizable():
            raise UnsupportedOperation(
                f"numpy (or DLPack) shares the memory of gathered parameters, of "
                f"{self.slots[0].name!r} or another beside it, which is freed now; make a copy "
                "first: parameter.detach().clone().numpy()"
            )
        self.full.untyped_storage().resize_(0)
        self.phase = "sharded"

    def free_after_forward(self) -> None:
        """Give memory back until the backward pass, keeping a larger part where that was asked."""
        if self._neighbours is not None and self.phase == "full" and self.ranks.shard.size > 1:
            parts = self.full.detach().view(self._neighbours.size, -1)
            self._kept = {self.gathered_versions: parts[self._neighbours.rank].clone()}
        self.free()

    def end_backward(self) -> None:
        """Give all memory back that only this step needed."""
        # An optimizer may write past the version counter; a copy is not trusted beyond a step.
        self._kept, self._resident = {}, {}
        self.free()

    # --- leaves and gradients --------------------------------------------------------------------

    def leaves(
        self, granule: int, on_gradient: Callable[[int, int, Tensor], None] | None
    ) -> list[Tensor]:
        """The views of `full` that one granule computes with, one per parameter.

        Args:
            granule: Which granule; the same one gets the same leaves until `drop_leaves`, so that
                several forward passes add up in one gradient.
            on_gradient: Called with (granule, slot index, leaf) when a leaf's gradient is complete.
                None leaves gradients at the leaves, for `take_gradients`.
        """
        key = granule, self.requires_grad
        if key not in self._leaves:
            views = [base.detach() for base in self.bases]
            for index, view in enumerate(views if self.requires_grad else ()):
                leaf = views[index] = torch.Tensor._make_subclass(_BufferView, view, True)
                leaf._is_param = True  # type: ignore[attr-defined] # an nn.Parameter to torch
                leaf.origin = self.bases[index], self, index
                if on_gradient is not None:
                    leaf.register_post_accumulate_grad_hook(partial(on_gradient, granule, index))
            for view in views:
                setattr(view, GATHERED, True)
            self._leaves[key] = views
        return self._leaves[key]

    def drop_leaves(self) -> None:
        """Forget all leaves; the next forward pass makes new ones."""
        self._leaves.clear()

    def take_gradients(self) -> list[tuple[int, list[Tensor | None]]]:
        """Take the gradients that lie at leaves, with the granule of each set that has any."""
        taken = []
        with torch._C.DisableTorchFunctionSubclass():  # quick: leaves watch what is done to them
            for (granule, _), leaves in self._leaves.items():
                gradients = [leaf.grad for leaf in leaves]
                if any(gradient is not None for gradient in gradients):
                    taken.append((granule, gradients))
                    for leaf in leaves:
                        leaf.grad = None
        return taken

    @property
    def has_gradients(self) -> bool:
        """Whether gradients lie at leaves."""
        with torch._C.DisableTorchFunctionSubclass():
            return any(leaf.grad is not None for each in self._leaves.values() for leaf in each)

    def show_held(self, is_held: list[bool]) -> None:
        """Let `.grad` of pieces tell that this rank holds gradients of them, not summed yet."""
        for slot, piece in enumerate(self.pieces):
            if is_held[slot] and slot not in self._held:
                self._held[slot] = HeldGradient(piece, self.unit.path(self, slot))
                piece.grad = self._held[slot]

    def take_cleared(self) -> list[int]:
        """Take the parameters whose held gradient the user has cleared since."""
        cleared = [slot for slot, held in self._held.items() if self.pieces[slot].grad is not held]
        for slot in cleared:
            del self._held[slot]
        return cleared

    def hide_held(self) -> None:
        """Undo `show_held`: `.grad` of pieces is what was summed, if anything."""
        for slot, held in self._held.items():
            if self.pieces[slot].grad is held:
                self.pieces[slot].grad = held.summed
        self._held = {}

    def give_gradients(self, parts: list[tuple[int, Tensor]]) -> None:
        """Add the summed gradients to those of the pieces, or start to move them to the host.

        Args:
            parts: A parameter's number, and this rank's part of its gradient [elements of the
                piece], on the device, in the dtype of the sum.
        """
        for slot, part in parts:
            if self._offload is None:
                _add_gradient(self.pieces[slot], part.to(self.dtype))
            else:
                moved = self._on_host(part) if self._offload.gradients else part
                self._moving.append((self.pieces[slot], moved))

    def _on_host(self, part: Tensor) -> Tensor:
        host = torch.empty(len(part), dtype=self.dtype, device=self._host, pin_memory=self._pins)
        return host.copy_(part, non_blocking=True)

    def settle(self) -> None:
        """Have every gradient where its piece is; called when the backward pass ends."""
        if self._offload is None or (self.device.type == "meta" and has_values()):
            return
        arrived = [
            (piece, part if self._offload.gradients else self._on_host(part))
            for piece, part in self._moving
        ]
        self.wait_for_copies()
        self._moving = []
        for piece, part in arrived:
            _add_gradient(piece, part)

    def wait_for_copies(self) -> None:
        """Let the host wait for copies from and to it, before either side is written."""
        if self._offload is not None and self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def drop_gradients(self) -> None:
        """Forget gradients that lie at leaves or are on their way."""
        self._moving = []
        self.take_gradients()


def _add_gradient(piece: nn.Parameter, part: Tensor) -> None:
    """Add a part of a gradient to a piece's own, as a backward pass that ends there would.

    Hooks on the piece run: by autograd itself, which costs a backward pass, where there are any.
    """
    if not piece.requires_grad:  # frozen since the forward pass; as torch's own backward pass does
        return
    is_sharded = isinstance(piece, ShardedTensor)
    gradient = ShardedTensor(part, piece.placement) if is_sharded else part.view(piece.shape)
    # A sharded one has a hook of ours, see `_make_piece`.
    if len(piece._backward_hooks or ()) > is_sharded or piece._post_accumulate_grad_hooks:
        torch.autograd.backward([piece], [gradient])
    elif piece.grad is None:
        piece.grad = gradient
    else:
        piece.grad.add_(gradient)


def take_over(original: nn.Parameter, piece: nn.Parameter) -> None:
    """Give a piece what users have put on the parameter: attributes and hooks."""
    vars(piece).update(
        {key: value for key, value in vars(original).items() if key not in (RECIPE, "__deepcopy__")}
    )
    for hook in (original._backward_hooks or {}).values():
        if getattr(hook, "func", None) is not shard_of:
            piece.register_hook(hook)
    for hook in (original._post_accumulate_grad_hooks or {}).values():
        piece.register_post_accumulate_grad_hook(hook)


def _sum_of_bits(value: Tensor) -> Tensor:
    return _bits(value).sum(dtype=torch.int64)


def _bits(value: Tensor) -> Tensor:
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    real = torch.view_as_real(value) if value.is_complex() else value
    return real.contiguous().view(-1).view(kinds[real.element_size()])
