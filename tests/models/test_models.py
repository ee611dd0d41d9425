"""The built-in models: shapes, counts, and equality with independent implementations."""

import dataclasses

import pytest
import torch

from unison.errors import BadInput
from unison.models import PRESETS, ModelConfig, build, count_parameters, load, preset, save

TINY_GPT2 = ModelConfig(
    family="gpt2",
    vocab_size=61,
    context_length=13,
    d_model=24,
    num_layers=3,
    num_heads=4,
    d_ff=40,
    tie_head=True,
)
TINY_DECODER = ModelConfig(
    family="decoder",
    vocab_size=61,
    context_length=13,
    d_model=24,
    num_layers=3,
    num_heads=4,
    d_ff=40,
)
BOTH = pytest.mark.parametrize("config", [TINY_DECODER, TINY_GPT2], ids=["decoder", "gpt2"])

COUNTS = {
    "tiny": 1_017_472,
    "small": 7_252_480,
    "gpt2": 124_439_808,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "13b": 12_853_386_240,
    "175b": 174_604_259_328,
    "1t": 1_008_014_617_600,
}


@pytest.mark.parametrize("name", PRESETS)
def test_preset_is_built_without_memory(name):
    model = build(name, device="meta")
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert count_parameters(model) == COUNTS[name]


def test_small_has_the_parameters_of_the_reference_notes():
    names = [name for name, _ in build("small", device="meta").named_parameters()]
    assert len(names) == 21
    assert names[0] == "token_embeddings.weight"
    assert names[-2:] == ["ln_final.weight", "lm_head.weight"]
    assert sum(name.startswith("layers.0.") for name in names) == 9


@pytest.mark.parametrize("tie_head", [False, True])
@BOTH
def test_both_families_equal_transformers(config, tie_head):
    from unison.hf.command import as_transformers

    config = dataclasses.replace(config, tie_head=tie_head, rope_theta=500.0)
    ours = build(config).double()
    ours.reset_buffers()  # again, now in float64
    theirs = as_transformers(ours)
    assert count_parameters(ours) == count_parameters(theirs)
    ids = torch.arange(2 * 11).reshape(2, 11) % config.vocab_size
    # transformers computes the rotary tables in float32
    near = (1e-4, 1e-5) if config.family == "decoder" else (1e-10, 1e-12)
    torch.testing.assert_close(ours(ids), theirs(ids).logits, rtol=near[0], atol=near[1])


@BOTH
@pytest.mark.parametrize("shape", [(0, 5), (1, 1), (3, 13)])
def test_any_batch_and_length(config, shape):
    model = build(config)
    logits = model(torch.zeros(shape, dtype=torch.long))
    assert logits.shape == (*shape, config.vocab_size)


@BOTH
def test_position_sees_only_its_past(config):
    model = build(config)
    ids = torch.arange(12).reshape(1, 12)
    changed = ids.clone()
    changed[0, 7:] = 60
    difference = (model(ids) - model(changed)).abs().amax(-1)[0]
    assert (difference[:7] == 0).all()
    assert (difference[7:] > 0).all()


@BOTH
def test_row_longer_than_the_context_is_refused(config):
    with pytest.raises(BadInput, match="14 tokens is longer than the model's context of 13"):
        build(config)(torch.zeros(1, 14, dtype=torch.long))


def test_tied_head_shares_memory_after_building():
    model = build(TINY_GPT2)
    assert model.lm_head.weight is model.token_embeddings.weight
    assert "lm_head.weight" not in dict(model.named_parameters())


def test_building_leaves_the_global_generator_alone():
    state = torch.get_rng_state()
    build("tiny")
    assert torch.equal(state, torch.get_rng_state())


@BOTH
def test_saved_model_loads_as_it_was(config, tmp_path):
    model = build(config, seed=3)
    save(config, dict(model.named_parameters()), tmp_path)
    loaded = load(tmp_path)
    ids = torch.arange(10).reshape(2, 5)
    assert loaded.config == config
    assert torch.equal(model(ids), loaded(ids))


def test_loading_from_elsewhere_says_what_is_missing(tmp_path):
    with pytest.raises(BadInput, match=r"found no model\.json"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"num_head": 3}, "did you mean 'num_heads'"),
        ({"num_heads": 3}, "num_heads must divide d_model"),
        ({"d_model": 0}, "d_model must be above 0"),
        ({"dropout": 1.5}, "dropout must lie between 0 and 1"),
        ({"d_model": 12, "num_heads": 4}, "even head width"),
    ],
)
def test_bad_config_is_refused(overrides, message):
    with pytest.raises(BadInput, match=message):
        preset("tiny", **overrides)


def test_misspelt_preset_is_suggested():
    with pytest.raises(BadInput, match="did you mean 'small'"):
        preset("smal")
