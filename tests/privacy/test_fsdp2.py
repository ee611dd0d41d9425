"""Private training under torch's own FSDP2: the results of one process, at FSDP2's own cost."""

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

import unison
from tests.harness import World, run_on_ranks
from tests.privacy.fsdp2_runs import trained, trained_as
from tests.privacy.sharded import CONFIG, modes_of, private_run, relative
from tests.shard.fsdp2.test_bits import every_part, nothing
from tests.shard.test_ordered import checkpoint_inside, checkpoint_outside

# Draws of 1, 1, 3, 4, 0, 0, ... samples: ranks without any, and whole batches too.
SHORT = {"rate": 0.06, "steps": 6}
LONG = {"rate": 0.06, "steps": 20}
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def run(world: World, case: dict) -> dict:
    return private_run(world, **case)


@functools.cache
def alone(mode: str, granule: int | None, steps: int) -> dict:
    case = {"how": "none", "mode": mode, "granule": granule, "rate": 0.06, "steps": steps}
    return run_on_ranks(1, run, case)[0]


def check_fast(size: int, mode: str, length: dict = SHORT) -> None:
    expected = alone("auto", None, length["steps"])  # all modes give the same gradients
    assert expected["sizes"].count(0) >= 2
    for found in run_on_ranks(size, run, {**length, "how": "fsdp2", "mode": mode}):
        assert found["sizes"] == expected["sizes"]
        assert relative(found, expected) <= 1e-6
        for norms, wanted in zip(found["norms"], expected["norms"], strict=True):
            assert norms == pytest.approx(wanted, rel=1e-5)


def check_bits(size: int, mode: str, length: dict = SHORT) -> None:
    expected = alone(mode, 2, length["steps"])
    for found in run_on_ranks(size, run, {**length, "how": "fsdp2", "mode": mode, "granule": 2}):
        for each in ("losses", "norms", "digest"):
            assert found[each] == expected[each], each


@pytest.mark.parametrize(("size", "mode"), [(1, "auto"), (2, "ghost"), (4, "auto")])
def test_fast_is_one_process(size, mode):
    check_fast(size, mode)


@pytest.mark.parametrize(("size", "mode"), [(1, "ghost"), (2, "auto"), (2, "ghost"), (4, "auto")])
def test_ordered_has_the_bits_of_one_process(size, mode):
    check_bits(size, mode)


@pytest.mark.full
@pytest.mark.parametrize("mode", [*modes_of("fsdp2"), "auto"])
def test_every_mode(mode):
    for size in (1, 2, 3, 4):
        check_fast(size, mode, LONG)
        check_bits(size, mode, LONG)


# --- other models, other ways to shard them -------------------------------------------------------


VARIANTS: dict[str, dict[str, Any]] = {
    "kept after forward": {"options": {"reshard_after_forward": False}},
    "everything at the root": {"parts": nothing},
    "every part by itself": {
        "parts": every_part,
        "config": replace(CONFIG, family="decoder", tie_head=False),
    },
    "checkpointed blocks": {"change": checkpoint_inside},
    "checkpointed from outside": {"change": checkpoint_outside, "clipping": "ghost"},
    "several passes": {"max_physical_batch_size": 2},
    "ordered before": {"how": "ordered before"},
}
OF_SHARDING = {"options", "parts"}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.full
def test_the_same_bits_with(name):
    case = {"granule": 2, **VARIANTS[name]}
    plain = {key: value for key, value in case.items() if key not in OF_SHARDING}
    expected = run_on_ranks(1, trained_as, {**plain, "how": "none"})[0]
    for found in run_on_ranks(2, trained_as, case):
        if name == "several passes":  # each tells its share of the loss: a sum rounds otherwise
            assert found.pop("losses") == pytest.approx(expected["losses"], rel=1e-6)
        assert found == {key: expected[key] for key in found}


@pytest.mark.full
def test_kept_in_smaller_shards_after_forward():
    expected = run_on_ranks(1, trained_as, {"how": "none", "granule": 2})[0]
    case = {"granule": 2, "options": {"reshard_after_forward": 2}}
    assert run_on_ranks(4, trained_as, case) == [expected] * 4


@pytest.mark.full
def test_copies_of_shards():
    for granule in (None, 2):
        expected = run_on_ranks(1, trained_as, {"granule": granule, "how": "none"})[0]
        for found in run_on_ranks(4, trained_as, {"granule": granule, "how": "hybrid"}):
            assert relative(found, expected) <= (1e-6 if granule is None else 0)


def checkpoint_reentrant(model: Any) -> None:
    for layer in model.layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=True)


def freeze(model: Any) -> None:
    """A frozen parameter beside trained ones, a whole frozen module, and one that is never used."""
    model.layers[0].ln1.weight.requires_grad_(False)
    model.layers[1].requires_grad_(False)
    model.unused = nn.Linear(3, 5)


def blocks_together(model: Any) -> list[nn.Module]:
    return [list(model.layers)]  # type: ignore[list-item]


FAST_VARIANTS: dict[str, dict[str, Any]] = {
    "reentrant checkpointing": {"change": checkpoint_reentrant},
    "frozen and unused": {"change": freeze, "parts": lambda m: [*m.layers, m.unused]},
    "blocks in one group": {"parts": blocks_together},
}


def fast_variant(world: World, name: str, how: str) -> dict:
    return trained(world, how=how, **FAST_VARIANTS[name])


@pytest.mark.parametrize("name", FAST_VARIANTS)
@pytest.mark.full
def test_one_process_with(name):
    expected = run_on_ranks(1, fast_variant, name, "none")[0]
    for found in run_on_ranks(2, fast_variant, name, "fsdp2"):
        assert relative(found, expected) <= 1e-6


@pytest.mark.full
def test_bf16():
    case = {"options": {"mp_policy": BF16}}
    expected = run_on_ranks(1, trained_as, {"how": "none"})[0]
    found = run_on_ranks(2, trained_as, case)[0]
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-2)
    assert found["norms"] == pytest.approx(expected["norms"], rel=3e-2)
    assert relative(found, expected) <= 5e-3
    policy = unison.MixedPrecision(param=torch.bfloat16, reduce=torch.float32)
    units = {"how": "units", "options": {"mp_policy": policy}, "granule": 2}
    ordered = run_on_ranks(1, trained_as, units)[0]
    for size in (1, 2):
        assert run_on_ranks(size, trained_as, {**case, "granule": 2})[0] == ordered
