"""The planner: which norm and gradient method each layer uses, and what the others would cost.

The named modes are points of norm × gradient, the same for all layers. `auto` takes for each
layer the cheapest pair, as long as what is kept until the end of the backward pass fits the memory
budget. A plan is a function of shapes, budget and machine name, and of nothing else unless it is
given what methods took on the device (calibration.py). It is frozen, JSON-able and part of the
mechanism: other methods round differently.

[Note: how a plan is found] A layer's alternatives differ in time, in the bytes that they keep until
the end of the backward pass, and in those they hold while they are at work. All layers together
need the sum of the former and the largest of the latter. Finding the fastest that fits is a
knapsack; this takes a good one, and the same one every time:

* Passes first. Without a second pass; with a second forward pass, which is paid for as a whole
  however few layers use it; with a second backward pass for all layers, which keeps nothing.
* For each of these, and for each bound on what a layer may hold while it is at work: every layer
  starts with its fastest alternative. While they keep too much, the one that loses least time per
  byte saved moves to a smaller one. In the end each layer takes the fastest that the bytes left
  over allow.
* The fastest of all these is taken.

[Note: freed memory] Layers come one after the other, and while they do, ordinary training frees
what it had saved for them. Where it is known how much (`freed_bytes`), clipping may use it:
what has been kept when a layer comes must fit into the budget and what has been freed by then.

[Note: compiled passes] The peak of compiled passes is held against that of compiled ordinary
training, which recomputes what is cheap: it saves little more than the inputs and outputs of
layers, nor more than ordinary training that is not compiled, where it is known what that frees. (A
layer's output may be the next one's input, but for an activation that saves nothing of its own.)
What it saves it frees on the way back, and there is room for as much. Unless the user gives a
budget, compiled passes may keep that, and so much more that the whole takes `COMPILED_SHARE` of
ordinary training: weights, gradients and two moments, and what is saved. Of what is more the
clipped sums take their part first, which are integers of four bytes in the place of gradients. They
take one pass over the model, since more would not be compiled. A head that is tied to an embedding
is multiplied out all the same: to form it twice, to be measured and to be added up, takes as long
as a block of the model.

[Note: rows of compiled passes] `max_physical_batch_size` is the most rows that a pass may have, and
says how much memory there is: what ordinary training takes with so many. Per-sample gradients of
all layers may not fit into that. With half the rows they take half of it, so that no layer has to
fall back on a slower method, and twice as many passes may be faster, though each reads and writes
the clipped sums. They must save a twentieth of what clipping takes (`SAVING`): forward and backward
of smaller passes take longer, by what is not known here. Where not even the smallest of all methods
fit, so that memory would be more than it should, smaller passes may take a little longer (`LOSS`).
"""

import heapq
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import repeat
from typing import TYPE_CHECKING

from unison import check
from unison.clip.costs import (
    AUTO,
    CHOICES,
    FORWARD,
    FORWARD_OVERHEAD,
    MACHINES,
    MODES,
    SUM_ITEMSIZE,
    Choice,
    Cost,
    LayerShape,
    choice_cost,
    describe,
    method_costs,
    timed_seconds,
)
from unison.clip.norms import GRADIENT_METHODS, refusal
from unison.errors import BadInput, UnsupportedOperation
from unison.ops import Record
from unison.schema import build, parse

if TYPE_CHECKING:
    from unison.clip.calibration import Calibration

COMPILED_SHARE = 1.14  # memory of compiled passes beside that of ordinary training
SAVING = 0.05  # of clipping's time, by passes of half the rows
LOSS = 0.05  # of clipping's time, for passes that fit: timings differ from run to run by 3 %

