"""The promise: the same bits at any world size."""

import math
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.harness import World, run_on_ranks
from tests.shard.common import DECODER, GPT2, ODD, ordered_run
from unison.models import preset

CASES = {
    "tied": {},
    "untied": {"config": DECODER},
    "everything at the root": {"how": "root"},
    "odd sizes": {"config": ODD},
    "odd sizes at the root": {"config": ODD, "how": "root"},
    "fused AdamW": {"config": ODD, "optimizer": {"fused": True}},
    "AdamW one by one": {"optimizer": {"foreach": False}},
    "granule of 2": {"granule": 2},
    "uneven batches": {"counts": (7, 5, 0, 8)},
    "uneven batches, granule of 2": {"counts": (7, 5, 0, 8, 1), "granule": 2},
    "bf16 autocast": {"is_bf16": True},
    "bf16 autocast, decoder": {"is_bf16": True, "config": DECODER},
    "ZeRO-2": {"options": {"reshard_after_forward": False}},
    "dropout off": {"config": replace(GPT2, dropout=0.0)},
}


def run(world: World, case: dict) -> dict:
    return ordered_run(world, **{"config": GPT2, **case})


@cache
def found(size: int, case: str) -> dict:
    return run_on_ranks(size, run, CASES[case])[0]


@pytest.mark.parametrize("case", CASES)
def test_world_size_changes_no_bit(case):
    alone, *others = (found(size, case) for size in (1, 2, 3, 4))
    assert all(math.isfinite(loss) for loss in alone["losses"])
    for other in others:
        assert other == alone


def test_blocks_and_root_give_one_digest():
    assert found(2, "tied") == found(2, "everything at the root") == found(2, "ZeRO-2")


def test_granule_is_part_of_the_mechanism():
    one, two = (found(1, case) for case in ("tied", "granule of 2"))
    assert one["losses"] == pytest.approx(two["losses"], rel=1e-5)
    assert one["digest"] != two["digest"]


@pytest.mark.full
def test_more_ranks():
    config = replace(ODD, vocab_size=251, d_model=68)  # odd as well, and quick on 8 ranks
    case = {"config": config, "counts": (8, 3)}
    alone = run_on_ranks(1, run, case)[0]
    assert run_on_ranks(5, run, case)[0] == alone
    split_between_pairs = {**case, "options": {"reshard_after_forward": 2}}
    assert run_on_ranks(8, run, split_between_pairs)[0] == alone


@pytest.mark.parametrize("granule", [1, 2])
def test_micro_batches_change_no_bit(granule):
    case = {"counts": (8, 7, 0, 3), "granule": granule}
    whole = run_on_ranks(1, run, case)[0]
    for size in (1, 2, 3):
        cut = run_on_ranks(size, run, {**case, "micro_batch": 2})[0]
        assert cut["losses"] == pytest.approx(whole["losses"], rel=1e-6)
        assert {**cut, "losses": None} == {**whole, "losses": None}


@pytest.mark.full
@pytest.mark.parametrize("how", ["auto", "root"])
@pytest.mark.parametrize(
    "case",
    [
        {},
        {"config": replace(preset("small"), tie_head=True)},
        {"is_bf16": True},
        {"config": replace(preset("small"), vocab_size=509, d_model=132, num_heads=6)},
        {"optimizer": {"fused": True}},
        {"granule": 2},
        {"counts": (7, 5, 0, 8) * 5},
    ],
    ids=["small", "tied", "bf16", "odd", "fused", "granule 2", "uneven"],
)
def test_twenty_steps_of_small(how, case):
    case = {"config": preset("small"), "counts": (8,) * 20, "how": how, **case}
    alone = run_on_ranks(1, run, case, timeout=900)[0]
    for size in (2, 3, 4, 8):
        assert run_on_ranks(size, run, case, timeout=900)[0] == alone


class Checkpointed(nn.Module):
    """A block under non-reentrant activation checkpointing, inside its unit."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args):
        return checkpoint(self.block, *args, use_reentrant=False)


def checkpoint_inside(model) -> None:
    model.layers = nn.ModuleList(Checkpointed(layer) for layer in model.layers)


def checkpoint_outside(model) -> None:
    """Wrap the *call* of each block, so that its unit's forward is what is run again."""
    for layer in model.layers:
        call = type(layer).__call__

        class Outside(type(layer)):
            def __call__(self, *args, _call=call):
                return checkpoint(partial(_call, self), *args, use_reentrant=False)

        layer.__class__ = Outside


@pytest.mark.parametrize("change", [checkpoint_inside, checkpoint_outside])
def test_checkpointing_changes_no_bit(change):
    plain = found(1, "odd sizes")
    results = [run_on_ranks(size, run, {"config": ODD, "change": change})[0] for size in (1, 3)]
    assert results[0]["losses"] == plain["losses"]
    assert results[0] == results[1]
    if change is checkpoint_outside:  # names, and so the digest, are the plain model's
        assert results[0] == plain


class Double(torch.autograd.Function):
    """Goes past torch functions, so that mapping single operations cannot see it."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class Hidden(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x):
        return Double.apply(self.norm(x)) * 0.5


def hide_an_operation(model) -> None:
    model.ln_final = Hidden(model.ln_final)


@pytest.mark.filterwarnings("ignore:.*Falling back to one forward pass")
def test_bypassed_root_falls_back_to_the_whole_model_loop():
    case = {"config": ODD, "change": hide_an_operation}
    alone = run_on_ranks(1, run, case)[0]
    assert run_on_ranks(3, run, case)[0] == alone
    plain = found(1, "odd sizes")
    assert alone["losses"][0] == plain["losses"][0]
