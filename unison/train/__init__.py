"""Training runs: from settings to a folder with a model, metrics and a loss curve."""

from unison.train.checkpoint import resumed_config, saved_world_size
from unison.train.launch import RankFailed, run_on_local_ranks, was_launched
from unison.train.loop import train
from unison.train.report import TrainResult, read_result, result_table
from unison.train.setup import check_before_launch

__all__ = [
    "RankFailed",
    "TrainResult",
    "check_before_launch",
    "read_result",
    "result_table",
    "resumed_config",
    "run_on_local_ranks",
    "saved_world_size",
    "train",
    "was_launched",
]
