"""What every test may lean on: real ranks, the oracle, the tolerance table, fixed keys."""

from tests.harness.context import seed_of
from tests.harness.oracle import clipped_sum, mean_gradient, per_sample_gradients, per_sample_norms
from tests.harness.ranks import ranks, run_on_ranks
from tests.harness.report import RanksFailed
from tests.harness.tolerance import assert_close, assert_same_bits
from tests.harness.world import World

__all__ = [
    "RanksFailed",
    "World",
    "assert_close",
    "assert_same_bits",
    "clipped_sum",
    "mean_gradient",
    "per_sample_gradients",
    "per_sample_norms",
    "ranks",
    "run_on_ranks",
    "seed_of",
]
