"""When parameters are gathered and freed, and when gradients are summed.

[Note: the life of a unit in one step]

    forward        gather ─ compute ─ free            (free: unless reshard_after_forward=False)
    backward       gather ─ compute ─ gradients arrive ─ free ─ start to sum over ranks
    end            finish the sums; every piece has its gradient

The module's `forward` is wrapped; its outputs carry a hook that fires before the unit's backward
pass begins; and a callback of the autograd engine ends the backward pass. Collectives are issued in
an order that every rank shares, whatever parameters it used: the order of the forward pass, and its
reverse in the backward pass. A unit must therefore be entered by every rank or by none.

[Note: when a unit's backward is over] Autograd runs what is ready in the reverse of the order in
which the forward pass made it. So when the backward pass comes to what a unit was given, or enters
a unit that the forward pass left before, the unit's own backward is over, and its gradients are
complete. That holds whether or not all parameters got one, which the arrival of the last gradient
would not tell (an unused parameter never sends word), and it is the same moment on every rank.
Calls are numbered as they are entered and left; a unit called several times counts from its first
call.

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
from torch.utils._pytree import tree_iter, tree_map

from unison.errors import BadInput, UnsupportedOperation
from unison.names import canonical_name
from unison.shard.deal import BatchPlan, current_plan, take_mean_was_used
from unison.shard.first_use import check_same_model, warn_of_same_data
from unison.shard.granules import (
    Bypassed,
    PerGranule,
    check_not_bypassed,
    join,
    num_granules_of,
    rows_of_granule,
    split,
)
from unison.shard.unit import PLAIN, Unit, per_granule, units_of
from unison.shard.whole import WholeModel

NO_TASK = -1
MAX_REDUCTIONS_IN_FLIGHT = 1  # beside the computation; each holds a unit's gradient


def backward_task() -> int:
    """The number of the running backward pass, or NO_TASK."""
    return torch._C._current_graph_task_id()


class Context:
    """What the units of one model share: their order and the state of the running pass."""

    def __init__(self, root: Unit) -> None:
        self.root = root
        self.units = units_of(root.module)
        paths = {module: path for path, module in root.module.named_modules()}
        for unit in self.units:
            unit.name = canonical_name(paths[unit.module]) or "root"
        self.order: list[Unit] = []  # units in the order of the running forward pass
        self.last_order: list[Unit] = []  # and of the one before, for prefetching
        self._depth = 0
        self._clock = 0  # counts calls entered and left
        self._open: dict[Unit, int] = {}  # units yet to be summed, and when they were entered
        self._summed: list[Unit] = []  # in the running backward pass
        self._begun: set[int] = set()  # calls whose backward pass has begun
        self._is_in_backward = False
        self._reducing: list[Unit] = []
        self._plan: BatchPlan | None = None
        self._has_compared_models = self._has_compared_data = False
        self.loop_granule: int | None = None  # see [Note: the whole-model loop]
        self.ran_without_grad: set[Unit] = set()
        self.whole = WholeModel(root, self.units) if WholeModel.suits(self.units) else None

    # --- forward ---------------------------------------------------------------------------------

    def enter(self, is_recompute: bool) -> None:
        """Keep count of nested units; the outermost one starts a forward pass."""
        if self._depth == 0 and not is_recompute:
            self.begin_forward()
        self._depth += 1

    def leave(self, is_recompute: bool) -> None:
        """Keep count of nested units; the outermost one ends a forward pass."""
        self._depth -= 1
        if self._depth == 0 and not is_recompute and not torch.is_grad_enabled():
            for each in self.units:
                each.end_inference()  # no backward pass will come to do it

    def begin_forward(self) -> None:
        """Look after what the last pass left, and forget its order."""
        is_whole_broken = self.whole is not None and self.whole.is_in_backward
        if self._is_in_backward or is_whole_broken:  # the last pass ended in an exception
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

    @property
    def has_compared(self) -> bool:
        """Whether the ranks have compared all they compare at their first pass."""
        return self._has_compared_models and self._has_compared_data

    def check_first_use(self, inputs: Any) -> None:
        """Before the first pass, and the first training pass, compare model and data of ranks."""
        if not self._has_compared_models:
            self._has_compared_models = True
            check_same_model(self.units)
        if not self._has_compared_data and torch.is_grad_enabled():
            self._has_compared_data = True
            if current_plan() is None:
                warn_of_same_data(self.root.axes.all, inputs)

    def note_forward(self, unit: Unit) -> int:
        """Put a unit into the order of the forward pass, and start to gather its successor.

        Returns:
            When the pass entered the unit.
        """
        entered_at = self.tick()
        if torch.is_grad_enabled():
            self._open.setdefault(unit, entered_at)
        else:
            self.ran_without_grad.add(unit)
        self.order.append(unit)
        place = len(self.order)
        follows_last = place < len(self.last_order) and self.last_order[place - 1] is unit
        if follows_last:
            self.last_order[place].start_gather()
        return entered_at

    def keeps_full(self, unit: Unit) -> bool:
        """Whether a unit's parameters stay after its forward pass."""
        if self.loop_granule is not None:
            return True  # ranks loop over different numbers of granules, but gather equally often
        is_kept = unit is self.root or unit.options.reshard_after_forward is False
        return is_kept and torch.is_grad_enabled()

    def free_after_loop(self, unit: Unit) -> None:
        """Free the units below one whose forward ran once per granule."""
        for below in units_of(unit.module)[1:]:
            if not self.keeps_full(below):
                below.free_after_forward()

    def granules(self, num_granules: int) -> list[int]:
        """Global numbers of the granules of the running pass."""
        plan = current_plan()
        if plan is None or len(plan.granule_ids) != num_granules:
            found = "no dealt batch" if plan is None else f"a plan of {len(plan.granule_ids)}"
            raise BadInput(
                f"expected the plan of a batch of {num_granules} granules, found {found}"
            )
        if plan is not self._plan:
            self._plan = plan
            for unit in self.units:
                unit.begin_pass(plan.edges)
        return list(plan.granule_ids)

    # --- backward --------------------------------------------------------------------------------

    def tick(self) -> int:
        """The next number of the clock."""
        self._clock += 1
        return self._clock

    def end_backward_of(self, entered_at: int) -> None:
        """The backward pass has come to what a unit was given: sum what is complete."""
        if self._is_in_backward:
            for each in self._entered_after(entered_at - 1):
                self._complete(each)

    def _entered_after(self, time: int) -> list[Unit]:
        """The open units that were entered after a time, the last one first."""
        # They were entered in this order, so that these are the last.
        return list(itertools.takewhile(lambda each: self._open[each] > time, reversed(self._open)))

    def begin_backward_of(self, unit: Unit, left_at: int) -> None:
        """Have a unit's parameters full, start to gather the next one, sum what is complete.

        Args:
            unit: The unit that the backward pass enters.
            left_at: When the forward pass left it.
        """
        if left_at in self._begun:  # another of its outputs
            return
        self._begun.add(left_at)
        if not self._is_in_backward:
            self._is_in_backward = True
            Variable._execution_engine.queue_callback(self._end_backward)
        if unit not in self._open:  # of a graph that an earlier backward pass left over
            self._open = {unit: 0, **self._open}
        unit.begin_backward()
        complete = self._entered_after(left_at)
        for each in complete:
            each.free()  # before memory is taken for the next one
        if not unit.is_whole:
            place = next((i for i in reversed(range(len(self.order))) if self.order[i] is unit), 0)
            if place > 0:
                self.order[place - 1].start_gather()
        for each in complete:
            self._complete(each)

    def _complete(self, unit: Unit) -> None:
        """A unit has all its gradients: free it and start to sum."""
        del self._open[unit]
        unit.free()
        if unit.keeps_gradients:
            unit.keep_gradients()
        elif not self._waits_for_more(unit):
            self._start_reduce(unit)

    def _waits_for_more(self, unit: Unit) -> bool:
        """Whether the sum over ranks must wait for later passes of the logical batch.

        The canonical tree is one over all granules of the batch, so it is finished once. The fast
        reducer sums after each pass instead and so never holds a whole gradient.
        """
        is_open = self._plan is not None and not self._plan.closes_logical_batch
        return is_open and unit.options.reducer == "ordered"

    def _start_reduce(self, unit: Unit) -> None:
        while len(self._reducing) >= MAX_REDUCTIONS_IN_FLIGHT:
            self.finish_reduce(self._reducing[0])
        unit.start_reduce()
        self._reducing.append(unit)
        self._summed.append(unit)

    def finish_reduce(self, unit: Unit) -> None:
        """Wait for a unit's sum and hand out its gradients."""
        self._reducing.remove(unit)
        unit.finish_reduce()

    def _end_backward(self) -> None:
        divisor = self.root.options.gradient_divisor
        if take_mean_was_used() and divisor != 1:
            self.abandon()
            raise BadInput(
                "the loss was made by unison.batch_mean, which divides by the global batch, "
                f"and fully_shard would divide by {divisor:g} again; pass gradient_divisor=1"
            )
        for unit in reversed(list(self._open)):
            self._complete(unit)
        for unit in reversed(self.units):
            if unit.has_late_gradients and not self._waits_for_more(unit):
                if unit.is_reducing:
                    self.finish_reduce(unit)
                self._start_reduce(unit)
        while self._reducing:
            self.finish_reduce(self._reducing[0])
        self._give_unused()
        for unit in self.units:
            unit.end_backward()
        for unit in self.units:
            unit.settle()
        self._begun.clear()
        self._is_in_backward = False

    def _give_unused(self) -> None:
        """Let ranks tell one another which parameters they used; see reducers.py."""
        units = list(dict.fromkeys(self._summed))
        self._summed = []
        everyone = self.root.axes.all
        if everyone.size == 1 or not units:
            for unit in units:
                unit.take_used()
                unit.give_unused(None)
            return
        used = [unit.take_used() for unit in units]
        device = next(group.device for unit in units for group in unit.groups)
        flags = torch.tensor([float(each) for of_unit in used for each in of_unit], device=device)
        everyone.sum_(flags)
        # Only a rank that missed a parameter has to look, which waits for the device.
        by_any = None if all(map(all, used)) else [count > 0 for count in flags.tolist()]
        for unit, of_unit in zip(units, used, strict=True):
            unit.give_unused(by_any and by_any[: len(of_unit)])
            by_any = by_any and by_any[len(of_unit) :]

    def abandon(self) -> None:
        """Drop what a broken pass left behind."""
        self._reducing, self._summed = [], []
        self._open = {}
        self._begun.clear()
        self._is_in_backward = False
        if self.whole is not None:
            self.whole.end_pass()
        for unit in self.units:
            unit.abandon()


