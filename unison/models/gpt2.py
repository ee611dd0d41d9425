"""A GPT-2-style language model: learned positions, LayerNorm, GELU, biases, optionally tied."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unison.models.config import ModelConfig
from unison.models.language_model import Head, LanguageModel
from unison.models.layers import (
    Embedding,
    LayerNorm,
    Linear,
    causal_attention,
    join_heads,
    split_heads,
)
from unison.rng.inits import Normal

WEIGHT_STD = 0.02
POSITION_STD = 0.01


def _residual_init(config: ModelConfig) -> Normal:
    """Projections onto the residual stream start smaller, so that its variance does not grow."""
    return Normal(std=WEIGHT_STD / math.sqrt(2 * config.num_layers))


class SelfAttention(nn.Module):
    """Causal multi-head attention with one joint projection for queries, keys and values."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        d = config.d_model
        self.num_heads = config.num_heads
        self.qkv_proj = Linear(d, 3 * d, init=Normal(std=WEIGHT_STD), bias=True)
        self.output_proj = Linear(d, d, init=_residual_init(config), bias=True)

    def forward(self, x: Tensor) -> Tensor:  # [batch, tokens, d_model]
        """Attend within each row."""
        q, k, v = (split_heads(y, self.num_heads) for y in self.qkv_proj(x).chunk(3, dim=-1))
        return self.output_proj(join_heads(causal_attention(q, k, v)))


class FeedForward(nn.Module):
    """`W2 gelu(W1 x + b1) + b2`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        d, d_ff = config.d_model, config.d_ff
        self.w1 = Linear(d, d_ff, init=Normal(std=WEIGHT_STD), bias=True)
        self.w2 = Linear(d_ff, d, init=_residual_init(config), bias=True)

    def forward(self, x: Tensor) -> Tensor:  # [batch, tokens, d_model]
        """Apply the feed-forward part to every token."""
        return self.w2(F.gelu(self.w1(x), approximate="tanh"))


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm and beside a residual path."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.ln1 = LayerNorm(config.d_model, eps=config.norm_eps)
        self.attn = SelfAttention(config)
        self.ln2 = LayerNorm(config.d_model, eps=config.norm_eps)
        self.ffn = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:  # [batch, tokens, d_model]
        """Run one block."""
        x = x + self.dropout(self.attn(self.ln1(x)))
        return x + self.dropout(self.ffn(self.ln2(x)))


class GPT2LM(LanguageModel):
    """The GPT-2 family as one module: token ids in, logits out."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.token_embeddings = Embedding(
            config.vocab_size, config.d_model, init=Normal(std=WEIGHT_STD)
        )
        self.position_embeddings = Embedding(
            config.context_length, config.d_model, init=Normal(std=POSITION_STD)
        )
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.ln_final = LayerNorm(config.d_model, eps=config.norm_eps)
        self.lm_head = Head(
            config.d_model, config.vocab_size, init=Normal(std=WEIGHT_STD), bias=False
        )
        self.tie_head_if_asked()

    def hidden_states(self, token_ids: Tensor) -> Tensor:  # -> [batch, tokens, d_model]
        """Return what goes into the head."""
        self.check_row_length(token_ids)
        positions = torch.arange(token_ids.shape[-1], device=token_ids.device)
        x = self.token_embeddings(token_ids) + self.position_embeddings(positions)
        x = self.dropout(x)
        for layer in self.layers:
            x = layer(x)
        return self.ln_final(x)
