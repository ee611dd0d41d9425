"""The short way through a model that one rank holds whole, as it computes with it.

Nothing is gathered, freed, cast, summed or divided there. So all units' parameters are put in place
together, once for the forward pass and once for the backward pass, units inside the root run as if
they were none, and gradients are handed to the pieces when the backward pass ends.
"""

from typing import Any

from torch.autograd import Variable

from unison.shard.attributes import Hidden
from unison.shard.leaves import PLAIN
from unison.shard.unit import Unit


class WholeModel:
    """Units of which this rank holds everything; see the note above."""

    def __init__(self, root: Unit, units: list[Unit]) -> None:
        self._root, self._units = root, units
        self._hidden: list[Hidden] | None = None  # while parameters are in place
        self.is_in_backward = False

    @staticmethod
    def suits(units: list[Unit]) -> bool:
        """Whether there is nothing to do but to compute."""
        return all(unit.keeps_gradients and not unit.options.precision.casts for unit in units)

    def run(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run the root's forward with every parameter in place."""
        self._put_in_place()
        try:
            return self._root.forward(*args, **kwargs)
        finally:
            if not self.is_in_backward:
                self._take_back()

    def begin_backward(self) -> None:
        """Have parameters in place for code that activation checkpointing runs again."""
        if not self.is_in_backward:
            self.is_in_backward = True
            self._put_in_place()
            Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        for unit in self._units:
            unit.keep_gradients()
        self.end_pass()

    def end_pass(self) -> None:
        """Leave the modules as they were; also after a pass that broke."""
        self.is_in_backward = False
        self._take_back()

    def _put_in_place(self) -> None:
        if self._hidden is None:
            self._hidden = [unit.attributes.shadow(unit.leaves(PLAIN)) for unit in self._units]
            for unit in self._units:
                unit.is_in_place = unit is not self._root

    def _take_back(self) -> None:
        if self._hidden is not None:
            for unit, hidden in zip(self._units, self._hidden, strict=True):
                unit.attributes.restore(hidden)
                unit.is_in_place = False
            self._hidden = None
