"""Many GPUs, one result: sharded, private and second-order training in PyTorch.

This module holds the public names and nothing else. Importing it needs torch and numpy only.
"""

from unison.errors import BadInput, Diverged, UnisonError, UnsupportedOperation
from unison.models import per_sample_loss
from unison.shard import (
    BatchPlan,
    CollectiveMismatch,
    CPUOffload,
    GradScaler,
    MixedPrecision,
    RankLost,
    auto_shard,
    batch_mean,
    clip_grad_norm_,
    current_plan,
    deal,
    digest,
    fingerprint,
    fully_shard,
    grad_norm,
    guard,
    memory_report,
    param_groups,
    param_norm,
)

__version__ = "0.1.0"

__all__ = [
    "BadInput",
    "BatchPlan",
    "CPUOffload",
    "CollectiveMismatch",
    "Diverged",
    "GradScaler",
    "MixedPrecision",
    "RankLost",
    "UnisonError",
    "UnsupportedOperation",
    "__version__",
    "auto_shard",
    "batch_mean",
    "clip_grad_norm_",
    "current_plan",
    "deal",
    "digest",
    "fingerprint",
    "fully_shard",
    "grad_norm",
    "guard",
    "memory_report",
    "param_groups",
    "param_norm",
    "per_sample_loss",
]
