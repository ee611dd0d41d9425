"""Claims and their checks: two runs that must agree, where they part, and what memory they took."""

from unison.verify import clipping_speed
from unison.verify.memory import MODEL_STATE, Bytes, Category, MemoryTracker
from unison.verify.parity import Experiment, Parity, Trained, compare
from unison.verify.private_parity import (
    WORLD_SIZES,
    PrivateExperiment,
    PrivatelyTrained,
    compare_privately,
)
from unison.verify.provenance import (
    check_writable,
    commit,
    cpu_model,
    hardware,
    version_of,
    versions,
    write_result,
)
from unison.verify.purity import Purity, purity
from unison.verify.runs import RunComparison, RunFolder, compare_runs

__all__ = [
    "MODEL_STATE",
    "WORLD_SIZES",
    "Bytes",
    "Category",
    "Experiment",
    "MemoryTracker",
    "Parity",
    "PrivateExperiment",
    "PrivatelyTrained",
    "Purity",
    "RunComparison",
    "RunFolder",
    "Trained",
    "check_writable",
    "clipping_speed",
    "commit",
    "compare",
    "compare_privately",
    "compare_runs",
    "cpu_model",
    "hardware",
    "purity",
    "version_of",
    "versions",
    "write_result",
]
