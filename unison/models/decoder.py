"""A decoder language model: rotary positions, RMSNorm, SwiGLU, no biases.

Its module names are those of the reference notes (`token_embeddings`, `positional_encoder`,
`layers`, `ln_final`, `lm_head`): a two-layer model has 21 parameters, nine per block.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unison.models.config import ModelConfig
from unison.models.language_model import Head, LanguageModel
from unison.models.layers import (
    Embedding,
    Linear,
    RMSNorm,
    causal_attention,
    join_heads,
    split_heads,
    truncated_at_3_std,
)


class RotaryEmbedding(nn.Module):
    """Rotates pairs of query and key features by an angle that grows with the position.

    The tables are buffers that no checkpoint stores: they follow from the shape alone.
    `reset_buffers` computes them, so that a model built without memory gets them back.
    """

    cos: Tensor  # [context, d_head / 2]
    sin: Tensor  # [context, d_head / 2]

    def __init__(self, context_length: int, d_head: int, theta: float) -> None:
        super().__init__()
        self.theta = theta
        shape = (context_length, d_head // 2)
        self.register_buffer("cos", torch.empty(shape), persistent=False)
        self.register_buffer("sin", torch.empty(shape), persistent=False)
        self.reset_buffers()

    def reset_buffers(self) -> None:
        """Fill the tables, in float64 before the one rounding to their own dtype."""
        context_length, half = self.cos.shape
        device = self.cos.device
        exponent = torch.arange(half, dtype=torch.float64, device=device) / half
        position = torch.arange(context_length, dtype=torch.float64, device=device)
        angle = torch.outer(position, self.theta**-exponent)
        self.cos.copy_(angle.cos())
        self.sin.copy_(angle.sin())

    def forward(self, x: Tensor) -> Tensor:  # [batch, heads, tokens, d_head]
        """Rotate features (0, 1), (2, 3), ... of every position."""
        tokens = x.shape[-2]
        cos, sin = self.cos[:tokens].to(x.dtype), self.sin[:tokens].to(x.dtype)
        even, odd = x[..., 0::2], x[..., 1::2]
        rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
        return rotated.flatten(-2)


class SelfAttention(nn.Module):
    """Causal multi-head attention with rotary positions."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.q_proj = Linear(config.d_model, config.d_model, bias=False)
        self.k_proj = Linear(config.d_model, config.d_model, bias=False)
        self.v_proj = Linear(config.d_model, config.d_model, bias=False)
        self.output_proj = Linear(config.d_model, config.d_model, bias=False)

    def forward(self, x: Tensor, rotate: RotaryEmbedding) -> Tensor:  # [batch, tokens, d_model]
        """Attend within each row."""
        q = rotate(split_heads(self.q_proj(x), self.num_heads))
        k = rotate(split_heads(self.k_proj(x), self.num_heads))
        v = split_heads(self.v_proj(x), self.num_heads)
        return self.output_proj(join_heads(causal_attention(q, k, v)))


class SwiGLU(nn.Module):
    """`W2 (silu(W1 x) * W3 x)`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.w1 = Linear(config.d_model, config.d_ff, bias=False)
        self.w2 = Linear(config.d_ff, config.d_model, bias=False)
        self.w3 = Linear(config.d_model, config.d_ff, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [batch, tokens, d_model]
        """Apply the gated feed-forward part to every token."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm and beside a residual path."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.ln1 = RMSNorm(config.d_model, eps=config.norm_eps)
        self.attn = SelfAttention(config)
        self.ln2 = RMSNorm(config.d_model, eps=config.norm_eps)
        self.ffn = SwiGLU(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, rotate: RotaryEmbedding) -> Tensor:  # [batch, tokens, d_model]
        """Run one block."""
        x = x + self.dropout(self.attn(self.ln1(x), rotate))
        return x + self.dropout(self.ffn(self.ln2(x)))


class DecoderLM(LanguageModel):
    """The decoder family as one module: token ids in, logits out."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.token_embeddings = Embedding(
            config.vocab_size, config.d_model, init=truncated_at_3_std(1.0)
        )
        self.positional_encoder = RotaryEmbedding(
            config.context_length, config.d_model // config.num_heads, config.rope_theta
        )
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.ln_final = RMSNorm(config.d_model, eps=config.norm_eps)
        self.lm_head = Head(config.d_model, config.vocab_size, bias=False)
        self.tie_head_if_asked()

    def reset_buffers(self) -> None:
        """Compute the rotary tables."""
        self.positional_encoder.reset_buffers()

    def hidden_states(self, token_ids: Tensor) -> Tensor:  # -> [batch, tokens, d_model]
        """Return what goes into the head."""
        self.check_row_length(token_ids)
        x = self.token_embeddings(token_ids)
        for layer in self.layers:
            x = layer(x, self.positional_encoder)
        return self.ln_final(x)
