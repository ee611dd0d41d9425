"""Gradients in the optimizer's hands: only those that were given, and not held."""

import gc
import weakref
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor, nn

from unison.errors import BadInput
from unison.parallel import ShardedParam
from unison.privacy.noise import Given, give, require_given

NAMES = ["a", "b", "c"]


def make() -> tuple[dict[str, nn.Parameter], list[ShardedParam]]:
    parameters = {name: nn.Parameter(torch.zeros(3)) for name in NAMES}
    return parameters, [ShardedParam.whole(name, each) for name, each in parameters.items()]


def released(owned: Sequence[ShardedParam]) -> Iterator[tuple[ShardedParam, Tensor]]:
    """Gradients of ones."""
    return ((each, torch.ones(3)) for each in owned)


def test_gradients_are_put_where_there_are_none_and_added_where_there_are():
    parameters, owned = make()
    given: Given = {}
    for count in (1, 2):
        give(released(owned), given)
        require_given(parameters, given)
        for each in parameters.values():
            assert each.grad is not None
            assert (each.grad == count).all()
    parameters["b"].grad = None  # as torch: added where there is one
    give(released(owned), given)
    require_given(parameters, given)
    found = [each.grad for each in parameters.values()]
    assert [float(each[0]) for each in found if each is not None] == [3, 1, 3]


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_somebody_else_are_refused_by_name(name):
    parameters, owned = make()
    given: Given = {}
    parameters[name].grad = torch.zeros(3)
    for use in (require_given, lambda *_: give(released(owned), given)):
        with pytest.raises(BadInput, match=rf"{name}\.grad is not what the privacy engine put"):
            use(parameters, given)
    assert not parameters[name].grad.any()
    for each in parameters.values():
        each.grad = None
    require_given(parameters, given)
    give(released(owned), given)
    mine = parameters[name].grad
    assert mine is not None
    parameters[name].grad = mine.clone()
    with pytest.raises(BadInput, match=rf"{name}\.grad is not"):
        require_given(parameters, given)
    parameters[name].grad = mine
    require_given(parameters, given)


def test_gradients_are_not_held():
    parameters, owned = make()
    given: Given = {}
    give(released(owned), given)
    seen = [weakref.ref(each.grad) for each in parameters.values()]
    kept = parameters["a"].grad
    gc.collect()
    require_given(parameters, given)  # those that C++ alone holds are known again
    for each in parameters.values():
        each.grad = None
    gc.collect()
    assert [each() is None for each in seen] == [False, True, True]
    require_given(parameters, given)  # though the user holds one
    assert kept is not None
    give(released(owned), given)
    assert all((each.grad == 1).all() for each in parameters.values())
    parameters["a"].grad = kept  # of the step before
    with pytest.raises(BadInput, match=r"a\.grad is not"):
        require_given(parameters, given)


def test_a_parameter_of_two_parts_gets_both():
    parameter = nn.Parameter(torch.zeros(3))
    owned = [ShardedParam.whole("a", parameter), ShardedParam.whole("a", parameter)]
    give(released(owned), {})
    assert parameter.grad is not None
    assert (parameter.grad == 2).all()


def test_other_parameters_may_follow():
    given: Given = {}
    for _ in range(2):
        parameters, owned = make()
        give(released(owned), given)
        require_given(parameters, given)
        assert all((each.grad == 1).all() for each in parameters.values())
