"""No hangs: ranks compare their collectives while they run, and raise together when they differ.

Each process logs its collectives (group, number, kind, shapes, dtypes, reduce operation, root, call
site); a thread publishes a digest of the log in a store and reads the other ranks'. What is seen
and how a blocked rank is reached, and how the ranks come to one verdict, is told in `block`.

Why not what torch has:
- `TORCH_DISTRIBUTED_DEBUG=DETAIL` checks before every collective, through a second gloo group with
  collectives of its own, which costs a round trip each time, must be set before the group is made,
  and names no call sites.
- `monitored_barrier` says who is missing at a barrier, for gloo only, and one must place it.
- The flight recorder keeps what NCCL issued, for a reader after the end; ranks are not compared.
- Completion hooks and `abort` are NCCL's; gloo's `abort` does not end a wait.
- A `TorchDispatchMode` sees `c10d` operations, and slows every other operation down.
"""

from unison.shard.guard.block import EXIT_CODE, Guard, guard
from unison.shard.guard.records import CollectiveMismatch, RankLost, compare_across_ranks
