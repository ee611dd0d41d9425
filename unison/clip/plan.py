"""The planner: which norm and gradient method each layer uses, and what the others would cost.

The named modes are points of norm × gradient, the same for all layers. `auto` takes for each
layer the cheapest pair, as long as what is kept until the end of the backward pass fits the memory
budget. A plan is a function of shapes, budget and machine name, and of nothing else unless it is
given what methods took on the device (calibration.py). It is frozen, JSON-able and part of the
mechanism: other methods round differently.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
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
from unison.clip.layers import Layer, Use, describe
from unison.clip.modes import AUTO, MODES, Choice
from unison.clip.norms import NORM_METHODS
from unison.clip.plan_table import details, table
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

    layer: Layer
    chosen: Alternative
    alternatives: tuple[Alternative, ...]
    forward_seconds: float = 0.0


class Timed(Protocol):
    """What methods took on a device.

    Attributes:
        device: Its name.
    """

    device: str

    def of(self, layer: Layer) -> Mapping[str, float] | None:
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

    def kinds(self, name: str) -> list[str] | None:
        """Return the kinds of the uses that are planned for, sorted; None if they are not known."""
        planned = self._by_name.get(name)
        is_known = planned is not None and not planned.layer.is_variable
        return sorted(use.kind for use in planned.layer.uses) if planned and is_known else None

    def choice_for(self, layer: Layer) -> Choice:
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
    layers: Sequence[Layer],
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
        layer=Layer(**{**layer, "uses": tuple(Use(**use) for use in layer["uses"])}),
        chosen=_alternative(fields["chosen"]),
        alternatives=tuple(map(_alternative, fields["alternatives"])),
        forward_seconds=fields["forward_seconds"],
    )


def _alternative(fields: dict[str, Any]) -> Alternative:
    choice, cost = Choice(**fields["choice"]), Cost(**fields["cost"])
    return Alternative(**{**fields, "choice": choice, "cost": cost})
