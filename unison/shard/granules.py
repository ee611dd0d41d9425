"""A tensor that is one value per granule, so that no shape ever depends on the world size.

[Note: per granule] Kernels round differently at different shapes: a GEMM's rows at another batch
size, a vector loop's tail at another length, a sum with another split. A rank that holds more
samples would therefore get other bits for the *same* sample. So every operation between the data
loader and the loss runs granule by granule, each at the one shape that all granules have.

`PerGranule` does this by provenance: it holds one tensor per granule, and every torch function maps
over them. Nothing is guessed from shapes. To the model's own code it looks like a single granule:
`x.shape` is the shape of one.

What goes past torch functions (an `autograd.Function` applied at the root, reentrant checkpointing,
vmap, compiled code) would see only the outer shell. The shell is a tripwire: it requires a gradient
without being the result of anything, so whatever was computed from it has a history, and raises at
the next torch function.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_iter, tree_unflatten

from unison.errors import BadInput, UnsupportedOperation
from unison.rng import BatchDraws
from unison.rng.draw_mode import DRAWING, current_draws, draw, of_granule

TAKES_GRANULES: set[Callable] = set()
"""Functions that are given all granules at once, and are not mapped over them."""

MAPPED_BY: dict[Callable, Callable] = {}
"""Functions that leave something behind, and what maps them: (call, args, kwargs, plan) -> result,
where `call` maps as others are mapped."""


class Bypassed(UnsupportedOperation):
    """A value was computed from the shell of a `PerGranule`, past torch functions."""


class PerGranule(Tensor):
    """One tensor per granule; every torch function maps over them.

    Attributes:
        parts: The granules' tensors, all of one shape and dtype.
        plan: The plan of the batch that they were computed from, a `BatchPlan`; None for
            parameters.
    """

    parts: list[Tensor]
    plan: Any

    @staticmethod
    def of(parts: Sequence[Tensor], plan: Any = None) -> "PerGranule":
        """Hold tensors of one shape, one per granule."""
        assert parts, "a rank has at least one granule, a ghost if need be"
        first = parts[0]
        if any(part.shape != first.shape or part.dtype != first.dtype for part in parts):
            shapes = [list(part.shape) for part in parts]
            raise BadInput(f"expected granules of one shape and dtype, found {shapes}")
        can_require_grad = first.is_floating_point() or first.is_complex()
        shell = torch.Tensor._make_subclass(PerGranule, first.detach(), can_require_grad)
        shell.parts, shell.plan = list(parts), plan
        return shell

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Map a torch function over the granules."""
        if func in TAKES_GRANULES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", repr(func))
        if func in MAPPED_BY:
            call = partial(_map, func, name)
            return MAPPED_BY[func](call, args, kwargs or {}, plan_of((args, kwargs)))
        if name in _REFUSED:
            raise UnsupportedOperation(f"{name} of a per-granule value: {_REFUSED[name]}")
        return _map(func, name, *args, **(kwargs or {}))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Show how many granules there are, and the first."""
        return f"PerGranule({len(self.parts)} granules, the first: {self.parts[0]!r})"


class RefusedTensor(Tensor):
    """Stands for a tensor that may not be read: every torch function of it calls `refuse`."""

    refuse: Callable[[], NoReturn]

    @staticmethod
    def of(value: Tensor, refuse: Callable[[], NoReturn]) -> "RefusedTensor":
        """Stand for a tensor."""
        made = torch.Tensor._make_subclass(RefusedTensor, value.detach())
        made.refuse = refuse
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Refuse."""
        next(each for each in tree_iter((args, kwargs)) if isinstance(each, cls)).refuse()


def _map(func: Callable, name: str, /, *args: Any, **kwargs: Any) -> Any:
    """Call a function once per granule."""
    flat, _ = tree_flatten((args, kwargs))
    _check_shells(flat, name)
    num_granules = next(len(value.parts) for value in flat if isinstance(value, PerGranule))
    _check_in_place(name, flat)
    plan = plan_of(flat)
    draws = draws_of(plan, num_granules) if func in DRAWING else None
    results = []
    for index, (row_args, row_kwargs) in enumerate(split((args, kwargs), num_granules)):
        if draws is None:
            results.append(func(*row_args, **row_kwargs))
            continue
        with of_granule(index, draws):
            results.append(draw(func, row_args, row_kwargs))
    return join(results, name, plan)


def draws_of(plan: Any, num_granules: int) -> BatchDraws | None:
    """Whose random numbers operations draw: of the running pass, or else of a batch's plan."""
    draws = current_draws()
    if draws is None:
        return plan.draws if plan is not None else None
    if draws.join is None:  # what the user said of the whole batch
        return draws.cut(num_granules, lambda results: join(results, "a draw", plan))
    return draws


