"""What is trained is what was made private, in module and optimizer, on gradients that are private.

Looked at in every step: parameters that were frozen, thawed, replaced or added, and gradients that
were neither clipped nor noised, are refused by name.
"""

from collections.abc import Iterable, Mapping, Sequence
from weakref import ref

from torch import Tensor, nn
from torch.optim import Optimizer

from unison.capture.parts import is_in_parts
from unison.capture.tracked import ParamRegistry
from unison.errors import BadInput
from unison.parallel import ParallelAdapter, ShardedParam


class Trained:
    """Looks at a module's parameters, once per pass, and refuses those that are others.

    Args:
        params: The module's parameters.
        owner: Who holds those that are trained.
    """

    def __init__(self, params: ParamRegistry, owner: ParallelAdapter) -> None:
        self._params = params
        params.refresh()
        self._private = _held_by(params, owner)

    @property
    def modules(self) -> Sequence[nn.Module]:
        """All modules, as of the last look."""
        return [module for _, module in self._params.modules]

    def check(self) -> tuple[str, ...]:
        """Make sure that what is trained is what was made private, and return its names.

        Raises:
            BadInput: Naming a parameter.
        """
        trained = self._params.refresh()
        self._refuse_others()
        return trained

    def _refuse_others(self) -> None:
        for place in self._params.places:
            name, parameter = place.name, place.parameter
            if parameter.requires_grad != (name in self._private):
                raise BadInput(
                    f"{name} was frozen or thawed since make_private; detach the engine and make "
                    "the module private again"
                )
            before = self._private.get(name)
            if before is not None and parameter is not before:
                raise BadInput(
                    f"{name} is another parameter than when make_private was called, and its "
                    "gradients would go to the one that the optimizer holds. Change the values in "
                    "place instead (parameter.data.copy_), or detach the engine and make the "
                    "module private again"
                )


def _held_by(params: ParamRegistry, owner: ParallelAdapter) -> dict[str, nn.Parameter | None]:
    """Return what an owner holds by name: the module's own parameter, or None if it has others."""
    own = {id(place.parameter) for place in params.places}
    held: dict[str, nn.Parameter | None] = {}
    for each in owner.params:
        # A DTensor and the whole of it take turns in a module.
        is_own = id(each.parameter) in own
        held[each.name] = None if is_in_parts(each.parameter) or not is_own else each.parameter
    return held


class OptimizerParams:
    """Looks at an optimizer's parameters, at every step, and refuses those that are others.

    `add_param_group` after `make_private` would train them on gradients of single records.

    Args:
        optimizer: The user's optimizer, as `check_optimizer` found it right.
        private: What is trained privately, by name.
    """

    def __init__(self, optimizer: Optimizer, private: Mapping[str, nn.Parameter]) -> None:
        self._optimizer = optimizer
        self._names = {id(each): name for name, each in private.items()}

    def check(self) -> None:
        """Make sure that the optimizer has what is trained privately, and nothing else to train.

        Raises:
            BadInput: Naming a parameter of the module, or the shape of one that is not.
        """
        now = [each for group in self._optimizer.param_groups for each in group["params"]]
        others = [each for each in now if id(each) not in self._names and each.requires_grad]
        if others:
            raise BadInput(
                f"the optimizer has a parameter of shape {list(others[0].shape)} that make_private "
                "did not see: it would be trained on gradients that are neither clipped nor "
                "noised. Put it into the module and call make_private after that, or give it to "
                "another optimizer that never sees private records"
            )
        held = set(map(id, now))
        missing = [name for key, name in self._names.items() if key not in held]
        if missing:
            raise BadInput(
                f"the optimizer has lost {missing[0]} since make_private: it takes part in "
                "clipping and would never be trained. Leave it to the optimizer, or detach() the "
                "engine and call make_private again"
            )


class GivenGradients:
    """Puts private gradients where the optimizer finds them, and knows them again.

    It does not hold them: a user who sets gradients to None between steps gets their memory back.
    """

    def __init__(self) -> None:
        # Torch's own weak references are for those who keep what they get; here it is compared.
        self._given: dict[str, ref[Tensor]] = {}

    def give(self, gradients: Iterable[tuple[ShardedParam, Tensor]]) -> None:
        """Put gradients where the optimizer finds them.

        As torch does: added to what is there, whose own noise was drawn and counted.

        Args:
            gradients: As `ShardedParam.as_gradient` returns them.
        """
        for owned, gradient in gradients:
            before = owned.parameter.grad
            if before is None:
                owned.parameter.grad = gradient
                self._given[owned.name] = ref(gradient)
            else:
                self._require_own(owned.name, before)
                before.add_(gradient)

    def check(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Require every gradient to be one that was given.

        Raises:
            BadInput: Naming the parameter whose gradient is another.
        """
        for name, parameter in parameters.items():
            if parameter.grad is not None:
                self._require_own(name, parameter.grad)

    def _require_own(self, name: str, gradient: Tensor) -> None:
        given = self._given.get(name)
        if given is None or gradient is not given():
            raise BadInput(
                f"{name}.grad is not what the privacy engine put there; a gradient that was not "
                "clipped and noised must not be trained on. Change gradients in place only, and "
                "after the last physical batch"
            )