def context_of(unit: Unit) -> Context:
    """The context of a unit's model; the first unit to run outside any other becomes the root."""
    context = unit.module.__dict__.get("_unison_context")
    if context is None:
        context = Context(unit)
        for each in context.units:
            each.module.__dict__["_unison_context"] = context
            each.on_late = context.finish_reduce
    return context


def install(unit: Unit) -> None:
    """Wrap the module's forward."""

    @functools.wraps(unit.forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if unit.is_in_place:
            return unit.forward(*args, **kwargs)
        if torch.compiler.is_compiling():
            return torch.compiler.disable(run_under_compiler)(unit, args, kwargs)  # type: ignore[call-arg]
        return run_forward(unit, args, kwargs)

    unit.module.forward = forward


def run_under_compiler(unit: Unit, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run a unit as it is where torch.compile was put around it: gathering cannot be traced."""
    warnings.warn(
        f"{unit.name} runs uncompiled: torch.compile around a sharded module stops at its units. "
        "Compile inside them, before sharding: block.forward = torch.compile(block.forward)",
        stacklevel=2,
    )
    return run_forward(unit, args, kwargs)


def run_forward(unit: Unit, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run a unit's forward with its full parameters in place."""
    context = context_of(unit)
    is_recompute = backward_task() != NO_TASK
    if not context.has_compared:
        context.check_first_use((args, kwargs))
    is_short = context.whole is not None and unit is context.root and not is_recompute
    if is_short and num_granules_of((args, kwargs)) == 0:
        return _run_whole(context, args, kwargs)
    precision = unit.options.precision
    if precision.cast_inputs:
        args, kwargs = _cast((args, kwargs), precision.param)
    context.enter(is_recompute)
    try:
        unit.finish_gather()
        if not is_recompute:
            entered_at = context.note_forward(unit)
            before_backward((args, kwargs), lambda: context.end_backward_of(entered_at))
        output = _compute(unit, context, args, kwargs)
        if not is_recompute and not unit.is_whole and not context.keeps_full(unit):
            unit.free_after_forward()
        output = _cast(output, precision.output)
        left_at = context.tick()
        check_output(output, unit)
        return before_backward(output, lambda: context.begin_backward_of(unit, left_at))
    except BaseException:
        # Not in a recompute: checkpointing ends one early by an exception, once it has what it
        # needs, and the unit's backward follows.
        if not is_recompute:
            unit.free()
        raise
    finally:
        context.leave(is_recompute)


def _run_whole(context: Context, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run a model that this rank holds whole; see whole.py."""
    whole = context.whole
    assert whole is not None
    context.begin_forward()
    output = whole.run(args, kwargs)
    check_output(output, context.root)
    return before_backward(output, whole.begin_backward)


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
        with unit.parameters_in_place(unit.leaves(granule)):
            return unit.forward(*args, **kwargs)
    granules = unit.last_granules = context.granules(num_granules)
    if unit.has_children and not unit.loops_over_model:
        try:
            return _map_operations(unit, granules, args, kwargs)
        except Bypassed as error:
            warnings.warn(
                f"{unit.name}: {error}. Falling back to one forward pass of the whole model per "
                "granule, which is right but keeps all units' parameters in memory meanwhile",
                stacklevel=2,
            )
            unit.loops_over_model = True
    return _loop_over_granules(unit, context, granules, args, kwargs)


def _granule_of_plain(unit: Unit, context: Context) -> int:
    """Which leaves a pass over plain tensors uses."""
    if unit.options.reducer != "ordered" or not torch.is_grad_enabled():
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
    outputs, before = [], context.loop_granule
    parts = split((args, kwargs), len(granules))
    for index, (granule_args, granule_kwargs) in enumerate(parts):
        context.loop_granule = granules[index]
        try:
            with (
                unit.parameters_in_place(unit.leaves(granules[index])),
                rows_of_granule(index, len(granules)),
            ):
                outputs.append(unit.forward(*granule_args, **granule_kwargs))
        finally:
            context.loop_granule = before
    if before is None:
        context.free_after_loop(unit)
    return join(outputs, unit.name)


def _map_operations(unit: Unit, granules: list[int], args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run the unit's forward once, each of its own operations granule by granule.

    A forward per granule would gather every unit below once per granule. So values and parameters
    are one tensor per granule here, and every torch function maps over them.
    """
    leaves = [unit.leaves(granule) for granule in granules]
    with unit.parameters_in_place(per_granule(leaves)):
        output = unit.forward(*args, **kwargs)
    check_not_bypassed(output, unit.name)
    return output


def check_output(output: Any, unit: Unit) -> None:
    """Refuse an output whose tensors cannot be found: their backward pass would come unannounced.

    Raises:
        UnsupportedOperation: If the output has no tensor with a gradient and holds an object that
            torch's pytrees do not know.
    """
    if isinstance(output, Tensor) or not torch.is_grad_enabled():
        return
    values = list(tree_iter(output))
    if any(isinstance(value, Tensor) and value.requires_grad for value in values):
        return
    for value in values:
        if not isinstance(value, _PLAIN_VALUES):
            raise UnsupportedOperation(
                f"{unit.name} returns a {type(value).__name__}, in which no tensor can be found; "
                "return tensors, tuples or dicts of them, or register the class with "
                "torch.utils._pytree.register_dataclass"
            )


_PLAIN_VALUES = (Tensor, int, float, complex, str, bytes, torch.dtype, torch.device, type(None))


def before_backward(output: Any, act: Callable[[], None]) -> Any:
    """Call `act` when the first gradient of any tensor in `output` arrives; without one, never."""
    if type(output) is Tensor:  # the usual case, without looking for more
        if output.requires_grad:
            output.register_hook(lambda gradient: act())
        return output
    for value in tree_iter(output) if torch.is_grad_enabled() else ():
        for tensor in value.parts if isinstance(value, PerGranule) else [value]:
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda gradient: act())
    return output
