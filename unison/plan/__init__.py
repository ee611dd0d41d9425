"""Plans: what a run takes, before it is started."""

from unison.plan.meter import CATEGORIES, Meter, Peak, Usage
from unison.plan.program import Scenario, count_trained, measure, simulate

__all__ = [
    "CATEGORIES",
    "Meter",
    "Peak",
    "Scenario",
    "Usage",
    "count_trained",
    "measure",
    "simulate",
]
