"""Capture by operation: what each parameter was used for, and the gradient of what came out."""

from unison.capture.apart import MixingReport, check_samples_apart, examine
from unison.capture.axes import AxisTable
from unison.capture.capture import Capture
from unison.capture.follow import learn_rows
from unison.capture.learn import (
    batch_size_of,
    generators_kept,
    learn_axes,
    resized,
)
from unison.capture.other_rows import probe_rows
from unison.capture.probe_state import ProbeState, state_kept
from unison.capture.recompute import RngAutocastState
from unison.capture.tracked import Tracked

__all__ = [
    "AxisTable",
    "Capture",
    "MixingReport",
    "ProbeState",
    "RngAutocastState",
    "Tracked",
    "batch_size_of",
    "check_samples_apart",
    "examine",
    "generators_kept",
    "learn_axes",
    "learn_rows",
    "probe_rows",
    "resized",
    "state_kept",
]
