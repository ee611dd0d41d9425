"""Gradients in the optimizer's hands: only those that were given, and not held."""

import gc
import weakref
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from unison.errors import BadInput
from unison.parallel import ShardedParam
from unison.privacy.given import GivenGradients, Released

NAMES = ["a", "b", "c"]


def make() -> tuple[dict[str, nn.Parameter], list[ShardedParam]]:
    parameters = {name: nn.Parameter(torch.zeros(3)) for name in NAMES}
    return parameters, [ShardedParam.whole(name, each) for name, each in parameters.items()]


def ones(owned: Sequence[ShardedParam]) -> list[Tensor]:
    return [torch.ones(3) for _ in owned]


def released(owned: Sequence[ShardedParam], is_lazy: bool = True):
    """Gradients of ones: as they come all at once, or one by one."""
    if is_lazy:
        return Released(lambda: (owned, ones(owned)))
    return ((each, torch.ones(3)) for each in owned)


BOTH = pytest.mark.parametrize("is_lazy", [True, False], ids=["at once", "one by one"])


def test_gradients_are_made_when_they_are_asked_for():
    _, owned = make()
    asked = []
    gradients = Released(lambda: asked.append(1) or (owned, ones(owned)))
    assert not asked
    assert [each.name for each, _ in gradients] == NAMES
    assert len(asked) == 1


@BOTH
def test_gradients_are_put_where_there_are_none_and_added_where_there_are(is_lazy):
    parameters, owned = make()
    given = GivenGradients()
    for count in (1, 2):
        given.give(released(owned, is_lazy))
        given.check(parameters)
        for each in parameters.values():
            assert each.grad is not None
            assert (each.grad == count).all()
    parameters["b"].grad = None  # as torch: added where there is one
    given.give(released(owned, is_lazy))
    given.check(parameters)
    found = [each.grad for each in parameters.values()]
    assert [float(each[0]) for each in found if each is not None] == [3, 1, 3]


@BOTH
@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_somebody_else_are_refused_by_name(is_lazy, name):
    parameters, owned = make()
    given = GivenGradients()
    parameters[name].grad = torch.zeros(3)
    for use in (given.check, lambda _: given.give(released(owned, is_lazy))):
        with pytest.raises(BadInput, match=rf"{name}\.grad is not what the privacy engine put"):
            use(parameters)
    assert not parameters[name].grad.any()
    for each in parameters.values():
        each.grad = None
    given.check(parameters)
    given.give(released(owned, is_lazy))
    mine = parameters[name].grad
    assert mine is not None
    parameters[name].grad = mine.clone()
    with pytest.raises(BadInput, match=rf"{name}\.grad is not"):
        given.check(parameters)
    parameters[name].grad = mine
    given.check(parameters)


@BOTH
def test_gradients_are_not_held(is_lazy):
    parameters, owned = make()
    given = GivenGradients()
    given.give(released(owned, is_lazy))
    seen = [weakref.ref(each.grad) for each in parameters.values()]
    kept = parameters["a"].grad
    gc.collect()
    given.check(parameters)  # those that C++ alone holds are known again
    for each in parameters.values():
        each.grad = None
    gc.collect()
    assert [each() is None for each in seen] == [False, True, True]
    given.check(parameters)  # though the user holds one
    assert kept is not None
    given.give(released(owned, is_lazy))
    assert all((each.grad == 1).all() for each in parameters.values())
    parameters["a"].grad = kept  # of the step before
    with pytest.raises(BadInput, match=r"a\.grad is not"):
        given.check(parameters)


@BOTH
def test_a_parameter_of_two_parts_gets_both(is_lazy):
    parameter = nn.Parameter(torch.zeros(3))
    owned = [ShardedParam.whole("a", parameter), ShardedParam.whole("a", parameter)]
    GivenGradients().give(released(owned, is_lazy))
    assert parameter.grad is not None
    assert (parameter.grad == 2).all()


def test_other_parameters_may_follow():
    given = GivenGradients()
    for _ in range(2):
        parameters, owned = make()
        given.give(released(owned))
        given.check(parameters)
        assert all((each.grad == 1).all() for each in parameters.values())
