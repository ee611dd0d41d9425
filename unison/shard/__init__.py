"""Sharding: one flat buffer per unit, a dealt batch, two reducers."""

from unison.shard.api import auto_shard, find_blocks, fully_shard
from unison.shard.deal import BatchPlan, DealtLoader, batch_mean, current_plan, deal
from unison.shard.digest import digest, fingerprint, full_parameters
from unison.shard.granules import PerGranule
from unison.shard.guard import CollectiveMismatch, RankLost, compare_across_ranks, guard
from unison.shard.memory import UnitMemory, memory_report, unit_memory
from unison.shard.norms import clip_grad_norm_, grad_norm, param_norm
from unison.shard.optimizers import param_groups
from unison.shard.policies import CPUOffload, MixedPrecision
from unison.shard.scaler import GradScaler
from unison.shard.unit import units_of

__all__ = [
    "BatchPlan",
    "CPUOffload",
    "CollectiveMismatch",
    "DealtLoader",
    "GradScaler",
    "MixedPrecision",
    "PerGranule",
    "RankLost",
    "UnitMemory",
    "auto_shard",
    "batch_mean",
    "clip_grad_norm_",
    "compare_across_ranks",
    "current_plan",
    "deal",
    "digest",
    "find_blocks",
    "fingerprint",
    "full_parameters",
    "fully_shard",
    "grad_norm",
    "guard",
    "memory_report",
    "param_groups",
    "param_norm",
    "unit_memory",
    "units_of",
]
