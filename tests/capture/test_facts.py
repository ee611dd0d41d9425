"""Facts of tensors: every change of any of them is noticed."""

import gc
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from unison.capture.facts import TensorFacts
from unison.capture.tracked import Source, Tracked


def tensors() -> list[Tensor]:
    return [nn.Parameter(torch.randn(4, 4)), torch.randn(3), nn.Parameter(torch.randn(2, 1, 5))]


def known(of: list[Tensor]) -> TensorFacts:
    found = TensorFacts(of)
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
def test_every_change_is_noticed(change, surroundings):
    of = tensors()
    with surroundings():
        found = known(of)
    change(of)
    for here in (nullcontext, surroundings):
        with here():
            assert not found.hold_for(of)


def test_other_tensors_like_them_will_do():
    of = tensors()
    found = known(of)
    of[1] = torch.zeros(3)
    of[0].data = of[0].data.clone()
    assert found.hold_for(of)
    assert found.hold_for(tuple(tensors()))
    assert known([]).hold_for([])


def test_tensors_that_answer_for_themselves_are_asked():
    class Listener:
        def call(self, func: Any, first: Tensor, args: tuple, kwargs: dict[str, Any]) -> Any:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)

    of = [Tracked.of(torch.randn(3), (Source("weight", (3,)),), Listener())]
    found = known(of)  # type: ignore[arg-type]
    assert not found.hold_for([Tracked.of(torch.randn(4), of[0].sources, Listener())])


def test_no_tensor_is_kept():
    of = tensors()
    found = known(of)
    refs = [weakref.ref(each) for each in of]
    del of
    gc.collect()
    assert not any(each() is not None for each in refs)
    assert found.hold_for(tensors())
