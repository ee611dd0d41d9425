"""Compiled private training under torch's own wrappers: the oracle's result, or a sentence.

FSDP2, DDP and tensor parallelism, compiled by `make_private(compile=)` or by the user.
"""

import functools
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.data import DataLoader, TensorDataset

import unison
from tests.harness import World, run_on_ranks
from tests.privacy import parallel
from tests.privacy.common import attach
from tests.privacy.fsdp2_runs import trained
from tests.privacy.parallel_runs import check_oracle, without_noise
from tests.privacy.sharded import CONFIG, losses, oracle_run, relative, rows, shard
from tests.shard.fsdp2.test_bits import every_part
from tests.shard.fsdp2.test_bits import nothing as no_part
from unison.models import build
from unison.privacy import Poisson
from unison.shard import find_blocks
from unison.shard.digest import full_parameters
from unison.torch_internals import canonical_name

EAGER: dict[str, Any] = {"compile": {"backend": "aot_eager"}}
INDUCTOR: dict[str, Any] = {"compile": True}
STEPS: dict[str, Any] = {"rate": 0.06, "steps": 5}  # some of them empty, or so on a rank


@functools.cache
def oracle() -> dict[str, Any]:
    return oracle_run(**STEPS)


def blocks(model: Any) -> Any:
    """As users of FSDP2 do."""
    for block in find_blocks(getattr(model, "module", model)):
        block.compile(backend="aot_eager")
    return model


def children(model: Any) -> Any:
    """As torchtitan does."""
    layers = getattr(model, "module", model).layers
    for index, block in enumerate(layers):
        layers[index] = torch.compile(block, backend="aot_eager")
    return model


def whole(model: nn.Module) -> Any:
    return torch.compile(model, backend="aot_eager")


def in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="aot_eager")
    return model


def nothing(model: nn.Module) -> nn.Module:
    return model


def run(
    world: World,
    how: str,
    *,
    first: Callable[[Any], Any] = nothing,
    before: Callable[[Any], Any] = nothing,
    after: Callable[[Any], Any] = nothing,
    **settings: Any,
) -> dict[str, Any]:
    """Train privately, compiled before it is sharded (first), and around `make_private`."""
    torch._dynamo.reset()
    own = build(CONFIG, seed=3)
    model = before(shard(first(own), how, world, "fast"))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        engine, model, optimizer, loader = attach(
            model,
            seed=5,
            optimizer=torch.optim.SGD(own.parameters(), lr=0.5, momentum=0.9),
            data_loader=DataLoader(TensorDataset(rows()), batch_size=4),
            sampling=Poisson(rate=STEPS["rate"]),
            expected_batch_size=4,
            noise_multiplier=0.5,
            max_grad_norm=0.2,
            **settings,
        )
        model, done = after(model), 0
        while done < STEPS["steps"]:
            for (ids,) in loader:
                optimizer.zero_grad()
                unison.batch_mean(losses(model, ids)).backward()
                done += loader.current.is_last
                optimizer.step()
                if done == STEPS["steps"]:
                    break
    passes = engine._attached.attachment._compiled
    engine.detach()
    return {
        "told": [str(each.message) for each in found if "ompiled" in str(each.message)],
        "graphs": passes and passes.num_graphs,
        "parameters": {
            canonical_name(name): value.double().tolist() for name, value in full_parameters(own)
        },
    }


def run_case(world: World, case: dict[str, Any]) -> dict[str, Any]:
    return run(world, **case)


CASES: dict[str, dict[str, Any]] = {
    "by make_private": EAGER,
    "by Inductor": INDUCTOR,
    "blocks, before sharding": {"first": blocks},
    "blocks": {"before": blocks},
    "blocks, after": {"after": blocks},
    "children": {"before": children},
    "children, after": {"after": children},
    "whole, before sharding": {"first": whole},
    "whole": {"before": whole},
    "whole, after": {"after": whole},
    "in place": {"before": in_place},
    "in place, after": {"after": in_place},
}


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("how", ["fsdp2", "ddp", "zero3"])
def test_steps_are_those_of_the_oracle(how, case):
    """Nothing runs uncompiled, and nobody is told that anything does."""
    for found in run_on_ranks(2, run_case, {"how": how, **CASES[case]}):
        assert relative(found, oracle()) <= 1e-6
        assert found["told"] == []
        assert found["graphs"] > 0


