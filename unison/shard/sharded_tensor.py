"""A parameter of which this rank holds a run of elements: the whole's shape, a part's memory.

What `parameters()`, `.grad`, an optimizer's state and `state_dict()` show of a sharded model.
DTensor has no placement for a run of elements that ends inside a row, so this follows its
protocols: it flattens for torch.compile and FakeTensor, and torch.distributed.checkpoint reads and
writes it by its own planners.

[Note: what may run on a part] An operation may run where its result on the part is the part of its
result on the whole: element by element, between tensors of which each rank holds the same elements,
and numbers. That is decided by torch's own tag `pointwise` and by its names of operations on lists.
Sums, norms, extremes and the search for infinities are made whole by a collective, for which ranks
meet first (`together`). All else raises, naming the parameter and what to do: a list of what is
allowed, so that an operation which a new torch brings is refused until somebody has looked at it.

[Note: versions below autograd] `__torch_dispatch__` runs below autograd. There a write does not
count in the inner tensor's version, and a view gets a version counter of its own. The version
of `local` tells whether a gather is stale, so writes are counted by hand, and `local` is handed on
as the very object it is: `nn.Parameter(x)` calls `detach`, too.
"""

import itertools
import math
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import _foreach_supported_types as _types_of_optimizers
from torch.utils._foreach_utils import _foreach_supported_types as _types_of_clipping
from torch.utils._pytree import tree_iter

from unison.errors import BadInput, NeedsWhole, UnsupportedOperation
from unison.shard.layout import Placement
from unison.shard.ranks import Ranks, meet
from unison.torch_internals import WithGradients, is_dtensor

aten = torch.ops.aten
Handler = Callable[[Any, tuple, dict[str, Any]], Any]

SAVING = (
    "save with torch.distributed.checkpoint.save or unison.save_checkpoint, or save what "
    "unison.full_state_dict(model) gives, called on every rank"
)
USING = (
    "to use it in a loss, call unshard() of the sharded module that holds it before, and reshard() "
    "after, or use it in the module's forward"
)
READING = "call .full_tensor() on every rank, or read .local knowing that it is a part"


