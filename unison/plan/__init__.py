"""Plans: the memory, the time and the ε of a run, before it is started."""

from unison.plan.estimate import (
    GPUS,
    Estimate,
    Gpu,
    PrivateBudget,
    assumptions,
    budget,
    estimate,
    find_gpu,
    is_inside,
)
from unison.plan.meter import CATEGORIES, Meter, Peak, PlannedCall, Usage
from unison.plan.program import (
    Scenario,
    add_lora,
    check_forward,
    count_trained,
    first_line,
    measure,
    simulate,
    stepper,
)

__all__ = [
    "CATEGORIES",
    "GPUS",
    "Estimate",
    "Gpu",
    "Meter",
    "Peak",
    "PlannedCall",
    "PrivateBudget",
    "Scenario",
    "Usage",
    "add_lora",
    "assumptions",
    "budget",
    "check_forward",
    "count_trained",
    "estimate",
    "find_gpu",
    "first_line",
    "is_inside",
    "measure",
    "simulate",
    "stepper",
]
