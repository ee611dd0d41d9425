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


def rebind_parameters(net: Any) -> None:
    net[2]._parameters = {"weight": nn.Parameter(torch.zeros(2, 4)), "bias": None}


def rebind_submodules(net: Any) -> None:
    net[1]._modules = {"0": nn.Linear(4, 4), "1": nn.ReLU()}


def rebind_no_submodules(net: Any) -> None:
    net[1][1]._modules = {"inner": nn.Linear(4, 4)}


def rebind_everything(net: Any) -> None:
    net[0].__dict__ = nn.Linear(3, 4).__dict__


def move_parameter(net: Any) -> None:
    """All parameters in the same order, and one in another module."""
    moved = net[0]._parameters.pop("bias")
    net[1][0]._parameters = {"bias": moved, "weight": net[1][0].weight}


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
    rebind_parameters,
    rebind_submodules,
    rebind_no_submodules,
    rebind_everything,
    move_parameter,
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


class Answering(nn.Module):
    """A module whose class answers for what it holds."""


def parameters_of(module: nn.Module) -> dict[str, Any]:
    return {"weight": vars(module).get("held")}


Answering._parameters = property(parameters_of, lambda *_: None)  # type: ignore[assignment]


def test_a_class_that_answers_for_its_modules_is_asked():
    net: Any = nn.Sequential(nn.Linear(2, 2), Answering())
    net[1].__dict__["held"] = parameter()
    kept = Places(net)
    assert kept.now()[-1].parameter is net[1].__dict__["held"]
    net[1].__dict__["held"] = parameter()
    assert kept.now()[-1].parameter is net[1].__dict__["held"]


class Copies:
    """What a scripted module holds: its values are copied for whoever asks."""

    def __init__(self, held: dict[str, Any]) -> None:
        self.held = held

    def __len__(self) -> int:
        return len(self.held)

    def values(self) -> list[Any]:
        return list(self.held.values())

    def items(self) -> list[tuple[str, Any]]:
        return list(self.held.items())


def test_what_hands_out_copies_is_asked_again():
    net: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    held = Copies(net[1]._parameters)
    net[1].__dict__["_parameters"] = held
    kept = Places(net)
    first = kept.now()
    assert kept.now() is first
    held.held["weight"] = parameter()
    assert kept.now()[2].parameter is held.held["weight"]


NAMES = ("0.weight", "0.bias", "1.0.weight", "2.weight", "2.bias")


def test_what_is_trained_is_the_same_tuple_until_something_changes():
    net = model()
    kept = Places(net)
    assert not kept.are_flags_kept()  # nobody has looked
    found = kept.trained()
    assert found == NAMES
    assert kept.trained() is found
    assert kept.are_flags_kept()
    net[2].bias.requires_grad_(False)
    assert not kept.are_flags_kept()
    assert kept.trained() == NAMES[:-1]
    assert kept.are_flags_kept()
    net[2].bias.requires_grad_(True)  # one that was frozen
    assert not kept.are_flags_kept()
    assert kept.trained() == NAMES
    with torch.no_grad():
        net[0].weight.requires_grad_(False)
        assert kept.trained() == NAMES[1:]


def test_a_tied_parameter_is_trained_in_all_of_its_places():
    net = model()
    tie(net)
    kept = Places(net)
    assert kept.trained() == (*NAMES[:3], "1.0.weight", "2.bias")
    net[1][0].weight.requires_grad_(False)
    assert kept.trained() == (*NAMES[:2], "2.bias")


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_is_trained_is_looked_up_after_every_change(change):
    net = model()
    kept = Places(net)
    kept.trained()
    change(net)
    assert kept.trained() == tuple(place.name for place in places(net))


def test_recurrent_modules_are_known():
    net: Any = nn.Sequential(nn.Linear(2, 2), nn.LSTM(2, 3))
    kept = Places(net)
    kept.now()
    assert kept.recurrent == [("1", net[1])]
