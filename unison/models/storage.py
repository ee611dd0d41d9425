"""A model on disk: its config as JSON beside its parameters as safetensors; never a pickle."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from unison.errors import BadInput
from unison.models.config import ModelConfig
from unison.models.decoder import DecoderLM
from unison.models.gpt2 import GPT2LM
from unison.models.language_model import LanguageModel

CONFIG_FILE = "model.json"
WEIGHTS_FILE = "model.safetensors"

_CLASSES = {"decoder": DecoderLM, "gpt2": GPT2LM}


def construct(config: ModelConfig) -> LanguageModel:
    """Build the module of a config's family; its parameters have no memory and no values."""
    with torch.device("meta"):
        return _CLASSES[config.family](config)


def allocate(model: LanguageModel, device: str | torch.device) -> None:
    """Give a model built on the meta device uninitialised memory."""
    model.to_empty(device=device)
    model.tie_head_if_asked()  # to_empty gives every use of a tied parameter its own memory


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
    model = construct(ModelConfig(**json.loads((folder / CONFIG_FILE).read_text())))
    allocate(model, device)
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
