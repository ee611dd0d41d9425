"""What each layer could do, and the cheapest of it that fits into memory together.

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
training, which recomputes what is cheap and saves little more than the inputs and outputs of
layers. What it saves it frees on the way back, and there is room for as much. Unless the user gives
a budget, compiled passes may keep that, and so much more that the whole takes `COMPILED_SHARE` of
ordinary training: weights, gradients and two moments, and what is saved. Of what is more the
clipped sums take their part first, which are integers of four bytes in the place of gradients. They
take one pass over the model, since more would not be compiled. A head that is tied to an embedding
is multiplied out all the same: to form it twice, to be measured and to be added up, takes as long
as a block of the model.
"""

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from unison.clip import costs, kernel_costs
from unison.clip.costs import MACHINES, Cost
from unison.clip.layers import CHOICES, MODES, Choice, LayerShape
from unison.clip.norms import NORM_METHODS
from unison.errors import BadInput, UnsupportedOperation

COSTS = {"cpu": costs, "cuda": kernel_costs}  # by machine

COMPILED_SHARE = 1.14  # memory of compiled passes beside that of ordinary training

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
        return self.choice.num_backwards, self.choice.num_forwards


def alternatives_of(
    layer: LayerShape, machine: str, timed: Mapping[str, float] | None = None
) -> list[Alternative]:
    """Return every choice of methods that takes this layer's records, fastest first.

    Args:
        layer: Its shapes.
        machine: One of `MACHINES`.
        timed: Seconds of the parts that choices are made of (`kernel_costs.parts_of`), if they were
            timed. A choice with a part that was not is left at what is predicted, after all others.
    """
    records, table = layer.placeholder_records(), COSTS[machine]
    found = []
    for choice in CHOICES:
        if NORM_METHODS[choice.norm].refusal(records) is None:
            cost = table.choice_cost(layer, choice)
            seconds = cost.seconds(MACHINES[machine])
            measured = None if timed is None else kernel_costs.timed_seconds(layer, choice, timed)
            found.append(Alternative(choice=choice, cost=cost, seconds=seconds, measured=measured))
    is_left = timed is not None
    return sorted(
        found,
        key=lambda a: (is_left and a.measured is None, a.time, a.cost.kept_bytes, str(a.choice)),
    )


def named(layer: LayerShape, options: Sequence[Alternative], mode: str) -> Alternative:
    """Return the methods of a mode.

    Raises:
        UnsupportedOperation: If they do not take the layer's records.
    """
    for option in options:
        if option.choice == MODES[mode]:
            return option
    why = NORM_METHODS[MODES[mode].norm].refusal(layer.placeholder_records())
    raise UnsupportedOperation(
        f"clipping {mode!r} cannot be used for {layer.name}: {why}; clipping 'auto' can"
    )


def fastest(
    options: Sequence[Sequence[Alternative]],
    memory_budget: int | None,
    forwards: Sequence[float],
    freed: Sequence[int],
) -> list[Alternative]:
    """Return one alternative per layer, all of one backward pass or all of two: see the note above.

    What was too slow to be timed is taken only where nothing else fits.

    Args:
        options: Each layer's alternatives.
        memory_budget: Bytes that clipping may hold, or None for no bound.
        forwards: Each layer's share of a forward pass, in seconds.
        freed: Bytes that are free when each layer comes, see [Note: freed memory].

    Raises:
        BadInput: If nothing fits.
    """
    preferred = [[a for a in each if a.measured is not None] or each for each in options]
    found = _fastest(preferred, memory_budget, forwards, freed)
    if found is None:
        found = _fastest(options, memory_budget, forwards, freed)
    if found is None:
        smallest = [
            [min(each, key=_num_held) for each in allowed] for _, allowed in _by_passes(options)
        ]
        check_fits(min(smallest, key=lambda each: bytes_needed(each, freed)), memory_budget, freed)
        raise AssertionError("the smallest fit, and were not found")
    return found


def fastest_compiled(
    layers: Sequence[LayerShape], options: Sequence[Sequence[Alternative]]
) -> list[Alternative]:
    """Return one alternative per layer for passes that are compiled: see [Note: compiled passes].

    Args:
        layers: Their shapes.
        options: Each layer's alternatives.
    """
    timed = [[a for a in each if a.measured is not None] or each for each in options]
    once = [[a for a in each if a.passes == (1, 1)] or each for each in timed]
    no_wait, room = [0.0] * len(layers), 0
    for i, layer in enumerate(layers):
        is_mixed = len({use.kind for use in layer.uses}) > 1
        kept = [a for a in once[i] if NORM_METHODS[a.choice.norm].is_kept]
        if is_mixed and kept:
            once[i] = kept
        least = min(a.cost.kept_bytes for a in once[i])
        room += max(layer.factor_bytes, least if is_mixed else 0)
    weights = sum(layer.numel * layer.itemsize for layer in layers)
    wider_sums = sum(layer.numel * kernel_costs.SUM_ITEMSIZE for layer in layers) - weights
    room += max(0, int((COMPILED_SHARE - 1) * (4 * weights + room)) - wider_sums)
    # Where not even the smallest fit, they are as small as can be.
    room = max(room, sum(min(a.cost.kept_bytes for a in each) for each in once))
    found = _within(once, no_wait, [room] * len(layers))
    return min(found, key=lambda chosen: total_seconds(chosen, no_wait))


def _by_passes(
    options: Sequence[Sequence[Alternative]],
) -> Iterator[tuple[tuple[int, int], list[list[Alternative]]]]:
    """Yield numbers of passes, and each layer's alternatives that take no more."""
    for passes in _PASSES:
        allowed = [[a for a in each if _is_within(a, passes)] for each in options]
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


def forward_seconds(
    layer: LayerShape, machine: str, timed: Mapping[str, float] | None = None
) -> float:
    """Return a layer's share of a forward pass; `timed` as in `alternatives_of`."""
    if timed is not None and kernel_costs.FORWARD in timed:
        return kernel_costs.FORWARD_OVERHEAD * timed[kernel_costs.FORWARD]
    return COSTS[machine].forward_cost(layer).seconds(MACHINES[machine])


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


def _is_within(alternative: Alternative, passes: tuple[int, int]) -> bool:
    return alternative.passes[0] == passes[0] and alternative.passes[1] <= passes[1]


def _num_held(alternative: Alternative) -> int:
    return alternative.cost.kept_bytes + alternative.cost.transient_bytes


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
    left = _left_over(chosen, turns, room)
    for turn, i in enumerate(turns):
        now, spare = chosen[i].cost.kept_bytes, min(left[turn:])
        affordable = [a for a in allowed[i] if a.cost.kept_bytes <= now + spare]
        chosen[i] = min(affordable, key=lambda a, i=i: (seconds(i, a), a.cost.kept_bytes))
        more = chosen[i].cost.kept_bytes - now
        left[turn:] = [each - more for each in left[turn:]]
    return [chosen]


def _left_over(
    chosen: Sequence[Alternative], turns: Sequence[int], room: Sequence[int]
) -> list[int]:
    """Return the bytes that are left when each layer has come."""
    left, kept = [], 0
    for i in turns:
        kept += chosen[i].cost.kept_bytes
        left.append(room[i] - kept)
    return left
