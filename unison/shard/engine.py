"""When parameters are gathered and freed, and when gradients are summed.

[Note: the life of a unit in one step]

    forward        gather ─ compute ─ free            (free: unless reshard_after_forward=False)
    backward       gather ─ compute ─ gradients arrive ─ free ─ start to sum over ranks
    end            finish the sums; every piece has its gradient

The module's `forward` is wrapped; its outputs carry a hook that fires before the unit's backward
pass begins (a backward pass that comes another way is noticed by the leaves, see flat_group.py);
and a callback of the autograd engine ends the backward pass. Collectives are issued in an order
that every rank shares, whatever parameters it used: the order of the forward pass, and its reverse
in the backward pass. A unit must therefore be entered by every rank or by none. What the
units of one model share meanwhile is their `Context`.

[Note: one rank] Where one rank holds all of a unit's parameters as it computes with them, nothing
is gathered, freed, cast, summed or divided: the pieces are the parameters, in their own shapes, and
the module's own forward runs with them. It may be used as any ordinary module may.

[Note: recompute] Activation checkpointing runs a unit's forward again inside the backward pass. The
parameters are then full, or are gathered, and stay so: the unit's backward follows at once.
"""

import functools
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_iter, tree_map_only

from unison.errors import BadInput, UnsupportedOperation
from unison.rng.compiled_draws import compile_drawing
from unison.rng.draw_mode import draws_of_granule, nothing_else_drawn, paused, unwatched
from unison.shard.deal import (
    BatchPlan,
    checked_plan,
    current_plan,
    hand_on,
    publish_plan,
    take_mean_was_used,
    without_plan,
)
from unison.shard.each_granule import call_each_granule, granular_pass, holds_cache
from unison.shard.flat_group import PLAIN, per_granule, watch_compiled
from unison.shard.granules import (
    Bypassed,
    PerGranule,
    check_not_bypassed,
    is_in_backward,
    num_granules_of,
    plan_of,
    refuse_reentrant,
    refuse_whole,
)
from unison.shard.guard import compare_across_ranks
from unison.shard.ranks import (
    Ranks,
    checksum,
    compare_ways,
    flags_of_all,
    meet,
    same_on_every_rank,
)
from unison.shard.unit import SETTINGS, Unit, Versions, shadowed, units_of
from unison.torch_internals import ORIGINAL, backend_in, canonical_name, has_values, pinned

# ------------------------------------------------------------------------------------------------
# What is settled before the first pass: the same model, not the same data, the same kernels.


def check_same_model(units: list[Unit]) -> None:
    """Refuse ranks that hold different models or settings; a collective.

    Raises:
        BadInput: On every rank, naming what differs.
    """
    items: dict[str, object] = {}
    starts: dict[str, object] = {}
    for unit in units:
        items[f"options of {unit.name}"] = {name: getattr(unit, name) for name in SETTINGS}
        for group in unit.groups:
            for slot, start in zip(group.slots, group.unchanged_start(), strict=True):
                name = f"{unit.name}: {slot.name}"
                items[name] = (slot.shape, group.dtype, group.requires_grad)
                starts[f"initial values of {name}"] = start
    everyone = units[0].ranks
    compare_across_ranks("the sharded model", items, everyone.group)
    # Ranks whose models were built from different seeds would each keep a part of another one.
    device = next((group.device for unit in units for group in unit.groups), None)
    is_known = torch.tensor([float(None not in starts.values())], device=device)
    if everyone.sum_(is_known).item() == everyone.size:
        compare_across_ranks("the sharded model", starts, everyone.group)


def warn_of_same_data(ranks: Ranks, inputs: Any) -> None:
    """Warn if every rank was handed the very same batch; a collective.

    Ranks that all compute the same samples look like a run on a larger batch and are not one (the
    reference note 000 compared such a run with a single process).
    """
    tensors = [value for value in tree_iter(inputs) if isinstance(value, Tensor)]
    if ranks.size == 1 or not tensors:
        return
    total = torch.stack([checksum(value) for value in tensors]).sum(dim=0)
    # A rank may have no rows: it takes part all the same.
    if same_on_every_rank(ranks, total.to(tensors[0].device)) and int(total[0]) > 0:
        warnings.warn(
            f"all {ranks.size} ranks were fed the same batch, so that they repeat one another's "
            "work; feed the model from unison.deal(loader), or use a DistributedSampler",
            stacklevel=2,
        )


