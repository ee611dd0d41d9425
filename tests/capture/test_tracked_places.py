"""Tracked tensors in the places of parameters: put there for a pass, and nothing gets past them."""

import gc
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn

from unison.capture import Capture, learn_axes
from unison.capture.tracked import ParamRegistry, Tracked, find_params
from unison.errors import UnsupportedOperation


class Model(nn.Module):
    """Two layers that share a weight, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(self.second(self.first(x).tanh())).square().mean(1)


def run(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)


def batch() -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


class Passes:
    """Captures of one module, one after the other; they may know its parameters all the while."""

    def __init__(self, model: nn.Module, known: ParamRegistry | None = None) -> None:
        self.model, self.known = model, known

    def marks(self) -> dict[str, Any]:
        """Run a pass, and return what lay in the places."""
        self.records: list[str] = []
        if self.known is not None:
            self.known.modules, self.known.places = find_params(self.model)
        capture = Capture(
            self.model,
            3,
            axes=learn_axes(self.model, run, batch()),
            on_record=lambda name, _: self.records.append(name),
            known=self.known,
        )
        with capture.installed():
            found = {
                f"{name}.{attribute}": child.__dict__[attribute]
                for name, child in self.model.named_modules()
                for attribute in child._parameters
                if attribute in child.__dict__
            }
            run(self.model, batch()).sum().backward()
        assert not any(name in vars(m) for m in self.model.modules() for name in m._parameters)
        return found


NAMES = {"first.weight", "first.bias", "second.weight", "second.bias"}


def test_marks_lie_in_all_places_of_what_is_trained():
    passes = Passes(Model())
    for _ in range(2):
        found = passes.marks()
        assert found.keys() == NAMES
        assert found["first.weight"] is found["second.weight"]
        assert sorted(passes.records) == [
            "first.bias",
            "first.weight",
            "first.weight",
            "second.bias",
        ]


def test_marks_are_kept_until_they_are_forgotten():
    """They hold memory, of which a user who moves the model must not find more than his own."""
    model = Model()
    params = ParamRegistry(*find_params(model))
    passes = Passes(model, params)
    before = passes.marks()
    after = passes.marks()
    assert all(after[name] is mark for name, mark in before.items())
    assert sorted(passes.records) == ["first.bias", "first.weight", "first.weight", "second.bias"]
    marks = [ref(mark) for mark in after.values()]
    params.tracked = {}
    del before, after
    gc.collect()
    assert all(mark() is None for mark in marks)


def replace_values(model: Model) -> None:
    model.first.weight.data = model.first.weight.data.clone()


def transpose_values(model: Model) -> None:
    model.first.weight.data = model.first.weight.data.t()


def replace_parameter(model: Model) -> None:
    model.first.weight = nn.Parameter(torch.randn(4, 4))


def replace_dictionary(model: Model) -> None:
    model.first._parameters = dict(model.first._parameters, weight=nn.Parameter(torch.randn(4, 4)))


def replace_everything(model: Model) -> None:
    model.first.__dict__ = nn.Linear(4, 4).__dict__


@pytest.mark.parametrize(
    "change",
    [replace_values, transpose_values, replace_parameter, replace_dictionary, replace_everything],
)
@pytest.mark.parametrize("is_known", [False, True])
def test_another_memory_is_marked_anew(change, is_known):
    model = Model()
    passes = Passes(model, ParamRegistry(*find_params(model)) if is_known else None)
    before = passes.marks()["first.weight"]
    change(model)
    after = passes.marks()["first.weight"]
    assert after is not before
    assert after.value.data_ptr() == model.first.weight.data_ptr()
    assert after.value.stride() == model.first.weight.stride()
    assert "first.weight" in passes.records


def test_another_dtype_is_marked_anew():
    model = Model()
    passes = Passes(model)
    before = passes.marks()
    model.double()
    capture = Capture(
        model,
        3,
        axes=learn_axes(model, run, batch().double()),
        on_record=lambda *_: None,
    )
    with capture.installed():
        found = model.first.__dict__["weight"]
        assert found is not before["first.weight"]
        assert found.value.dtype is torch.float64


def test_what_is_trained_is_looked_up_every_time():
    model = Model()
    passes = Passes(model)
    passes.marks()
    model.first.bias.requires_grad_(False)
    model.frozen.bias.requires_grad_(True)
    found = passes.marks()
    assert found.keys() == NAMES - {"first.bias"} | {"frozen.bias"}
    assert set(passes.records) == {"first.weight", "second.bias", "frozen.bias"}


def test_what_others_put_in_a_place_stays_there():
    model = Model()
    passes = Passes(model)
    before = passes.marks()
    other = model.first.bias.detach() + 1
    model.first.__dict__["bias"] = other
    capture = Capture(model, 3, axes=learn_axes(model, run, batch()), on_record=print)
    with capture.installed():
        found = model.first.__dict__["bias"]
        assert isinstance(found, Tracked)
        assert found is not before["first.bias"]
        assert torch.equal(found.value, other)
    assert model.first.__dict__.pop("bias") is other
    assert torch.equal(passes.marks()["first.bias"].value, before["first.bias"].value)


class Past(torch.autograd.Function):
    """An operation that torch functions do not see."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, has_gradient: bool) -> Tensor:
        ctx.save_for_backward(x)
        ctx.has_gradient = has_gradient
        return x * weight.detach().sum()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return g, torch.zeros(4, 4) * (g * x).sum() if ctx.has_gradient else None, None