class ShardedTensor(Tensor):
    """A tensor of the whole's shape that holds this rank's elements of it.

    Attributes:
        local: The elements [stop - start], in memory of this rank.
        placement: Which they are.
    """

    __slots__ = ("local", "placement")
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    local: Tensor
    placement: Placement

    @staticmethod
    def __new__(
        cls: type["ShardedTensor"], local: Tensor, placement: Placement, requires_grad: bool = False
    ) -> "ShardedTensor":
        """Make one of a rank's elements."""
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            placement.shape,
            dtype=local.dtype,
            device=local.device,
            requires_grad=requires_grad,
        )
        made.local, made.placement = local, placement
        return made

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute on this rank's elements, with the other ranks, or not at all."""
        handler = _handlers.get(func)
        if handler is None:
            handler = _handlers[func] = _handler_of(func)
        return handler(func, args, kwargs or {})

    def full_tensor(self) -> Tensor:
        """The whole parameter, on every rank; a collective.

        Gradients do not go through it: a loss may use what the module's forward returns.
        """
        place = self.placement

        def make() -> Tensor:
            meet(place.ranks, f"full_tensor() of {place.name!r}")
            return _gather(self.local, place).to(self.device)

        def refuse(_: Tensor) -> NoReturn:
            raise NeedsWhole(
                f"gradients do not go through full_tensor() of {place.name!r}; {USING}"
            )

        return WithGradients.apply(make, refuse, self)  # type: ignore[no-any-return]

    def to_local(self) -> Tensor:  # [stop - start]
        """This rank's elements, with gradients of their own; `local` is the same without."""
        place = self.placement
        return WithGradients.apply(  # type: ignore[no-any-return]
            self.local.detach,
            lambda gradient: [ShardedTensor(gradient.contiguous(), place)],
            self,
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        kind = "Parameter of " if isinstance(self, nn.Parameter) else ""
        return (
            f"ShardedTensor({kind}{self.placement.name!r}: elements {self.placement.start}:"
            f"{self.placement.stop} of {list(self.shape)}, {self.dtype}, {self.device})"
        )

    # --- what does not come to the dispatcher ----------------------------------------------------

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        """The same elements, without history; to assign is to copy the values.

        Where the memory is stays as it is, since a flat buffer is gathered from it. So it is what
        `.data` gave out before, the very `local`, that gets other memory, and keeps its values:
        `kept = p.data; p.data = average; ...; p.data = kept` is right, as with plain tensors.
        """
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if value.dtype != self.dtype or value.device != self.device:
            raise BadInput(
                f"{self.placement.name!r} is {self.dtype} on {self.device} and cannot become "
                f"{value.dtype} on {value.device}; move and cast parameters before sharding"
            )
        if isinstance(value, ShardedTensor) and value.local is self.local:
            return
        with torch.no_grad():
            given, self.local = self.local, self.local.detach()
            given.data = given.clone()
            self.copy_(value)

    def mean(self, *args: Any, **kwargs: Any) -> Tensor:  # type: ignore[override]
        """A sum, divided: autograd begins its gradient with a number, that of a mean does not."""
        return super().mean(*args, **kwargs) if args or kwargs else self.sum() / self.numel()

    def untyped_storage(self) -> torch.UntypedStorage:
        """Memory of which nobody may ask where it is."""
        storage: Any = super().untyped_storage()  # must not raise: torch.compile asks for it
        storage.data_ptr = _refuse_place  # where safetensors and transformers begin to write
        return storage

    def _refuse_value(self, *args: Any, **kwargs: Any) -> Any:
        raise NeedsWhole(f"its value needs all of {self.placement}; {READING}")

    # Torch's own would hand out a null pointer, or read from one.
    numpy = tolist = __array__ = __dlpack__ = share_memory_ = _refuse_value

    def storage(self) -> Any:
        """Refused: savers ask where it begins."""
        raise NeedsWhole(f"a file needs all of {self.placement}; {SAVING}")

    def __reduce_ex__(self, proto: Any) -> Any:
        return self.storage()

    def __deepcopy__(self, memo: dict[int, Any]) -> "ShardedTensor":
        if id(self) not in memo:
            copy = ShardedTensor(self.local.detach().clone(), self.placement, self.requires_grad)
            memo[id(self)] = copy
            vars(copy).update(vars(self))  # `_is_param`, which makes it an nn.Parameter
            if self.grad is not None and not isinstance(self, nn.Parameter):  # as torch's own does
                copy.grad = self.grad.__deepcopy__(memo)
        return memo[id(self)]

    def __tensor_flatten__(self) -> tuple[list[str], Placement]:
        return ["local"], self.placement

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], placement: Placement, *_: Any
    ) -> "ShardedTensor":
        return ShardedTensor(inner["local"], placement)

    # --- torch.distributed.checkpoint ------------------------------------------------------------

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [
            ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            for offsets, sizes, _ in self.placement.boxes
        ]

    def __create_write_items__(self, fqn: str, _: Any) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties.create_from_tensor(self.local)
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        for offsets, sizes, first in self.placement.boxes:
            if offsets == tuple(index.offset):
                part = self.local.detach().narrow(0, first - self.placement.start, math.prod(sizes))
                return part.view(sizes)
        raise NeedsWhole(f"no box of {self.placement} begins at {tuple(index.offset)}")


def _refuse_place() -> int:
    raise NeedsWhole(f"a file needs the whole of a sharded parameter; {SAVING}")


