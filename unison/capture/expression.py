"""What is made of parameters alone: followed as a parameter of its own.

`1 + w`, `w.float()`, `table[positions]` do not depend on the batch. Their records are made where
they meet the batch, and lead back to the parameter from there: for slices, reshapes, transposes and
lookups without leaving the form of the record, for the rest through autograd.

Operations without a rule that do depend on the batch go through torch.func, one sample at a time
under vmap (`per_sample_fallback`).
"""

import warnings
from collections.abc import Callable
from functools import cache, partial
from inspect import Signature, signature
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils._pytree import tree_flatten, tree_unflatten

from unison.capture.axes import Axes, Axis, Call
from unison.capture.parts import looked_up_part, refuse_use
from unison.capture.tracked import Tracked, all_plain, like, mapped, plain
from unison.errors import UnsupportedOperation
from unison.kernels.available import is_traced
from unison.ops import (
    Builder,
    Dense,
    Layout,
    Record,
    in_rows,
    is_lookup,
    looked_up,
    per_sample,
    reshaped,
    transposed,
)
from unison.torch_internals import is_dtensor


def _both(*names: str) -> set[Any]:
    """Return torch's functions and a tensor's methods of these names."""
    return {getattr(owner, name) for owner in (torch, Tensor) for name in names}


# The same values in another dtype or place in memory: records are those of the parameter.
SAME = {
    *(Tensor.to, Tensor.type_as, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16),
    *(Tensor.contiguous, Tensor.cuda, Tensor.cpu),
} | _both("clone")

# Of a matrix.
TRANSPOSES = {Tensor.T.__get__, Tensor.mT.__get__} | _both("t", "adjoint")  # type: ignore[attr-defined]

