"""Facts of tensors: every change of any of them is noticed, by C++ and by Python."""

import gc
import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from unison.capture import facts
from unison.capture.facts import TensorFacts
from unison.capture.tracked import Source, Tracked


@pytest.fixture(params=["C++", "Python"])
def by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Who compares; without torch's guards, or with them where there are any."""
    if request.param == "Python":
        monkeypatch.setattr(facts, "_guards_of_torch", lambda: None)
    elif facts._guards_of_torch() is None:
        pytest.skip("this torch has no guards")
    return request.param


def tensors() -> list[Tensor]:
    return [nn.Parameter(torch.randn(4, 4)), torch.randn(3), nn.Parameter(torch.randn(2, 1, 5))]


def known(of: list[Tensor]) -> TensorFacts:
    """Facts that have been asked twice: by Python first, then by whoever is quicker."""
    found = TensorFacts(of)
    assert found.hold_for(of)
    assert found.hold_for(of)
    return found


def freeze(of: list[Tensor]) -> None:
    of[0].requires_grad_(False)


def thaw(of: list[Tensor]) -> None:
    of[1].requires_grad_(True)


def change_dtype(of: list[Tensor]) -> None:
    of[2].data = of[2].data.double()


def change_shape(of: list[Tensor]) -> None:
    of[2].data = of[2].data.view(5, 1, 2)


def change_rank(of: list[Tensor]) -> None:
    of[2].data = of[2].data.view(2, 5)


def transpose(of: list[Tensor]) -> None:
    of[0].data = of[0].data.t()


def change_device(of: list[Tensor]) -> None:
    of[1] = torch.empty(3, device="meta")


def change_layout(of: list[Tensor]) -> None:
    of[1] = of[1].to_sparse()


def leave_one_out(of: list[Tensor]) -> None:
    of.pop()


def add_one(of: list[Tensor]) -> None:
    of.append(torch.randn(3))


def swap_two(of: list[Tensor]) -> None:
    of[0], of[2] = of[2], of[0]


CHANGES = [
    freeze,
    thaw,
    change_dtype,
    change_shape,
    change_rank,
    transpose,
    change_device,
    change_layout,
    leave_one_out,
    add_one,
    swap_two,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize(
    "surroundings",
    [nullcontext, torch.no_grad, lambda: torch.autocast("cpu")],
    ids=["as ever", "no_grad", "autocast"],
)
@pytest.mark.usefixtures("by")
def test_every_change_is_noticed(change, surroundings):
    of = tensors()
    with surroundings():
        found = known(of)
    change(of)
    for here in (nullcontext, surroundings):
        with here():
            assert not found.hold_for(of)


@pytest.mark.usefixtures("by")
def test_other_tensors_like_them_will_do():
    of = tensors()
    found = known(of)
    of[1] = torch.zeros(3)
    of[0].data = of[0].data.clone()
    assert found.hold_for(of)
    assert found.hold_for(tuple(tensors()))
    assert known([]).hold_for([])


class Guards:
    """Torch's guards, counted."""

    num_made = num_passed = 0

    def __init__(self, *of: Tensor, **settings: Any) -> None:
        self._guards = torch._C._dynamo.guards.TensorGuards(*of, **settings)  # type: ignore[attr-defined]
        Guards.num_made += 1

    def check(self, *of: Tensor) -> bool:
        found = self._guards.check(*of)
        Guards.num_passed += found
        return found


@pytest.fixture
def guards(monkeypatch: pytest.MonkeyPatch) -> type[Guards]:
    if facts._guards_of_torch() is None:
        pytest.skip("this torch has no guards")
    monkeypatch.setattr(facts, "_guards_of_torch", lambda: Guards)
    Guards.num_made = Guards.num_passed = 0
    return Guards


def test_guards_are_made_for_each_of_two_surroundings(guards):
    of = tensors()
    found = TensorFacts(of)
    around: list[AbstractContextManager[Any]] = [nullcontext(), torch.autocast("cpu")]
    for _ in range(3):
        for each in around:
            with each:
                assert found.hold_for(of)
    assert guards.num_made == 2
    assert guards.num_passed == 2 + 4  # when each was made, and ever after
    with torch.inference_mode():
        assert found.hold_for(of)
    assert guards.num_made == 2


def test_a_tensor_that_comes_twice_is_compared_by_python(guards):
    each = torch.randn(3)
    found = known([each, each])
    assert guards.num_made == 1
    assert not found.hold_for([each, torch.randn(4)])
    assert found.hold_for([each, torch.zeros(3)])


def test_tensors_that_answer_for_themselves_are_asked(guards):
    class Listener:
        def call(self, func: Any, first: Tensor, args: tuple, kwargs: dict[str, Any]) -> Any:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)

    of = [Tracked.of(torch.randn(3), (Source("weight", (3,)),), Listener())]
    found = known(of)  # type: ignore[arg-type]
    assert guards.num_made == 0
    assert not found.hold_for([Tracked.of(torch.randn(4), of[0].sources, Listener())])


@pytest.mark.usefixtures("by")
def test_no_tensor_is_kept():
    of = tensors()
    found = known(of)
    refs = [weakref.ref(each) for each in of]
    del of
    gc.collect()
    assert not any(each() is not None for each in refs)
    assert found.hold_for(tensors())
