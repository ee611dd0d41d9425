"""The ordered reducer over copies of a sharded model, in its smallest form.

`test_hybrid.py` has the whole matrix, which `make test` leaves out.
"""

from torch.distributed.device_mesh import init_device_mesh

from tests.harness import World, run_on_ranks
from tests.shard.common import ODD, ordered_run


def run(world: World) -> dict:
    options = {} if world.size == 1 else {"mesh": init_device_mesh("cpu", (2, world.size // 2))}
    return ordered_run(world, ODD, counts=(7, 5), options=options)


def test_two_copies_of_two_parts_have_the_bits_of_one_rank():
    (alone,) = run_on_ranks(1, run)
    assert run_on_ranks(4, run) == [alone] * 4
