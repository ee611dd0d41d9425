"""Training runs: from settings to a folder with a model, metrics and a loss curve."""

from unison.train.checkpoint import resumed_config, saved_world_size
from unison.train.loop import check_before_launch, train
from unison.train.report import TrainResult, read_result, result_table
from unison.train.run_folder import LEDGER_FILE, chart
from unison.train.world import RankFailed, run_on_local_ranks, was_launched

__all__ = [
    "LEDGER_FILE",
    "RankFailed",
    "TrainResult",
    "chart",
    "check_before_launch",
    "read_result",
    "result_table",
    "resumed_config",
    "run_on_local_ranks",
    "saved_world_size",
    "train",
    "was_launched",
]
