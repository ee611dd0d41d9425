"""What is trained: whether it is still what was made private, in the module and the optimizer."""

from collections.abc import Mapping, Sequence
from itertools import chain
from operator import attrgetter, is_, itemgetter

from torch import Tensor, nn
from torch.optim import Optimizer

from unison.capture.parts import is_in_parts
from unison.capture.tracked import ParamRegistry
from unison.errors import BadInput
from unison.parallel import ParallelAdapter


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
        self._remember(self._now())

    def _now(self) -> list[Tensor]:
        return list(chain.from_iterable(map(_params_of, self._optimizer.param_groups)))

    def _remember(self, now: list[Tensor]) -> None:
        self._last = now
        self._frozen = [each for each in now if id(each) not in self._names]

    def check(self) -> None:
        """Make sure that the optimizer has what is trained privately, and nothing else to train.

        Raises:
            BadInput: Naming a parameter of the module, or the shape of one that is not.
        """
        now = self._now()
        # Parameter by parameter in C: microseconds for hundreds.
        is_same = len(now) == len(self._last) and all(map(is_, now, self._last))
        if is_same and not any(map(_is_trained, self._frozen)):
            return
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
        self._remember(now)  # in another order, or in other groups


_params_of = itemgetter("params")
_is_trained = attrgetter("requires_grad")
