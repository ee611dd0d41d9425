"""Gradients in the optimizer's hands: only those that were given, and not held."""

import gc
import weakref
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor, nn

from unison.errors import BadInput
from unison.parallel import ShardedParam
from unison.privacy.param_check import GivenGradients

NAMES = ["a", "b", "c"]


def make() -> tuple[dict[str, nn.Parameter], list[ShardedParam]]:
    parameters = {name: nn.Parameter(torch.zeros(3)) for name in NAMES}
    return parameters, [ShardedParam.whole(name, each) for name, each in parameters.items()]


def released(owned: Sequence[ShardedParam]) -> Iterator[tuple[ShardedParam, Tensor]]:
    """Gradients of ones."""
    return ((each, torch.ones(3)) for each in owned)


def test_gradients_are_put_where_there_are_none_and_added_where_there_are():
    parameters, owned = make()
    given = GivenGradients()
    for count in (1, 2):
        given.give(released(owned))
        given.check(parameters)
        for each in parameters.values():
            assert each.grad is not None
            assert (each.grad == count).all()
    parameters["b"].grad = None  # as torch: added where there is one
    given.give(released(owned))
    given.check(parameters)
    found = [each.grad for each in parameters.values()]
    assert [float(each[0]) for each in found if each is not None] == [3, 1, 3]


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_somebody_else_are_refused_by_name(name):
    parameters, owned = make()
    given = GivenGradients()
    parameters[name].grad = torch.zeros(3)
    for use in (given.check, lambda _: given.give(released(owned))):
        with pytest.raises(BadInput, match=rf"{name}\.grad is not what the privacy engine put"):
            use(parameters)
    assert not parameters[name].grad.any()
    for each in parameters.values():
        each.grad = None
    given.check(parameters)
    given.give(released(owned))
    mine = parameters[name].grad
    assert mine is not None
    parameters[name].grad = mine.clone()
    with pytest.raises(BadInput, match=rf"{name}\.grad is not"):
        given.check(parameters)
    parameters[name].grad = mine
    given.check(parameters)


def test_gradients_are_not_held():
    parameters, owned = make()
    given = GivenGradients()
    given.give(released(owned))
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
    given.give(released(owned))
    assert all((each.grad == 1).all() for each in parameters.values())
    parameters["a"].grad = kept  # of the step before
    with pytest.raises(BadInput, match=r"a\.grad is not"):
        given.check(parameters)


def test_a_parameter_of_two_parts_gets_both():
    parameter = nn.Parameter(torch.zeros(3))
    owned = [ShardedParam.whole("a", parameter), ShardedParam.whole("a", parameter)]
    GivenGradients().give(released(owned))
    assert parameter.grad is not None
    assert (parameter.grad == 2).all()


def test_other_parameters_may_follow():
    given = GivenGradients()
    for _ in range(2):
        parameters, owned = make()
        given.give(released(owned))
        given.check(parameters)
        assert all((each.grad == 1).all() for each in parameters.values())
