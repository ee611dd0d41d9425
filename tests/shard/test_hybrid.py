"""Copies of a sharded model: a mesh of two dimensions, replicate × shard."""

from functools import partial

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from tests.harness import World, assert_close, run_on_ranks
from tests.shard.common import DECODER, GPT2, ODD, ordered_run
from tests.shard.test_fast import STEPS, train
from unison.errors import BadInput
from unison.models import build
from unison.shard import auto_shard, units_of

CASES = {
    "tied": {},
    "odd sizes at the root": {"config": ODD, "how": "root"},
    "uneven batches, granule of 2": {"counts": (7, 5, 0, 8, 1), "granule": 2},
    "micro-batches": {"config": DECODER, "counts": (8, 7), "micro_batch": 1},
}


def make_mesh(replicas: int, size: int):
    return init_device_mesh("cpu", (replicas, size // replicas))


def run(world: World, replicas: int, case: dict) -> dict:
    options = {} if world.size == 1 else {"mesh": make_mesh(replicas, world.size)}
    return ordered_run(world, **{"config": GPT2, **case}, options=options)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.full) if case.startswith("uneven") else case
        for case in CASES
    ],
)
def test_hybrid_has_the_bits_of_one_rank(case):
    alone = run_on_ranks(1, run, 1, CASES[case])[0]
    for size, replicas in [(4, 2), (4, 4), (4, 1), (2, 2)]:
        for found in run_on_ranks(size, run, replicas, CASES[case]):
            if "micro_batch" in CASES[case]:  # the shares of a loss add up in another order
                assert found.pop("losses") == pytest.approx(alone["losses"], rel=1e-6)
            assert {**alone, **found} == alone


@pytest.mark.full
def test_three_copies_of_two_parts():
    case = {"config": ODD, "counts": (8, 3)}
    alone = run_on_ranks(1, run, 1, case)[0]
    assert run_on_ranks(6, run, 3, case)[0] == alone


def fast(world: World, replicas: int, step, how: str):
    return train(world, step, how, mesh=make_mesh(replicas, world.size))


@pytest.mark.parametrize("name", STEPS)
def test_fast_hybrid_is_right(name):
    expected = run_on_ranks(1, partial(train, num_ranks=4), STEPS[name], None)[0]
    for found in run_on_ranks(4, fast, 2, STEPS[name], "auto"):
        assert_close(found, expected, dtype=torch.float64)


def shard_sizes(world: World) -> tuple[int, int]:
    model = auto_shard(build(GPT2, seed=0), mesh=make_mesh(2, world.size))
    unit = units_of(model)[0]
    return unit.ranks.shard.size, unit.ranks.replicas.size


def test_a_copy_is_sharded_over_the_second_dimension():
    assert set(run_on_ranks(4, shard_sizes)) == {(2, 2)}


def three_dimensions(world: World) -> str:
    with pytest.raises(BadInput, match="two"):
        auto_shard(build(GPT2, seed=0), mesh=init_device_mesh("cpu", (1, 1, 2)))
    return "refused"


def test_three_dimensions_are_refused():
    assert run_on_ranks(2, three_dimensions)[0] == "refused"


def different_seeds(world: World) -> str:
    model = auto_shard(build(GPT2, seed=world.rank))
    with pytest.raises(BadInput, match=r"initial values of root: token_embeddings.weight"):
        model(torch.zeros(1, 4, dtype=torch.int64))
    return "refused"


def test_ranks_that_built_other_models_are_refused():
    assert set(run_on_ranks(3, different_seeds)) == {"refused"}