class HeldGradient(ShardedTensor):
    """What `.grad` is while this rank's own gradient waits to be summed over ranks.

    To clear it, as `zero_grad()` does, is to forget what waits. Anything else raises.

    Attributes:
        summed: What `.grad` was before: a sum over ranks, or None.
    """

    __slots__ = ("_name", "_parameter", "summed")
    summed: Tensor | None

    @staticmethod
    def __new__(cls: type["HeldGradient"], parameter: nn.Parameter, name: str) -> "HeldGradient":
        """Stand for the gradient of a parameter."""
        made = torch.Tensor._make_wrapper_subclass(
            cls, parameter.shape, dtype=parameter.dtype, device=parameter.device
        )
        made.summed, made._name, made._parameter = parameter.grad, name, weakref.ref(parameter)
        return made

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Let `zero_grad()` and autograd write; see the class."""
        held = next(each for each in tree_iter((args, kwargs)) if type(each) is HeldGradient)
        parameter = held._parameter()
        is_there = parameter is not None and parameter.grad is held
        if is_there and func is aten._foreach_zero_.default:  # of other gradients, too
            for each in args[0]:
                each.zero_()
            return None
        if is_there and func is aten.zero_.default:
            parameter.grad = torch.zeros_like(parameter)
            return held
        if is_there and func is aten.add_.Tensor and args[0] is held and len(args) == 2:
            # A term of the parameters alone, which autograd adds by itself.
            held.summed = args[1].clone() if held.summed is None else held.summed.add_(args[1])
            return held
        return held.refuse()

    def refuse(self, *_: Any, **__: Any) -> NoReturn:
        """Raise, with the remedy."""
        raise UnsupportedOperation(
            f"the gradient of {self._name!r} is this rank's own and not summed over ranks yet; "
            "call set_requires_gradient_sync(True) before the last backward pass of a step"
        )

    local = placement = property(refuse)  # type: ignore[assignment]
    numpy = tolist = __array__ = __dlpack__ = storage = refuse  # type: ignore[assignment]

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"HeldGradient(of {self._name!r}, not summed over ranks yet)"


def _gather(part: Tensor, placement: Placement) -> Tensor:
    """The whole of a tensor, from the elements that each rank holds; a collective."""
    longest = max(stop - start for start, stop in placement.ranges)
    sent = torch.zeros(longest, dtype=part.dtype, device=placement.device)
    sent[: placement.stop - placement.start] = part.detach().reshape(-1)
    received = sent.new_empty(placement.ranks.size, longest)
    placement.ranks.gather(received.view(-1), sent).wait()
    rows = zip(received, placement.ranges, strict=True)
    return torch.cat([row[: stop - start] for row, (start, stop) in rows]).view(placement.shape)


# As for DTensor: without this, optimizers and clip_grad_norm_ would go tensor by tensor.
_types_of_optimizers.append(ShardedTensor)
_types_of_clipping.append(ShardedTensor)


# ---- what an operation does ----------------------------------------------------------------------


def _handler_of(func: Any) -> Handler:
    schema = func._schema
    name = schema.name.removeprefix("aten::")
    if name.startswith("_foreach_"):
        return _on_lists(schema) if _is_elementwise_list(name) else _refuse
    if name in ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_"):
        return _on_lists(schema)
    is_elementwise = name in ("zero_", "fill_", "masked_fill_", "masked_fill") or (
        torch.Tag.pointwise in func.tags
        and torch.Tag.nondeterministic_seeded not in func.tags
        and [str(result.type) for result in schema.returns] == ["Tensor"]  # `equal` has the tag too
    )
    return _elementwise if is_elementwise else _refuse


def _is_elementwise_list(name: str) -> bool:
    base = name.removeprefix("_foreach_")
    if base == "max":  # of each tensor, though aten.max(a, b) is elementwise
        return False
    single = getattr(aten, base.rstrip("_"), None)
    overloads = [] if single is None else [getattr(single, each) for each in single.overloads()]
    return base in ("zero_", "copy_") or any(
        torch.Tag.pointwise in overload.tags for overload in overloads
    )


# ---- refusals ------------------------------------------------------------------------------------


def _refuse(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    shard = next(each for each in tree_iter((args, kwargs)) if type(each) is ShardedTensor)
    name = func._schema.name.removeprefix("aten::")
    if torch.Tag.nondeterministic_seeded in func.tags:
        remedy = "each rank would draw for itself: draw before sharding, or under unison.meta_init"
    elif _is_called_by(DistributedDataParallel):
        remedy = (
            "DistributedDataParallel would sum gradients that the module sums itself: leave it out "
            "(accelerate and transformers' Trainer put it there; unison.hf.PrivateTrainer does not)"
        )
    else:
        remedy = READING
    raise NeedsWhole(f"{name} needs all of {shard.placement}; {remedy}")


def _is_called_by(kind: type) -> bool:
    """Whether code of the file that a class is written in is running, further out."""
    file, frame = sys.modules[kind.__module__].__file__, sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != file:
        frame = frame.f_back
    return frame is not None


# ---- element by element --------------------------------------------------------------------------


def _part(value: Any, placement: Placement | None) -> Any:
    """What an elementwise operation on the elements at a placement sees of an argument."""
    if type(value) is ShardedTensor:
        own = value.placement
        if placement is not None and (
            own is placement or (own.shape, own.ranges) == (placement.shape, placement.ranges)
        ):
            return value.local  # every rank holds the same elements of both
        raise NeedsWhole(
            f"element by element, {own}, does not fit "
            f"{'a tensor of one rank' if placement is None else placement}; {READING}"
        )
    if placement is None or not isinstance(value, Tensor):
        return value
    if value.shape == placement.shape and not any(value.stride()):
        value = value.as_strided((), ())  # a number, expanded: the gradient of a sum begins so
    if not value.dim():
        node = torch._C._current_autograd_node()
        if node is not None and node.name() != "torch::autograd::AccumulateGrad":  # no user's hook
            _check_same_gradient(value, placement)
        return value
    raise NeedsWhole(
        f"element by element, a plain tensor of shape {list(value.shape)} does not fit "
        f"{placement}: each rank may have another one; {USING}; otherwise copy it into a sharded "
        "one (.copy_) first, or call .full_tensor() on every rank"
    )


def _check_same_gradient(number: Tensor, placement: Placement) -> None:
    """Refuse a number of a backward pass that is not the same on every rank; a collective.

    It is the gradient of a sum or a norm, of which each rank's elements take their part. That is
    right for a term of the parameters alone. A factor of a rank's own data has another gradient on
    each rank, and their sum would be wanted.
    """
    what = f"the gradient of a sum or norm of {placement.name!r}"
    of_ranks = _of_all_ranks(number.reshape(1), placement, what)
    if not torch.equal(of_ranks.nan_to_num(), of_ranks[:1].nan_to_num().expand_as(of_ranks)):
        raise NeedsWhole(
            f"{what} differs between ranks, since the loss multiplies it with values of their own "
            f"batches; {USING}"
        )


def _elementwise(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    is_write = func._schema.is_mutable
    shard = written = kwargs.get("out", args[0])
    if type(shard) is not ShardedTensor:
        if is_write:
            return _refuse(func, args, kwargs)
        shard = next(each for each in (*args, *kwargs.values()) if type(each) is ShardedTensor)
    placement = shard.placement
    parts = [_part(each, placement) for each in args]
    result = func(*parts, **{key: _part(value, placement) for key, value in kwargs.items()})
    if not is_write:
        return ShardedTensor(result, placement)
    _count_writes(_part(written, placement))
    return written


def _write_where(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """`x[mask] = number`, where every rank holds the same elements of both; Rprop does that."""
    shard, indices, value, *others = args
    mask = indices[0] if len(indices) == 1 else None
    is_mask = type(mask) is ShardedTensor and mask.dtype == torch.bool
    if type(shard) is not ShardedTensor or not is_mask or value.numel() != 1 or any(others):
        return _refuse(func, args, kwargs)
    return _elementwise(aten.masked_fill_.Tensor, (shard, mask, value.reshape(())), {})


def _on_lists(schema: Any) -> Handler:
    """An operation on lists: item i of each lies where item i of the first does, or is plain."""
    is_written = [argument.is_write for argument in schema.arguments]

    def handler(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        placements = [each.placement if type(each) is ShardedTensor else None for each in args[0]]

        def parts(value: Any) -> Any:
            if isinstance(value, list | tuple) and value and isinstance(value[0], Tensor):
                return [
                    _part(each, placement)
                    for each, placement in zip(value, placements, strict=True)
                ]
            return value

        lists = [parts(each) for each in args]
        result = func(*lists, **{key: parts(value) for key, value in kwargs.items()})
        if not schema.is_mutable:
            return [
                each if placement is None else ShardedTensor(each, placement)
                for each, placement in zip(result, placements, strict=True)
            ]
        for value, is_its in zip(lists, is_written, strict=False):
            if is_its:
                _count_writes(value)
        return None

    return handler


def _count_writes(parts: Any) -> None:
    """See [Note: versions below autograd] in sharded_tensor.py."""
    if not torch.is_inference_mode_enabled():
        increment_version(parts)


# ---- copies --------------------------------------------------------------------------------------


def _same(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Detach, alias, and views that change nothing."""
    shard, *sizes = args
    if sizes and tuple(sizes[0]) != tuple(shard.shape):
        return _refuse(func, args, kwargs)
    return ShardedTensor(shard.local, shard.placement)


