"""Gradients in the optimizer's hands: those that were clipped and noised, and no others."""

from collections.abc import Iterable, Mapping
from weakref import ref

from torch import Tensor, nn

from unison.errors import BadInput
from unison.privacy.owners.base import Owned


class GivenGradients:
    """Puts private gradients where the optimizer finds them, and knows them again.

    It does not hold them: a user who sets gradients to None between steps gets their memory back.
    """

    def __init__(self) -> None:
        # Torch's own weak references are for those who keep what they get; here it is compared.
        self._given: dict[str, ref[Tensor]] = {}

    def give(self, gradients: Iterable[tuple[Owned, Tensor]]) -> None:
        """Put gradients where the optimizer finds them.

        As torch does: added to what is there, whose own noise was drawn and counted.

        Args:
            gradients: As `Owned.as_gradient` returns them.
        """
        given = self._given
        for owned, gradient in gradients:
            parameter = owned.parameter
            before = parameter.grad
            if before is None:
                parameter.grad = gradient
                given[owned.name] = ref(gradient)
            else:
                self._require_own(owned.name, before)
                before.add_(gradient)

    def check(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Require every gradient to be one that was given.

        Raises:
            BadInput: Naming the parameter whose gradient is another.
        """
        find = self._given.get
        for name, parameter in parameters.items():
            gradient = parameter.grad
            if gradient is None:
                continue
            given = find(name)
            if given is None or given() is not gradient:
                self._require_own(name, gradient)

    def _require_own(self, name: str, gradient: Tensor) -> None:
        given = self._given.get(name)
        if given is None or gradient is not given():
            raise BadInput(
                f"{name}.grad is not what the privacy engine put there; a gradient that was not "
                "clipped and noised must not be trained on. Change gradients in place only, and "
                "after the last physical batch"
            )
