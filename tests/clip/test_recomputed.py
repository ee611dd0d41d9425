"""Keep g, recompute a: the same sums from a second forward pass, or an error."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.capture.common import make
from tests.capture.zoo import ZOO
from tests.clip.models import Deep, ids, losses
from tests.harness import assert_close, assert_same_bits
from tests.harness.oracle import clipped_sum, per_sample_norms
from unison.capture import Capture, rng_autocast_state
from unison.clip import (
    GRADIENT_METHODS,
    RULES,
    Choice,
    Clipping,
    Plan,
    clipped_gradients,
    learn,
    plan_clipping,
)
from unison.errors import UnsupportedOperation

MODE = "recompute_bk"


def changed(plan: Plan, choices: dict[str, Choice]) -> Plan:
    """The plan with other methods for some layers."""
    layers = [
        replace(each, chosen=next(a for a in each.alternatives if a.choice == choice))
        if (choice := choices.get(each.layer.name))
        else each
        for each in plan.layers
    ]
    return replace(plan, mode="auto", layers=tuple(layers))


def clipped_by(plan: Plan, model: nn.Module, batch: torch.Tensor, max_norm: float):
    """As `clipped_gradients`, with a plan of the test's own."""
    learned = learn(model, losses, batch)
    clipping = Clipping(plan, len(batch), learned.storage)
    capture = Capture(
        model,
        len(batch),
        axes=learned.axes,
        on_record=clipping.take,
        on_product=clipping.take_product,
    )
    with capture.installed():
        surroundings = rng_autocast_state(model, batch)
        losses(model, batch).sum().backward()
        norms = clipping.norms()
        total = norms.total()
        by_name = dict.fromkeys(norms, RULES["flat"](total, max_norm).values)
        if clipping.num_forwards == 2:
            clipping.begin_second_pass(by_name)
            with capture.recompute(surroundings):
                losses(model, batch)
        return dict(clipping.clipped_sums(by_name)), clipping


def median_norm(model: nn.Module, batch: torch.Tensor) -> float:
    return float(per_sample_norms(model, losses, batch).median())


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_bits_are_those_of_kept_records(is_checkpointed):
    """The same records in the same arithmetic, wherever a parameter has one of them."""
    torch.manual_seed(0)
    model, batch = Deep(dropout=0.3, is_checkpointed=is_checkpointed), ids()
    found = {}
    for mode in ("flash_fuse_bk", MODE):
        torch.manual_seed(1)
        learn(model, losses, batch)
        found[mode] = clipped_gradients(model, losses, batch, max_norm=0.5, mode=mode)
        found[mode, "after"] = torch.get_rng_state()
    assert_same_bits(found[MODE].norms, found["flash_fuse_bk"].norms)
    assert found[MODE].sums.keys() == found["flash_fuse_bk"].sums.keys()
    for name, value in found["flash_fuse_bk"].sums.items():
        assert_same_bits(found[MODE].sums[name], value)
    assert_same_bits(found[MODE, "after"], found["flash_fuse_bk", "after"])


def test_layers_may_be_clipped_in_different_ways():
    torch.manual_seed(0)
    model, batch = Deep(is_tied=True, depth=2).double(), ids()
    max_norm = median_norm(model, batch)
    expected = clipped_sum(model, losses, batch, max_norm)
    plan = learn(model, losses, batch).plan(
        len(batch), mode="auto", memory_budget=None, machine="cpu"
    )
    methods = {
        "table.weight": Choice("gram", "recomputed"),
        "blocks.0.up.weight": Choice("materialize", "kept"),
        "blocks.0.down.weight": Choice("tile", "recomputed"),
        "blocks.0.down.bias": Choice("tile", "recomputed"),
        "blocks.0.norm.weight": Choice("gram", "records"),
        "blocks.1.up.weight": Choice("gram", "records"),
        "blocks.1.down.weight": Choice("gram", "recomputed"),
    }
    sums, _ = clipped_by(changed(plan, methods), model, batch, max_norm)
    assert_close(sums, expected, dtype=torch.float32)


def test_without_products_there_is_no_second_pass():
    torch.manual_seed(0)
    model, batch = Deep(depth=1).double(), ids()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in ("table.weight", "blocks.0.norm.weight"))
    plan = learn(model, losses, batch).plan(
        len(batch), mode=MODE, memory_budget=None, machine="cpu"
    )
    assert plan.num_forwards == 2
    sums, clipping = clipped_by(plan, model, batch, 0.1)
    assert clipping.num_forwards == 1
    assert_close(sums, clipped_sum(model, losses, batch, 0.1), dtype=torch.float32)


def test_who_has_no_second_pass_to_offer_keeps_the_records():
    """As an engine that does not repeat its forward pass: more memory, the same result."""
    torch.manual_seed(0)
    model, batch = Deep().double(), ids()
    learned = learn(model, losses, batch)
    plan = learned.plan(len(batch), mode=MODE, memory_budget=None, machine="cpu")
    clipping = Clipping(plan, len(batch))
    capture = Capture(model, len(batch), axes=learned.axes, on_record=clipping.take)
    with capture.installed():
        losses(model, batch).sum().backward()
    norms = clipping.norms()
    assert (clipping.num_backwards, clipping.num_forwards) == (1, 1)
    total = norms.total()
    by_name = dict.fromkeys(norms, RULES["flat"](total, 0.1).values)
    sums = dict(clipping.clipped_sums(by_name))
    assert_close(sums, clipped_sum(model, losses, batch, 0.1), dtype=torch.float32)