_NARROW = (torch.bfloat16, torch.float16)
_LARGE = 64  # sides of a product that oneDNN takes


def settle_kernels(units: list[Unit]) -> None:
    """Let torch decide before the first pass how it multiplies narrow numbers on this CPU.

    [Note: oneDNN] Where a CPU has no bf16, torch's first product in bfloat16 fails in oneDNN; torch
    then switches oneDNN off *for the rest of the process*, and products in float32 have other bits
    from there on. That must not happen in the middle of a pass, where it would depend on how many
    granules the rank has run before.
    """
    groups = [group for unit in units for group in unit.groups]
    dtypes = {group.compute_dtype for group in groups if group.device.type == "cpu"}
    if torch.is_autocast_enabled("cpu"):
        dtypes.add(torch.get_autocast_dtype("cpu"))
    for dtype in dtypes & {*_NARROW}:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "mkldnn_matmul failed": that is what it is for
            square = torch.ones(_LARGE, _LARGE, dtype=dtype)
            torch.mm(square, square)


# ------------------------------------------------------------------------------------------------
# What the units of one model share while they run: their order, and the state of the pass.
#
# [Note: when a unit's backward is over] Autograd runs what is ready in the reverse of the order
# in which the forward pass made it. So when the backward pass comes to what a unit was given, or
# enters a unit that the forward pass left before, the unit's own backward is over, and its
# gradients are complete. That holds whether or not all parameters got one, which the arrival of
# the last gradient would not tell (an unused parameter never sends word), and it is the same
# moment on every rank. Calls are numbered as they are entered and left; a unit called several
# times counts from its first call.


# What ranks do together in a unit, or at the end of a pass.