# They may give some rows, or another shape, of the same memory.
VIEWS = {Tensor.__getitem__, Tensor.view, Tensor.view_as} | _both(
    *("narrow", "chunk", "split", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze")
)

# Expressions whatever their sizes are, where the parameter is the only tensor: that they do not
# depend on the batch need not be learned.
ALWAYS = SAME | TRANSPOSES
_EXPANSIONS = {Tensor.expand, Tensor.expand_as, torch.broadcast_to, Tensor.broadcast_to}
_REPEATS = {Tensor.repeat, torch.tile, Tensor.tile}
# Their second argument says no more than what it is like.
_OF_SHAPES = {Tensor.expand_as, Tensor.view_as, Tensor.reshape_as, Tensor.type_as}


def derive(func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run a function of parameters alone; what comes out is tracked too."""
    output = _derived(func, args, kwargs)
    first = args[0] if args else None
    if type(first) is not Tracked:
        return output
    if type(output) is Tracked and (func in _EXPANSIONS or func in _REPEATS):
        sizes = zip(reversed(first.value.shape), reversed(output.value.shape), strict=False)
        if all(size in (1, made) for size, made in sizes):
            output.expanded_from = first
    elif func in SAME and type(output) is Tracked and (before := first.expanded_from) is not None:
        output.expanded_from = derive(func, (before, *args[1:]), kwargs)
    if not is_traced(first.value):
        memory = first.value.untyped_storage().data_ptr()
        for item in output if isinstance(output, list | tuple) else (output,):
            if type(item) is Tracked and item.value.untyped_storage().data_ptr() == memory:
                item.shares_memory = first.shares_memory = True
    return output


def _derived(func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    first = args[0] if args else None
    if type(first) is Tracked:
        # Where numbers become complex, or cease to be, or are conjugated, autograd leads back.
        if func in SAME and not first.value.is_complex():
            value = func(first.value, *all_plain(args[1:]), **all_plain(kwargs))
            if not value.is_complex():
                is_float = value.is_floating_point()
                return Tracked.of(value, first.sources, first.listener) if is_float else value
        elif func in TRANSPOSES and first.value.ndim == 2 and not first.value.is_complex():
            return first.through(transposed, func(first.value))
        if func is Tensor.__getitem__ and is_lookup(first.value, args[1]):
            return _lookup(args[1] % len(first.value), first)
        _refuse_part(first, func)
        if func in VIEWS:
            output = func(first.value, *all_plain(args[1:]), **kwargs)
            items = output if isinstance(output, list | tuple) else [output]
            keys = args[1] if func is Tensor.__getitem__ else ()
            keys = keys if isinstance(keys, tuple) else (keys,)
            # A key that chooses elements one by one gives a copy.
            is_chosen = any(isinstance(each, Tensor | list | bool) for each in keys)
            views = [None if is_chosen else _view(first, item) for item in items]
            if all(view is not None for view in views):
                return like(output, views) if isinstance(output, list | tuple) else views[0]
    if func is F.embedding:
        return _lookup(*args, **kwargs)
    return _through_autograd(func, args, kwargs)


def _refuse_part(tracked: Tracked, func: Callable[..., Any]) -> None:
    if is_dtensor(tracked.value):
        name = getattr(func, "__name__", func)
        refuse_use(tracked.of_parameters, f"{name} makes something of it that all samples share")


def _view(first: Tracked, output: Tensor) -> Tracked | None:
    """Follow a view that is a reshape of the tensor or a run of its rows; None for others."""
    base, shape = first.value, tuple(first.value.shape)
    if not base.is_contiguous() or not output.is_contiguous() or output.numel() == 0:
        return None
    if not is_traced(base):  # those have no memory: of a contiguous tensor, views are made
        places = [each.untyped_storage().data_ptr() for each in (base, output)]
        if places[0] != places[1]:
            return None
    start = output.storage_offset() - base.storage_offset()
    if output.numel() == base.numel():
        return first.through(partial(reshaped, shape=shape), output)
    if output.shape[1:] == base.shape[1:] and output.ndim == base.ndim:
        row = start // base.stride(0)
        return first.through(partial(in_rows, start=row, shape=shape), output)
    return None


def _lookup(
    input: Any,  # noqa: A002
    weight: Any,
    padding_idx: int | None = None,
    *_: Any,
    **__: Any,
) -> Tracked:
    """Rows of a table for ids that are the same for all samples, such as positions."""
    table = plain(weight)
    value = F.embedding(input, table, padding_idx)
    if is_dtensor(table):
        step = partial(looked_up_part, ids=input, table=table, padding=padding_idx)
    else:
        step = partial(looked_up, ids=input, shape=tuple(table.shape), padding=padding_idx)
    return weight.through(step, value)


def _through_autograd(func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    leaves: dict[int, tuple[Tracked, Tensor]] = {}

    def as_leaf(value: Any) -> Any:
        if type(value) is not Tracked:
            if isinstance(value, Tensor) and value.requires_grad:
                if func in _OF_SHAPES:
                    return value.detach()
                raise UnsupportedOperation(
                    f"{getattr(func, '__name__', func)} of a parameter and of something computed "
                    "from all samples together, such as their mean: one sample's gradient then "
                    "depends on the others"
                )
            return value
        _refuse_part(value, func)
        if id(value) not in leaves:
            leaves[id(value)] = value, value.value.detach().requires_grad_()
        return leaves[id(value)][1]

    with torch.enable_grad():
        output = func(*mapped(as_leaf, args), **mapped(as_leaf, kwargs))

    def followed(item: Any) -> Any:
        if not isinstance(item, Tensor) or not item.requires_grad:
            return item
        sources = tuple(
            source.through(partial(_pulled_back, output=item, leaf=leaf))
            for tracked, leaf in leaves.values()
            for source in tracked.sources
        )
        first, _ = next(iter(leaves.values()))
        return Tracked.of(item, sources, first.listener)

    is_list = isinstance(output, list | tuple)
    return like(output, list(map(followed, output))) if is_list else followed(output)


def _pulled_back(record: Record, *, output: Tensor, leaf: Tensor) -> Dense:
    """The record of `leaf` from that of `output`, through the graph between them."""
    value = per_sample(record)  # [batch, *output.shape]
    if len(value) == 0:
        return Dense(value.new_zeros(0, *leaf.shape))
    pull = partial(torch.autograd.grad, output, leaf, retain_graph=True, allow_unused=True)
    value = value.to(output.dtype)
    try:
        (gradient,) = pull(value, is_grads_batched=True)
    except RuntimeError:  # what a custom function does on the way back may have no rule for vmap
        found = [pull(each)[0] for each in value]
        gradient = None if found[0] is None else torch.stack(found)
    return Dense(value.new_zeros(len(value), *leaf.shape) if gradient is None else gradient)


if TYPE_CHECKING:
    from unison.capture.capture import Capture

_told: set[Callable[..., Any]] = set()


def is_in_place(func: Callable[..., Any]) -> bool:
    """Whether a torch function writes into its first argument, by its name."""
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        return name in ("__setitem__", "__ipow__", "__ifloordiv__", "__imod__")
    return name.endswith("_") and name != "requires_grad_"


@cache
def _signature_with_inplace(func: Callable[..., Any]) -> Signature | None:
    try:
        found = signature(func)
    except (TypeError, ValueError):  # of torch's own, which have another name to work in place
        return None
    return found if "inplace" in found.parameters else None


def not_in_place(
    func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict[str, Any]] | None:
    """Arguments with `inplace=False` in the place of `inplace=True`; None where it is not asked."""
    known = _signature_with_inplace(func)
    if known is None:
        return None
    bound = known.bind(*args, **kwargs)
    if not bound.arguments.get("inplace"):
        return None
    bound.arguments["inplace"] = False
    return bound.args, bound.kwargs


@cache
def with_result(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return what a function that writes into its first argument makes of a copy of it."""

    def run(target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        given = (target, *args, *kwargs.values())
        if has_torch_function(given):
            return handle_torch_function(run, given, target, *args, **kwargs)
        made = target.clone()
        func(made, *args, **kwargs)
        return made

    run.__name__ = func.__name__.rstrip("_")
    return run


def per_sample_fallback(
    capture: "Capture", call: Call, axes: Axes, args: tuple, kwargs: dict[str, Any]
) -> Tensor:
    """Run an operation without a rule and record its parameters' gradients through torch.func.

    Raises:
        UnsupportedOperation: If it returns anything but one tensor, or makes the rows of samples
            from parameters alone.
    """
    func = call.func
    if func not in _told:
        _told.add(func)
        warnings.warn(
            f"no rule for {call}: its per-sample gradients are made by torch.func, which is slower "
            "and holds one gradient per sample",
            stacklevel=2,
        )
    flat, spec = tree_flatten((args, kwargs))
    values = [plain(item) for item in flat]
    output = func(*(tree_unflatten(values, spec)[0]), **tree_unflatten(values, spec)[1])
    if not isinstance(output, Tensor):
        raise UnsupportedOperation(
            f"{call} returns several tensors and has no rule; put it into a rule of its own with "
            "unison.ops.rule"
        )
    places = [place for place, item in enumerate(flat) if isinstance(item, Tensor)]
    axis_of = dict(zip(places, axes[1], strict=True))
    batched = [place for place in places if axis_of[place] is not None]
    if not batched:
        raise UnsupportedOperation(
            f"{call} makes the rows of all samples from parameters alone; use `expand`"
        )
    saved = tuple(values[place] for place in batched)
    for place in batched:
        values[place] = None  # kept by autograd, which knows when to let go
    uses = [
        (item, _builder(call, values, spec, place, batched, axis_of))
        for place, item in enumerate(flat)
        if type(item) is Tracked
    ]
    return capture(output, saved=saved, uses=uses, is_fresh=False)


def _builder(
    call: Call,
    values: list[Any],
    spec: Any,
    parameter: int,
    batched: list[int],
    axes: dict[int, Axis],
) -> Builder:
    def build(layout: Layout, g: Tensor, *saved: Tensor, shape: tuple[int, ...]) -> Dense:
        if layout.batch == 0:
            return Dense(g.new_zeros(0, *shape))

        def of_one(g_one: Tensor, *inputs: Tensor) -> Tensor:
            items = list(values)
            for place, item in zip(batched, inputs, strict=True):
                items[place] = item.movedim(0, axes[place] or 0)

            def output(weight: Tensor) -> Tensor:
                items[parameter] = weight
                args, kwargs = tree_unflatten(items, spec)
                return call.func(*args, **kwargs)

            vjp = torch.func.vjp(output, values[parameter])[1]
            return vjp(g_one.movedim(0, layout.axis))[0]

        # Each sample keeps its dimension, with as many rows as it has: [batch, rows, ...].
        def samples(value: Tensor, axis: Axis) -> Tensor:
            front = value.movedim(axis or 0, 0)
            return front.reshape(layout.batch, front.shape[0] // layout.batch, *front.shape[1:])

        inputs = [samples(value, axes[place]) for value, place in zip(saved, batched, strict=True)]
        try:
            return Dense(torch.func.vmap(of_one)(samples(g, layout.axis), *inputs))
        except RuntimeError as error:
            raise UnsupportedOperation(
                f"{call} has no rule, and torch.func cannot run it one sample at a time: {error}"
            ) from error

    return build
