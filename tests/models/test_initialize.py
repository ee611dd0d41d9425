"""Described inits: the description is the truth, and it can be replayed."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from unison.errors import BadInput
from unison.models import PRESETS, LanguageModel, build, named_inits, preset
from unison.rng.inits import Constant, Normal, TruncatedNormal


@pytest.mark.parametrize("name", PRESETS)
def test_every_parameter_knows_its_init(name):
    model = build(name, device="meta")
    inits = named_inits(model)
    assert inits.keys() == dict(model.named_parameters()).keys()


def test_decoder_inits_are_those_of_the_reference_notes():
    inits = named_inits(build("small", device="meta"))
    assert inits["token_embeddings.weight"] == TruncatedNormal(std=1.0, low=-3.0, high=3.0)
    std = math.sqrt(2 / (512 + 1344))
    assert inits["layers.1.ffn.w1.weight"] == TruncatedNormal(std=std, low=-3 * std, high=3 * std)
    assert inits["ln_final.weight"] == Constant(value=1.0)


def test_gpt2_scales_residual_projections():
    inits = named_inits(build("gpt2", device="meta"))
    assert inits["layers.0.attn.qkv_proj.weight"] == Normal(std=0.02)
    assert inits["layers.0.attn.output_proj.weight"] == Normal(std=0.02 / math.sqrt(24))
    assert inits["layers.0.ffn.w2.weight"] == Normal(std=0.02 / math.sqrt(24))


@pytest.mark.parametrize("family", ["tiny", "gpt2"])
def test_values_follow_their_description(family):
    model = build(preset(family, num_layers=1, d_model=128, num_heads=4, vocab_size=1000), seed=1)
    inits = named_inits(model)
    for name, parameter in model.named_parameters():
        match inits[name]:
            case Constant(value=value):
                assert (parameter == value).all(), name
            case Normal(mean=mean, std=std):
                tolerance = 5 * std / math.sqrt(parameter.numel())
                assert abs(parameter.mean().item() - mean) < tolerance, name
                assert abs(parameter.std().item() / std - 1) < 0.05, name
            case TruncatedNormal(std=std, low=low, high=high):
                assert parameter.min() >= low, name
                assert parameter.max() <= high, name
                # a normal cut at three standard deviations keeps 0.9866 of its spread
                assert abs(parameter.std().item() / (0.9866 * std) - 1) < 0.05, name
            case other:
                raise AssertionError(f"{name}: {other}")


def test_values_depend_on_seed_and_name_only():
    full = dict(build("tiny", seed=5).named_parameters())
    torch.manual_seed(1234)
    fewer = dict(build(preset("tiny", num_layers=2), seed=5).named_parameters())
    other = dict(build("tiny", seed=6).named_parameters())
    for name, parameter in fewer.items():
        assert torch.equal(parameter, full[name]), name
    drawn = [name for name, init in named_inits(build("tiny")).items() if init != Constant(value=1)]
    assert drawn
    assert all(not torch.equal(full[name], other[name]) for name in drawn)


def test_two_parameters_of_one_shape_differ():
    model = build("tiny")
    q, k = (model.get_parameter(f"layers.0.attn.{name}_proj.weight") for name in "qk")
    assert not torch.equal(q, k)


def test_a_model_built_by_hand_draws_from_torch():
    config = preset("gpt2", num_layers=2, vocab_size=100)
    torch.manual_seed(0)
    first = LanguageModel(config)
    torch.manual_seed(0)
    second = LanguageModel(config)
    for name, parameter in first.named_parameters():
        assert torch.equal(parameter, second.get_parameter(name))
    layer: Any = first.get_submodule("layers.0.ffn.w2")
    assert abs(layer.weight.std().item() / (0.02 / 2) - 1) < 0.05
    assert (layer.bias == 0).all()


def test_undescribed_parameter_is_named():
    with pytest.raises(BadInput, match=r"parameter 'head\.weight' has no described init"):
        named_inits(nn.ModuleDict({"head": nn.Linear(2, 2)}))
