"""Shapes of the built-in language models, as frozen data, and the named presets."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any

from unison import check
from unison.errors import BadInput

FAMILIES = ("decoder", "gpt2")


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
        check.positive(
            vocab_size=self.vocab_size,
            context_length=self.context_length,
            d_model=self.d_model,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            d_ff=self.d_ff,
            rope_theta=self.rope_theta,
            norm_eps=self.norm_eps,
        )
        check.probability(dropout=self.dropout)
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


def _decoder(d_model: int, num_layers: int, num_heads: int, **sizes: Any) -> ModelConfig:
    shape: dict[str, Any] = {"d_model": d_model, "num_layers": num_layers, "num_heads": num_heads}
    return ModelConfig(family="decoder", **shape, **sizes)


def _gpt2(d_model: int, num_layers: int, num_heads: int, context_length: int) -> ModelConfig:
    return ModelConfig(
        family="gpt2",
        vocab_size=50_257,
        context_length=context_length,
        d_model=d_model,
        num_layers=num_layers,
        num_heads=num_heads,
        d_ff=4 * d_model,
        tie_head=True,
    )


PRESETS: Mapping[str, ModelConfig] = MappingProxyType(
    {
        "tiny": _decoder(128, 4, 4, d_ff=448, vocab_size=258, context_length=256),
        "small": _decoder(512, 2, 8, d_ff=1344, vocab_size=1000, context_length=128),
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