_PASSES = ((1, 1), (1, 2), (2, 1))  # backward, forward


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """What one choice of methods costs on one layer, and how long that takes.

    Attributes:
        choice: The methods.
        cost: FLOPs and bytes.
        seconds: How long they take at the machine's rates.
        measured: How long they took on the device, where they were timed.
    """

    choice: Choice
    cost: Cost
    seconds: float
    measured: float | None = None

    @property
    def time(self) -> float:
        """Seconds as timed, or as predicted where nothing was timed."""
        return self.seconds if self.measured is None else self.measured

    @property
    def passes(self) -> tuple[int, int]:
        """Backward and forward passes of the whole model."""
        return GRADIENT_METHODS[self.choice.gradient]


def alternatives_of(
    layer: LayerShape, machine: str, timed: Mapping[str, float] | None = None
) -> tuple[list[Alternative], float]:
    """Return every choice of methods that takes this layer's records, fastest first.

    Args:
        layer: Its shapes.
        machine: One of `MACHINES`.
        timed: Seconds of the parts that choices are made of (`costs.parts_of`), if they were
            timed. A choice with a part that was not is left at what is predicted, after all others.

    Returns:
        The alternatives, and the layer's share of a forward pass in seconds.
    """
    records, costs = layer.records(), method_costs(layer, machine)
    found = []
    for choice in CHOICES:
        if refusal(choice.norm, records) is None:
            cost = choice_cost(layer, choice, machine, costs)
            measured = None if timed is None else timed_seconds(layer, choice, timed)
            seconds = cost.seconds(machine)
            found.append(Alternative(choice=choice, cost=cost, seconds=seconds, measured=measured))
    is_left = timed is not None
    forward = costs["forward"].seconds(machine)
    if timed is not None and FORWARD in timed:
        forward = FORWARD_OVERHEAD * timed[FORWARD]
    return sorted(
        found,
        key=lambda a: (is_left and a.measured is None, a.time, a.cost.kept_bytes, str(a.choice)),
    ), forward


def named(layer: LayerShape, options: Sequence[Alternative], mode: str) -> Alternative:
    """Return the methods of a mode.

    Raises:
        UnsupportedOperation: If they do not take the layer's records.
    """
    for option in options:
        if option.choice == MODES[mode]:
            return option
    why = refusal(MODES[mode].norm, layer.records())
    raise UnsupportedOperation(
        f"clipping {mode!r} cannot be used for {layer.name}: {why}; clipping 'auto' can"
    )


def fastest(
    options: Sequence[Sequence[Alternative]],
    memory_budget: int | None,
    forwards: Sequence[float],
    freed: Sequence[int],
    *,
    is_estimate: bool = False,
) -> list[Alternative]:
    """Return one alternative per layer, all of one backward pass or all of two: see the note above.

    What was too slow to be timed is taken only where nothing else fits.

    Args:
        options: Each layer's alternatives.
        memory_budget: Bytes that clipping may hold, or None for no bound.
        forwards: Each layer's share of a forward pass, in seconds.
        freed: Bytes that are free when each layer comes, see [Note: freed memory].
        is_estimate: Whether the budget is rough: where nothing fits, the smallest are returned.

    Raises:
        BadInput: If nothing fits.
    """
    preferred = [[a for a in each if a.measured is not None] or each for each in options]
    for allowed in (preferred, options):
        found = _fastest(allowed, memory_budget, forwards, freed)
        if found is not None:
            return found
    smallest = [
        [min(each, key=lambda a: a.cost.kept_bytes + a.cost.transient_bytes) for each in allowed]
        for _, allowed in _by_passes(options)
    ]
    found = min(smallest, key=lambda each: bytes_needed(each, freed))
    if is_estimate:
        return found
    check_fits(found, memory_budget, freed)
    raise AssertionError("the smallest fit, and were not found")


