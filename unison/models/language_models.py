"""The built-in language models: what they share, two families, and how one is built and stored.

Every parameter knows its init: `named_inits` collects the descriptions of a whole model by the
names of parameters, and `initialize` draws the values from them. A value depends on the seed, the
parameter's name and the element's index; not on the order of construction, not on the device, not
on other parameters. On disk a model is its config as JSON beside its parameters as safetensors;
never a pickle.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unison.errors import BadInput
from unison.kernels.cross_entropy import linear_cross_entropy
from unison.models.config import ModelConfig, preset
from unison.models.layers import (
    Embedding,
    LayerNorm,
    Norm,
    Projection,
    RMSNorm,
    causal_attention,
    split_heads,
    truncated_at_3_std,
)
from unison.rng import Key, fill_
from unison.rng.inits import Init, Normal

CONFIG_FILE = "model.json"
WEIGHTS_FILE = "model.safetensors"

WEIGHT_STD = 0.02  # of the GPT-2 family
POSITION_STD = 0.01


class LanguageModelHead(Projection):
    """The last layer: logits of every token, or with labels the loss of every sample.

    Both are this module's own forward, so that whoever watches or gathers the parameters of a
    module does so for either.
    """

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return logits [batch, tokens, vocab], or losses [batch] that never hold them.

        Args:
            x: Hidden states [batch, tokens, d_model].
            labels: The token after each position [batch, tokens], -100 where none counts.
        """
        if labels is None:
            return super().forward(x)
        return linear_cross_entropy(x, self.weight, labels, bias=self.bias, reduction="sample_mean")


class LanguageModel(nn.Module):
    """Base of the built-in models: token ids [batch, tokens] in, logits out."""

    token_embeddings: Embedding
    lm_head: LanguageModelHead

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config

    def tie_head_if_asked(self) -> None:
        """Make the head's weight the embedding table itself, when the config says so."""
        if self.config.tie_head:
            self.lm_head.weight = self.token_embeddings.weight

    def hidden_states(self, token_ids: Tensor) -> Tensor:
        """Return what goes into the head: [batch, tokens] -> [batch, tokens, d_model]."""
        raise NotImplementedError

    def forward(self, token_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return the logits of the token after each position, or the loss of each sample.

        Args:
            token_ids: [batch, tokens].
            labels: The token after each position [batch, tokens], -100 where none counts. They are
                compared as they are, and not shifted.

        Returns:
            Logits [batch, tokens, vocab]; with labels what `unison.per_sample_loss` makes of them,
            [batch], without logits of the whole batch in memory.
        """
        hidden = self.hidden_states(token_ids)
        # By name: plans of tensor parallelism put one tensor in the place of positional arguments.
        return self.lm_head(hidden) if labels is None else self.lm_head(hidden, labels=labels)

    def reset_buffers(self) -> None:
        """Compute the buffers that follow from the config; the base has none."""

    def check_row_length(self, token_ids: Tensor) -> None:
        """Refuse a row that is longer than the positions the model knows."""
        if token_ids.ndim != 2:
            raise BadInput(f"token_ids must be [batch, tokens], found {list(token_ids.shape)}")
        if token_ids.shape[1] > self.config.context_length:
            raise BadInput(
                f"a row of {token_ids.shape[1]} tokens is longer than the model's context of "
                f"{self.config.context_length}; shorten the rows or raise context_length"
            )


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm and beside a residual path."""

    def __init__(
        self,
        config: ModelConfig,
        norm: type[Norm],
        attention: Callable[[ModelConfig], nn.Module],
        feed_forward: Callable[[ModelConfig], nn.Module],
    ) -> None:
        super().__init__()
        self.ln1 = norm(config.d_model, eps=config.norm_eps)
        self.attn = attention(config)
        self.ln2 = norm(config.d_model, eps=config.norm_eps)
        self.ffn = feed_forward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, *positions: nn.Module) -> Tensor:  # [batch, tokens, d_model]
        """Run one block; `positions` is what the attention takes besides."""
        x = x + self.dropout(self.attn(self.ln1(x), *positions))
        return x + self.dropout(self.ffn(self.ln2(x)))


