"""The slow way for operations without a rule: torch.func, one sample at a time under vmap."""

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from unison.capture.axes import Axes, Axis, Call
from unison.capture.tracked import Tracked, plain
from unison.errors import UnsupportedOperation
from unison.ops import Builder, Dense, Layout

if TYPE_CHECKING:
    from unison.capture.capture import Capture

_told: set[Callable[..., Any]] = set()


def is_in_place(func: Callable[..., Any]) -> bool:
    """Whether a torch function writes into its first argument, by its name."""
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        return name in ("__setitem__", "__ipow__", "__ifloordiv__", "__imod__")
    return name.endswith("_") and name != "requires_grad_"


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