def fastest_compiled(
    layers: Sequence[LayerShape],
    options: Sequence[Sequence[Alternative]],
    most_rows: int | None = None,
) -> list[Alternative]:
    """Return one alternative per layer for passes that are compiled: see [Note: compiled passes].

    Args:
        layers: Their shapes.
        options: Each layer's alternatives.
        most_rows: Rows of the largest pass, which says how much memory there is; those of this one
            if it is not given.
    """
    once = [_of_one_pass(*each) for each in zip(layers, options, strict=True)]
    no_wait, room = [0.0] * len(layers), _room(layers, once, most_rows or 0)
    # Where not even the smallest fit, they are as small as can be.
    room = max(room, sum(min(a.cost.kept_bytes for a in each) for each in once))
    found = _within(once, no_wait, [room] * len(layers))
    return min(found, key=lambda chosen: total_seconds(chosen, no_wait))


def _of_one_pass(layer: LayerShape, options: Sequence[Alternative]) -> list[Alternative]:
    """Return a layer's alternatives in compiled passes: see [Note: compiled passes]."""
    timed = [a for a in options if a.measured is not None] or list(options)
    once = [a for a in timed if a.passes == (1, 1)] or timed
    return (layer.is_mixed and [a for a in once if a.choice.is_kept]) or once


def _room(
    layers: Sequence[LayerShape], options: Sequence[Sequence[Alternative]], most_rows: int
) -> int:
    """Return the bytes that compiled passes may keep: see [Note: compiled passes].

    Args:
        layers: Shapes of all layers.
        options: Their alternatives in compiled passes.
        most_rows: Rows of the largest pass, if there may be larger ones than this.
    """
    room, rows = 0, max([most_rows, *(layer.batch for layer in layers)])
    for layer, each in zip(layers, options, strict=True):
        least = min(a.cost.kept_bytes for a in each) if layer.is_mixed else 0
        room += max(layer.factor_bytes, least) * rows // layer.batch
    saved = rows * max((layer.freed_per_sample for layer in layers), default=0)
    if saved and not any(layer.is_checkpointed for layer in layers):
        room = min(room, saved)
    weights = sum(layer.numel * layer.itemsize for layer in layers)
    wider_sums = sum(layer.numel * SUM_ITEMSIZE for layer in layers) - weights
    return room + max(0, int((COMPILED_SHARE - 1) * (4 * weights + room)) - wider_sums)