def test_a_second_pass_that_is_left_out_is_noticed():
    torch.manual_seed(0)
    model, batch = Deep(depth=1).double(), ids()
    learned = learn(model, losses, batch)
    plan = learned.plan(len(batch), mode=MODE, memory_budget=None, machine="cpu")
    clipping = Clipping(plan, len(batch))
    capture = Capture(
        model,
        len(batch),
        axes=learned.axes,
        on_record=clipping.take,
        on_product=clipping.take_product,
    )
    with capture.installed():
        losses(model, batch).sum().backward()
    by_name = dict.fromkeys(clipping.norms(), torch.ones(len(batch), dtype=torch.float64))
    with pytest.raises(
        UnsupportedOperation, match=r"1 of those uses did not come .* keeps records"
    ):
        dict(clipping.clipped_sums(by_name))


class Forgetful(Deep):
    """Draws from a generator that is not torch's."""

    def __init__(self) -> None:
        super().__init__(depth=1)
        self.generator = torch.Generator().manual_seed(0)
        self.noise = 0.0

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        x = x + self.noise * torch.randn(x.shape, generator=self.generator)
        return self.head(self.blocks[0](x))


def test_a_model_that_cannot_be_repeated_is_refused():
    torch.manual_seed(0)
    model, batch = Forgetful(), ids()
    clipped_gradients(model, losses, batch, max_norm=1.0, mode=MODE)
    model.noise = 0.1
    with pytest.raises(UnsupportedOperation, match=r"blocks\.0\.up\.weight.*bits.*flash_fuse_bk"):
        clipped_gradients(model, losses, batch, max_norm=1.0, mode=MODE)
    clipped_gradients(model, losses, batch, max_norm=1.0, mode="flash_fuse_bk")
    model.noise = 0.0  # nothing was left behind
    clipped_gradients(model, losses, batch, max_norm=1.0, mode=MODE)


@pytest.mark.full
@pytest.mark.parametrize("name", ["gpt2", "llama+lora", "bert"])
def test_models_of_transformers(name):
    torch.manual_seed(0)
    case = ZOO[name]
    model, batch = case.make().double().train(), case.batch(3)
    norms = per_sample_norms(model, case.loss, batch)
    max_norm = float(norms.median())
    found = clipped_gradients(model, case.loss, batch, max_norm=max_norm, mode=MODE)
    torch.testing.assert_close(found.norms, norms, rtol=1e-6, atol=0.0)
    expected = clipped_sum(model, case.loss, batch, max_norm)
    for key, value in expected.items():
        error = float((found.sums[key].double() - value).norm())
        assert error <= 1e-6 * max_norm, key


# ---- the planner -------------------------------------------------------------------------------


def test_auto_recomputes_what_does_not_fit():
    """Under checkpointing, a second forward pass is cheaper than a second backward pass."""
    torch.manual_seed(0)
    model, batch = Deep(width=256, depth=2), ids(batch=4, tokens=32)
    learned = learn(model, losses, batch).layers
    layers = [replace(each, batch=4, freed_per_sample=0) for each in learned]  # by shapes alone
    by_name = {each.name: each for each in layers}
    assert by_name["blocks.0.up.weight"].is_checkpointed
    assert not by_name["head.weight"].is_checkpointed
    assert all(each.is_repeatable for each in layers)
    max_norm = median_norm(model, batch)
    expected = clipped_sum(model, losses, batch, max_norm)
    budget, seen = plan_clipping(layers).bytes_needed, []
    while plan_clipping(layers, memory_budget=budget).num_backwards == 1:
        found = clipped_gradients(model, losses, batch, max_norm=max_norm, memory_budget=budget)
        assert_close(found.sums, expected, dtype=torch.float32)
        seen.append((found.plan.num_forwards, found.plan.seconds))
        methods = {each.chosen.choice.gradient for each in found.plan.layers}
        assert (found.plan.num_forwards == 2) == ("recomputed" in methods)
        budget = min(found.plan.bytes_needed - 1, int(0.9 * budget))
    assert {num_forwards for num_forwards, _ in seen} == {1, 2}
    assert seen == sorted(seen)


def test_reentrant_checkpointing_is_planned_with_what_it_keeps():
    model, batch, loss = make("reentrant checkpoint")
    layers = {each.name: each for each in learn(model, loss, batch).layers}
    block, head = layers["block.1.weight"], layers["head.weight"]
    assert (block.is_checkpointed, block.is_repeatable) == (True, False)
    assert (head.is_checkpointed, head.is_repeatable) == (False, True)
    for layer, is_smaller in ((block, False), (head, True)):
        (planned,) = plan_clipping([layer], mode=MODE).layers
        kept = {str(a.choice): a.cost.kept_bytes for a in planned.alternatives}
        assert (kept["tile+recomputed"] < kept["tile+records"]) == is_smaller


def test_one_layer_that_is_recomputed_costs_a_whole_forward_pass():
    layers = [
        replace(each, batch=4)
        for each in learn(Deep(), losses, ids()).layers
        if each.name.endswith(("up.weight", "down.weight"))
    ]
    plan = plan_clipping(layers, mode="flash_fuse_bk")
    one = changed(plan, {layers[0].name: Choice("tile", "recomputed")})
    both = changed(plan, {each.name: Choice("tile", "recomputed") for each in layers[:2]})
    assert one.num_forwards == both.num_forwards == 2
    first = one.seconds - plan.seconds
    second = both.seconds - one.seconds
    assert first > 3 * second > 0
    assert GRADIENT_METHODS["recomputed"] == (1, 2)