def past(model: Model, *, has_gradient: bool = True) -> Tensor:
    x = batch().requires_grad_()
    return Past.apply(x, model.first.weight, has_gradient).sum()  # type: ignore[union-attr]


REFUSED = r"gradient reached 'first\.weight'"


def capture_of(passes: Passes) -> Capture:
    axes = learn_axes(passes.model, run, batch())
    return Capture(passes.model, 3, axes=axes, on_record=lambda *_: None)


def test_gradients_past_marks_are_refused_in_the_backward_pass():
    model = Model()
    passes = Passes(model)
    for _ in range(2):
        with capture_of(passes).installed():
            loss = past(model)
            with pytest.raises(UnsupportedOperation, match=REFUSED):
                loss.backward()
        passes.marks()  # what was refused leaves nothing behind
        assert "first.weight" in passes.records


def test_gradients_after_a_pass_are_refused_as_they_come():
    model = Model()
    passes = Passes(model)
    with capture_of(passes).installed():
        loss = past(model)
    with pytest.raises(UnsupportedOperation, match=REFUSED):
        loss.backward()
    passes.marks()


def test_a_function_without_a_gradient_for_a_mark_is_let_pass():
    model = Model()
    passes = Passes(model)
    for _ in range(2):
        with capture_of(passes).installed():
            past(model, has_gradient=False).backward()


def test_gradients_past_marks_of_others_are_refused():
    model = Model()
    model.first.__dict__["weight"] = model.first.weight.detach().clone()
    refused = pytest.raises(UnsupportedOperation, match=REFUSED)
    with refused, capture_of(Passes(model)).installed():
        past(model).backward()


def test_a_tied_parameter_has_one_name_in_all_of_its_places():
    model = Model()
    found = [
        (each.name, each.attribute) for each in find_params(model)[1] if each.module is model.second
    ]
    assert found == [("first.weight", "weight"), ("second.bias", "bias")]

    def trained() -> list[str]:
        return [each.name for each in find_params(model)[1] if each.parameter.requires_grad]

    assert trained() == ["first.weight", "first.bias", "first.weight", "second.bias"]
    model.second.weight = nn.Parameter(torch.zeros(4, 4))  # tied no more
    assert trained()[2] == "second.weight"
    model.second.append = nn.Linear(4, 4, bias=False)
    assert trained()[-1] == "second.append.weight"


def compile_call(model: Model) -> None:
    model.first.compile(backend="eager")


def compile_forward(model: Model) -> None:
    model.first.forward = torch.compile(model.first.forward, backend="eager")  # type: ignore[method-assign]


def compile_class(model: Model) -> None:
    class Compiled(nn.Linear):
        forward = torch.compile(nn.Linear.forward, backend="eager")

    model.first.__class__ = Compiled


@pytest.mark.parametrize("change", [compile_call, compile_forward, compile_class])
def test_what_is_compiled_between_passes_is_refused(change):
    model = Model()
    passes = Passes(model)
    passes.marks()
    capture = capture_of(passes)
    change(model)
    with (
        pytest.raises(UnsupportedOperation, match="module 'first' is compiled"),
        capture.installed(),
    ):
        pass
    assert "weight" not in vars(model.first)


def test_a_forward_of_the_instance_is_no_compiled_one():
    model = Model()
    passes = Passes(model)
    passes.marks()
    model.first.forward = lambda x: nn.functional.linear(x, model.first.weight)  # type: ignore[method-assign]
    assert passes.marks().keys() == NAMES
