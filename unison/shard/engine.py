"""When parameters are gathered and freed, and when gradients are summed.

[Note: the life of a unit in one step]

    forward        gather ─ compute ─ free            (free: unless reshard_after_forward=False)
    backward       gather ─ compute ─ gradients arrive ─ free ─ start to sum over ranks
    end            finish the sums; every piece has its gradient

The module's `forward` is wrapped; its outputs carry a hook that fires before the unit's backward
pass begins (a backward pass that comes another way is noticed by the leaves, see leaves.py); and a
callback of the autograd engine ends the backward pass. Collectives are issued in
an order that every rank shares, whatever parameters it used: the order of the forward pass, and its
reverse in the backward pass. A unit must therefore be entered by every rank or by none. What the
units of one model share meanwhile is their `Context`.

[Note: one rank] Where one rank holds all of a unit's parameters as it computes with them, nothing
is gathered, freed, cast, summed or divided: the pieces are the parameters, in their own shapes, and
the module's own forward runs with them. It may be used as any ordinary module may.

[Note: recompute] Activation checkpointing runs a unit's forward again inside the backward pass. The
parameters are then full, or are gathered, and stay so: the unit's backward follows at once.
"""

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_iter, tree_map

from unison.dynamo import ORIGINAL, backend_in, pinned
from unison.errors import BadInput, UnsupportedOperation
from unison.rng.compiled_draws import DrawingBackend
from unison.rng.draw_mode import draws_of_granule, nothing_else_drawn, paused, unwatched
from unison.shard.context import Context, context_of
from unison.shard.deal import use_plan_of
from unison.shard.dealt import hand_on, without_plan
from unison.shard.each_granule import call_each_granule, holds_cache
from unison.shard.granules import (
    Bypassed,
    PerGranule,
    check_not_bypassed,
    num_granules_of,
)
from unison.shard.leaves import PLAIN, per_granule, watch_compiled
from unison.shard.unit import Unit
from unison.shard.watch import granular_pass

NO_TASK = -1


def backward_task() -> int:
    """The number of the running backward pass, or NO_TASK."""
    return torch._C._current_graph_task_id()


