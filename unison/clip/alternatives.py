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
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from unison.clip import costs, kernel_costs
from unison.clip.costs import MACHINES, Cost
from unison.clip.layers import Layer
from unison.clip.modes import CHOICES, MODES, Choice
from unison.clip.norms import NORM_METHODS
from unison.errors import BadInput, UnsupportedOperation

COSTS = {"cpu": costs, "cuda": kernel_costs}  # by machine

_PASSES = ((1, 1), (1, 2), (2, 1))  # backward, forward


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """What one choice of methods costs on one layer, and how long that takes."""

    choice: Choice
    cost: Cost
    seconds: float

    @property
    def passes(self) -> tuple[int, int]:
        """Backward and forward passes of the whole model."""
        return self.choice.num_backwards, self.choice.num_forwards


def alternatives_of(layer: Layer, machine: str) -> list[Alternative]:
    """Return every choice of methods that takes this layer's records, fastest first."""
    records, table = layer.placeholder_records(), COSTS[machine]
    found = []
    for choice in CHOICES:
        if NORM_METHODS[choice.norm].refusal(records) is None:
            cost = table.NORM_COSTS[choice.norm](layer) + table.GRADIENT_COSTS[choice.gradient](
                layer
            )
            seconds = cost.seconds(MACHINES[machine])
            found.append(Alternative(choice=choice, cost=cost, seconds=seconds))
    return sorted(found, key=lambda a: (a.seconds, a.cost.kept_bytes, str(a.choice)))


def named(layer: Layer, options: Sequence[Alternative], mode: str) -> Alternative:
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
    layers: Sequence[Layer],
    options: Sequence[Sequence[Alternative]],
    memory_budget: int | None,
    machine: str,
) -> list[Alternative]:
    """Return one alternative per layer, all of one backward pass or all of two: see the note above.

    Raises:
        BadInput: If nothing fits.
    """
    forwards = [forward_seconds(layer, machine) for layer in layers]
    fitting, smallest = [], []
    for passes in _PASSES:
        allowed = [[a for a in each if _is_within(a, passes)] for each in options]
        if not all(allowed):
            continue
        if memory_budget is None:
            fitting.append([each[0] for each in allowed])
            continue
        # Who does not use the second forward pass has to wait for it all the same.
        waits = [share if passes == (1, 2) else 0.0 for share in forwards]
        smallest.append([min(each, key=_num_held) for each in allowed])
        for bound in sorted({0} | {a.cost.transient_bytes for each in allowed for a in each}):
            held = [[a for a in each if a.cost.transient_bytes <= bound] for each in allowed]
            if all(held):
                fitting += _within(held, waits, memory_budget - bound)
    if not fitting:
        check_fits(min(smallest, key=bytes_needed), memory_budget)
        raise AssertionError("the smallest fit, and were not found")
    return min(fitting, key=lambda chosen: total_seconds(chosen, forwards))


def forward_seconds(layer: Layer, machine: str) -> float:
    """Return a layer's share of a forward pass."""
    return COSTS[machine].forward_cost(layer).seconds(MACHINES[machine])


def total_seconds(chosen: Sequence[Alternative], forwards: Sequence[float]) -> float:
    """Return the time of all layers; if one needs a second forward pass, with all of it.

    Args:
        chosen: What each layer does.
        forwards: Each layer's share of a forward pass.
    """
    total = sum(each.seconds for each in chosen)
    if all(each.choice.num_forwards == 1 for each in chosen):
        return total
    return total + sum(
        share for a, share in zip(chosen, forwards, strict=True) if a.choice.num_forwards == 1
    )


def bytes_needed(chosen: Sequence[Alternative]) -> int:
    """Return what all layers keep, and the most that one holds on top."""
    transient = max((each.cost.transient_bytes for each in chosen), default=0)
    return sum(each.cost.kept_bytes for each in chosen) + transient


def check_fits(chosen: Sequence[Alternative], memory_budget: int | None) -> None:
    """Require layers to fit.

    Raises:
        BadInput: If they do not.
    """
    if memory_budget is not None and bytes_needed(chosen) > memory_budget:
        raise BadInput(
            f"clipping needs {bytes_needed(chosen):,} bytes, and memory_budget is "
            f"{memory_budget:,}: use a smaller physical batch"
        )


def _is_within(alternative: Alternative, passes: tuple[int, int]) -> bool:
    return alternative.passes[0] == passes[0] and alternative.passes[1] <= passes[1]


def _num_held(alternative: Alternative) -> int:
    return alternative.cost.kept_bytes + alternative.cost.transient_bytes


def _within(
    allowed: Sequence[Sequence[Alternative]], waits: Sequence[float], num_bytes: int
) -> list[list[Alternative]]:
    """Return a choice that keeps at most so many bytes, or none.

    Args:
        allowed: Each layer's alternatives.
        waits: What those of one forward pass take beside their own time.
        num_bytes: What may be kept.
    """

    def seconds(i: int, a: Alternative) -> float:
        return a.seconds + (waits[i] if a.choice.num_forwards == 1 else 0.0)

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
    num_left = num_bytes - sum(each.cost.kept_bytes for each in chosen)
    swaps = [swap for swap in map(best_swap, range(len(chosen))) if swap]
    heapq.heapify(swaps)
    while num_left < 0 and swaps:
        _, i, _, smaller = heapq.heappop(swaps)
        num_left += chosen[i].cost.kept_bytes - smaller.cost.kept_bytes
        chosen[i] = smaller
        swap = best_swap(i)
        if swap:
            heapq.heappush(swaps, swap)
    if num_left < 0:
        return []
    for i, now in enumerate(chosen):
        affordable = [a for a in allowed[i] if a.cost.kept_bytes <= now.cost.kept_bytes + num_left]
        chosen[i] = min(affordable, key=lambda a, i=i: (seconds(i, a), a.cost.kept_bytes))
        num_left += now.cost.kept_bytes - chosen[i].cost.kept_bytes
    return [chosen]
