"""Training runs: from settings to a folder with a model, metrics and a loss curve."""

from unison.run_files import TrainResult
from unison.train.checkpoint import resumed_config, saved_world_size
from unison.train.loop import check_before_launch, train
from unison.train.replay import ReplayConfig, check_replay, replay
from unison.train.report import result_table
from unison.train.run_folder import chart
from unison.train.world import RankFailed, run_on_local_ranks, was_launched
