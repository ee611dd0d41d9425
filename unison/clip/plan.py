"""The planner: which norm and gradient method each layer uses, and what the others would cost.

The named modes are points of norm × gradient, the same for all layers. `auto` takes for each
layer the cheapest pair, as long as what is kept until the end of the backward pass fits the memory
budget. A plan is a function of shapes, budget and machine name, and of nothing else unless it is
given what methods took on the device (calibration.py). It is frozen, JSON-able and part of the
mechanism: other methods round differently.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Protocol

from unison import check
from unison.clip.alternatives import (
    Alternative,
    alternatives_of,
    bytes_needed,
    check_fits,
    fastest,
    fastest_compiled,
    forward_seconds,
    named,
    total_seconds,
)
from unison.clip.costs import MACHINES, Cost
from unison.clip.layers import AUTO, MODES, Choice, LayerShape, UseShape, describe
from unison.clip.norms import NORM_METHODS
from unison.errors import BadInput, UnsupportedOperation
from unison.ops import Record

__all__ = [
    "AUTO",
    "MODES",
    "Alternative",
    "Choice",
    "LayerPlan",
    "Plan",
    "Timed",
    "choose",
    "plan_clipping",
]


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


class Timed(Protocol):
    """What methods took on a device.

    Attributes:
        device: Its name.
    """

    device: str

    def of(self, layer: LayerShape) -> Mapping[str, float] | None:
        """Return seconds by part (`kernel_costs.parts_of`); None if nothing of it was timed."""
        ...


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

    @property
    def num_backwards(self) -> int:
        """Backward passes per batch: all layers agree."""
        return max((layer.chosen.choice.num_backwards for layer in self.layers), default=1)

    @property
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
        """What is held beside ordinary training: see [Note: freed memory] in alternatives.py."""
        return bytes_needed(
            [each.chosen for each in self.layers], [each.layer.freed_bytes for each in self.layers]
        )

    @cached_property
    def _by_name(self) -> dict[str, LayerPlan]:
        return {each.layer.name: each for each in self.layers}

    @cached_property
    def factored(self) -> frozenset[str]:
        """The layers whose per-sample gradients are not multiplied out to be kept."""
        found = [each for each in self.layers if not NORM_METHODS[each.chosen.choice.norm].is_kept]
        return frozenset(each.layer.name for each in found)

    def choice(self, name: str) -> Choice:
        """Return the methods of the layer of that name."""
        if name not in self._by_name:
            raise KeyError(f"no layer {name!r} in the plan; it has {list(self._by_name)}")
        return self._by_name[name].chosen.choice

    def num_uses(self, name: str) -> int | None:
        """Return how often the parameter of that name is expected to be used; None if not known."""
        planned = self._by_name.get(name)
        is_known = planned is not None and not planned.layer.is_variable
        return len(planned.layer.uses) if planned is not None and is_known else None

    def num_forwards_of(self, name: str) -> int:
        """Return how many forward passes the layer of that name takes; one if it is not known."""
        planned = self._by_name.get(name)
        return 1 if planned is None else planned.chosen.choice.num_forwards

    def kinds(self, name: str) -> list[tuple[str, int]] | None:
        """Return kind and tokens of the uses that are planned for, sorted; None if not known."""
        planned = self._by_name.get(name)
        if planned is None or planned.layer.is_variable:
            return None
        return sorted((use.kind, use.tokens) for use in planned.layer.uses)

    def choice_for(self, layer: LayerShape) -> Choice:
        """Return the methods of a layer, planning anew for one that is not what was planned for.

        Such a layer takes as many passes as it was to take.
        """
        planned = self._by_name.get(layer.name)
        # In which order uses come is autograd's business, and the compiler's.
        if planned is not None and Counter(planned.layer.uses) == Counter(layer.uses):
            return planned.chosen.choice
        options = alternatives_of(layer, self.machine)
        if self.mode != AUTO:
            return named(layer, options, self.mode).choice
        passes = self.num_backwards, self.num_forwards_of(layer.name)
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
        fields = json.loads(text)
        return cls(**{**fields, "layers": tuple(map(_layer_plan, fields["layers"]))})

    def __str__(self) -> str:
        return table(self)

    def details(self) -> str:
        """Return a longer table: of every layer all that it could have done, chosen marked *."""
        return details(self)


def plan_clipping(
    layers: Sequence[LayerShape],
    *,
    mode: str = AUTO,
    memory_budget: int | None = None,
    machine: str = "cpu",
    timed: Timed | None = None,
    is_compiled: bool = False,
) -> Plan:
    """Return the cheapest allowed methods of every layer.

    In `auto` it is found as [Note: how a plan is found] in alternatives.py says.

    Args:
        layers: Shapes of every parameter's records, from `describe`.
        mode: One of `MODES`, or `"auto"`.
        memory_budget: Bytes that clipping may hold beside the model's own training.
        machine: One of `MACHINES`.
        timed: What methods took on the device. Without it a plan depends on shapes alone.
        is_compiled: Whether passes are compiled: see [Note: compiled passes] in alternatives.py.

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
    known = list(zip(layers, seconds, strict=True))
    options = [alternatives_of(layer, machine, each) for layer, each in known]
    forwards = [forward_seconds(layer, machine, each) for layer, each in known]
    freed = [layer.freed_bytes for layer in layers]
    if mode == AUTO and is_compiled and memory_budget is None:
        chosen = fastest_compiled(layers, options)
    elif mode == AUTO:
        chosen = fastest(options, memory_budget, forwards, freed)
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