def rows_per_pass(plan_of: Callable[[int], "Plan"], most_rows: int) -> int:
    """Return how many rows compiled passes should have: see [Note: rows of compiled passes].

    Args:
        plan_of: Plans passes of so many rows, in the memory of those of `most_rows`.
        most_rows: How many they may have.
    """
    rows = most_rows
    while rows % 2 == 0:
        plan = plan_of(rows)
        layers = [each.layer for each in plan.layers]
        options = [_of_one_pass(each.layer, each.alternatives) for each in plan.layers]
        kept = sum(each.chosen.cost.kept_bytes for each in plan.layers)
        saving = SAVING if kept <= _room(layers, options, most_rows) else -LOSS
        if saving > 0 and all(each.is_fastest for each in plan.layers):
            break
        if 2 * plan_of(rows // 2).seconds > (1 - saving) * plan.seconds:
            break
        rows //= 2
    return rows


def _by_passes(
    options: Sequence[Sequence[Alternative]],
) -> Iterator[tuple[tuple[int, int], list[list[Alternative]]]]:
    """Yield numbers of passes, and each layer's alternatives that take no more."""
    for passes in _PASSES:
        allowed = [
            [a for a in each if a.passes[0] == passes[0] and a.passes[1] <= passes[1]]
            for each in options
        ]
        if all(allowed):
            yield passes, allowed


def _fastest(
    options: Sequence[Sequence[Alternative]],
    memory_budget: int | None,
    forwards: Sequence[float],
    freed: Sequence[int],
) -> list[Alternative] | None:
    """Return the fastest that fits, or None."""
    fitting = []
    for passes, allowed in _by_passes(options):
        if memory_budget is None:
            fitting.append([min(each, key=lambda a: a.time) for each in allowed])
            continue
        # Who does not use the second forward pass has to wait for it all the same.
        waits = [share if passes == (1, 2) else 0.0 for share in forwards]
        for bound in sorted({0} | {a.cost.transient_bytes for each in allowed for a in each}):
            held = [[a for a in each if a.cost.transient_bytes <= bound] for each in allowed]
            if all(held):
                fitting += _within(held, waits, [memory_budget - bound + each for each in freed])
    return min(fitting, key=lambda chosen: total_seconds(chosen, forwards), default=None)


def total_seconds(chosen: Sequence[Alternative], forwards: Sequence[float]) -> float:
    """Return the time of all layers; if one needs a second forward pass, with all of it.

    Args:
        chosen: What each layer does.
        forwards: Each layer's share of a forward pass.
    """
    total = sum(each.time for each in chosen)
    if all(each.choice.num_forwards == 1 for each in chosen):
        return total
    return total + sum(
        share for a, share in zip(chosen, forwards, strict=True) if a.choice.num_forwards == 1
    )


def bytes_needed(chosen: Sequence[Alternative], freed: Sequence[int]) -> int:
    """Return what all layers keep beside what is free by then, and the most one holds on top."""
    kept, most = 0, 0
    for i in in_turn(freed):
        kept += chosen[i].cost.kept_bytes
        most = max(most, kept - freed[i])
    return most + max((each.cost.transient_bytes for each in chosen), default=0)


def in_turn(freed: Sequence[int]) -> list[int]:
    """Return layers as they come: what is free grows."""
    return sorted(range(len(freed)), key=lambda i: freed[i])


def check_fits(
    chosen: Sequence[Alternative], memory_budget: int | None, freed: Sequence[int]
) -> None:
    """Require layers to fit.

    Raises:
        BadInput: If they do not.
    """
    if memory_budget is not None and bytes_needed(chosen, freed) > memory_budget:
        raise BadInput(
            f"clipping needs {bytes_needed(chosen, freed):,} bytes, and memory_budget is "
            f"{memory_budget:,}: use a smaller physical batch"
        )


def _within(
    allowed: Sequence[Sequence[Alternative]], waits: Sequence[float], room: Sequence[int]
) -> list[list[Alternative]]:
    """Return a choice that keeps at most so many bytes, or none.

    Args:
        allowed: Each layer's alternatives.
        waits: What those of one forward pass take beside their own time.
        room: What may be kept when each layer has come, by all that have come until then.
    """

    def seconds(i: int, a: Alternative) -> float:
        return a.time + (waits[i] if a.choice.num_forwards == 1 else 0.0)

    def best_swap(i: int) -> tuple[float, int, str, Alternative] | None:
        """Return the layer's smaller alternative that loses least time per byte."""
        kept, now = chosen[i].cost.kept_bytes, seconds(i, chosen[i])
        swaps = [
            ((seconds(i, a) - now) / (kept - a.cost.kept_bytes), i, str(a.choice), a)
            for a in allowed[i]
            if a.cost.kept_bytes < kept
        ]
        return min(swaps, key=lambda swap: swap[:3], default=None)

    chosen = [min(each, key=lambda a, i=i: seconds(i, a)) for i, each in enumerate(allowed)]
    turns = in_turn(room)
    place = {i: turn for turn, i in enumerate(turns)}
    swaps = [swap for swap in map(best_swap, range(len(chosen))) if swap]
    heapq.heapify(swaps)
    kept = sum(each.cost.kept_bytes for each in chosen)
    for turn in reversed(range(len(turns))):  # the last first: all layers have come by then
        while kept > room[turns[turn]] and swaps:
            _, i, _, smaller = heapq.heappop(swaps)
            if place[i] > turn:
                continue  # it comes later, where all fits already
            kept -= chosen[i].cost.kept_bytes - smaller.cost.kept_bytes
            chosen[i] = smaller
            swap = best_swap(i)
            if swap:
                heapq.heappush(swaps, swap)
        if kept > room[turns[turn]]:
            return []
        kept -= chosen[turns[turn]].cost.kept_bytes
    left, kept = [], 0  # bytes that are left when each layer has come
    for i in turns:
        kept += chosen[i].cost.kept_bytes
        left.append(room[i] - kept)
    for turn, i in enumerate(turns):
        now, spare = chosen[i].cost.kept_bytes, min(left[turn:])
        affordable = [a for a in allowed[i] if a.cost.kept_bytes <= now + spare]
        chosen[i] = min(affordable, key=lambda a, i=i: (seconds(i, a), a.cost.kept_bytes))
        more = chosen[i].cost.kept_bytes - now
        left[turn:] = [each - more for each in left[turn:]]
    return [chosen]


# --- plans ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """What one layer does, and what it could have done.

    Attributes:
        layer: Its shapes.
        chosen: What it does.
        alternatives: Every pair of methods that takes this layer's records, cheapest first.
        forward_seconds: Its share of a forward pass.
    """

    layer: LayerShape
    chosen: Alternative
    alternatives: tuple[Alternative, ...]
    forward_seconds: float = 0.0

    @property
    def is_fastest(self) -> bool:
        """Whether nothing that takes one pass over the model would be faster."""
        return self.chosen.time <= min(a.time for a in self.alternatives if a.passes == (1, 1))

    @cached_property
    def kinds(self) -> list[tuple[str, int]] | None:
        """Kind and tokens of the uses that are planned for, sorted; None if values decide them."""
        if self.layer.is_variable:
            return None
        return sorted((use.kind, use.tokens) for use in self.layer.uses)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The methods of all layers. `str(plan)` is a table; `Plan.from_json` reads `plan.to_json()`.

    Attributes:
        mode: One of `MODES`, or `"auto"`.
        machine: The name of the machine whose rates were assumed.
        memory_budget: Bytes that clipping may hold, or None for no bound.
        layers: In the order given.
        timed_on: The device on which methods were timed; None if all times are predicted.
    """

    mode: str
    machine: str
    memory_budget: int | None
    layers: tuple[LayerPlan, ...]
    timed_on: str | None = None

    @cached_property
    def num_backwards(self) -> int:
        """Backward passes per batch: all layers agree."""
        return max((layer.chosen.choice.num_backwards for layer in self.layers), default=1)

    @cached_property
    def num_forwards(self) -> int:
        """Forward passes per batch: two, if a layer needs them."""
        return max((layer.chosen.choice.num_forwards for layer in self.layers), default=1)

    @property
    def seconds(self) -> float:
        """Time of clipping, beside forward pass and input gradients: timed, or else predicted."""
        forwards = [each.forward_seconds for each in self.layers]
        return total_seconds([each.chosen for each in self.layers], forwards)

    @property
    def bytes_needed(self) -> int:
        """What is held beside ordinary training: see [Note: freed memory]."""
        return bytes_needed(
            [each.chosen for each in self.layers], [each.layer.freed_bytes for each in self.layers]
        )

    @cached_property
    def by_name(self) -> dict[str, LayerPlan]:
        """The layers by their names."""
        return {each.layer.name: each for each in self.layers}

    @cached_property
    def factored(self) -> frozenset[str]:
        """The layers whose per-sample gradients are not multiplied out to be kept."""
        found = [each for each in self.layers if not each.chosen.choice.is_kept]
        return frozenset(each.layer.name for each in found)

    def choice(self, name: str) -> Choice:
        """Return the methods of the layer of that name."""
        if name not in self.by_name:
            raise KeyError(f"no layer {name!r} in the plan; it has {list(self.by_name)}")
        return self.by_name[name].chosen.choice

    def choice_for(self, layer: LayerShape) -> Choice:
        """Return the methods of a layer, planning anew for one that is not what was planned for.

        Such a layer takes as many passes as it was to take.
        """
        planned = self.by_name.get(layer.name)
        # In which order uses come is autograd's business, and the compiler's.
        if planned is not None and Counter(planned.layer.uses) == Counter(layer.uses):
            return planned.chosen.choice
        options, _ = alternatives_of(layer, self.machine)
        if self.mode != AUTO:
            return named(layer, options, self.mode).choice
        num_forwards = 1 if planned is None else planned.chosen.choice.num_forwards
        passes = self.num_backwards, num_forwards
        options = [each for each in options if each.passes == passes]
        if not options:
            raise UnsupportedOperation(f"no clipping method of the plan's passes takes {layer}")
        return options[0].choice

    def to_json(self) -> str:
        """Return the whole plan as one line of JSON, keys in a fixed order."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Return the plan that `to_json` wrote."""
        return build(cls, parse(text, "the plan"), "the plan")

    def __str__(self) -> str:
        """Return one line for all layers of a kind, and a line about all of them.

        Layers are of a kind if their names differ in numbers alone, and they record and do the
        same. Times and bytes are those of all layers in the line together.
        """
        kinds: dict[tuple, list[LayerPlan]] = {}
        for each in self.layers:
            layer, chosen = each.layer, each.chosen
            kind = (_NUMBER.sub("*", layer.name), layer.batch, layer.itemsize, layer.uses)
            kinds.setdefault((*kind, chosen.choice, chosen.measured is not None), []).append(each)
        lines = [("layer", "layers", "records", "method", "kept MB", "predicted ms", "measured ms")]
        for (name, *_), kind in kinds.items():
            layer, chosen = kind[0].layer, [each.chosen for each in kind]
            kept = f"{sum(each.cost.kept_bytes for each in chosen) / 1e6:,.1f}"
            names = layer.name if len(kind) == 1 else name, str(len(kind)), _records(layer)
            lines.append((*names, str(chosen[0].choice), kept, *_milliseconds(chosen)))
        return _table(self, lines, is_number={1, 4, 5, 6})

    def details(self) -> str:
        """Return a longer table: of every layer all that it could have done, chosen marked *."""
        header = ("layer", "records", "", "method", "GFLOP", "moved MB", "kept MB")
        lines: list[tuple[str, ...]] = [(*header, "predicted ms", "measured ms")]
        for each in self.layers:
            head = (each.layer.name, _records(each.layer))
            for option in each.alternatives:
                cost, mark = option.cost, "*" if option == each.chosen else ""
                costs = (cost.flops / 1e9, cost.moved_bytes / 1e6, cost.kept_bytes / 1e6)
                numbers = (f"{costs[0]:,.3f}", f"{costs[1]:,.2f}", f"{costs[2]:,.2f}")
                lines.append((*head, mark, str(option.choice), *numbers, *_milliseconds([option])))
                head = ("", "")
        return _table(self, lines, is_number={4, 5, 6, 7, 8})


def plan_clipping(
    layers: Sequence[LayerShape],
    *,
    mode: str = AUTO,
    memory_budget: int | None = None,
    machine: str = "cpu",
    timed: "Calibration | None" = None,
    is_compiled: bool = False,
    most_rows: int | None = None,
    can_repeat: bool = True,
    is_estimate: bool = False,
) -> Plan:
    """Return the cheapest allowed methods of every layer.

    In `auto` it is found as [Note: how a plan is found] says.

    Args:
        layers: Shapes of every parameter's records, from `describe`.
        mode: One of `MODES`, or `"auto"`.
        memory_budget: Bytes that clipping may hold beside the model's own training.
        machine: One of `MACHINES`.
        timed: What methods took on the device. Without it a plan depends on shapes alone.
        is_compiled: Whether passes are compiled: see [Note: compiled passes].
        most_rows: How many rows compiled passes may have; those of these layers if not given.
        can_repeat: Whether `auto` may run the forward pass again.
        is_estimate: Whether the budget is rough: where nothing fits it, `auto` takes as little as
            it can.

    Raises:
        BadInput: if a name is unknown or given twice, or nothing fits the budget.
        UnsupportedOperation: if the mode's methods do not take the records of a layer.
    """
    check.one_of([AUTO, *MODES], mode=mode)
    check.one_of(MACHINES, machine=machine)
    names = [layer.name for layer in layers]
    if len(set(names)) < len(names):
        raise BadInput(f"expected every parameter once, found {sorted(names)}")
    seconds = [None if timed is None else timed.of(layer) for layer in layers]
    found = [alternatives_of(*each) for each in zip(layers, repeat(machine), seconds, strict=False)]
    options, forwards = [each for each, _ in found], [share for _, share in found]
    freed = [layer.freed_bytes for layer in layers]
    if mode == AUTO and is_compiled and memory_budget is None:
        chosen = fastest_compiled(layers, options, most_rows)
    elif mode == AUTO:
        allowed = options
        if not can_repeat:
            allowed = [[a for a in each if a.choice.num_forwards == 1] for each in options]
        chosen = fastest(allowed, memory_budget, forwards, freed, is_estimate=is_estimate)
    else:
        chosen = [named(layer, o, mode) for layer, o in zip(layers, options, strict=True)]
        check_fits(chosen, memory_budget, freed)
    plans = zip(layers, chosen, options, forwards, strict=True)
    return Plan(
        mode=mode,
        machine=machine,
        memory_budget=memory_budget,
        layers=tuple(
            LayerPlan(layer=p, chosen=c, alternatives=tuple(o), forward_seconds=f)
            for p, c, o, f in plans
        ),
        timed_on=None if timed is None or not any(seconds) else timed.device,
    )


def choose(records: Sequence[Record], mode: str = AUTO, machine: str = "cpu") -> Choice:
    """Return the methods for the records of one parameter, with no bound on memory."""
    layer = describe("the parameter", records)
    return plan_clipping([layer], mode=mode, machine=machine).choice(layer.name)


def block_of(name: str) -> str:
    """Return a parameter's name up to the number of its block; nothing if it is in none.

    >>> block_of("transformer.h.11.attn.2.weight"), block_of("head.weight")
    ('transformer.h.11', '')
    """
    found = _NUMBER.search(name)
    return name[: found.end()] if found else ""


_NUMBER = re.compile(r"(?:(?<=\.)|^)\d+(?=\.)")  # of a block, in the middle of a name


def _records(layer: LayerShape) -> str:
    """Return samples, and tokens × rows × columns of every use."""
    uses = [f"{use.kind} {use.tokens}×{use.rows}×{use.columns}" for use in layer.uses]
    return f"{layer.batch} × ({', '.join(uses)})" if len(uses) > 1 else f"{layer.batch} × {uses[0]}"


def _milliseconds(chosen: Sequence[Alternative]) -> tuple[str, str]:
    """Return what alternatives take together, as predicted and as measured."""
    measured = [each.measured for each in chosen if each.measured is not None]
    predicted = f"{1e3 * sum(each.seconds for each in chosen):,.3f}"
    return predicted, f"{1e3 * sum(measured):,.3f}" if measured else "–"


def _table(plan: Plan, lines: Sequence[Sequence[str]], is_number: set[int]) -> str:
    """Return lines with columns one below the other, and what holds of all layers together."""
    if plan.timed_on is None:  # nothing stands in the last column
        lines = [line[:-1] for line in lines]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = [
        "  ".join(
            cell.rjust(width) if i in is_number else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    budget = "none" if plan.memory_budget is None else f"{plan.memory_budget / 1e6:,.1f} MB"
    about = [
        f"mode {plan.mode}, machine {plan.machine}, memory budget {budget}: "
        f"{plan.num_forwards} forward, {plan.num_backwards} backward, "
        f"{plan.bytes_needed / 1e6:,.1f} MB, {1e3 * plan.seconds:,.3f} ms"
    ]
    if plan.timed_on is not None:
        num_timed = sum(each.chosen.measured is not None for each in plan.layers)
        about.append(f"{num_timed} of {len(plan.layers)} layers timed on {plan.timed_on}")
    return "\n".join([*aligned, "", *about])
