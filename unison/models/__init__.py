"""Language models whose parameters describe their own initial values."""

import torch
from torch import nn

from unison.models.config import FAMILIES, PRESETS, ModelConfig, preset
from unison.models.decoder import DecoderLM
from unison.models.gpt2 import GPT2LM
from unison.models.initialize import initialize, named_inits
from unison.models.language_model import LanguageModel
from unison.models.losses import per_sample_loss, token_loss_sums
from unison.models.storage import allocate, construct, load, save

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
    model = construct(preset(config) if isinstance(config, str) else config)
    if torch.device(device).type != "meta":
        allocate(model, device)
        initialize(model, seed=seed)
    return model


def count_parameters(model: nn.Module) -> int:
    """Count the elements of all parameters, a tied one once.

    >>> count_parameters(build("gpt2", device="meta"))
    124439808
    """
    return sum(parameter.numel() for parameter in model.parameters())