class Context:
    """What the units of one model share: their order and the state of the running pass."""

    def __init__(self, root: Unit) -> None:
        self.root = root
        self.units = units_of(root.module)
        self.groups = [group for unit in self.units for group in unit.groups]
        paths = {module: path for path, module in root.module.named_modules()}
        for unit in self.units:
            unit.name = canonical_name(paths[unit.module]) or "root"
        self.order: list[Unit] = []  # units in the order of the running forward pass
        self.last_order: list[Unit] = []  # and of the one before, for prefetching
        self.depth = 0  # of nested units that are running
        self.clock = itertools.count(1)  # numbers calls as they are entered and left
        self._open: dict[Unit, int] = {}  # units yet to be summed, and when they were entered
        self._entered: dict[Unit, int] = {}  # when the last forward pass entered each
        self._summed: list[Unit] = []  # in the running backward pass
        self._begun: set[int] = set()  # calls whose backward pass has begun
        self._is_in_backward = False
        self._keeps_graph = False  # whether the running backward pass has a graph of its own
        # Whose sum is under way beside the computation: one, since it holds a unit's gradient.
        self._reducing: Unit | None = None
        self._plan: BatchPlan | None = None
        self._has_compared_models = self._has_compared_data = False
        self.loop_granule: int | None = None  # see [Note: the whole-model loop] in engine.py
        self.ran_without_grad: set[Unit] = set()
        self.compares_ways = False  # whether values may lead ranks through other units

    def compare_ways(self, unit: Unit | None, what: str) -> None:
        """Make sure that every rank has come to the same place, where values may have led it.

        See `unison.shard.ranks.compare_ways`.

        Args:
            unit: What this rank has come to; None at the end of a pass.
            what: What it is going to do.

        Raises:
            UnsupportedOperation: Another rank has come to another place; on every rank.
        """
        names, name = [each.name for each in self.units], None if unit is None else unit.name
        try:
            compare_ways(self.root.ranks, what, names, name, self.groups[0].device)
        except UnsupportedOperation:
            self.abandon()
            raise

    # --- forward ---------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """Look after what the last pass left, and forget its order."""
        if self._is_in_backward:  # the last pass ended in an exception
            self.abandon()
        for unit in self.units:
            unit.check_untouched()
            if unit.has_untaken_gradients:
                raise UnsupportedOperation(
                    f"a backward pass reached the parameters of {unit.name!r} but none of the "
                    "model's outputs, so that their gradients were not summed; return every tensor "
                    "that a loss is made of from the sharded module's forward"
                )
        take_mean_was_used()  # of a backward pass that was not ours
        if self.order:
            self.last_order = self.order
        self.order = []
        self.ran_without_grad = set()

    def check_first_use(self, inputs: Any) -> None:
        """Before the first pass, and the first training pass, compare model and data of ranks."""
        if not self._has_compared_models:
            self._has_compared_models = True
            settle_kernels(self.units)
            check_same_model(self.units)
        if not self._has_compared_data and torch.is_grad_enabled():
            self._has_compared_data = True
            if plan_of(inputs) is None and current_plan() is None:
                warn_of_same_data(self.root.ranks, inputs)

    def note_forward(self, unit: Unit) -> int:
        """Put a unit into the order of the forward pass, and start to gather its successor.

        Returns:
            When the pass entered the unit.
        """
        entered_at = next(self.clock)
        if torch.is_grad_enabled():
            self._entered[unit] = self._open.setdefault(unit, entered_at)
        else:
            self.ran_without_grad.add(unit)
        self.order.append(unit)
        place = len(self.order)
        follows_last = place < len(self.last_order) and self.last_order[place - 1] is unit
        if follows_last:
            self.last_order[place].start_gather()
        return entered_at

    @property
    def has_to_gather(self) -> bool:
        """Whether a pass would gather anything: not while all modules are `unshard()`ed."""
        return any(not each.is_alias and each.phase == "sharded" for each in self.groups)

    def keeps_full(self, unit: Unit) -> bool:
        """Whether a unit's parameters stay after its forward pass."""
        if self.loop_granule is not None:
            return True  # ranks loop over different numbers of granules, but gather equally often
        is_kept = unit is self.root or unit.reshard_after_forward is False
        return is_kept and torch.is_grad_enabled()

    def granules(self, num_granules: int) -> list[int]:
        """Global numbers of the granules of the running pass."""
        plan = checked_plan(current_plan(), num_granules)
        if plan is not self._plan:
            if self._plan is not None and plan.accumulation is not self._plan.accumulation:
                for unit in self.units:  # what a logical batch that was left early had summed
                    if unit.reducer == "ordered":
                        unit.forget_gradients()
            self._plan = plan
            for unit in self.units:
                unit.begin_pass(plan.edges)
        return list(plan.granule_ids)

    # --- backward --------------------------------------------------------------------------------

    def end_backward_of(self, entered_at: int) -> None:
        """The backward pass has come to what a unit was given: sum what is complete."""
        if self._is_in_backward:
            for each in self._entered_after(entered_at - 1):
                self._complete(each)

    def _entered_after(self, time: int) -> list[Unit]:
        """The open units that were entered after a time, the last one first."""
        return [each for each in reversed(self._open) if self._open[each] > time]

    def begin_backward_of(self, unit: Unit, left_at: int, versions: Versions) -> None:
        """Have a unit's parameters full, start to gather the next one, sum what is complete.

        Args:
            unit: The unit that the backward pass enters.
            left_at: When the forward pass left it.
            versions: Of its parameters in that forward pass.
        """
        if left_at in self._begun:  # another of its outputs
            return
        self._begun.add(left_at)
        self.reached(unit)
        unit.forward_versions = versions
        if self.compares_ways:
            self.compare_ways(unit, "backward pass")
        unit.begin_backward()
        complete = self._entered_after(left_at)
        for each in complete:
            self._free(each)  # before memory is taken for the next one
        if not unit.is_whole:
            place = next((i for i in reversed(range(len(self.order))) if self.order[i] is unit), 0)
            if place > 0:
                self.order[place - 1].start_gather()
        for each in complete:
            self._complete(each)

    def reached(self, unit: Unit) -> None:
        """The backward pass is in a unit, announced by its outputs or not."""
        if not self._is_in_backward:
            self._is_in_backward = True
            self._keeps_graph = torch.is_grad_enabled()
            Variable._execution_engine.queue_callback(self._end_backward)
        if unit not in self._open:  # of a graph that an earlier backward pass left over, or late
            # Private training goes backward twice at once: the second time as the first.
            is_same = unit.leaf_source is not None
            self._open = {unit: self._entered.get(unit, 0) if is_same else 0, **self._open}

    def _free(self, unit: Unit) -> None:
        """Give a unit's memory back, unless nodes of this backward pass will be run backwards."""
        if self._keeps_graph:
            unit.show_pieces()
        else:
            unit.free()

    def _complete(self, unit: Unit) -> None:
        """A unit has all its gradients: free it and start to sum."""
        del self._open[unit]
        self._free(unit)
        if unit.leaf_source is not None:  # whoever gave it its leaves sums their gradients
            if unit.on_complete is not None:
                unit.on_complete(unit)
            return
        if not unit.requires_sync:
            unit.hold_gradients()
        elif not self._waits_for_more(unit):
            self._start_reduce(unit)

    def _waits_for_more(self, unit: Unit) -> bool:
        """Whether the sum over ranks must wait for later passes of the logical batch.

        The canonical tree is one over all granules of the batch, so it is finished once. The fast
        reducer sums after each pass instead and so never holds a whole gradient.
        """
        is_open = self._plan is not None and not self._plan.closes_logical_batch
        return is_open and unit.reducer == "ordered"

    def _start_reduce(self, unit: Unit) -> None:
        self.finish_reduce()  # maybe of the same unit, which was reached again
        unit.start_reduce()
        self._reducing = unit
        self._summed.append(unit)

    def finish_reduce(self) -> None:
        """Wait for the sum under way, if there is one, and hand out its gradients."""
        if self._reducing is not None:
            unit, self._reducing = self._reducing, None
            unit.finish_reduce()

    def _end_backward(self) -> None:
        if self.compares_ways:
            self.compare_ways(None, "backward end")
        divisor = self.root.gradient_divisor
        if take_mean_was_used() and divisor != 1:
            self.abandon()
            raise BadInput(
                "the loss was made by unison.batch_mean, which divides by the global batch, "
                f"and fully_shard would divide by {divisor:g} again; pass gradient_divisor=1"
            )
        for unit in reversed(list(self._open)):
            self._complete(unit)
        for unit in reversed(self.units):
            if not unit.requires_sync:
                unit.hold_gradients()
            elif unit.has_late_gradients and not self._waits_for_more(unit):
                self._start_reduce(unit)
        self.finish_reduce()
        self._give_unused()
        for unit in self.units:
            if self._keeps_graph:
                unit.show_pieces()
            else:
                unit.end_backward()
        for group in self.groups:
            group.settle()
        self._begun.clear()
        self._is_in_backward = False

    def _give_unused(self) -> None:
        """Let ranks tell one another which parameters they used; see reducers.py."""
        units, self._summed = list(dict.fromkeys(self._summed)), []
        groups = [group for unit in units for group in unit.trainable]
        places = [(group, slot) for group in groups for slot in range(len(group.slots))]
        # What this rank used itself it gets in any case: a unit that was summed twice may have
        # used it in one of the two sums only.
        used = {place for unit in units for place in unit.used}
        everyone = self.root.ranks
        if everyone.size > 1 and places:
            own = [place in used for place in places]
            flags = flags_of_all(everyone, own, groups[0].device)
            used = {place for place, is_used in zip(places, flags, strict=True) if is_used}
        for unit in units:
            unit.give_unused(used)

    def abandon(self) -> None:
        """Drop what a broken pass left behind."""
        self._reducing, self._summed = None, []
        self._open = {}
        self._begun.clear()
        self._is_in_backward = False
        for unit in self.units:
            unit.abandon()


