"""Private training on ranks: the oracle's result, and in ordered mode the same bits everywhere."""

import functools
from types import SimpleNamespace
from typing import Any

import pytest

from tests.harness import World, ranks, run_on_ranks
from tests.privacy.sharded import modes_of, oracle_run, private_run, relative
from unison.errors import UnsupportedOperation
from unison.kernels import multi_tensor
from unison.privacy import learning, noise

SHARDINGS = ("none", "ddp", "zero2", "zero3", "root", "hybrid")
# Small draws: with several ranks some have no sample at most steps, and two draws are empty (the
# fifth and the sixth of those here, of 1, 1, 3, 4, 0, 0, 2, 0, 4, ... samples).
LONG = {"rate": 0.06, "steps": 20}
SHORT = {"rate": 0.06, "steps": 6}


def run(world: World, case: dict) -> dict:
    return private_run(world, **case)


def run_on_small_gpus(world: World, case: dict) -> dict:
    """The same on devices of which the second one has no memory to spare."""
    own = learning.room_for_tensors
    try:
        learning.room_for_tensors = lambda _: 10**9 if world.rank == 0 else 10**4
        return private_run(world, **case)
    finally:
        learning.room_for_tensors = own


def run_as_on_gpus(world: World, case: dict) -> dict:
    """The same with the noise of all parameters drawn at once, by the kernel's reference."""
    own, found = noise.multi_tensor, multi_tensor.release
    try:
        noise.multi_tensor = SimpleNamespace(is_fast=lambda _: True, release=found)  # type: ignore[assignment]
        return private_run(world, **case)
    finally:
        noise.multi_tensor = own


@functools.cache
def oracle(steps: int) -> dict:
    return oracle_run(rate=0.06, steps=steps)


@functools.cache
def ordered_alone(mode: str, steps: int) -> dict:
    case = {"rate": 0.06, "steps": steps, "how": "none", "granule": 2, "mode": mode}
    return run_on_ranks(1, run, case)[0]


def check_against_oracle(size: int, case: dict, length: dict, work: Any = run) -> dict:
    found = run_on_ranks(size, work, {**length, **case})[0]
    expected = oracle(length["steps"])
    assert found["sizes"] == expected["sizes"]
    assert 0 in found["sizes"]
    assert relative(found, expected) <= 1e-5
    for norms, wanted in zip(found["norms"], expected["norms"], strict=True):
        assert norms == pytest.approx(wanted, rel=1e-4)  # of parameters that drift apart
    return found


ALL = ("losses", "norms", "digest")


def check_bits(size: int, case: dict, length: dict = SHORT, what: tuple[str, ...] = ALL) -> None:
    alone = ordered_alone(case.get("mode", "auto"), length["steps"])
    for found in run_on_ranks(size, run, {**length, "granule": 2, **case}):
        for each in what:
            assert found[each] == alone[each], each


@pytest.mark.parametrize(("size", "how"), [(1, "zero3"), (2, "zero3"), (3, "ddp"), (4, "hybrid")])
def test_noisy_steps_are_those_of_the_oracle(size, how):
    check_against_oracle(size, {"how": how}, SHORT)


@pytest.mark.parametrize(("size", "how"), [(2, "zero3"), (3, "ddp"), (4, "hybrid")])
def test_noise_that_is_drawn_at_once_is_that_of_the_parts(size, how):
    check_against_oracle(size, {"how": how}, SHORT, run_as_on_gpus)


@pytest.mark.full
@pytest.mark.parametrize(
    ("how", "mode"), [(how, mode) for how in SHARDINGS for mode in [*modes_of(how), "auto"]]
)
def test_every_mode_on_every_sharding(how, mode):
    check_against_oracle(4 if how == "hybrid" else 3, {"how": how, "mode": mode}, LONG)


@pytest.mark.parametrize(
    ("size", "how"),
    [(1, "zero3"), (2, "zero3"), (3, "ddp"), (3, "root"), (4, "hybrid"), (4, "zero2"), (2, "none")],
)
def test_ordered_is_the_same_bits_on_any_number_of_ranks(size, how):
    check_bits(size, {"how": how})


@pytest.mark.full
@pytest.mark.parametrize(
    ("how", "mode"), [(how, mode) for how in SHARDINGS for mode in modes_of(how)]
)
def test_every_mode_keeps_its_bits_on_every_sharding(how, mode):
    for size in (2, 4) if how == "hybrid" else (2, 3, 4, 8):
        check_bits(size, {"how": how, "mode": mode}, LONG)


def test_passes_of_a_logical_batch_change_no_bit():
    for size, physical in ((1, 2), (2, 2), (3, 4)):
        # Each pass tells its share of the loss, and a sum of shares rounds otherwise.
        check_bits(size, {"how": "zero3", "physical": physical}, what=("norms", "digest"))


@ranks(1)
def test_a_forward_pass_again_is_refused_on_shards(world):
    for how in ("zero3", "fsdp2"):
        with pytest.raises(UnsupportedOperation, match="sharded modules do not take yet: use"):
            private_run(world, how=how, mode="recompute_bk", steps=1)


def test_two_backward_passes_on_shards():
    check_bits(2, {"how": "zero3", "mode": "ghost"})
    check_against_oracle(2, {"how": "zero3", "mode": "flash_fuse"}, SHORT)


@pytest.mark.parametrize("how", ["zero3", "fsdp2"])
def test_auto_keeps_nothing_on_shards_where_there_is_no_room(how):
    budget = 30_000  # less than the records take
    case = {"how": how, "memory_budget": budget}
    found = check_against_oracle(2, case, SHORT)
    assert found["passes"] == (1, 2)


def test_ranks_plan_for_the_smallest_of_their_gpus():
    found = check_against_oracle(2, {"how": "zero3"}, SHORT, run_on_small_gpus)
    assert found["passes"] == (1, 2)
    # What has no bound needs one pass; and bits of granules depend on no GPU.
    assert run_on_ranks(1, run, {"how": "zero3", "steps": 1})[0]["passes"] == (1, 1)
    case = {"how": "zero3", "granule": 2, "steps": 1}
    assert run_on_ranks(2, run_on_small_gpus, case)[0]["passes"] == (1, 1)


@pytest.mark.parametrize("how", ["zero3", "ddp"])
def test_summed_losses(how):
    """A peer divides the sum by the number of ranks, and leaves the noise as it is."""
    case = {"how": how, "reduction": "sum", "learning_rate": 0.1, "steps": 4}
    alone = run_on_ranks(1, run, {**case, "how": "none"})[0]
    assert relative(run_on_ranks(3, run, case)[0], alone) <= 1e-6


def test_a_mean_of_each_ranks_rows():
    """The loop that users write, with their own criterion over the rows they were given."""
    case = {"how": "zero3", "reduction": "own mean", "steps": 5}
    alone = run_on_ranks(1, run, {**case, "how": "none", "reduction": "mean"})[0]
    assert relative(run_on_ranks(3, run, case)[0], alone) <= 1e-6
