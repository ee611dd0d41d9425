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

The computation sees *leaves*, which are views of `full`; see leaves.py.

[Note: one version per parameter] Autograd counts the writes to a tensor together with its views,
and refuses a backward pass over values that have changed since they were saved. Parameters that
share a buffer must not share that count: a step of a discriminator's weights would forbid the
backward pass of a generator in the same unit. So every piece, and every leaf, has a count of its
own (through `.data`). A gather that fills `full` with other values than the last one counts as a
write to the leaves that differ, so that autograd refuses at any number of ranks what it refuses
in one process.
"""

import copy
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from unison.errors import BadInput, UnsupportedOperation
from unison.shard.layout import FlatLayout, Placement, ShardPiece, Slot
from unison.shard.leaves import Leaves, give_gradient
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


def as_precision(policy: Any) -> MixedPrecision:
    """Accept None, our own policy, or the one of torch's FSDP2.

    Raises:
        BadInput: If it is something else.
    """
    if policy is None:
        return MixedPrecision()
    if isinstance(policy, MixedPrecision):
        return policy
    if type(policy).__name__ == "MixedPrecisionPolicy":  # torch.distributed.fsdp's, not imported
        return MixedPrecision(
            param=policy.param_dtype,
            # FSDP2 sums in the computing dtype unless told otherwise; its users rely on that.
            reduce=policy.reduce_dtype or policy.param_dtype,
            output=policy.output_dtype,
            cast_inputs=policy.cast_forward_inputs,
        )
    raise BadInput(
        "mp_policy must be a unison.MixedPrecision or torch.distributed.fsdp.MixedPrecisionPolicy, "
        f"found {policy!r}"
    )


def as_offload(policy: Any) -> CPUOffload | None:
    """Accept None, our own policy, or one of torch's FSDP2.

    Raises:
        BadInput: If it is something else.
    """
    if policy is None or isinstance(policy, CPUOffload):
        return policy
    if type(policy).__name__ == "CPUOffloadPolicy":
        return CPUOffload(pin_memory=policy.pin_memory)
    if type(policy).__name__ == "OffloadPolicy":  # FSDP2's word for none
        return None
    raise BadInput(
        "offload_policy must be a unison.CPUOffload or torch.distributed.fsdp.CPUOffloadPolicy, "
        f"found {policy!r}"
    )


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
