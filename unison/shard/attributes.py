"""The attributes at which a unit's modules hold its parameters.

[Note: shadowing] Python finds an instance's own dictionary before `nn.Module.__getattr__` looks
into `_parameters`. So a full parameter that is put into the dictionary shadows its piece, while
`named_parameters()` goes on showing pieces.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from unison.shard.flat_group import Use

# What attributes were before they were shadowed: (instance dictionary, name, value).
Hidden = list[tuple[dict[str, Any], str, Tensor | None]]


class Attributes:
    """Where the parameters of one unit are seen; see [Note: shadowing].

    Args:
        uses: For each flat group and each parameter in it, where modules hold it.
    """

    def __init__(self, uses: Sequence[Sequence[Sequence[Use]]]) -> None:
        self._places = [
            (use.module.__dict__, use.attribute, group, slot)
            for group, of_group in enumerate(uses)
            for slot, of_slot in enumerate(of_group)
            for use in of_slot
        ]
        self._recurrent = {
            use.module
            for of_group in uses
            for of_slot in of_group
            for use in of_slot
            if isinstance(use.module, nn.RNNBase)
        }

    @contextmanager
    def shadowed(self, tensors: Sequence[Sequence[Tensor]]) -> Iterator[None]:
        """Let the attributes be the given tensors, one sequence per flat group."""
        hidden = self.shadow(tensors)
        try:
            yield
        finally:
            self.restore(hidden)

    def shadow(self, tensors: Sequence[Sequence[Tensor]]) -> Hidden:
        """Hide the pieces behind full parameters; returns what `restore` takes."""
        hidden = [
            (attributes, name, attributes.get(name)) for attributes, name, _, _ in self._places
        ]
        for attributes, name, group, slot in self._places:
            attributes[name] = tensors[group][slot]
        if self._recurrent:
            self._renew_flat_weights()
        return hidden

    def restore(self, hidden: Hidden) -> None:
        """Undo `shadow`."""
        for attributes, name, before in hidden:
            if before is None:
                del attributes[name]
            else:
                attributes[name] = before
        if self._recurrent:
            self._renew_flat_weights()

    def _renew_flat_weights(self) -> None:
        """Let recurrent modules, which keep a second list of parameters, see the same ones."""
        for module in self._recurrent:
            module._flat_weights = [
                getattr(module, name, None) for name in module._flat_weights_names
            ]