def context_of(unit: Unit) -> Context:
    """The context of a unit's model; the first unit to run outside any other becomes the root."""
    context = unit.context
    if context is None:
        context = Context(unit)
        for each in context.units:
            each.context = context
    return context


def call_unit(unit: Unit, /, *args: Any, **kwargs: Any) -> Any:
    """Run a unit's module: the unit's pass around the module's own forward."""
    # Compiled code of the module calls its own forward.
    if unit.is_inside or (torch.compiler.is_compiling() and unit.is_plain):
        return unit.forward(*args, **kwargs)
    if torch.compiler.is_compiling():
        return torch.compiler.disable(run_under_compiler)(unit, args, kwargs)  # type: ignore[call-arg]
    return run_forward(unit, args, kwargs)


def install(unit: Unit) -> None:
    """Wrap the module's forward; a copy of the module copies this, with a unit of its own."""
    forward = functools.partial(call_unit, unit)
    unit.module.forward = functools.update_wrapper(forward, unit.forward, updated=())
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
    backend = functools.partial(compile_drawing, pinned(backend_in(compiled)))
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
    is_recompute = is_in_backward()
    is_inner = unit is not context.root if unit.is_plain else context.depth > 0
    plan = None if is_inner or is_recompute else plan_of((args, kwargs))
    if plan is not None:
        publish_plan(plan)
    if plan is None or plan.is_granular:
        return _run_forward(unit, context, is_recompute, args, kwargs)
    args, kwargs = without_plan((args, kwargs))
    return hand_on(_run_forward(unit, context, is_recompute, args, kwargs), plan)


