"""Sharding: one flat buffer per unit, a dealt batch, two reducers."""

from unison.errors import CheckpointFailed
from unison.shard.api import (
    GradScaler,
    auto_shard,
    find_blocks,
    fully_shard,
    memory_report,
    param_groups,
    unit_memory,
)
from unison.shard.deal import BatchPlan, DealtLoader, batch_mean, current_plan, deal
from unison.shard.deferred.fill import materialize
from unison.shard.deferred.recorder import meta_init, register_init
from unison.shard.digest import digest, fingerprint, full_parameters
from unison.shard.each_granule import running_granule
from unison.shard.flat_group import CPUOffload, MixedPrecision
from unison.shard.fsdp2 import stop_ordered_reduction, use_ordered_reduction
from unison.shard.granules import PerGranule
from unison.shard.guard import CollectiveMismatch, RankLost, compare_across_ranks, guard
from unison.shard.norms import clip_grad_norm_, grad_norm, param_norm
from unison.shard.sharded_tensor import ShardedTensor
from unison.shard.state.checkpoint import (
    ALONE,
    MANIFEST_FILE,
    Manifest,
    load_checkpoint,
    read_manifest,
    save_checkpoint,
    settle_checkpoints,
)
from unison.shard.state.entries import (
    KeyReport,
    full_state_dict,
    load_full_state_dict,
    open_weights,
)
from unison.shard.state.optimizer import (
    full_optimizer_state_dict,
    load_full_optimizer_state_dict,
)
from unison.shard.unit import units_of