class Forward:
    """What `module.forward` is: the unit's pass around the module's own. A copy has its own unit.

    Args:
        unit: Whose module it is.
    """

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        functools.update_wrapper(self, unit.forward, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        unit = self._unit
        if unit.is_inside:  # compiled code of the module calls its own forward
            return unit.forward(*args, **kwargs)
        if torch.compiler.is_compiling():
            if unit.is_plain:
                return unit.forward(*args, **kwargs)
            return torch.compiler.disable(run_under_compiler)(unit, args, kwargs)  # type: ignore[call-arg]
        return run_forward(unit, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Forward":
        return Forward(copy.deepcopy(self._unit, memo))


def install(unit: Unit) -> None:
    """Wrap the module's forward."""
    unit.module.forward = Forward(unit)
    compile_inside(unit)


def compile_inside(unit: Unit) -> None:
    """Let what the user has compiled run inside the unit's pass, and not the pass inside it.

    `module.compile()` compiles `module.__call__`, hooks and all, so the pass goes around that. It
    goes around a compiled forward in any case, and around that of `torch.compile(module)`.
    """
    module, forward = unit.module, unit.forward
    in_place = module._compiled_call_impl
    compiled = in_place or forward
    own = module._call_impl if in_place else getattr(forward, ORIGINAL, None)
    if own is None or unit.is_plain or isinstance(compiled, functools.partial):
        return

    # In granules it is compiled anew, for numbers of samples and for bits that stay.
    backend = DrawingBackend(pinned(backend_in(compiled)))
    drawing = torch.compile(own, backend=backend)

    def inner(*args: Any, **kwargs: Any) -> Any:
        unit.is_inside = True
        is_drawing = draws_of_granule() is not None
        run, context = (
            (drawing, nothing_else_drawn(unit.name)) if is_drawing else (compiled, paused())
        )
        try:
            with context, unwatched(), _disable_current_modes():
                return run(*args, **kwargs)
        finally:
            unit.is_inside = False

    unit.inner, unit.compiled = inner, compiled
    if in_place is not None:
        module._compiled_call_impl = functools.partial(_call_compiled, unit)


def _call_compiled(unit: Unit, *args: Any, **kwargs: Any) -> Any:
    # Of a module around it; or hooks come first, which take it out of the compiler's hands.
    if torch.compiler.is_compiling() or unit.runs_hooks_first:
        return unit.module._call_impl(*args, **kwargs)
    return run_forward(unit, args, kwargs)


def run_under_compiler(unit: Unit, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run a unit as it is where torch.compile was put around it: gathering cannot be traced."""
    warnings.warn(
        f"{unit.name} runs uncompiled: torch.compile around a sharded module stops at its units. "
        "Compile the blocks instead: block.compile()",
        stacklevel=2,
    )
    return run_forward(unit, args, kwargs)


def run_forward(unit: Unit, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run a unit's forward, for the batch that its inputs come from where they know it."""
    context = context_of(unit)
    if context.is_aside and unit.is_plain:
        return unit.forward(*args, **kwargs)
    is_recompute = backward_task() != NO_TASK
    is_inner = unit is not context.root if unit.is_plain else not context.is_outside
    if is_inner or is_recompute or (plan := use_plan_of((args, kwargs))) is None:
        return _run_forward(unit, context, is_recompute, args, kwargs)
    if plan.is_granular:
        return _run_forward(unit, context, is_recompute, args, kwargs)
    args, kwargs = without_plan((args, kwargs))
    return hand_on(_run_forward(unit, context, is_recompute, args, kwargs), plan)


def _run_forward(
    unit: Unit, context: Context, is_recompute: bool, args: tuple, kwargs: dict[str, Any]
) -> Any:
    """Run a unit's forward with its full parameters in place."""
    if not context.has_compared:
        context.check_first_use((args, kwargs))
    if unit.is_plain and num_granules_of((args, kwargs)) == 0:
        if unit is not context.root or is_recompute:
            return unit.forward(*args, **kwargs)
        context.begin_forward()
        context.is_aside = True  # units below need not look for granules again
        try:
            return unit.forward(*args, **kwargs)
        finally:
            context.is_aside = False
    precision = unit.options.precision
    if precision.cast_inputs:
        args, kwargs = _cast((args, kwargs), precision.param)
    context.enter(is_recompute)
    try:
        unit.finish_gather()
        versions = unit.versions
        if is_recompute:
            unit.check_unchanged()
        else:
            unit.forward_versions = versions
            entered_at = context.note_forward(unit)
            before_backward((args, kwargs), lambda: context.end_backward_of(entered_at))
        looks = unit.leaf_source is None  # or private training writes down what it sees
        with granular_pass(unit.name, unit.module, (args, kwargs), looks_at_writes=looks):
            written = unit.note_written()
            output = _compute(unit, context, args, kwargs)
            unit.check_not_written(written)
        if torch.is_grad_enabled() and not is_recompute:
            watch_compiled(output, (args, kwargs), unit.reach)
        if not is_recompute and not unit.is_whole and not context.keeps_full(unit):
            unit.free_after_forward()
        output = _cast(output, precision.output)
        left_at = context.tick()
        return before_backward(output, lambda: context.begin_backward_of(unit, left_at, versions))
    except BaseException:
        # Not in a recompute: checkpointing ends one early by an exception, once it has what it
        # needs, and the unit's backward follows.
        if not is_recompute:
            unit.free()
        raise
    finally:
        context.leave(is_recompute)


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    """Cast every floating-point tensor in a nested value."""
    if dtype is None:
        return value
    return tree_map(
        lambda item: (
            item.to(dtype) if isinstance(item, Tensor) and item.is_floating_point() else item
        ),
        value,
    )


def _compute(unit: Unit, context: Context, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Call the module's own forward, once or granule by granule."""
    is_plain = not kwargs and all(type(each) is Tensor for each in args)  # the usual case, quick
    num_granules = 0 if is_plain else num_granules_of((args, kwargs))
    is_recompute = backward_task() != NO_TASK
    if num_granules == 0:
        granule = _granule_of_plain(unit, context)
        if not is_recompute:
            unit.last_granules = None if granule == PLAIN else [granule]
        with unit.attributes.shadowed(unit.leaves(granule)):
            return unit.inner(*args, **kwargs)
    granules = unit.last_granules = context.granules(num_granules)
    if unit.has_children and not unit.loops_over_model:
        try:
            return _map_operations(unit, granules, args, kwargs)
        except Bypassed as error:
            if holds_cache((args, kwargs)):  # units have written to it
                raise
            warnings.warn(
                f"{unit.name}: {error}. Falling back to one forward pass of the whole model per "
                "granule, which is right but keeps all units' parameters in memory meanwhile",
                stacklevel=2,
            )
            unit.loops_over_model = True
    return _loop_over_granules(unit, context, granules, args, kwargs)


def _granule_of_plain(unit: Unit, context: Context) -> int:
    """Which leaves a pass over plain tensors uses."""
    is_ordered = unit.options.reducer == "ordered" and unit.leaf_source is None
    if not is_ordered or not torch.is_grad_enabled():
        return PLAIN
    if backward_task() != NO_TASK:
        if unit in context.ran_without_grad:
            raise UnsupportedOperation(
                f"{unit.name} is under reentrant checkpointing, which hides from the ordered "
                "reducer which granule it computes; pass use_reentrant=False"
            )
        return PLAIN  # a recompute: only values are used, the graph has its own leaves
    if context.loop_granule is None:
        raise BadInput(
            f"the ordered reducer of {unit.name!r} needs a batch cut into granules; feed the model "
            "from unison.deal(loader, granule=...), or evaluate under torch.no_grad()"
        )
    return context.loop_granule


def _loop_over_granules(
    unit: Unit, context: Context, granules: list[int], args: tuple, kwargs: dict[str, Any]
) -> Any:
    """Run the unit's whole forward once per granule.

    [Note: the whole-model loop] With units below, this is the fallback where mapping operations is
    not possible. They then see plain tensors, learn from `loop_granule` whose turn it is, and keep
    their parameters until the loop ends.
    """
    before = context.loop_granule

    def call(index: int, own_args: tuple, own_kwargs: dict[str, Any]) -> Any:
        context.loop_granule = granules[index]
        try:
            with unit.attributes.shadowed(unit.leaves(granules[index])):
                return unit.inner(*own_args, **own_kwargs)
        finally:
            context.loop_granule = before

    output = call_each_granule(unit.name, unit.module, call, len(granules), args, kwargs)
    if before is None:
        context.free_after_loop(unit)
    return output


def _map_operations(unit: Unit, granules: list[int], args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run the unit's forward once, each of its own operations granule by granule.

    A forward per granule would gather every unit below once per granule. So values and parameters
    are one tensor per granule here, and every torch function maps over them.
    """
    leaves = [unit.leaves(granule) for granule in granules]
    with unit.attributes.shadowed(per_granule(leaves)):
        output = unit.inner(*args, **kwargs)
    check_not_bypassed(output, unit.name)
    return output


def before_backward(output: Any, act: Callable[[], None]) -> Any:
    """Call `act` when the first gradient of any tensor in `output` arrives; without one, never."""
    if type(output) is Tensor:  # the usual case, without looking for more
        if output.requires_grad:
            output.register_hook(lambda gradient: act())
        return output
    for value in tree_iter(output) if torch.is_grad_enabled() else ():
        for tensor in value.parts if isinstance(value, PerGranule) else [value]:
            # Not of what private training follows itself: functions of parameters alone.
            is_followed = hasattr(tensor, "listener")
            if isinstance(tensor, Tensor) and tensor.requires_grad and not is_followed:
                tensor.register_hook(lambda gradient: act())
    return output