def _run_forward(
    unit: Unit, context: Context, is_recompute: bool, args: tuple, kwargs: dict[str, Any]
) -> Any:
    """Run a unit's forward with its full parameters in place."""
    is_evaluation = context.depth == 0 and not torch.is_grad_enabled()
    if is_evaluation and context.has_to_gather and has_values():
        # Some run it on one rank alone, or for more batches than on others.
        what = f"a forward pass of {unit.name!r} without gradients"
        meet(unit.ranks.shard, what, may_be_late=True)
    context.check_first_use((args, kwargs))
    if unit.is_plain and num_granules_of((args, kwargs)) == 0:
        if unit is context.root and not is_recompute:
            context.begin_forward()
        return unit.forward(*args, **kwargs)
    precision = unit.precision
    if precision.cast_inputs:
        args, kwargs = _cast((args, kwargs), precision.param)
    if context.depth == 0 and not is_recompute:
        context.begin_forward()
    context.depth += 1
    try:
        if context.compares_ways:
            context.compare_ways(unit, "recomputation" if is_recompute else "forward pass")
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
        if context.compares_ways and context.depth == 1 and not is_recompute:
            context.compare_ways(None, "forward end")
        output = _cast(output, precision.output)
        left_at = next(context.clock)
        return before_backward(output, lambda: context.begin_backward_of(unit, left_at, versions))
    except BaseException:
        # Not in a recompute: checkpointing ends one early by an exception, once it has what it
        # needs, and the unit's backward follows.
        if not is_recompute:
            unit.free()
        raise
    finally:
        context.depth -= 1
        if context.depth == 0 and not is_recompute and not torch.is_grad_enabled():
            for each in context.units:
                each.free()  # no backward pass will come to do it
                for group in each.groups:
                    group.wait_for_copies()


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    """Cast every floating-point tensor in a nested value."""
    if dtype is None:
        return value
    return tree_map_only(
        Tensor, lambda item: item.to(dtype) if item.is_floating_point() else item, value
    )


def _compute(unit: Unit, context: Context, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Call the module's own forward, once or granule by granule."""
    num_granules = num_granules_of((args, kwargs))
    if num_granules == 0:
        granule = _granule_of_plain(unit, context)
        if not is_in_backward():
            unit.last_granules = None if granule == PLAIN else [granule]
        with shadowed(unit.places, unit.leaves(granule)):
            return unit.inner(*args, **kwargs)
    granules = unit.last_granules = context.granules(num_granules)
    if unit.has_children and not unit.loops_over_model:
        # A forward per granule would gather every unit below once per granule. So values and
        # parameters are one tensor per granule, and every torch function maps over them.
        try:
            with shadowed(unit.places, per_granule([unit.leaves(each) for each in granules])):
                output = unit.inner(*args, **kwargs)
            check_not_bypassed(output, unit.name)
            return output
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
    is_ordered = unit.reducer == "ordered" and unit.leaf_source is None
    if not is_ordered or not torch.is_grad_enabled():
        return PLAIN
    if is_in_backward():
        if unit in context.ran_without_grad:
            refuse_reentrant(unit.name)
        return PLAIN  # a recompute: only values are used, the graph has its own leaves
    if context.loop_granule is None:
        refuse_whole(unit.name)
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
            with shadowed(unit.places, unit.leaves(granules[index])):
                return unit.inner(*own_args, **own_kwargs)
        finally:
            context.loop_granule = before

    output = call_each_granule(unit.name, unit.module, call, len(granules), args, kwargs)
    if before is None:
        for below in units_of(unit.module)[1:]:
            if not context.keeps_full(below):
                below.free_after_forward()
    return output


def before_backward(output: Any, act: Callable[[], None]) -> Any:
    """Call `act` when the first gradient of any tensor in `output` arrives; without one, never."""
    for value in tree_iter(output) if torch.is_grad_enabled() else ():
        for tensor in value.parts if isinstance(value, PerGranule) else [value]:
            # Not of what private training follows itself: functions of parameters alone.
            is_followed = hasattr(tensor, "listener")
            if isinstance(tensor, Tensor) and tensor.requires_grad and not is_followed:
                tensor.register_hook(lambda gradient: act())
    return output
