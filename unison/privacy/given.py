"""Gradients in the optimizer's hands: those that were clipped and noised, and no others."""

from collections.abc import Mapping

from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from unison.errors import BadInput
from unison.privacy.owners.base import Owned


class GivenGradients:
    """Puts private gradients where the optimizer finds them, and knows them again.

    It does not hold them: a user who sets gradients to None between steps gets their memory back.
    """

    def __init__(self) -> None:
        self._given: dict[str, TensorWeakRef] = {}

    def give(self, owned: Owned, gradient: Tensor) -> None:
        """Put a gradient where the optimizer finds it.

        As torch does: added to what is there, whose own noise was drawn and counted.
        """
        parameter, gradient = owned.parameter, owned.as_gradient(gradient)
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            self._require_own(owned.name, parameter)
            parameter.grad.add_(gradient)
        self._given[owned.name] = TensorWeakRef(parameter.grad)

    def check(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Require every gradient to be one that was given.

        Raises:
            BadInput: Naming the parameter whose gradient is another.
        """
        for name, parameter in parameters.items():
            if parameter.grad is not None:
                self._require_own(name, parameter)

    def _require_own(self, name: str, parameter: nn.Parameter) -> None:
        given = self._given.get(name)
        if given is None or parameter.grad is not given():
            raise BadInput(
                f"{name}.grad is not what the privacy engine put there; a gradient that was not "
                "clipped and noised must not be trained on. Change gradients in place only, and "
                "after the last physical batch"
            )
