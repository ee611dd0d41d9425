"""What clipping costs a training step: modes × lengths beside ordinary training and peers.

`Experiment` says what, `measure` does it, `results_of` makes tables of it, and `draw` a picture.
"""

from bench.clipping_speed.experiment import (
    ALL_MODES,
    DTYPES,
    NO_DP,
    Case,
    Experiment,
    Planned,
    planned_visits,
)
from bench.clipping_speed.peers import missing as missing_peers
from bench.clipping_speed.peers import versions as peer_versions
from bench.clipping_speed.plot import draw
from bench.clipping_speed.results import (
    TOLERANCE,
    AtLength,
    Row,
    Timing,
    Verdict,
    figures_of,
    results_of,
)
from bench.clipping_speed.visits import Visit, measure

__all__ = [
    "ALL_MODES",
    "DTYPES",
    "NO_DP",
    "TOLERANCE",
    "AtLength",
    "Case",
    "Experiment",
    "Planned",
    "Row",
    "Timing",
    "Verdict",
    "Visit",
    "draw",
    "figures_of",
    "measure",
    "missing_peers",
    "peer_versions",
    "planned_visits",
    "results_of",
]
