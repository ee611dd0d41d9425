"""Places of parameters: looked up again whenever something has changed."""

from typing import Any

import pytest
import torch
from torch import nn

from unison.capture.names import Place, Places, places


def model() -> Any:
    return nn.Sequential(
        nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU()), nn.Linear(4, 2)
    )


def parameter() -> nn.Parameter:
    return nn.Parameter(torch.zeros(4, 4))


def add_parameter(net: Any) -> None:
    net[1].register_parameter("scale", nn.Parameter(torch.ones(4)))


def remove_parameter(net: Any) -> None:
    del net[2].bias


def unset_parameter(net: Any) -> None:
    net[2].bias = None


def set_parameter_that_was_none(net: Any) -> None:
    net[1][0].bias = nn.Parameter(torch.zeros(4))


def replace_parameter(net: Any) -> None:
    net[1][0].weight = parameter()


def rename_parameter(net: Any) -> None:
    net[1][0].other = net[1][0].weight
    del net[1][0].weight


def tie(net: Any) -> None:
    net[2].weight = net[1][0].weight


def untie(net: Any) -> None:
    tie(net)
    net[2].weight = parameter()


def add_submodule(net: Any) -> None:
    net[1].append(nn.Linear(4, 4))


def add_submodule_again(net: Any) -> None:
    net.append(net[0])


def add_submodule_without_parameters(net: Any) -> None:
    net.append(nn.Sequential())
    net[3].append(nn.Linear(2, 2))


def remove_submodule(net: Any) -> None:
    del net[2]


def replace_submodule(net: Any) -> None:
    net[1][0] = nn.Linear(4, 4, bias=False)


def replace_submodule_without_parameters(net: Any) -> None:
    net[1][1] = nn.Linear(4, 4)


def swap_submodules(net: Any) -> None:
    net[0], net[2] = net[2], net[0]


CHANGES = [
    add_parameter,
    remove_parameter,
    unset_parameter,
    set_parameter_that_was_none,
    replace_parameter,
    rename_parameter,
    tie,
    untie,
    add_submodule,
    add_submodule_again,
    add_submodule_without_parameters,
    remove_submodule,
    replace_submodule,
    replace_submodule_without_parameters,
    swap_submodules,
]


def same(found: list[Place], expected: list[Place]) -> bool:
    return len(found) == len(expected) and all(
        a.module is b.module and a.parameter is b.parameter and a[1::2] == b[1::2]
        for a, b in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_every_change_is_noticed(change):
    net = model()
    kept = Places(net)
    before = list(places(net))
    assert same(list(kept), before)
    change(net)
    after = list(places(net))
    if change is not untie:
        assert not same(before, after) or change is add_submodule_again
    assert same(list(kept), after)
    assert same(kept.now(), after)  # and again, now that nothing changes


def test_untying_is_noticed():
    net = model()
    tie(net)
    kept = Places(net)
    assert [place.name for place in kept][-2] == "1.0.weight"
    net[2].weight = parameter()
    assert [place.name for place in kept][-2] == "2.weight"


def test_a_module_is_walked_through_once():
    net = model()
    kept = Places(net)
    first = kept.now()
    assert kept.now() is first
    net[0].weight.requires_grad_(False)
    with torch.no_grad():
        net[0].weight.add_(1)
    assert kept.now() is first


def test_a_module_without_parameters_may_get_some():
    net: Any = nn.Sequential()
    kept = Places(net)
    assert kept.now() == []
    net.append(nn.Linear(2, 2))
    assert [place.name for place in kept] == ["0.weight", "0.bias"]
