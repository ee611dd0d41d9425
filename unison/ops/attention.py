"""Attention: torch's own multi-head attention, and attention with a learned bias.

torch computes its output projection on rows flattened token by token, where a sample has no place
of its own. Here it is computed again from its parts, so that every parameter meets a tensor
[tokens, batch, features]; each part is an operation with a rule of its own.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from unison.errors import UnsupportedOperation
from unison.ops.registry import Tap, rule


@rule(F.scaled_dot_product_attention)
def scaled_dot_product_attention(
    tap: Tap, query: Any, key: Any, value: Any, attn_mask: Any = None, *args: Any, **options: Any
) -> Any:
    """Attention with a learned bias [..., heads, tokens, tokens], handed out to every sample."""
    if any(tap.tracks(each) for each in (query, key, value)) or query.ndim != 4:
        return NotImplemented
    shape = torch.broadcast_shapes(tap.plain(attn_mask).shape, (len(query), 1, 1, 1))
    bias = tap.expand(attn_mask, shape, query)
    return F.scaled_dot_product_attention(query, key, value, bias, *args, **options)


@rule(F.multi_head_attention_forward)
def multi_head_attention(
    tap: Tap,
    query: Any,  # [queries, batch, features]
    key: Any,  # [keys, batch, key features]
    value: Any,  # [keys, batch, value features]
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Any,
    in_proj_bias: Any,
    bias_k: Any,
    bias_v: Any,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Any,
    out_proj_bias: Any,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Any = None,
    k_proj_weight: Any = None,
    v_proj_weight: Any = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> Any:
    """`F.multi_head_attention_forward`, and so `nn.MultiheadAttention`."""
    if any(tap.tracks(each) for each in (query, key, value)):
        return NotImplemented
    if query.ndim != 3 or static_k is not None or static_v is not None:
        raise UnsupportedOperation(
            "multi-head attention without a batch dimension, or with static keys or values"
        )
    if use_separate_proj_weight:
        weights = (q_proj_weight, k_proj_weight, v_proj_weight)
        biases = (None,) * 3 if in_proj_bias is None else in_proj_bias.chunk(3)
        q, k, v = map(F.linear, (query, key, value), weights, biases)
    else:
        q, k, v = _packed_projection(query, key, value, in_proj_weight, in_proj_bias)
    batch, num_keys = k.shape[1], k.shape[0]
    if bias_k is not None:  # one learned key and value more
        k = torch.cat([k, tap.expand(bias_k, (1, batch, -1), k)])
        v = torch.cat([v, tap.expand(bias_v, (1, batch, -1), v)])
    if add_zero_attn:
        k, v = F.pad(k, (0, 0, 0, 0, 0, 1)), F.pad(v, (0, 0, 0, 0, 0, 1))
    has_hint = is_causal and key_padding_mask is None and not need_weights
    mask = _merged_mask(
        None if has_hint else attn_mask,
        key_padding_mask,
        num_heads=num_heads,
        num_extra=k.shape[0] - num_keys,
        dtype=query.dtype,
    )
    # [tokens, batch, features] to [batch, heads, tokens, features of a head]
    q, k, v = (each.unflatten(-1, (num_heads, -1)).permute(1, 2, 0, 3) for each in (q, k, v))
    dropout_p = dropout_p if training else 0.0
    if need_weights:
        scores = (q * math.sqrt(1.0 / q.shape[-1])) @ k.mT  # [batch, heads, queries, keys]
        shares = torch.softmax(scores if mask is None else scores + mask, dim=-1)
        shares = F.dropout(shares, dropout_p)
        mixed = shares @ v
        weights = shares.mean(dim=1) if average_attn_weights else shares
    else:
        mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout_p, has_hint)
        weights = None
    mixed = mixed.permute(2, 0, 1, 3).flatten(2)  # [queries, batch, features]
    return F.linear(mixed, out_proj_weight, out_proj_bias), weights


def _packed_projection(
    query: Tensor, key: Tensor, value: Tensor, weight: Any, bias: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values by one matrix [3 * features, features]: one use where they can."""
    if query is key and key is value:
        q, k, v = F.linear(query, weight, bias).chunk(3, dim=-1)
        return q, k, v
    size = query.shape[-1]
    if key is value:
        first, rest = weight.split([size, 2 * size])
        b_first, b_rest = (None, None) if bias is None else bias.split([size, 2 * size])
        k, v = F.linear(key, rest, b_rest).chunk(2, dim=-1)
        return F.linear(query, first, b_first), k, v
    weights = weight.chunk(3)
    biases = (None,) * 3 if bias is None else bias.chunk(3)
    q, k, v = map(F.linear, (query, key, value), weights, biases)
    return q, k, v


def _merged_mask(
    attention: Tensor | None,  # [queries, keys] or [batch * heads, queries, keys]
    padding: Tensor | None,  # [batch, keys]
    *,
    num_heads: int,
    num_extra: int,
    dtype: torch.dtype,
) -> Tensor | None:
    """Both masks as one to add to scores [batch, heads, queries, keys + extra]."""
    merged = None
    if attention is not None:
        merged = _added(attention, num_extra, dtype)
        if merged.ndim == 3:
            merged = merged.unflatten(0, (-1, num_heads))
    if padding is not None:
        extended = _added(padding, num_extra, dtype)[:, None, None]
        merged = extended if merged is None else merged + extended
    return merged


def _added(mask: Tensor, num_extra: int, dtype: torch.dtype) -> Tensor:
    """A mask as numbers to add, with nothing masked in the extra keys at its end."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)
    return F.pad(mask, (0, num_extra))
