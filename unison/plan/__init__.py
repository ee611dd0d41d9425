"""Plans: the memory, the time and the ε of a run, before it is started."""

from unison.plan.estimate import (
    GPUS,
    Estimate,
    Gpu,
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
