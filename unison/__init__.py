"""Many GPUs, one result: sharded, private and second-order training in PyTorch.

This module holds the public names and nothing else. Importing it needs torch and numpy only.
"""

from unison import clip
from unison.config import Privacy
from unison.errors import BadInput, Diverged, NeedsWhole, UnisonError, UnsupportedOperation
from unison.kernels.cross_entropy import linear_cross_entropy
from unison.kfac import KFAC, KFACConfig
from unison.models import per_sample_loss
from unison.privacy import AdaptiveClipping, Budget, BudgetSpent, PrivacyEngine, public
from unison.shard import (
    BatchPlan,
    CheckpointFailed,
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
    full_optimizer_state_dict,
    full_state_dict,
    fully_shard,
    grad_norm,
    guard,
    load_checkpoint,
    load_full_optimizer_state_dict,
    load_full_state_dict,
    materialize,
    memory_report,
    meta_init,
    param_groups,
    param_norm,
    register_init,
    save_checkpoint,
    stop_ordered_reduction,
    use_ordered_reduction,
)

__version__ = "0.1.0"

__all__ = [
    "KFAC",
    "AdaptiveClipping",
    "BadInput",
    "BatchPlan",
    "Budget",
    "BudgetSpent",
    "CPUOffload",
    "CheckpointFailed",
    "CollectiveMismatch",
    "Diverged",
    "GradScaler",
    "KFACConfig",
    "MixedPrecision",
    "NeedsWhole",
    "Privacy",
    "PrivacyEngine",
    "RankLost",
    "UnisonError",
    "UnsupportedOperation",
    "__version__",
    "auto_shard",
    "batch_mean",
    "clip",
    "clip_grad_norm_",
    "current_plan",
    "deal",
    "digest",
    "fingerprint",
    "full_optimizer_state_dict",
    "full_state_dict",
    "fully_shard",
    "grad_norm",
    "guard",
    "linear_cross_entropy",
    "load_checkpoint",
    "load_full_optimizer_state_dict",
    "load_full_state_dict",
    "materialize",
    "memory_report",
    "meta_init",
    "param_groups",
    "param_norm",
    "per_sample_loss",
    "public",
    "register_init",
    "save_checkpoint",
    "stop_ordered_reduction",
    "use_ordered_reduction",
]