def _layer_plan(fields: dict[str, Any]) -> LayerPlan:
    layer = fields["layer"]
    return LayerPlan(
        layer=LayerShape(**{**layer, "uses": tuple(UseShape(**use) for use in layer["uses"])}),
        chosen=_alternative(fields["chosen"]),
        alternatives=tuple(map(_alternative, fields["alternatives"])),
        forward_seconds=fields["forward_seconds"],
    )


def _alternative(fields: dict[str, Any]) -> Alternative:
    choice, cost = Choice(**fields["choice"]), Cost(**fields["cost"])
    return Alternative(**{**fields, "choice": choice, "cost": cost})


_NUMBER = re.compile(r"(?:(?<=\.)|^)\d+(?=\.)")  # of a block, in the middle of a name


def table(plan: "Plan") -> str:
    """Return one line for all layers of a kind, and a line about all of them.

    Layers are of a kind if their names differ in numbers alone, and they record and do the same.
    Times and bytes are those of all layers in the line together.
    """
    lines = [("layer", "layers", "records", "method", "kept MB", "predicted ms", "measured ms")]
    for kind in _kinds(plan.layers):
        first = kind[0]
        name = first.layer.name if len(kind) == 1 else _NUMBER.sub("*", first.layer.name)
        chosen = [each.chosen for each in kind]
        lines.append(
            (
                name,
                str(len(kind)),
                _records(first.layer),
                str(first.chosen.choice),
                _megabytes(sum(each.cost.kept_bytes for each in chosen)),
                _milliseconds(sum(each.seconds for each in chosen)),
                _measured(chosen),
            )
        )
    return _text(plan, lines, is_number={1, 4, 5, 6})


def details(plan: "Plan") -> str:
    """Return one line per layer and alternative, chosen marked with *."""
    header = ("layer", "records", "", "method", "GFLOP", "moved MB", "kept MB")
    lines: list[tuple[str, ...]] = [(*header, "predicted ms", "measured ms")]
    for each in plan.layers:
        heads = [(each.layer.name, _records(each.layer))]
        heads += [("", "")] * (len(each.alternatives) - 1)
        for head, option in zip(heads, each.alternatives, strict=True):
            mark = "*" if option == each.chosen else ""
            lines.append(
                (
                    *head,
                    mark,
                    str(option.choice),
                    f"{option.cost.flops / 1e9:,.3f}",
                    f"{option.cost.moved_bytes / 1e6:,.2f}",
                    f"{option.cost.kept_bytes / 1e6:,.2f}",
                    _milliseconds(option.seconds),
                    _measured([option]),
                )
            )
    return _text(plan, lines, is_number={4, 5, 6, 7, 8})


def _text(plan: "Plan", lines: Sequence[Sequence[str]], is_number: set[int]) -> str:
    if plan.timed_on is None:  # nothing stands in the last column
        lines = [line[:-1] for line in lines]
    return "\n".join([*_aligned(lines, is_number), "", *_about(plan)])


def _kinds(layers: Iterable["LayerPlan"]) -> list[list["LayerPlan"]]:
    """Group layers of a kind, in the order of the first of each."""
    kinds: dict[tuple, list[LayerPlan]] = {}
    for each in layers:
        layer = each.layer
        is_timed = each.chosen.measured is not None
        name = _NUMBER.sub("*", layer.name)
        key = (name, layer.batch, layer.itemsize, layer.uses, each.chosen.choice, is_timed)
        kinds.setdefault(key, []).append(each)
    return list(kinds.values())


def _records(layer: LayerShape) -> str:
    """Return samples, and tokens × rows × columns of every use."""
    uses = [f"{use.kind} {use.tokens}×{use.rows}×{use.columns}" for use in layer.uses]
    return f"{layer.batch} × ({', '.join(uses)})" if len(uses) > 1 else f"{layer.batch} × {uses[0]}"


def _measured(chosen: Sequence[Alternative]) -> str:
    seconds = [each.measured for each in chosen if each.measured is not None]
    return _milliseconds(sum(seconds)) if seconds else "–"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.3f}"


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f}"


def _about(plan: "Plan") -> list[str]:
    """Return what holds of all layers together."""
    budget = "none" if plan.memory_budget is None else f"{_megabytes(plan.memory_budget)} MB"
    lines = [
        f"mode {plan.mode}, machine {plan.machine}, memory budget {budget}: "
        f"{plan.num_forwards} forward, {plan.num_backwards} backward, "
        f"{_megabytes(plan.bytes_needed)} MB, {_milliseconds(plan.seconds)} ms"
    ]
    if plan.timed_on is not None:
        num_timed = sum(each.chosen.measured is not None for each in plan.layers)
        lines.append(f"{num_timed} of {len(plan.layers)} layers timed on {plan.timed_on}")
    return lines


def _aligned(lines: Sequence[Sequence[str]], is_number: set[int]) -> list[str]:
    """Return lines with columns one below the other, numbers at their right end."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if i in is_number else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
