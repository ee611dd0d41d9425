"""unison's language models as transformers' own: a decoder is a Llama, a gpt2 a GPT-2."""

from typing import Any

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from unison.models import LanguageModel, ModelConfig

_LLAMA_NAMES = {
    "token_embeddings": "model.embed_tokens",
    "layers": "model.layers",
    "ln_final": "model.norm",
    "ln1": "input_layernorm",
    "ln2": "post_attention_layernorm",
    "attn": "self_attn",
    "output_proj": "o_proj",
    "ffn": "mlp",
    "w1": "gate_proj",
    "w2": "down_proj",
    "w3": "up_proj",
}
_GPT2_NAMES = {
    "token_embeddings": "transformer.wte",
    "position_embeddings": "transformer.wpe",
    "layers": "transformer.h",
    "ln_final": "transformer.ln_f",
    "ln1": "ln_1",
    "ln2": "ln_2",
    "qkv_proj": "c_attn",
    "output_proj": "c_proj",
    "ffn": "mlp",
    "w1": "c_fc",
    "w2": "c_proj",
}


@torch.no_grad()
def as_transformers(model: LanguageModel) -> Any:
    """Return a model of transformers with the same parameters, and so the same logits."""
    config = model.config
    is_llama = config.family == "decoder"
    twin: Any = _llama(config) if is_llama else _gpt2(config)
    twin.to(next(model.parameters()).dtype)
    names = _LLAMA_NAMES if is_llama else _GPT2_NAMES
    for name, parameter in model.named_parameters():
        path = ".".join(names.get(part, part) for part in name.split("."))
        value = _as_llama(name, parameter, config) if is_llama else _as_gpt2(name, parameter)
        twin.get_parameter(path).copy_(value)
    return twin.eval()


def _llama(config: ModelConfig) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            max_position_embeddings=config.context_length,
            hidden_size=config.d_model,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            intermediate_size=config.d_ff,
            rms_norm_eps=config.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            tie_word_embeddings=config.tie_head,
        )
    )


def _gpt2(config: ModelConfig) -> GPT2LMHeadModel:
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=config.vocab_size,
            n_positions=config.context_length,
            n_embd=config.d_model,
            n_layer=config.num_layers,
            n_head=config.num_heads,
            n_inner=config.d_ff,
            layer_norm_epsilon=config.norm_eps,
            resid_pdrop=config.dropout,
            attn_pdrop=0.0,
            embd_pdrop=0.0,
            bos_token_id=None,
            eos_token_id=None,
            tie_word_embeddings=config.tie_head,
        )
    )


def _as_llama(name: str, value: Tensor, config: ModelConfig) -> Tensor:
    if "q_proj" not in name and "k_proj" not in name:
        return value
    # Llama rotates feature i with i + d/2, we rotate 2i with 2i + 1.
    half = config.d_model // config.num_heads // 2
    return value.view(config.num_heads, half, 2, -1).transpose(1, 2).reshape(value.shape)


def _as_gpt2(name: str, value: Tensor) -> Tensor:
    is_transposed = name.startswith("layers.") and value.ndim == 2  # transformers' Conv1D
    return value.T if is_transposed else value
