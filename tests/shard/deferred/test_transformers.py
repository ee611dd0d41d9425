"""Models of transformers, of many families, start as transformers itself would start them."""

import math
from typing import Any

import pytest
import torch

from unison.shard import materialize, meta_init

SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
}  # fmt: skip
TEXT = {"vocab_size": 200, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
IMAGE = {"image_size": 32, "patch_size": 8}
KEYS = {"num_key_value_heads": 2}

# By class: its config class and settings.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "BertForMaskedLM": ("BertConfig", {**SIZES, **TEXT}),
    "BloomForCausalLM": ("BloomConfig", {"hidden_size": 32, "n_layer": 2, "n_head": 4, **TEXT}),
    "CLIPModel": ("CLIPConfig", {
        "text_config": {**SIZES, **TEXT}, "vision_config": {**SIZES, **IMAGE},
    }),
    "DebertaV2Model": ("DebertaV2Config", {**SIZES, **TEXT}),
    "Gemma2ForCausalLM": ("Gemma2Config", {**SIZES, **TEXT, **KEYS, "head_dim": 8}),
    "Mamba2ForCausalLM": ("Mamba2Config", {
        "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "num_heads": 8, "head_dim": 8,
        "n_groups": 1, **TEXT,
    }),
    "MambaForCausalLM": ("MambaConfig", {
        "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, **TEXT,
    }),
    "MixtralForCausalLM": ("MixtralConfig", {**SIZES, **TEXT, **KEYS, "num_local_experts": 4}),
    "OPTForCausalLM": ("OPTConfig", {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 48,
        "word_embed_proj_dim": 32, **TEXT,
    }),
    "PhiForCausalLM": ("PhiConfig", {**SIZES, **TEXT}),
    "Qwen3ForCausalLM": ("Qwen3Config", {**SIZES, **TEXT, **KEYS, "head_dim": 8}),
    "ResNetModel": ("ResNetConfig", {
        "embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1],
    }),
    "SwinModel": ("SwinConfig", {
        "image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2],
        "window_size": 4,
    }),
    "T5ForConditionalGeneration": ("T5Config", {
        "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, **TEXT,
    }),
    "ViTModel": ("ViTConfig", {**SIZES, **IMAGE}),
    "Wav2Vec2Model": ("Wav2Vec2Config", {
        **SIZES, **TEXT, "conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3),
        "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 16,
        "num_conv_pos_embedding_groups": 4,
    }),
    "WhisperModel": ("WhisperConfig", {
        "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
        "decoder_start_token_id": 1, **TEXT,
    }),
}  # fmt: skip


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")  # transformers warns of its own doings
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_has_its_own_distributions(name):
    transformers = pytest.importorskip("transformers")
    config_name, settings = FAMILIES[name]
    config = getattr(transformers, config_name)(**settings)
    family = getattr(transformers, name)
    before = torch.get_rng_state()
    with meta_init():
        model = family(config)
    assert torch.equal(torch.get_rng_state(), before)
    materialize(model, seed=0)
    found, eager = tensors(model), tensors(family(config))
    assert list(found) == list(eager)
    for key, value in eager.items():
        assert found[key].dtype == value.dtype
        assert found[key].requires_grad == value.requires_grad
        if torch.equal(found[key], value):
            continue
        spread = value.double().std()
        assert spread > 0, key  # what is constant would have been equal
        assert abs(found[key].double().std() / spread - 1) < 8 / math.sqrt(value.numel()), key


def tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
