"""Language models whose parameters describe their own initial values."""

from unison.models.config import FAMILIES, PRESETS, ModelConfig, preset
from unison.models.language_models import (
    GPT2LM,
    DecoderLM,
    LanguageModel,
    build,
    count_parameters,
    initialize,
    load,
    named_inits,
    save,
)
from unison.models.layers import per_sample_loss, token_loss_sums

__all__ = [
    "FAMILIES",
    "GPT2LM",
    "PRESETS",
    "DecoderLM",
    "LanguageModel",
    "ModelConfig",
    "build",
    "count_parameters",
    "initialize",
    "load",
    "named_inits",
    "per_sample_loss",
    "preset",
    "save",
    "token_loss_sums",
]