def test_fsdp2_with_blocks_that_the_user_compiles():
    for found in run_on_ranks(2, run_case, {"how": "fsdp2", "before": blocks}):
        assert relative(found, oracle()) <= 1e-6
        assert found["told"] == []
        assert found["graphs"] == 1  # for both blocks


# ---- FSDP2's settings ------------------------------------------------------------------------


def checkpointed(model: Any) -> None:
    kind = type(model.layers[0])
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, kind))


def frozen(model: Any) -> None:
    for parameter in (*model.layers[0].parameters(), model.layers[1].ffn.w1.weight):
        parameter.requires_grad_(False)


SETTINGS: dict[str, dict[str, Any]] = {
    "the root alone": {"parts": no_part},
    "kept full": {"options": {"reshard_after_forward": False}},
    "bfloat16": {"options": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}},
    "checkpointed": {"change": checkpointed},
    "frozen": {"change": frozen},
    "factors kept": {"clipping": "ghost_bk"},
    "in passes of two": {"max_physical_batch_size": 2},
    "hybrid": {"how": "hybrid"},
    "in granules": {"granule": 2},
    "ordered before": {"granule": 2, "how": "ordered before"},
}


def run_setting(world: World, case: dict[str, Any]) -> dict[str, Any]:
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's compiler
        warnings.filterwarnings("error", message=".*compiled")
        return trained(world, **case)


@pytest.mark.full
@pytest.mark.parametrize("name", SETTINGS)
def test_fsdp2_with_its_settings(name):
    case, size = SETTINGS[name], 4 if name == "hybrid" else 2
    expected = run_on_ranks(size, run_setting, case)[0]
    for found in run_on_ranks(size, run_setting, {**case, **EAGER}):
        assert relative(found, expected) <= 1e-6


@pytest.mark.full
def test_fsdp2_of_parts_of_blocks():
    case = {"parts": every_part, "config": replace(CONFIG, tie_head=False)}
    expected = run_on_ranks(2, run_setting, case)[0]
    for found in run_on_ranks(2, run_parts, case):
        assert relative(found, expected) <= 1e-6


def run_parts(world: World, case: dict[str, Any]) -> dict[str, Any]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = trained(world, **case, **EAGER)
    reasons = [str(each.message) for each in told if "uncompiled" in str(each.message)]
    assert len(reasons) == 1
    assert "uncompiled: it has no repeated blocks that are sharded" in reasons[0]
    return found


@pytest.mark.full
@pytest.mark.parametrize("how", [EAGER, INDUCTOR], ids=["aot_eager", "inductor"])
def test_one_result_at_1_and_2_ranks_and_as_in_units(how):
    """In granules, with dropout: the same bits."""
    case = {"granule": 2, "config": replace(CONFIG, dropout=0.3), **how}
    expected = run_on_ranks(1, run_setting, {**case, "how": "units"})[0]
    for size in (1, 2):
        found = run_on_ranks(size, run_setting, {**case, "how": "fsdp2"})[0]
        assert found["parameters"] == expected["parameters"]


# ---- tensor parallelism ----------------------------------------------------------------------


def cut_blocks(model: Any) -> Any:
    for block in model.blocks:
        block.compile(backend="aot_eager")
    return model


def cut_child(model: Any) -> Any:
    model.blocks[0] = torch.compile(model.blocks[0], backend="aot_eager")
    return model


CUT: dict[str, dict[str, Any]] = {
    "by make_private": EAGER,
    "blocks": {"before": cut_blocks},
    "blocks, after": {"after": cut_blocks},
    "child": {"before": cut_child},
    "child, after": {"after": cut_child},
    "whole": {"before": whole},
    "whole, after": {"after": whole},
    "in place, after": {"after": in_place},
    "twice": {**EAGER, "before": whole, "after": cut_blocks},
    "in granules": {**EAGER, "granule": 2},
}


def run_cut(world: World, case: dict[str, Any]) -> dict[str, Any]:
    torch._dynamo.reset()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        result = parallel.private_run(world, **case)
    return {**result, "told": [str(each.message) for each in found]}


@pytest.mark.parametrize(
    "case",
    [
        each if each == "blocks, after" else pytest.param(each, marks=pytest.mark.full)
        for each in CUT
    ],
)
def test_tensor_parallel_modules_run_uncompiled_and_say_so_once(case):
    expected = without_noise("attention")
    for found in run_on_ranks(2, run_cut, {**expected, **CUT[case]}):
        check_oracle(found, expected)
        assert len([each for each in found["told"] if "distributed tensors" in each]) == 1
