"""Capture by operation: what each parameter was used for, and the gradient of what came out."""

from unison.capture.axes import AxisTable, batch_size_of
from unison.capture.capture import Capture
from unison.capture.learn import generators_kept, learn_axes, learn_rows, resized
from unison.capture.probes import ProbeState, probe_rows, state_kept
from unison.capture.recompute import RngAutocastState, rng_autocast_state
from unison.capture.separation import MixingReport, check_samples_apart, examine
from unison.capture.tracked import Tracked