def _like(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Copies and `*_like`: the same elements, perhaps of another dtype or device."""
    kwargs = {key: value for key, value in kwargs.items() if key != "memory_format"}
    return ShardedTensor(func(args[0].local, *args[1:], **kwargs), args[0].placement)


def _new(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    shard, size, *rest = args
    if tuple(size) != tuple(shard.shape):
        return func(shard.local, size, *rest, **kwargs)  # of another shape: a tensor of its own
    if func is aten.new_empty_strided.default:  # autograd's, for a gradient that others hold too
        rest = [shard.local.stride()]
    return ShardedTensor(func(shard.local, shard.local.shape, *rest, **kwargs), shard.placement)


def _copy(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """A whole tensor may be copied into a sharded one, which takes its elements; not back."""
    target, source = args[:2]
    if type(target) is not ShardedTensor:
        return _refuse(func, args, kwargs)
    placement = target.placement
    if type(source) is not ShardedTensor and source.shape == placement.shape:
        if not source.is_meta:  # ranks would hold parts of different tensors
            what = f"copying a whole tensor into {placement.name!r} (as load_state_dict does)"
            meet(placement.ranks, what, may_be_late=True)
        part = source.reshape(-1)[placement.start : placement.stop]
    else:
        part = _part(source, placement)
    func(target.local, part, *args[2:])
    _count_writes(target.local)
    return target


def shard_of(whole: Tensor, placement: Placement) -> ShardedTensor:
    """This rank's elements of a tensor that every rank has whole."""
    if type(whole) is ShardedTensor:
        return whole
    if not any(whole.stride()):
        _check_same_gradient(whole.detach().as_strided((), ()), placement)
    return ShardedTensor(
        whole.detach().reshape(-1)[placement.start : placement.stop].clone(), placement
    )


# ---- together with the other ranks ---------------------------------------------------------------


def _of_all_ranks(parts: Tensor, placement: Placement, what: str) -> Tensor:
    """Every rank's numbers [ranks, numbers] of this rank's [numbers]."""
    if parts.is_meta:
        return parts.expand(placement.ranks.size, *parts.shape)
    meet(placement.ranks, what)
    sent = parts.to(placement.device)
    received = sent.new_empty(placement.ranks.size * len(sent))
    placement.ranks.gather(received, sent).wait()
    return received.view(placement.ranks.size, len(sent)).to(parts.device)


def _check_not_ordered(placement: Placement, what: str) -> None:
    if placement.is_ordered:
        raise NeedsWhole(
            f"{what} of {placement.name!r} would have other bits at other world sizes, which the "
            "ordered reducer promises not to; use unison.grad_norm, unison.param_norm or "
            "unison.clip_grad_norm_, which add in one order"
        )


def _norms(
    shards: Sequence[ShardedTensor], order: Any = 2, dtype: torch.dtype | None = None
) -> list[Tensor]:
    """Norms of whole tensors, by one exchange, in float64."""
    order, first = float(order), shards[0]
    if order <= 0:
        raise NeedsWhole(f"the norm of order {order} needs all of {first.placement}; {READING}")
    if not math.isinf(order):
        _check_not_ordered(first.placement, "the norm")
    zero = first.local.new_zeros(1)  # an empty part has no largest element
    parts = torch._foreach_norm(
        [shard.local if len(shard.local) else zero for shard in shards], order, torch.float64
    )
    of_ranks = _of_all_ranks(torch.stack(parts), first.placement, "a norm of sharded tensors")
    is_largest = math.isinf(order)
    totals = of_ranks.amax(0) if is_largest else of_ranks.pow(order).sum(0).pow(1 / order)
    return list(totals.to(dtype or first.dtype).unbind())


def _vector_norm(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    shard: ShardedTensor = args[0]
    order = args[1] if len(args) > 1 else 2
    dim: Sequence[int] = (args[2] if len(args) > 2 else None) or ()
    if (len(args) > 3 and args[3]) or 0 < len(dim) < shard.dim():
        return _refuse(func, args, kwargs)
    return _norms([shard], order, kwargs.get("dtype"))[0]


def _norms_of_list(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    shards = [each for each in args[0] if type(each) is ShardedTensor]
    norms = iter(_norms(shards, *args[1:], **kwargs))
    return [
        next(norms) if type(each) is ShardedTensor else func([each], *args[1:], **kwargs)[0]
        for each in args[0]
    ]


def _sum(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The sum or the mean of all elements, added in float64."""
    shard, wanted = args[0], kwargs.get("dtype")
    _check_not_ordered(shard.placement, "the sum")
    is_integer = not (shard.is_floating_point() or shard.is_complex())
    wide = torch.int64 if is_integer else torch.promote_types(shard.dtype, torch.float64)
    part = shard.local.sum(dtype=wide).view(1)
    total = _of_all_ranks(part, shard.placement, "a sum over a sharded tensor").sum(0)[0]
    if func is aten.mean.default:
        total = total / shard.placement.numel
    return total.to(wanted or (wide if is_integer else shard.dtype))


def _extreme(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The largest or smallest element, or whether any or all are true."""
    shard = args[0]
    # Numbers stay exact, and a NaN is carried on, as `func` itself would.
    part = func(shard.local if len(shard.local) else shard.local.new_zeros(1)).view(1)
    sent = part.to(torch.uint8) if part.dtype == torch.bool else part
    of_ranks = _of_all_ranks(sent, shard.placement, f"{func._schema.name[6:]} of a sharded tensor")
    holds_some = [start < stop for start, stop in shard.placement.ranges]
    return func(of_ranks.to(part.dtype)[holds_some, 0])


def _unscale(func: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    """`GradScaler`: an infinity in one rank's part stops all ranks."""
    gradients, found, scale = args
    parts = [_part(each, getattr(each, "placement", None)) for each in gradients]
    func(parts, found, scale)
    _count_writes(parts)
    placement = next(each.placement for each in gradients if type(each) is ShardedTensor)
    found.copy_(_of_all_ranks(found.view(1), placement, "GradScaler").amax(0).view(found.shape))


_handlers: dict[Any, Handler] = {
    **dict.fromkeys((aten.detach.default, aten.alias.default, aten.view.default), _same),
    **dict.fromkeys((aten.clone.default, aten._to_copy.default), _like),
    **dict.fromkeys((aten.empty_like.default, aten.full_like.default), _like),
    **dict.fromkeys((aten.zeros_like.default, aten.ones_like.default), _like),
    **dict.fromkeys((aten.new_zeros.default, aten.new_empty.default), _new),
    aten.new_empty_strided.default: _new,
    aten.copy_.default: _copy,
    aten.index_put_.default: _write_where,
    aten.linalg_vector_norm.default: _vector_norm,
    aten._foreach_norm.Scalar: _norms_of_list,
    **dict.fromkeys((aten.sum.default, aten.mean.default), _sum),
    **dict.fromkeys(
        (aten.max.default, aten.min.default, aten.any.default, aten.all.default), _extreme
    ),
    aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
}


# ------------------------------------------------------------------------------------------------
# Parameters that torch's own FSDP2 holds: distributed tensors, cut along dimension 0.
#
# Nothing here imports `torch.distributed.tensor` or `torch.distributed.fsdp`, which take a second:
# where nobody has imported them there is nothing of theirs to find.


def fsdp2_modules(module: nn.Module) -> list[tuple[str, Any]]:
    """The modules at and below one on which torch's `fully_shard` was called, with their paths."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return []
    return [(p, child) for p, child in module.named_modules() if isinstance(child, fsdp.FSDPModule)]


def show_shards(module: nn.Module) -> None:
    """Let an FSDP2 model's attributes be its sharded parameters.

    FSDP2 leaves the root's parameters full after a forward pass without a backward pass, and then
    `named_parameters()` shows those instead of what the optimizer holds.
    """
    for _, child in fsdp2_modules(module):
        child.reshard()


def mesh_of(parameter: Tensor, name: str) -> DeviceMesh:
    """The one-dimensional mesh over whose ranks a parameter's rows are spread.

    Raises:
        UnsupportedOperation: If the parameter lies on the ranks in any other way.
    """
    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    if mesh.ndim != 1 or not placements[0].is_shard(0):
        raise UnsupportedOperation(
            f"parameter {name!r} has the placements {tuple(placements)} on a mesh of shape "
            f"{tuple(mesh.shape)}; expected (Shard(dim=0),) on a mesh of one dimension. Use "
            "unison.fully_shard for other meshes"
        )
    return mesh


def one_mesh(meshes: Mapping[DeviceMesh, str]) -> DeviceMesh:
    """The mesh of all parameters, given the name of a parameter on each.

    Raises:
        BadInput: If there are several, or none.
    """
    if len(meshes) != 1:
        found = ", ".join(f"{name!r} on {mesh}" for mesh, name in meshes.items())
        raise BadInput(f"expected all parameters on one mesh, found {found or 'no parameters'}")
    return next(iter(meshes))


def element_ranges(shape: Sequence[int], num_ranks: int) -> tuple[tuple[int, int], ...]:
    """Which elements [start, stop) of a flattened parameter each rank holds of FSDP2's.

    Rows are cut as torch.chunk does: equal runs, of which the last may be short or empty.

    >>> element_ranges((5, 10), num_ranks=4)
    ((0, 20), (20, 40), (40, 50), (50, 50))
    """
    rows, *row = shape
    per_rank = -(-rows // num_ranks)
    edges = [min(rank * per_rank, rows) * math.prod(row) for rank in range(num_ranks + 1)]
    return tuple(itertools.pairwise(edges))


def local_part(value: Tensor) -> Tensor:
    """This rank's part of a tensor, in its own memory; a plain tensor is its own."""
    if isinstance(value, ShardedTensor):
        return value.local
    return value._local_tensor if is_dtensor(value) else value  # type: ignore[attr-defined]


@torch.no_grad()
def whole(value: Tensor, name: str) -> Tensor:
    """The whole of a tensor, on every rank; a collective if it is distributed.

    By our own gather: DTensor's crashes with gloo on CUDA tensors, and does not move what is
    offloaded to the device that the ranks exchange on.

    Raises:
        UnsupportedOperation: If it is spread in any other way than by rows, naming it.
    """
    part = local_part(value)
    if part is value:
        return value.detach()
    placement = placement_of(value, name)
    meet(placement.ranks, f"the whole of {name!r}", may_be_late=True)
    return _gather(part, placement)


def placement_of(value: Tensor, name: str) -> Placement:
    """Which elements of a tensor each rank holds: of one of ours, of FSDP2's, or of a plain one.

    Raises:
        UnsupportedOperation: If it is spread in any other way than by rows, naming it.
    """
    if isinstance(value, ShardedTensor):
        return value.placement
    shape = tuple(value.shape)
    if not is_dtensor(value):
        return Placement(name, shape, ((0, value.numel()),), Ranks(None), value.device)
    mesh = mesh_of(value, name)
    ranges = element_ranges(shape, mesh.size())
    return Placement(name, shape, ranges, Ranks.of(mesh), torch.device(mesh.device_type))
