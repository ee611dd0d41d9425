"""The ordered reducer on torch's own FSDP2: the bits of our own engine."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from tests.harness import World, run_on_ranks
from tests.shard.common import DECODER, GPT2, ODD, ordered_run, tokens
from tests.shard.fsdp2.common import fsdp2, lm, train
from tests.shard.test_ordered import checkpoint_inside, checkpoint_outside
from unison.models import ModelConfig
from unison.shard import auto_shard, find_blocks
from unison.shard.fsdp2 import use_ordered_reduction

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def every_part(model: Any) -> list[nn.Module]:
    """So many modules that the root has no parameters left, and blocks have modules below them."""
    inside = [part for layer in model.layers for part in (layer.attn, layer.ffn, layer)]
    return [*inside, model.token_embeddings, model.ln_final, model.lm_head]


def nothing(_: nn.Module) -> list[nn.Module]:
    return []


def language_model(
    world: World,
    config: ModelConfig = GPT2,
    *,
    kind: str = "fsdp2",
    counts: tuple[int, ...] = (8, 8),
    parts: Callable[[Any], list[nn.Module]] = find_blocks,
    change: Callable[[nn.Module], None] | None = None,
    options: dict[str, Any] | None = None,
    **how: Any,
) -> dict[str, Any]:
    model = lm(config)
    if change is not None:
        change(model)
    if kind == "fsdp2":
        use_ordered_reduction(fsdp2(model, world, parts, **(options or {})))
    else:
        auto_shard(model, reducer="ordered", gradient_divisor=1, **(options or {}))
    return train(model, [tokens(n, config, step) for step, n in enumerate(counts)], **how)


ENGINE_CASES = {
    "tied": {"config": GPT2},
    "untied": {"config": DECODER},
    "odd sizes": {"config": ODD, "counts": (4, 4)},
    "granule of 2": {"config": GPT2, "granule": 2},
    "clipped hard": {"config": DECODER, "max_norm": 1e-3},
}


def engine(world: World, case: dict) -> dict:
    return ordered_run(world, **case)


def adapter(world: World, case: dict) -> dict:
    return language_model(world, **case)


@pytest.mark.parametrize(
    "case",
    [
        case
        if case in ("granule of 2", "clipped hard")
        else pytest.param(case, marks=pytest.mark.full)
        for case in ENGINE_CASES
    ],
)
def test_the_bits_of_our_own_engine(case):
    expected = run_on_ranks(1, engine, ENGINE_CASES[case])[0]
    for size in (1, 2, 4):
        assert run_on_ranks(size, adapter, ENGINE_CASES[case]) == [expected] * size


OTHER_CASES = {
    "bf16 autocast": {"is_bf16": True},
    "bf16 parameters": {"options": {"mp_policy": BF16}, "config": DECODER},
    "kept after forward": {"options": {"reshard_after_forward": False}},
    "everything at the root": {"parts": nothing},
    "every part by itself": {"parts": every_part, "config": DECODER},
    "checkpointed blocks": {"change": checkpoint_inside},
    "checkpointed from outside": {"change": checkpoint_outside},
    "dropout": {"config": replace(DECODER, dropout=0.3), "has_dropout": True},
    "dropout by the batch's plan": {"config": replace(DECODER, dropout=0.3)},
    "an empty batch": {"counts": (8, 0, 4)},
    "AdamW for all at once": {"optimizer": {"foreach": True}},
}


@pytest.mark.parametrize("case", OTHER_CASES)
def test_the_same_bits_with(case):
    case = {"counts": (4, 4), **OTHER_CASES[case]}
    expected = run_on_ranks(1, language_model_of, {**case, "kind": "engine"})[0]
    assert run_on_ranks(2, language_model_of, case) == [expected] * 2


def language_model_of(world: World, case: dict) -> dict:
    return language_model(world, **case)


def test_micro_batches_change_no_bit():
    whole = run_on_ranks(1, engine, {"config": GPT2, "counts": (8, 8)})[0]
    for size in (1, 2):
        case = {"micro_batch": 2, "counts": (8, 8)}
        found = run_on_ranks(size, language_model_of, case)[0]
        assert found.pop("losses") == pytest.approx(whole["losses"], rel=1e-6)
        assert found == {name: value for name, value in whole.items() if name != "losses"}


@pytest.mark.full
@pytest.mark.parametrize("config", [GPT2, DECODER, ODD], ids=["tied", "untied", "odd"])
def test_more_ranks_and_steps(config):
    case = {"config": config, "counts": (16,) * 10}
    expected = run_on_ranks(1, engine, case)[0]
    for size in (1, 2, 4, 8):
        assert run_on_ranks(size, adapter, case) == [expected] * size
