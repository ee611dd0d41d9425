"""Modules that are copied, filled again or saved, with values and without."""

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

from tests.harness import assert_same_bits
from tests.shard.deferred.cases import SEED, Constants, OneDraw, draw
from tests.shard.deferred.common import built, linear_init
from unison.errors import BadInput
from unison.rng.inits import Normal
from unison.shard import materialize, meta_init
from unison.shard.deferred.recorder import recipe_of

# --- deepcopy ------------------------------------------------------------------------------------


def test_copies_draw_under_their_own_names():
    layers = built(
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3)
    ).layers
    first, second = layers[0].linear1.weight, layers[1].linear1.weight
    bound = linear_init(8)
    assert_same_bits(first.detach(), draw(bound, "layers.0.linear1.weight", (16, 8)))
    assert_same_bits(second.detach(), draw(bound, "layers.1.linear1.weight", (16, 8)))


def test_copies_after_building_have_recipes_too():
    with meta_init():
        block = nn.Sequential(nn.Linear(11, 37), nn.BatchNorm1d(37))
        block[0].twice = nn.Parameter(block[0].get_parameter("weight").detach() * 2)
    blocks = nn.ModuleList([block, copy.deepcopy(block), copy.deepcopy(block).bfloat16()])
    assert all(p.is_meta for p in blocks.parameters())
    materialize(blocks, seed=SEED)
    bound = linear_init(11)
    children: list[Any] = list(blocks)
    for index, child in enumerate(children):
        expected = draw(bound, f"{index}.0.weight")
        dtype = torch.float32 if index < 2 else torch.bfloat16
        assert_same_bits(child[0].weight.detach(), expected.to(dtype))
        # What a block's parameters have in common they have in common in the copy.
        assert_same_bits(child[0].twice.detach(), (expected * 2).to(dtype))
        assert child[1].num_batches_tracked == 0
        assert (child[1].running_var == 1).all()


def test_a_copy_can_be_made_equal():
    """A teacher that starts as its student."""

    def make():
        student = nn.Linear(3, 4)
        teacher = copy.deepcopy(student)
        teacher.load_state_dict(student.state_dict())
        return nn.ModuleDict({"student": student, "teacher": teacher})

    module = built(make)
    assert torch.equal(module.student.weight, module.teacher.weight)


# --- filling again, saving -----------------------------------------------------------------------


def test_another_seed_fills_anew_in_the_same_memory():
    module = built(OneDraw)
    parameter, address = module.w, module.w.data_ptr()
    materialize(module, seed=SEED + 1)
    assert module.w is parameter
    assert module.w.data_ptr() == address
    assert not torch.equal(module.w, draw(Normal(std=0.02), "w"))
    materialize(module, seed=SEED)
    assert_same_bits(module.w.detach(), draw(Normal(std=0.02), "w"))


def test_an_optimizer_made_before_holds_the_parameters():
    with meta_init():
        module = nn.Linear(3, 4)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    materialize(module, seed=SEED)
    before = module.weight.detach().clone()
    module(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    assert not torch.equal(module.weight, before)


def test_a_filled_module_is_saved_as_any_other():
    module, buffer = built(Constants), io.BytesIO()
    torch.save(dict(module.named_parameters()), buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)
    assert torch.equal(loaded["eye"], module.eye)
    assert recipe_of(loaded["eye"]) is None


def test_a_copy_of_a_filled_module_keeps_its_values():
    module = copy.deepcopy(built(Constants))
    with pytest.raises(BadInput, match="nothing to fill"):
        materialize(module, seed=0)


def test_a_module_without_values_is_not_saved():
    with meta_init():
        module = nn.Linear(3, 4)
    with pytest.raises(TypeError, match="no values to save yet"):
        torch.save(module, io.BytesIO())
