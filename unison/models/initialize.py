"""Initial values from descriptions: every parameter knows its init, and it can be replayed.

`named_inits` collects the descriptions of a whole model by parameter name. `initialize` draws the
values from them. A value depends on the seed, the parameter's name and the element's index; not on
the order of construction, not on the device, not on other parameters.
"""

import torch
from torch import nn

from unison.errors import BadInput
from unison.models.language_model import LanguageModel
from unison.rng import Key, fill_
from unison.rng.inits import Init


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
