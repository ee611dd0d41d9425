"""The built-in language models: shapes and presets, two families, how one is built and stored.

The layers are torch's own. What a model adds is `init_of`: a description of what each parameter
starts from, by its name. `named_inits` collects the descriptions, and `initialize` draws the values
from them. A value depends on the seed, the parameter's name and the element's index; not on the
order of construction, not on the device, not on other parameters. On disk a model is its config as
JSON beside its parameters as safetensors; never a pickle.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unison import check, schema
from unison.errors import BadInput
from unison.kernels.available import takes
from unison.kernels.cross_entropy import (
    IGNORE_INDEX,
    linear_cross_entropy,
    sample_means,
    statistics,
)
from unison.rng import Key, fill_
from unison.rng.inits import Constant, Init, Normal, TruncatedNormal

FAMILIES = ("decoder", "gpt2")
MAX_SIZE, MAX_LAYERS = 1 << 24, 1 << 12  # far beyond any model; their products still count
NO_SIZES = ("family", "dropout", "tie_head")
CONFIG_FILE = "model.json"
WEIGHTS_FILE = "model.safetensors"

WEIGHT_STD = 0.02  # of the GPT-2 family
POSITION_STD = 0.01

# ---- shapes --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of one language model; two models with equal configs have equal parameters.

    Attributes:
        family: `"decoder"` (RoPE, RMSNorm, SwiGLU, no biases) or `"gpt2"` (learned positions,
            LayerNorm, GELU, biases).
        vocab_size: Rows of the embedding table and of the output head.
        context_length: The longest row of tokens the model takes.
        d_model: Width of the residual stream.
        num_layers: Number of blocks.
        num_heads: Attention heads per block; must divide `d_model`.
        d_ff: Hidden width of the feed-forward part.
        dropout: Probability of dropping an element of a sublayer's output.
        tie_head: Whether the output head is the embedding table itself.
        rope_theta: Base of the rotary frequencies (`"decoder"` only).
        norm_eps: The constant added inside the normalisations.
    """

    family: str
    vocab_size: int
    context_length: int
    d_model: int
    num_layers: int
    num_heads: int
    d_ff: int
    dropout: float = 0.0
    tie_head: bool = False
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        check.one_of(FAMILIES, family=self.family)
        sizes = {n: each for n, each in vars(self).items() if n not in NO_SIZES}
        check.positive(**sizes)
        check.probability(dropout=self.dropout)
        for name in ("vocab_size", "context_length", "d_model", "d_ff", "num_layers"):
            most = MAX_LAYERS if name == "num_layers" else MAX_SIZE
            if sizes[name] > most:
                raise BadInput(f"{name} must be at most {most:,}, found {sizes[name]}")
        if self.d_model % self.num_heads:
            raise BadInput(
                f"num_heads must divide d_model, found num_heads={self.num_heads} and "
                f"d_model={self.d_model}"
            )
        if self.family == "decoder" and (self.d_model // self.num_heads) % 2:
            raise BadInput(
                f"rotary positions need an even head width, found d_model / num_heads = "
                f"{self.d_model // self.num_heads}"
            )


def _shape(family: str, d_model: int, num_layers: int, num_heads: int, **more: Any) -> ModelConfig:
    shape: dict[str, Any] = {"d_model": d_model, "num_layers": num_layers, "num_heads": num_heads}
    return ModelConfig(family=family, **shape, **more)


def _gpt2(d_model: int, num_layers: int, num_heads: int, context_length: int) -> ModelConfig:
    sizes: dict[str, Any] = {"vocab_size": 50_257, "context_length": context_length}
    sizes |= {"d_ff": 4 * d_model, "tie_head": True}
    return _shape("gpt2", d_model, num_layers, num_heads, **sizes)


PRESETS: Mapping[str, ModelConfig] = MappingProxyType(
    {
        "tiny": _shape("decoder", 128, 4, 4, d_ff=448, vocab_size=258, context_length=256),
        "small": _shape("decoder", 512, 2, 8, d_ff=1344, vocab_size=1000, context_length=128),
        "gpt2": _gpt2(768, 12, 12, 1024),
        "gpt2-large": _gpt2(1280, 36, 20, 1024),
        "gpt2-xl": _gpt2(1600, 48, 25, 1024),
        "13b": _gpt2(5120, 40, 40, 2048),
        "175b": _gpt2(12_288, 96, 96, 2048),
        "1t": _gpt2(25_600, 128, 160, 2048),
    }
)


def preset(name: str, **overrides: Any) -> ModelConfig:
    """Return the named preset, with some of its fields replaced.

    >>> preset("small").d_model
    512
    >>> preset("gpt2", num_layers=2, dropout=0.1).num_layers
    2

    Raises:
        BadInput: If there is no such preset or no such field.
    """
    check.one_of(PRESETS, preset=name)
    known = [field.name for field in fields(ModelConfig)]
    for override in overrides:
        check.one_of(known, field=override)
    return replace(PRESETS[name], **overrides)


# ---- the model --------------------------------------------------------------------


class LanguageModelHead(nn.Linear):
    """The last layer: logits of every token, or with labels the loss of every sample.

    Both are this module's own forward, so that whoever watches or gathers the parameters of a
    module does so for either.
    """

    def forward(self, input: Tensor, labels: Tensor | None = None) -> Tensor:  # noqa: A002
        """Return logits [batch, tokens, vocab], or losses [batch] that never hold them.

        Args:
            input: Hidden states [batch, tokens, d_model].
            labels: The token after each position [batch, tokens], -100 where none counts.
        """
        if labels is None:
            return super().forward(input)
        return linear_cross_entropy(
            input, self.weight, labels, bias=self.bias, reduction="sample_mean"
        )


class RMSNorm(nn.RMSNorm):
    """Torch's, without the Python function between, which asks function modes under Dynamo too."""

    def forward(self, x: Tensor) -> Tensor:  # [..., d_model]
        """Normalise the last dimension."""
        return torch.rms_norm(x, self.normalized_shape, self.weight, self.eps)


class LayerNorm(nn.LayerNorm):
    """Torch's, without the Python function between."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # [..., d_model]
        """Normalise the last dimension."""
        return torch.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


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


class Attention(nn.Module):
    """Causal multi-head attention; GPT-2 has one joint projection for queries, keys and values."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        d, self.num_heads = config.d_model, config.num_heads
        is_gpt2 = config.family == "gpt2"
        if is_gpt2:
            self.qkv_proj = nn.Linear(d, 3 * d)
        else:
            self.q_proj = nn.Linear(d, d, bias=False)
            self.k_proj = nn.Linear(d, d, bias=False)
            self.v_proj = nn.Linear(d, d, bias=False)
        self.output_proj = nn.Linear(d, d, bias=is_gpt2)

    def forward(self, x: Tensor, rotate: RotaryEmbedding | None = None) -> Tensor:
        """Attend to the past and the present of each row: [batch, tokens, d_model]."""
        if rotate is None:
            q, k, v = (self._split(y) for y in self.qkv_proj(x).chunk(3, dim=-1))
        else:
            q = rotate(self._split(self.q_proj(x)))
            k = rotate(self._split(self.k_proj(x)))
            v = self._split(self.v_proj(x))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.output_proj(attended.transpose(1, 2).flatten(2))

    def _split(self, x: Tensor) -> Tensor:
        """[batch, tokens, heads * d_head] -> [batch, heads, tokens, d_head]."""
        batch, tokens, width = x.shape
        return x.view(batch, tokens, self.num_heads, width // self.num_heads).transpose(1, 2)


class FeedForward(nn.Module):
    """`W2 gelu(W1 x + b1) + b2` in GPT-2, `W2 (silu(W1 x) * W3 x)` elsewhere."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.is_gated = config.family != "gpt2"
        self.w1 = nn.Linear(config.d_model, config.d_ff, bias=not self.is_gated)
        self.w2 = nn.Linear(config.d_ff, config.d_model, bias=not self.is_gated)
        if self.is_gated:
            self.w3 = nn.Linear(config.d_model, config.d_ff, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [batch, tokens, d_model]
        """Apply the feed-forward part to every token."""
        if self.is_gated:
            return self.w2(F.silu(self.w1(x)) * self.w3(x))
        return self.w2(F.gelu(self.w1(x), approximate="tanh"))


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm and beside a residual path."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        norm = LayerNorm if config.family == "gpt2" else RMSNorm
        self.ln1 = norm(config.d_model, eps=config.norm_eps)
        self.attn = Attention(config)
        self.ln2 = norm(config.d_model, eps=config.norm_eps)
        self.ffn = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, *positions: nn.Module) -> Tensor:  # [batch, tokens, d_model]
        """Run one block; `positions` is what the attention takes besides."""
        x = x + self.dropout(self.attn(self.ln1(x), *positions))
        return x + self.dropout(self.ffn(self.ln2(x)))


class LanguageModel(nn.Module):
    """Token ids [batch, tokens] in, logits out.

    The decoder family has rotary positions, RMSNorm, SwiGLU and no biases. Its module names are
    those of the reference notes (`token_embeddings`, `positional_encoder`, `layers`, `ln_final`,
    `lm_head`): a two-layer model has 21 parameters, nine per block. The GPT-2 family has learned
    positions, LayerNorm, GELU and biases.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config, is_gpt2 = config, config.family == "gpt2"
        self.token_embeddings = nn.Embedding(config.vocab_size, config.d_model)
        if is_gpt2:
            self.position_embeddings = nn.Embedding(config.context_length, config.d_model)
            self.dropout = nn.Dropout(config.dropout)
        else:
            self.positional_encoder = RotaryEmbedding(
                config.context_length, config.d_model // config.num_heads, config.rope_theta
            )
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        norm = LayerNorm if is_gpt2 else RMSNorm
        self.ln_final = norm(config.d_model, eps=config.norm_eps)
        self.lm_head = LanguageModelHead(config.d_model, config.vocab_size, bias=False)
        self.reset_parameters()

    def init_of(self, name: str, parameter: Tensor) -> Init:
        """Return what a parameter starts from."""
        if parameter.ndim == 1:
            return Constant(value=0.0 if name.endswith("bias") else 1.0)
        if self.config.family == "gpt2":
            if name == "position_embeddings.weight":
                return Normal(std=POSITION_STD)
            # Projections onto the residual stream start smaller: its variance must not grow.
            is_residual = name.endswith(("output_proj.weight", "w2.weight"))
            num_added = 2 * self.config.num_layers if is_residual else 1
            return Normal(std=WEIGHT_STD / math.sqrt(num_added))
        # Glorot's variance for matrices; normals are cut at three standard deviations.
        is_table = name == "token_embeddings.weight"
        std = 1.0 if is_table else math.sqrt(2 / sum(parameter.shape))
        return TruncatedNormal(std=std, low=-3 * std, high=3 * std)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Tie the head, and draw all parameters from torch's global generator.

        This serves a model built by hand, as `nn.Linear` would do. `initialize` fills parameters
        with values that depend on the seed and the parameter's name only.
        """
        self.tie_head_if_asked()
        for name, parameter in self.named_parameters():
            match self.init_of(name, parameter):
                case Constant(value=value):
                    parameter.fill_(value)
                case Normal(mean=mean, std=std):
                    parameter.normal_(mean, std)
                case TruncatedNormal(mean=mean, std=std, low=low, high=high):
                    nn.init.trunc_normal_(parameter, mean, std, low, high)
                case init:
                    raise AssertionError(f"no rule for {init}")

    def reset_buffers(self) -> None:
        """Compute the buffers that follow from the config: rotary tables."""
        if self.config.family != "gpt2":
            self.positional_encoder.reset_buffers()

    def tie_head_if_asked(self) -> None:
        """Make the head's weight the embedding table itself, when the config says so."""
        if self.config.tie_head:
            self.lm_head.weight = self.token_embeddings.weight

    def hidden_states(self, token_ids: Tensor) -> Tensor:
        """Return what goes into the head: [batch, tokens] -> [batch, tokens, d_model]."""
        if token_ids.ndim != 2:
            raise BadInput(f"token_ids must be [batch, tokens], found {list(token_ids.shape)}")
        if token_ids.shape[1] > self.config.context_length:
            raise BadInput(
                f"a row of {token_ids.shape[1]} tokens is longer than the model's context of "
                f"{self.config.context_length}; shorten the rows or raise context_length"
            )
        if self.config.family == "gpt2":
            positions = torch.arange(token_ids.shape[-1], device=token_ids.device)
            x = self.token_embeddings(token_ids) + self.position_embeddings(positions)
            x, rotations = self.dropout(x), ()
        else:
            x, rotations = self.token_embeddings(token_ids), (self.positional_encoder,)
        for layer in self.layers:
            x = layer(x, *rotations)
        return self.ln_final(x)

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


# ---- initial values ------------------------------------------------------------------------------


def named_inits(model: nn.Module) -> dict[str, Init]:
    """Return what each parameter starts from, by its full name; a tied one under its first name.

    Raises:
        BadInput: If a parameter has no description.
    """
    inits: dict[str, Init] = {}
    for name, parameter in model.named_parameters():
        if not isinstance(model, LanguageModel):
            raise BadInput(
                f"parameter {name!r} has no described init: derive the model from LanguageModel, "
                "and describe it in init_of(name, parameter)"
            )
        inits[name] = model.init_of(name, parameter)
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
        model = LanguageModel(config)
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
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    folder = Path(folder)
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / name).is_file():
            raise BadInput(
                f"expected {CONFIG_FILE} and {WEIGHTS_FILE} in {folder}, found no {name}"
            )
    config = schema.build(ModelConfig, schema.read_json(folder / CONFIG_FILE), folder / CONFIG_FILE)
    model = _empty_model(config, device)
    try:
        tensors = load_file(folder / WEIGHTS_FILE, device=str(device))
    except SafetensorError as error:
        raise BadInput(f"{folder / WEIGHTS_FILE} is damaged: {error}") from None
    parameters = dict(model.named_parameters())
    if tensors.keys() != parameters.keys():
        differing = sorted(tensors.keys() ^ parameters.keys())
        raise BadInput(f"{folder / WEIGHTS_FILE} does not fit its config: parameters {differing}")
    with torch.no_grad():
        for name, parameter in parameters.items():
            if tensors[name].shape != parameter.shape:
                raise BadInput(
                    f"{folder / WEIGHTS_FILE}: {name} must be {list(parameter.shape)}, found "
                    f"{list(tensors[name].shape)}"
                )
            parameter.copy_(tensors[name])
    model.reset_buffers()
    return model


# ---- losses that keep samples apart --------------------------------------------------------------


def per_sample_loss(
    logits: Tensor,  # [batch, tokens, vocab]
    labels: Tensor,  # [batch, tokens]
    ignore_index: int = IGNORE_INDEX,
) -> Tensor:  # [batch]
    """Mean cross-entropy of each sample over its own counted tokens, in nats.

    The usual mean over all tokens of a batch couples samples through its denominator: a long sample
    makes the others weigh less. Here a sample's loss depends on that sample alone, which per-sample
    clipping needs. A sample without counted tokens has loss 0.

    `unison.linear_cross_entropy(..., reduction="sample_mean")` is the same from hidden states,
    without the logits.
    """
    return sample_means(_token_losses(logits, labels, ignore_index), labels, ignore_index)


def token_loss_sums(
    logits: Tensor,  # [batch, tokens, vocab]
    labels: Tensor,  # [batch, tokens]
    ignore_index: int = IGNORE_INDEX,
) -> Tensor:  # [batch]
    """Sum of the cross-entropy of each sample over its counted tokens, in nats."""
    return _token_losses(logits, labels, ignore_index).sum(dim=1)


def _token_losses(logits: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    # A compiler makes one kernel of what is below. Without one, ours reads the logits once, where
    # torch would copy them to float32 and keep a copy of their logarithms besides.
    if not torch.compiler.is_compiling() and type(logits) is Tensor and takes(logits):
        return statistics(logits.flatten(0, 1), labels.flatten(), ignore_index)[1].view_as(labels)
    precise = torch.promote_types(logits.dtype, torch.float32)  # a sum of many: never in bf16
    losses = F.cross_entropy(
        logits.flatten(0, 1).to(precise),
        labels.flatten(),
        ignore_index=ignore_index,
        reduction="none",
    )
    return losses.view(labels.shape)
