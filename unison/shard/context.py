"""What the units of one model share while they run: their order, and the state of the pass.

[Note: when a unit's backward is over] Autograd runs what is ready in the reverse of the order in
which the forward pass made it. So when the backward pass comes to what a unit was given, or enters
a unit that the forward pass left before, the unit's own backward is over, and its gradients are
complete. That holds whether or not all parameters got one, which the arrival of the last gradient
would not tell (an unused parameter never sends word), and it is the same moment on every rank.
Calls are numbered as they are entered and left; a unit called several times counts from its first
call.
"""

import itertools
from typing import Any

import torch
from torch.autograd import Variable

from unison.errors import BadInput, UnsupportedOperation
from unison.names import canonical_name
from unison.shard.deal import BatchPlan, current_plan, take_mean_was_used
from unison.shard.first_use import check_same_model, settle_kernels, warn_of_same_data
from unison.shard.granules import plan_of
from unison.shard.unit import Unit, Versions, units_of

MAX_REDUCTIONS_IN_FLIGHT = 1  # beside the computation; each holds a unit's gradient


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
        self.is_aside = False  # while the root runs as an ordinary module, see [Note: one rank]
        self._clock = 0  # counts calls entered and left
        self._open: dict[Unit, int] = {}  # units yet to be summed, and when they were entered
        self._summed: list[Unit] = []  # in the running backward pass
        self._begun: set[int] = set()  # calls whose backward pass has begun
        self._is_in_backward = False
        self._keeps_graph = False  # whether the running backward pass has a graph of its own
        self._reducing: list[Unit] = []
        self._plan: BatchPlan | None = None
        self._has_compared_models = self._has_compared_data = False
        self.loop_granule: int | None = None  # see [Note: the whole-model loop] in engine.py
        self.ran_without_grad: set[Unit] = set()

    # --- forward ---------------------------------------------------------------------------------

    @property
    def is_outside(self) -> bool:
        """Whether no unit is running at the moment."""
        return self._depth == 0

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

    @property
    def has_compared(self) -> bool:
        """Whether the ranks have compared all they compare at their first pass."""
        return self._has_compared_models and self._has_compared_data

    def check_first_use(self, inputs: Any) -> None:
        """Before the first pass, and the first training pass, compare model and data of ranks."""
        if not self._has_compared_models:
            self._has_compared_models = True
            settle_kernels(self.units)
            check_same_model(self.units)
        if not self._has_compared_data and torch.is_grad_enabled():
            self._has_compared_data = True
            if plan_of(inputs) is None and current_plan() is None:
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
            if self._plan is not None and plan.accumulation is not self._plan.accumulation:
                for unit in self.units:  # what a logical batch that was left early had summed
                    unit.forget_gradients()
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
            self._open = {unit: 0, **self._open}

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
        if unit.leaf_source is not None:
            return  # whoever gave it its leaves sums their gradients
        if unit.keeps_gradients:
            unit.keep_gradients()
        elif not unit.requires_sync:
            unit.hold_gradients()
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
        if unit.is_reducing:  # and was reached again
            self.finish_reduce(unit)
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
            if not unit.requires_sync:
                unit.hold_gradients()
            elif unit.has_late_gradients and not self._waits_for_more(unit):
                if unit.is_reducing:
                    self.finish_reduce(unit)
                self._start_reduce(unit)
        while self._reducing:
            self.finish_reduce(self._reducing[0])
        self._give_unused()
        for unit in self.units:
            if self._keeps_graph:
                unit.show_pieces()
            else:
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
        for unit in self.units:
            unit.abandon()

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None  # a copy of a model finds its own units when it first runs


def context_of(unit: Unit) -> Context:
    """The context of a unit's model; the first unit to run outside any other becomes the root."""
    context = unit.module.__dict__.get("_unison_context")
    if context is None:
        context = Context(unit)
        for each in context.units:
            each.module.__dict__["_unison_context"] = context
            each.on_late, each.on_reached = context.finish_reduce, context.reached
    return context