# ---- the decoder family: rotary positions, RMSNorm, SwiGLU, no biases ----------------------------


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


class RotaryAttention(nn.Module):
    """Causal multi-head attention with rotary positions."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.q_proj = Projection(config.d_model, config.d_model, bias=False)
        self.k_proj = Projection(config.d_model, config.d_model, bias=False)
        self.v_proj = Projection(config.d_model, config.d_model, bias=False)
        self.output_proj = Projection(config.d_model, config.d_model, bias=False)

    def forward(self, x: Tensor, rotate: RotaryEmbedding) -> Tensor:  # [batch, tokens, d_model]
        """Attend within each row."""
        q = rotate(split_heads(self.q_proj(x), self.num_heads))
        k = rotate(split_heads(self.k_proj(x), self.num_heads))
        v = split_heads(self.v_proj(x), self.num_heads)
        return self.output_proj(causal_attention(q, k, v))


class SwiGLU(nn.Module):
    """`W2 (silu(W1 x) * W3 x)`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.w1 = Projection(config.d_model, config.d_ff, bias=False)
        self.w2 = Projection(config.d_ff, config.d_model, bias=False)
        self.w3 = Projection(config.d_model, config.d_ff, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [batch, tokens, d_model]
        """Apply the gated feed-forward part to every token."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class DecoderLM(LanguageModel):
    """The decoder family as one module: token ids in, logits out.

    Its module names are those of the reference notes (`token_embeddings`, `positional_encoder`,
    `layers`, `ln_final`, `lm_head`): a two-layer model has 21 parameters, nine per block.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.token_embeddings = Embedding(
            config.vocab_size, config.d_model, init=truncated_at_3_std(1.0)
        )
        self.positional_encoder = RotaryEmbedding(
            config.context_length, config.d_model // config.num_heads, config.rope_theta
        )
        self.layers = nn.ModuleList(
            Block(config, RMSNorm, RotaryAttention, SwiGLU) for _ in range(config.num_layers)
        )
        self.ln_final = RMSNorm(config.d_model, eps=config.norm_eps)
        self.lm_head = LanguageModelHead(config.d_model, config.vocab_size, bias=False)
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


# ---- the GPT-2 family: learned positions, LayerNorm, GELU, biases, optionally tied ---------------


def _residual_init(config: ModelConfig) -> Normal:
    """Projections onto the residual stream start smaller, so that its variance does not grow."""
    return Normal(std=WEIGHT_STD / math.sqrt(2 * config.num_layers))


class SelfAttention(nn.Module):
    """Causal multi-head attention with one joint projection for queries, keys and values."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        d = config.d_model
        self.num_heads = config.num_heads
        self.qkv_proj = Projection(d, 3 * d, init=Normal(std=WEIGHT_STD), bias=True)
        self.output_proj = Projection(d, d, init=_residual_init(config), bias=True)

    def forward(self, x: Tensor) -> Tensor:  # [batch, tokens, d_model]
        """Attend within each row."""
        q, k, v = (split_heads(y, self.num_heads) for y in self.qkv_proj(x).chunk(3, dim=-1))
        return self.output_proj(causal_attention(q, k, v))


class FeedForward(nn.Module):
    """`W2 gelu(W1 x + b1) + b2`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        d, d_ff = config.d_model, config.d_ff
        self.w1 = Projection(d, d_ff, init=Normal(std=WEIGHT_STD), bias=True)
        self.w2 = Projection(d_ff, d, init=_residual_init(config), bias=True)

    def forward(self, x: Tensor) -> Tensor:  # [batch, tokens, d_model]
        """Apply the feed-forward part to every token."""
        return self.w2(F.gelu(self.w1(x), approximate="tanh"))


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
        self.layers = nn.ModuleList(
            Block(config, LayerNorm, SelfAttention, FeedForward) for _ in range(config.num_layers)
        )
        self.ln_final = LayerNorm(config.d_model, eps=config.norm_eps)
        self.lm_head = LanguageModelHead(
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


# ---- initial values ------------------------------------------------------------------------------


def named_inits(model: nn.Module) -> dict[str, Init]:
    """Return what each parameter starts from, by its full name; a tied one under its first name.

    Raises:
        BadInput: If a parameter has no description.
    """
    inits: dict[str, Init] = {}
    for name, _ in model.named_parameters():
        path, _, leaf = name.rpartition(".")
        described = getattr(model.get_submodule(path), "inits", {})
        if leaf not in described:
            raise BadInput(
                f"parameter {name!r} has no described init: register it with "
                f"Described.add_parameter(name, shape, init)"
            )
        inits[name] = described[leaf]
    return inits


@torch.no_grad()
def initialize(model: LanguageModel, *, seed: int) -> None:
    """Fill the parameters and the derived buffers of a model whose memory is allocated.

    Guarantees:
        Equal seeds give equal bits, whatever was built, drawn or filled before.
    """
    inits = named_inits(model)
    key = Key.from_seed(seed)
    for name, parameter in model.named_parameters():
        fill_(parameter, inits[name], key, name)
    model.reset_buffers()


# ---- building and storing ------------------------------------------------------------------------

FAMILY_CLASSES = {"decoder": DecoderLM, "gpt2": GPT2LM}


def build(
    config: ModelConfig | str, *, seed: int = 0, device: str | torch.device = "cpu"
) -> LanguageModel:
    """Build a model from a config or a preset's name.

    The module is built without memory first and filled from its descriptions afterwards, so that
    torch's global generators are left alone and nothing is drawn twice. On the meta device it
    stays without memory: `build("1t", device="meta")` takes a second.

    Args:
        config: A `ModelConfig` or the name of a preset.
        seed: Seed of the initial values.
        device: Where the parameters are to live; `"meta"` for nowhere.

    Returns:
        The model, in training mode.
    """
    model = _empty_model(preset(config) if isinstance(config, str) else config, device)
    if torch.device(device).type != "meta":
        initialize(model, seed=seed)
    return model


def _empty_model(config: ModelConfig, device: str | torch.device) -> LanguageModel:
    """Return a model whose parameters have memory, but no values; on the meta device neither."""
    with torch.device("meta"):
        model = FAMILY_CLASSES[config.family](config)
    if torch.device(device).type != "meta":
        model.to_empty(device=device)
        model.tie_head_if_asked()  # to_empty gives every use of a tied parameter its own memory
    return model


def count_parameters(model: nn.Module) -> int:
    """Count the elements of all parameters, a tied one once.

    >>> count_parameters(build("gpt2", device="meta"))
    124439808
    """
    return sum(parameter.numel() for parameter in model.parameters())


def save(config: ModelConfig, parameters: Mapping[str, Tensor], folder: str | Path) -> None:
    """Write a model into an existing folder.

    Args:
        config: The model's shape.
        parameters: Its full parameters by name, a tied one once: `dict(model.named_parameters())`,
            or `dict(unison.shard.full_parameters(model))` where the model is sharded.
        folder: Where to write model.json and model.safetensors.
    """
    from safetensors.torch import save_file

    folder = Path(folder)
    tensors = {name: value.detach().contiguous().cpu() for name, value in parameters.items()}
    (folder / CONFIG_FILE).write_text(json.dumps(asdict(config), indent=2) + "\n")
    save_file(tensors, folder / WEIGHTS_FILE)


def load(folder: str | Path, *, device: str | torch.device = "cpu") -> LanguageModel:
    """Read a model that `save` wrote, for example from the folder of a run.

    Raises:
        BadInput: If the folder does not hold a model, or holds one with other parameters.
    """
    from safetensors.torch import load_file

    folder = Path(folder)
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / name).is_file():
            raise BadInput(
                f"expected {CONFIG_FILE} and {WEIGHTS_FILE} in {folder}, found no {name}"
            )
    model = _empty_model(ModelConfig(**json.loads((folder / CONFIG_FILE).read_text())), device)
    tensors = load_file(folder / WEIGHTS_FILE, device=str(device))
    parameters = dict(model.named_parameters())
    if tensors.keys() != parameters.keys():
        differing = sorted(tensors.keys() ^ parameters.keys())
        raise BadInput(f"{folder / WEIGHTS_FILE} does not fit its config: parameters {differing}")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])
    model.reset_buffers()
    return model