def _contains(call: Callable, args: tuple, kwargs: dict[str, Any], plan: Any) -> bool:
    """Whether a value is in the batch: in that of all ranks, which go on alike; a collective."""
    values, element = args
    is_in = any(part.__contains__(element) for part in values.parts)
    if plan is None:
        return is_in
    flag = torch.tensor([float(is_in)], device=values.parts[0].device)
    return bool(plan.ranks.max_(flag).item())


MAPPED_BY[Tensor.__contains__] = _contains
_REFUSED = {
    "backward": "make it one number first with unison.batch_mean(per_sample_losses)",
    "item": "make it one number first with unison.batch_mean(per_sample_losses)",
    # What a compiler asks of a tensor before all else.
    "untyped_storage": "torch.compile around a batch in granules does not see them; shard the "
    "model with unison.fully_shard and compile its blocks instead: block.compile()",
    "__bool__": "each granule may have another truth; make it one number with unison.batch_mean",
}


def _check_shells(flat: list[Any], name: str) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        for value in flat:
            if isinstance(value, PerGranule) and value.grad_fn is not None:
                raise Bypassed(
                    f"{name}: an input was computed past torch functions (an autograd.Function, "
                    "reentrant checkpointing, vmap or compiled code) outside the units; put that "
                    "part of the model into a unit of its own with fully_shard"
                )


def _check_in_place(name: str, flat: list[Any]) -> None:
    is_in_place = name.endswith("_") and not name.endswith("__")
    is_in_place |= name.startswith("__i") and name not in ("__index__", "__int__", "__invert__")
    is_in_place |= name in ("__setitem__", "__set__")
    if is_in_place and isinstance(flat[0], Tensor) and not isinstance(flat[0], PerGranule):
        raise UnsupportedOperation(
            f"{name}: a tensor that all granules share is changed by values of one granule"
        )


def join(results: list[Any], name: str, plan: Any = None) -> Any:
    """Turn one result per granule into one result of `PerGranule`s.

    Raises:
        UnsupportedOperation: If a Python value differs between granules, since the model's code can
            follow only one of them.
    """
    columns, specs = zip(*(tree_flatten(result) for result in results), strict=True)
    joined = []
    for values in zip(*columns, strict=True):
        if isinstance(values[0], Tensor):
            joined.append(PerGranule.of(values, plan))
        elif all(value == values[0] for value in values):
            joined.append(values[0])
        else:
            raise UnsupportedOperation(
                f"{name} gives different Python values for different granules: {values[:3]}"
            )
    return tree_unflatten(joined, specs[0])


def split(value: Any, num_granules: int) -> list[Any]:
    """One copy of a nested value per granule, each with its own parts."""
    flat, spec = tree_flatten(value)
    columns = [
        item.parts if isinstance(item, PerGranule) else [item] * num_granules for item in flat
    ]
    if not columns:
        return [value] * num_granules
    return [tree_unflatten(list(row), spec) for row in zip(*columns, strict=True)]


PLAN = "_unison_plan"  # on a plain tensor that was dealt: its plan


def plan_of(value: Any) -> Any:
    """The plan of the batch that a nested value came from, a `BatchPlan`; None if it is not known.

    Values per granule carry it along; a plain tensor has it as it was dealt, and its views do.
    """
    for item in tree_iter(value):
        if isinstance(item, PerGranule):
            plan = item.plan
        elif isinstance(item, Tensor):
            plan = getattr(item, PLAN, None) or getattr(item._base, PLAN, None)
        else:
            plan = None
        if plan is not None:
            return plan
    return None


def is_in_backward() -> bool:
    """Whether a backward pass is running: a forward pass in it is a recompute."""
    return torch._C._current_graph_task_id() != -1


def num_granules_of(value: Any) -> int:
    """The number of granules of the first `PerGranule` in a nested value; 0 if there is none."""
    for item in tree_flatten(value)[0]:
        if isinstance(item, PerGranule):
            return len(item.parts)
    return 0


def refuse_reentrant(name: str) -> NoReturn:
    """Refuse gradients of which nobody knows to which granule they belong."""
    raise UnsupportedOperation(
        f"{name} is under reentrant checkpointing, which hides from the ordered reducer which "
        "granule it computes; pass use_reentrant=False to torch.utils.checkpoint"
    )


def refuse_whole(name: str) -> NoReturn:
    """Refuse a batch that is not cut into granules, where gradients have to be summed in order."""
    raise BadInput(
        f"the ordered reducer of {name!r} needs a batch cut into granules; feed the model from "
        "unison.deal(loader, granule=...), or evaluate under torch.no_grad()"
    )


def check_not_bypassed(value: Any, name: str) -> None:
    """Refuse a result that was computed from shells.

    Raises:
        Bypassed: If it was.
    """
    flat = tree_flatten(value)[0]
    _check_shells(flat, name)
    for item in flat:
        if isinstance(item, Tensor) and not isinstance(item, PerGranule) and item.requires_grad:
            raise Bypassed(f"the output of {name} is not one value per granule")
