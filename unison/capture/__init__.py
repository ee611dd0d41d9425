"""Capture by operation: what each parameter was used for, and the gradient of what came out."""

from unison.capture.again import Surroundings
from unison.capture.axes import AxisTable
from unison.capture.capture import Capture
from unison.capture.follow import learn_rows
from unison.capture.learn import (
    batch_size_of,
    check_samples_apart,
    generators_kept,
    learn_axes,
    resized,
)
from unison.capture.tracked import Tracked

__all__ = [
    "AxisTable",
    "Capture",
    "Surroundings",
    "Tracked",
    "batch_size_of",
    "check_samples_apart",
    "generators_kept",
    "learn_axes",
    "learn_rows",
    "resized",
]
